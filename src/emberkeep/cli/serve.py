"""`emberkeep serve`: the server."""

from __future__ import annotations

from emberkeep.cli.commands import one_command
from emberkeep.cli.flags import with_settings
from emberkeep.cli.model_setup import ensure, pull_reporter
from emberkeep.config.settings import Config

EXAMPLES = """\b
Examples:
  emberkeep serve --model mine --port 9000     a model that was pulled before
  emberkeep serve --warm system.txt            with this system prompt ready before the first request
  emberkeep serve --server-tools safe --enable-tools memory,read_file
  emberkeep serve --model mine --models all    loads all others when they are asked for, too
  emberkeep serve --backend gpt,local          a model of `emberkeep api list`, the one here if it is down
"""


@with_settings(
    *("model", "backend", "ctx", "parallel", "host", "port", "api_key", "data_dir", "ram_budget", "disk_budget"),
    *("models", "aliases", "pinned", "unload_after_s", "model_memory", "base_url", "lora", "kv_type", "pooling"),
    *("speculation", "remote", "kv_bits", "approximate", "warm", "ttl", "max_concurrent_per_user", "max_tokens"),
    *("too_long", "memory_margin", "reasoning", "recall", "tools", "server_tools", "enable_tools"),
    *("disable_tools", "tools_from", "tools_root", "engine", "threads", "mlock", "flash_attention", "device"),
    *("dtype", "quantization", "attention", "residency", "gpu_memory", "gpu_layers", "cpu_moe", "tensor_split"),
    "config",
)
def serve(config: Config) -> None:
    """Answer OpenAI-compatible requests over HTTP until stopped.

    The default model is pulled first when it is missing.
    """
    # Imported late, as in every command: `emberkeep serve --help` must not load a web framework.
    from emberkeep.server.lifecycle import serve as serve_until_stopped

    with pull_reporter() as reporter:
        serve_until_stopped(config, prepare=ensure, reporter=reporter)


app = one_command(serve, epilog=EXAMPLES)
