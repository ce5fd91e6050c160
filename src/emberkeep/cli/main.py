"""`emberkeep`: the commands, and how their errors reach a person."""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated, NoReturn

import typer

from emberkeep import __version__
from emberkeep.cli.api import app as api_app
from emberkeep.cli.bench import app as bench_app
from emberkeep.cli.cache import app as cache_app
from emberkeep.cli.chat import EXAMPLES as CHAT_EXAMPLES
from emberkeep.cli.chat import ChatCommand, chat
from emberkeep.cli.cluster import app as cluster_app
from emberkeep.cli.config import app as config_app
from emberkeep.cli.console import complain
from emberkeep.cli.devices import devices
from emberkeep.cli.doctor import doctor
from emberkeep.cli.flags import LogLevelFlag, VerboseFlag, with_settings
from emberkeep.cli.launch import EXAMPLES as LAUNCH_EXAMPLES
from emberkeep.cli.launch import launch
from emberkeep.cli.mcp import app as mcp_app
from emberkeep.cli.memory import app as memory_app
from emberkeep.cli.model_setup import install_model
from emberkeep.cli.models import app as models_app
from emberkeep.cli.ps import ps, stop
from emberkeep.cli.tools import app as tools_app
from emberkeep.config import Config
from emberkeep.errors import EmberkeepError
from emberkeep.signals import Leaving, ending_signals

EXAMPLES = """\b
Examples:
  emberkeep serve                              OpenAI-compatible server on http://127.0.0.1:8080
  emberkeep chat                               talk to the default model in this terminal
  emberkeep chat --continue                    go on with the latest conversation
  emberkeep launch claude                      a coding agent that uses the server
  emberkeep models pull hf:owner/repo/file.gguf --name mine
  emberkeep serve --model mine --ctx 32768     a model that was pulled before
  emberkeep ps                                 which models the server has loaded
  emberkeep serve --engine hf -m owner/repo    a repository of the Hugging Face hub, in PyTorch
  emberkeep cache ls                           which prompts are kept, where and for how long
  emberkeep memory search "my boat"            what was said about it, long ago
  emberkeep tools list                         what a model can do here
  emberkeep mcp list                           MCP servers of the settings, and whether they work
  emberkeep api add gpt openai                 a model that runs elsewhere, for `chat --backend gpt`
  emberkeep cluster serve --cluster-replicas 3 several servers as one, on Ray Serve
  emberkeep devices                            CPU and GPUs, and which of them a model would be put on
  emberkeep doctor                             is everything in place?
  emberkeep config show                        every setting and where its value came from
  emberkeep config trust                       use all that the emberkeep.toml of this folder says

\b
Settings can also be variables (EMBERKEEP_CTX=8192) and keys in emberkeep.toml (ctx = 8192).
"""

SERVE_EXAMPLES = """\b
Examples:
  emberkeep serve --model mine --port 9000     a model that was pulled before
  emberkeep serve --warm system.txt            with this system prompt ready before the first request
  emberkeep serve --server-tools --enable-tools memory,read_file
  emberkeep serve --model mine --models all    loads all others when they are asked for, too
  emberkeep serve --backend gpt,local          a model of `emberkeep api list`, the one here if it is down
"""

app = typer.Typer(
    name="emberkeep",
    help="A local LLM runtime that never evaluates a token twice.",
    epilog=EXAMPLES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"emberkeep {__version__}")
        raise typer.Exit


@app.callback()
def emberkeep(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    verbose: VerboseFlag = False,
    log_level: LogLevelFlag = None,
) -> None:
    pass


@app.command(epilog=SERVE_EXAMPLES)
@with_settings(
    *("model", "models", "aliases", "accept_any_model", "pinned", "unload_after_s", "model_memory"),
    *("host", "port", "data_dir", "ctx", "parallel", "ram_budget", "disk_budget", "remote"),
    *("kv_bits", "approximate", "exact", "api_key", "threads", "lora", "kv_type", "flash_attention"),
    *("mlock",),
    *("gpu_layers", "cpu_moe", "tensor_split", "engine", "device", "dtype", "quantization", "attention", "warm"),
    *("residency", "keep_first", "keep_last", "gpu_memory"),
    *("max_tokens", "max_concurrent_per_user", "speculation", "draft_model", "draft_max"),
    *(
        "planning",
        "auto_truncate",
        "evict",
        "recall",
        "pooling",
        "truncate_dimensions",
        "server_tools",
        "ask_permission",
        "enable_tools",
        "disable_tools",
    ),
    *("tools_from", "tools_root", "notools", "reasoning", "backend", "base_url", "config"),
)
def serve(config: Config) -> None:
    """Answer OpenAI-compatible requests over HTTP until stopped.

    The default model is pulled first when it is missing.
    """
    # Imported late, as in every command: `emberkeep --help` must not load a web framework.
    from emberkeep.server.lifecycle import serve as serve_until_stopped

    serve_until_stopped(config, install=install_model)


app.command(cls=ChatCommand, epilog=CHAT_EXAMPLES)(chat)
app.command(epilog=LAUNCH_EXAMPLES)(launch)
app.add_typer(models_app, name="models")
app.add_typer(cache_app, name="cache")
app.add_typer(memory_app, name="memory")
app.add_typer(api_app, name="api")
app.add_typer(tools_app, name="tools")
app.add_typer(mcp_app, name="mcp")
app.add_typer(cluster_app, name="cluster")
app.command()(ps)
app.command()(stop)
app.command()(devices)
app.command()(doctor)
app.add_typer(config_app, name="config")
app.add_typer(bench_app, name="bench")


def main() -> None:
    run(app)


def run(app: typer.Typer) -> None:
    """Exit status: 0 done, 1 an error that has been explained, 2 wrong usage, 128 and a signal's number (130:
    interrupted)."""
    _leave_in_order()
    try:
        try:
            app()
        finally:
            # Here, not when Python ends: then it would be too late to explain what went wrong.
            sys.stdout.flush()
    except EmberkeepError as error:
        complain(str(error))
        sys.exit(1)
    except BrokenPipeError:
        _drop_output()
        sys.exit(1)
    except OSError as error:
        complain(_explain(error))
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _leave_in_order() -> None:
    """SIGTERM, and SIGHUP when the terminal closes, end a command as Ctrl-C does: with all that it has started."""

    def leave(number: int, _: object) -> NoReturn:
        signal.signal(number, signal.SIG_DFL)  # who asks twice does not want to wait
        raise Leaving(128 + number)

    numbers = ending_signals()
    for number in numbers:
        if number != signal.SIGINT:
            signal.signal(number, leave)
    if os.name == "posix":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


def _explain(error: OSError) -> str:
    what = f"Cannot use {error.filename}" if error.filename else "Reading or writing failed"
    try:
        # What a large write could not put out is lost, and flushing alone would succeed then.
        if not error.filename:
            sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError:
        what = "Cannot write the output"
        _drop_output()
    return f"{what}: {error.strerror or error}."


def _drop_output() -> None:
    # What is left in its buffer is written when Python ends, which would fail again, with a traceback.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
