"""Every setting, said once: name, default, what is accepted, help text."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

import platformdirs

from emberkeep.config.kinds import (
    BYTES,
    LORAS,
    NAMES,
    PATH,
    PATHS,
    PREFIXES,
    REMOTES,
    SECRET,
    SERVERS,
    SHARES,
    SWITCH,
    TEXT,
    URL,
    Kind,
    clamped_seconds,
    layers,
    one_number_of,
    one_of,
    or_word,
    seconds,
    share,
    spelled,
    whole,
)
from emberkeep.config.lora import LoraFile
from emberkeep.config.ram import total_ram
from emberkeep.config.tables import McpServer
from emberkeep.config.warm import WarmPrefix
from emberkeep.errors import ConfigError
from emberkeep.types import AttentionTier, Json, Recall, RemoteModel, Repair, Ttl

DEFAULT_MODEL = "smollm2-135m"
OFF = "off"
"""State that stands at another place is not reused."""

_YEAR_S = 365 * 86_400


def _quarter_of_ram() -> int:
    return total_ram() // 4


def _user_data_dir() -> Path:
    return platformdirs.user_data_path("emberkeep", appauthor=False)


def _about(kind: Kind, help: str) -> Mapping[str, object]:
    return {"kind": kind, "help": help}


@dataclass(frozen=True, slots=True, repr=False)
class Config:
    model: str = field(
        default=DEFAULT_MODEL,
        metadata=_about(TEXT, "Model to load: an installed name, a .gguf file, or a folder of safetensors."),
    )
    host: str = field(default="127.0.0.1", metadata=_about(TEXT, "Address to listen on."))
    port: int = field(default=8080, metadata=_about(whole(0, 65535), "Port to listen on; 0 takes any free one."))
    api_key: str | None = field(
        default=None,
        metadata=_about(SECRET, "Key that clients must send; required when listening beyond this machine."),
    )
    data_dir: Path = field(
        default_factory=_user_data_dir,
        metadata=_about(PATH, "Folder for models, stored state and chat history."),
    )
    ctx: int | None = field(
        default=None,
        metadata=_about(
            or_word(whole(128, 1 << 24), "auto", lambda: None),
            "Longest conversation in tokens; auto takes the model's own length, capped.",
        ),
    )
    parallel: int = field(
        default=4, metadata=_about(whole(1, 256), "Requests that are generated at the same time.")
    )
    threads: int | None = field(
        default=None,
        metadata=_about(or_word(whole(1, 1024), "auto", lambda: None), "CPU threads; auto takes every core."),
    )
    lora: tuple[LoraFile, ...] = field(
        default=(),
        metadata=_about(LORAS, "LoRA adapters (GGUF) to apply to a GGUF model, and how strongly; 1 unless told."),
    )
    kv_type: str = field(
        default="f16",
        metadata=_about(
            one_of("f16", "q8_0", "q4_0"),
            "Numbers in which a GGUF model's state is held and stored: q8_0 takes half the room, q4_0 a quarter.",
        ),
    )
    gpu_layers: int | None = field(
        default=None,
        metadata=_about(
            or_word(layers(), "auto", lambda: None),
            "Layers of a GGUF model to put on GPUs that llama.cpp can use (all: every one); auto: as many as fit.",
        ),
    )
    cpu_moe: int = field(
        default=0,
        metadata=_about(
            layers(), "Layers, from the first on, whose experts stay in RAM when the rest of them is on a GPU."
        ),
    )
    tensor_split: tuple[float, ...] | None = field(
        default=None,
        metadata=_about(
            or_word(SHARES, "auto", lambda: None),
            "How layers are shared out among several GPUs; auto: by their free memory.",
        ),
    )
    llama_library: str = field(
        default="auto",
        metadata=_about(
            TEXT,
            "Which llama.cpp is used: native (compiled here), ready-made, or the path of a libllama; "
            "auto takes the first of them that runs on this CPU.",
        ),
    )
    engine: str = field(
        default="auto",
        metadata=_about(
            one_of("auto", "llamacpp", "hf"),
            "What runs the model; auto takes llamacpp for GGUF, hf for safetensors.",
        ),
    )
    device: str = field(
        default="auto",
        metadata=_about(
            spelled(r"auto|cpu|mps|cuda(:\d{1,3})?", "one of auto, cpu, mps, cuda, cuda:1 and so on"),
            "Where the hf engine computes; auto takes a GPU if there is one.",
        ),
    )
    dtype: str = field(
        default="auto",
        metadata=_about(
            one_of("auto", "float32", "bfloat16", "float16"),
            "Numbers the hf engine computes with; auto takes the model's own, and float32 on a CPU.",
        ),
    )
    attention: str = field(
        default="auto",
        metadata=_about(
            one_of("auto", *AttentionTier), "How the hf engine computes attention; auto takes the fastest."
        ),
    )
    prefill_slice: int | None = field(
        default=None,
        metadata=_about(
            or_word(whole(1, 1 << 16), "auto", lambda: None),
            "Most prompt tokens evaluated in one step, so that others are not held up; auto: 512, on a GPU 4096.",
        ),
    )
    ram_budget: int = field(
        default_factory=_quarter_of_ram,
        metadata=_about(
            or_word(BYTES, "auto", _quarter_of_ram),
            "RAM for stored prompt state; auto takes a quarter of the memory.",
        ),
    )
    disk_budget: int = field(default=20 << 30, metadata=_about(BYTES, "Disk space for stored prompt state."))
    kv_bits: int = field(
        default=16,
        metadata=_about(
            one_number_of(16, 8, 4),
            "Bits in which prompt state is stored: 8 halves it and 4 halves it again, and is no longer exact.",
        ),
    )
    approximate: str = field(
        default=OFF,
        metadata=_about(
            one_of(OFF, *Repair),
            "How stored state that stands at another place is repaired and reused, unless a request says; "
            "what it gives is not exact.",
        ),
    )
    exact: bool = field(
        default=False,
        metadata=_about(
            SWITCH, "Turn every approximation off, also where a request or another setting asks for one."
        ),
    )
    planning: bool = field(
        default=True,
        metadata=_about(SWITCH, "Predict the memory of every request, and refuse one that cannot fit."),
    )
    memory_margin: float = field(
        default=0.1,
        metadata=_about(
            share(0, 10), "Share of the predicted memory that is kept free besides, in case it becomes more."
        ),
    )
    auto_truncate: bool = field(
        default=False,
        metadata=_about(
            SWITCH, "Leave the oldest part out of a prompt that does not fit, instead of refusing it."
        ),
    )
    queue: int = field(
        default=64, metadata=_about(whole(0, 100_000), "Requests that may wait before new ones are refused.")
    )
    max_concurrent_per_user: int | None = field(
        default=None,
        metadata=_about(
            or_word(whole(1, 100_000), "none", lambda: None),
            "Requests that one user may have here at a time, running or waiting.",
        ),
    )
    connections: int = field(
        default=1000,
        metadata=_about(
            whole(1, 100_000),
            "Connections that may be open; never more than half of the files the process may open.",
        ),
    )
    evict: bool = field(
        default=True,
        metadata=_about(
            SWITCH, "Let the oldest messages leave a conversation that is too long; otherwise it is an error."
        ),
    )
    low_water: float = field(
        default=0.5,
        metadata=_about(share(0.1, 0.9), "Share of the context that is still filled after messages have left."),
    )
    memory: bool = field(
        default=True, metadata=_about(SWITCH, "Archive what leaves a context, so that it can be found again.")
    )
    memory_budget: int = field(
        default=10 << 30,
        metadata=_about(BYTES, "Size of the memory on disk; beyond it the oldest archived turns go."),
    )
    recall: str = field(
        default=str(Recall.AUTO),
        metadata=_about(
            one_of(*Recall),
            "How archived turns come back: tool lets the model search, auto puts the best before the question.",
        ),
    )
    recall_tokens: int | None = field(
        default=None,
        metadata=_about(
            or_word(whole(16, 1 << 20), "auto", lambda: None),
            "Most tokens that auto puts there; auto takes an eighth of the context, at most 512.",
        ),
    )
    embeddings: bool = field(
        default=False,
        metadata=_about(SWITCH, "Search memory by meaning too; needs the extra emberkeep[embeddings]."),
    )
    tools: str = field(
        default="auto",
        metadata=_about(
            one_of("auto", "on", "off"),
            "Whether a chat may use tools; auto: where the model's chat template knows tools.",
        ),
    )
    server_tools: bool = field(
        default=False,
        metadata=_about(SWITCH, "Let the server run its own tools for clients that send none."),
    )
    enable_tools: tuple[str, ...] = field(
        default=(),
        metadata=_about(
            NAMES, "Tools or groups to use (all: every one); none named: all, but in a server no dangerous ones."
        ),
    )
    disable_tools: tuple[str, ...] = field(
        default=(), metadata=_about(NAMES, "Tools or groups that are not to be used.")
    )
    tools_from: tuple[Path, ...] = field(
        default=(), metadata=_about(PATHS, "Python files whose functions, marked with @tool, are tools too.")
    )
    tools_root: Path = field(
        default_factory=Path.cwd,
        metadata=_about(PATH, "Folder that file tools cannot leave, and where commands run."),
    )
    tool_timeout_s: float = field(
        default=60.0, metadata=_about(seconds(0.1, 86_400), "Longest time one tool call may take.")
    )
    tool_output: int = field(
        default=8000,
        metadata=_about(whole(200, 1 << 24), "Most characters of a tool's result that the model gets at a time."),
    )
    tool_turns: int = field(
        default=16, metadata=_about(whole(1, 1000), "Rounds of tool calls before a model has to answer.")
    )
    http_private: tuple[str, ...] = field(
        default=(),
        metadata=_about(
            NAMES, "Hosts in private networks, or host:port, that the HTTP tools may reach all the same."
        ),
    )
    notools: bool = field(
        default=False,
        metadata=_about(SWITCH, "Leave what a model writes as it is: nothing is taken for a tool call."),
    )
    reasoning: str = field(
        default="separate",
        metadata=_about(
            one_of("separate", "strip", "inline"),
            "Where reasoning goes, unless a request says: a field of its own, nowhere, or into the text.",
        ),
    )
    mcp: tuple[McpServer, ...] = field(
        default=(), metadata=_about(SERVERS, "MCP servers whose tools, resources and prompts can be used.")
    )
    backend: str = field(
        default="auto",
        metadata=_about(
            TEXT,
            "Who answers: auto, local, a name from `emberkeep api list`, or a kind (openai, anthropic, gemini, "
            "grok, ollama, trtllm); several, separated by commas, stand in for each other.",
        ),
    )
    backends: tuple[RemoteModel, ...] = field(
        default=(), metadata=_about(REMOTES, "Models that run somewhere else, as `emberkeep api add` adds them.")
    )
    base_url: str | None = field(
        default=None,
        metadata=_about(or_word(URL, "none", lambda: None), "Address of a backend that is named by its kind."),
    )
    consult_depth: int = field(
        default=1,
        metadata=_about(whole(0, 8), "How many models may ask one another in a chain; 0: none asks another."),
    )
    remote_retries: int = field(
        default=2, metadata=_about(whole(0, 20), "How often a request is sent again that a remote service failed.")
    )
    warm: tuple[WarmPrefix, ...] = field(
        default=(),
        metadata=_about(
            PREFIXES,
            "System prompt to have ready for everybody, or a file with one (.json: messages and tools).",
        ),
    )
    ttl_short_s: float = field(
        default=300.0,
        metadata=_about(clamped_seconds(2, _YEAR_S), "Seconds after its last use that a prefix is kept ready."),
    )
    ttl_long_s: float = field(
        default=3600.0,
        metadata=_about(
            clamped_seconds(2, _YEAR_S), "The same for conversations, and for what asks for the class long."
        ),
    )
    ttl_extended_s: float = field(
        default=86_400.0, metadata=_about(clamped_seconds(2, _YEAR_S), "The same for the class extended.")
    )
    sweep_s: float = field(
        default=30.0,
        metadata=_about(
            clamped_seconds(1, 3600), "How often to look for prefixes to warm again and conversations to let go."
        ),
    )
    turns_to_warm: int = field(
        default=2,
        metadata=_about(
            whole(1, 1000), "Turns of its conversation after which an unused branch leaves the engine for RAM."
        ),
    )
    turns_to_cold: int = field(
        default=4, metadata=_about(whole(1, 1000), "Turns after which it leaves RAM for the disk.")
    )
    tracked_conversations: int = field(
        default=16,
        metadata=_about(whole(1, 10_000), "Conversations whose slot and prefix are looked after at a time."),
    )
    disk_writes_per_day: int | None = field(
        default=200 << 30,
        metadata=_about(
            or_word(BYTES, "none", lambda: None),
            "Bytes a day written to disk; beyond them only what has been reused is.",
        ),
    )
    deadline_s: float | None = field(
        default=None,
        metadata=_about(
            or_word(seconds(0.001, 86_400), "none", lambda: None), "Longest time one request may take."
        ),
    )
    drain_s: float = field(
        default=20.0,
        metadata=_about(seconds(0, 86_400), "Time that running requests get to finish when the server stops."),
    )
    allowed_hosts: tuple[str, ...] = field(
        default=(),
        metadata=_about(NAMES, "Names, besides this machine's own, that clients may call the server by."),
    )
    allowed_origins: tuple[str, ...] = field(
        default=(),
        metadata=_about(NAMES, "Origins of web pages, such as http://localhost:3000, that may call the server."),
    )
    log_level: str = field(
        default="info", metadata=_about(one_of("debug", "info", "warning", "error"), "How much is logged.")
    )

    def __repr__(self) -> str:
        values = ", ".join(f"{key}={value!r}" for key, value in public_values(self).items())
        return f"Config({values})"


FIELDS: Mapping[str, Field[Any]] = {entry.name: entry for entry in fields(Config)}


def slice_tokens(config: Config, *, on_gpu: bool = False) -> int:
    """Most prompt tokens per step. A GPU takes as long for 500 tokens as for thousands."""
    return config.prefill_slice or (4096 if on_gpu else 512)


def ttls(config: Config) -> dict[Ttl, float]:
    """Seconds of each class."""
    return {Ttl.SHORT: config.ttl_short_s, Ttl.LONG: config.ttl_long_s, Ttl.EXTENDED: config.ttl_extended_s}


def help_for(key: str) -> str:
    return str(FIELDS[key].metadata["help"])


def accepts(key: str) -> str:
    return str(kind_of(key).accepts)


def type_of(key: str) -> str:
    return kind_of(key).type


def default_of(key: str) -> str:
    """The default as a person reads it."""
    return kind_of(key).word or shown(Config(), key)


def shown(config: Config, key: str) -> str:
    """A value as a person reads it, secrets masked."""
    return kind_of(key).show(getattr(config, key))


def public_values(config: Config) -> dict[str, Json]:
    """Every setting as JSON, secrets masked."""
    return {key: kind_of(key).public(getattr(config, key)) for key in FIELDS}


def check_exposure(config: Config) -> None:
    """Raises ConfigError when others could reach the server without a key."""
    if config.api_key is None and not is_loopback(config.host):
        raise ConfigError(
            f"Listening on {config.host} lets other machines in: set --api-key or EMBERKEEP_API_KEY."
        )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def kind_of(key: str) -> Kind:
    kind = FIELDS[key].metadata["kind"]
    assert isinstance(kind, Kind)
    return kind
