"""Every setting, said once: name, default, what is accepted, help text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import Field, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import platformdirs

from emberkeep.config.kinds import (
    ALIASES,
    BYTES,
    LIFETIMES,
    LORAS,
    NAMES,
    OTHERS,
    PATH,
    PATHS,
    SECRET,
    SHARED_SERVER,
    SHARES,
    SWITCH,
    TEXT,
    URL,
    Alias,
    Kind,
    Lifetimes,
    LoraFile,
    clamped_seconds,
    has_cores,
    is_name_here,
    layers,
    one_of,
    or_word,
    path_or,
    pattern,
    seconds,
    share,
    span,
    whole,
)
from emberkeep.config.machine import total_ram
from emberkeep.config.tables import HYGIENE, PREFIXES, REMOTES, SERVERS, McpServer, WarmPrefix
from emberkeep.logs import AUTO
from emberkeep.types.hygiene import HygieneRule
from emberkeep.types.lineage import Repair
from emberkeep.types.models import AttentionTier, Quantization, RemoteModel, Residency
from emberkeep.types.request import Json, Recall
from emberkeep.values import dataclass

DEFAULT_MODEL = "smollm2-135m"
ASK = "ask"
NEVER = "never"
OFF = "off"
"""`approximate`: state that was stored at another position is not reused. `speculation`: nothing is drafted."""

TOOL_TURNS = 16
"""Rounds of tool calls before a model has to answer."""
DRAIN_S = 20.0
"""How long running requests may take to finish when a server stops."""
PREFILL_SLICE = 512
"""Most prompt tokens in one step on a CPU, so that others do not wait long."""


class TooLong(StrEnum):
    EVICT = "evict"
    TRUNCATE = "truncate"
    REFUSE = "refuse"


_YEAR_S = 365 * 86_400


def _quarter_of_ram() -> int:
    return total_ram() // 4


def _user_data_dir() -> Path:
    return platformdirs.user_data_path("emberkeep", appauthor=False)


def _setting(default: object, kind: Kind, help: str, *, harmless: Callable[[object], bool] | None = None) -> Any:
    """A field of Config. A `default` that can be called makes one when it is needed.

    `harmless`: which values, as they are written, a file may hold that its user has not agreed to.
    """
    about = {"kind": kind, "help": help, "harmless": harmless}
    if callable(default):
        return field(default_factory=default, metadata=about)
    return field(default=default, metadata=about)


def _harmless(default: object, kind: Kind, help: str) -> Any:
    """A setting that such a file may hold with any value: it shapes answers, or how they are computed. It cannot
    run, read, send or redirect anything, fill the disk, take away a limit or a protection, or hide a warning."""
    return _setting(default, kind, help, harmless=lambda value: True)


@dataclass(frozen=True, slots=True, repr=False)
class Config:
    model: str | None = _setting(
        None,
        or_word(TEXT, "auto"),
        f"Model to load: an installed name, a .gguf file, or a folder of safetensors; auto: {DEFAULT_MODEL} here, "
        "and elsewhere what a backend takes by itself.",
        harmless=is_name_here,
    )
    models: tuple[str, ...] = _setting(
        (),
        OTHERS,
        "Other models that a server answers for, loaded when they are asked for; auto: all, unless model or "
        "backend names one.",
    )
    aliases: tuple[Alias, ...] = _setting((), ALIASES, "Other names by which clients may ask for models.")
    pinned: tuple[str, ...] = _setting(
        (), NAMES, "Models that stay loaded, though they are idle or another one needs their memory."
    )
    unload_after_s: float | None = _setting(
        300.0,
        or_word(seconds(0, _YEAR_S), "never"),
        "Seconds after its last request that a model is unloaded; the one that was loaded at the start stays.",
    )
    model_memory: int | None = _setting(
        None,
        or_word(BYTES, "auto"),
        "Memory for all models that are loaded at a time; auto: five eighths of RAM, and what GPUs have.",
    )
    backend: str = _setting(
        "auto",
        TEXT,
        "Who answers: auto, local, a name from `emberkeep api list`, or a kind (openai, anthropic, gemini, "
        "grok, ollama, trtllm); several, separated by commas, stand in for each other.",
    )
    backends: tuple[RemoteModel, ...] = _setting(
        (), REMOTES, "Models that run somewhere else, as `emberkeep api add` adds them."
    )
    base_url: str | None = _setting(None, or_word(URL, "none"), "Address of a backend that is named by its kind.")
    ctx: int | None = _harmless(
        None,
        or_word(whole(128, 1 << 24), "auto"),
        "Longest conversation in tokens; auto takes the model's own length, 32,768 at most.",
    )
    lora: tuple[LoraFile, ...] = _setting(
        (), LORAS, "LoRA adapters (GGUF) to apply to a GGUF model, and how strongly; 1 unless told."
    )
    kv_type: str = _harmless(
        "f16",
        one_of("f16", "q8_0", "q4_0"),
        "Numbers in which a GGUF model's state is held and stored: q8_0 takes half the room, q4_0 a quarter.",
    )
    speculation: str = _setting(
        "auto",
        TEXT,
        "What drafts tokens before the model computes them: auto (stored texts, where that is faster), off, "
        "or besides these a small model with the same vocabulary.",
        harmless=is_name_here,
    )
    pooling: str = _harmless(
        "auto",
        one_of("auto", "mean", "cls", "last"),
        "How states become one vector for embeddings; auto: as the model says, and a chat model gives none.",
    )
    ram_budget: int = _setting(
        _quarter_of_ram,
        or_word(BYTES, "auto", _quarter_of_ram),
        "RAM for stored prompt state; auto takes a quarter of the memory.",
    )
    disk_budget: int = _setting(20 << 30, BYTES, "Disk space for stored prompt state.")
    disk_writes_per_day: int | None = _setting(
        200 << 30, or_word(BYTES, "none"), "Bytes a day written to disk; beyond them only what has been reused is."
    )
    remote: str | None = _setting(
        None,
        or_word(SHARED_SERVER, "none"),
        "Valkey or Redis server in which hosts share prompt state, such as valkey://user:password@10.0.0.5:6379; "
        "with a password best in EMBERKEEP_REMOTE.",
    )
    remote_key: str | None = _setting(
        None, SECRET, "Secret that all hosts have, with which everything in that server is encrypted."
    )
    kv_bits: int = _harmless(
        16,
        one_of(16, 8, 4),
        "Bits in which prompt state is stored: 8 halves it and 4 halves it again, and is no longer exact.",
    )
    approximate: str = _setting(
        OFF,
        one_of(OFF, NEVER, *Repair),
        "How state from another position is repaired and reused, unless a request says; it is not exact. "
        "never: who asks for that, or for fewer kv_bits, is refused.",
        harmless=lambda value: value == NEVER,
    )
    warm: tuple[WarmPrefix, ...] = _setting(
        (), PREFIXES, "System prompt to have ready for all users, or a file with one (.json: messages and tools)."
    )
    hygiene: tuple[HygieneRule, ...] = _setting(
        (),
        HYGIENE,
        "Rules for parts of prompts that change with every call: what they do so that the rest is reused.",
    )
    ttl: Lifetimes = _setting(
        Lifetimes(),
        LIFETIMES,
        "Seconds after its last use that a prefix (short), a conversation (long) and what asks for extended "
        "are kept ready.",
    )
    expire: bool = _setting(
        False, SWITCH, "Delete what has outlived its TTL, from RAM and disk too, at the next sweep; pins stay."
    )
    sweep_s: float = _setting(
        30.0, clamped_seconds(1, 3600), "How often to look for prefixes to warm again and conversations to let go."
    )
    host: str = _setting("127.0.0.1", TEXT, "Address to listen on.")
    port: int = _setting(8080, whole(0, 65535), "Port to listen on; 0 takes any free one.")
    api_key: str | None = _setting(
        None, SECRET, "Key that clients must send; required when listening beyond this machine."
    )
    allow: tuple[str, ...] = _setting(
        (),
        NAMES,
        "Names by which clients may call the server besides this machine's own; origins of pages that may, "
        "such as http://localhost:3000.",
    )
    data_dir: Path = _setting(_user_data_dir, PATH, "Folder for models, stored state and chat history.")
    parallel: int = _harmless(4, whole(1, 256), "Requests that are generated at the same time.")
    queue: int = _setting(64, whole(0, 100_000), "Requests that may wait before new ones are refused.")
    max_concurrent_per_user: int | None = _setting(
        None,
        or_word(whole(1, 100_000), "none"),
        "Requests that one user may have here at a time, running or waiting.",
    )
    max_tokens: int | None = _setting(
        None,
        or_word(whole(1, 1 << 24), "none"),
        "Most tokens of an answer, also where a request asks for more or says nothing.",
    )
    deadline_s: float | None = _setting(
        None, or_word(seconds(0.001, 86_400), "none"), "Longest time one request may take."
    )
    too_long: str = _harmless(
        str(TooLong.EVICT),
        one_of(*TooLong),
        "What becomes of a conversation that is too long: its oldest messages leave and are archived, its "
        "oldest part is left out, or it is refused.",
    )
    memory_margin: float | None = _setting(
        0.1,
        or_word(share(0, 10), OFF),
        "Share of a request's predicted memory that is kept free besides; off: memory is not predicted, and "
        "nothing refused for it.",
    )
    reasoning: str = _harmless(
        "separate",
        one_of("separate", "strip", "inline"),
        "Where reasoning goes, unless a request says: a field of its own, nowhere, or into the text.",
    )
    log_level: str = _setting(
        AUTO,
        one_of(AUTO, "debug", "info", "warning", "error"),
        "How much is logged; auto: info in servers, and warnings in other commands.",
    )
    memory: bool = _setting(True, SWITCH, "Archive what leaves a context, so that it can be found again.")
    memory_budget: int = _setting(
        10 << 30, BYTES, "Size of the memory on disk; beyond it the oldest archived turns and stored responses go."
    )
    recall: str = _setting(
        str(Recall.AUTO),
        one_of(*Recall),
        "How archived turns come back: tool lets the model search, auto puts the best before the question.",
    )
    tools: str = _setting(
        "auto",
        one_of("auto", "on", OFF),
        "Whether models are told of tools; auto: in a chat, where the template knows them; off: of none, also "
        "where clients send some.",
    )
    server_tools: str = _setting(
        OFF,
        one_of(OFF, "safe", ASK),
        "Tools that the server runs by itself for clients that send none: safe ones, or (ask) all that its "
        "client asks a person about.",
    )
    enable_tools: tuple[str, ...] = _setting(
        (), NAMES, "Tools or groups to use (all: every one); none named: all, but in a server no dangerous ones."
    )
    disable_tools: tuple[str, ...] = _setting((), NAMES, "Tools or groups that are not to be used.")
    tools_from: tuple[Path, ...] = _setting(
        (), PATHS, "Python files whose functions, marked with @tool, are tools too."
    )
    tools_root: Path = _setting(Path.cwd, PATH, "Folder that file tools cannot leave, and where commands run.")
    tool_timeout_s: float = _setting(60.0, seconds(0.1, 86_400), "Longest time one tool call may take.")
    http_private: tuple[str, ...] = _setting(
        (), NAMES, "Hosts in private networks, or host:port, that the HTTP tools may reach all the same."
    )
    mcp: tuple[McpServer, ...] = _setting(
        (), SERVERS, "MCP servers whose tools, resources and prompts can be used."
    )
    engine: str = _harmless(
        "auto",
        one_of("auto", "llamacpp", "hf"),
        "What runs the model; auto takes llamacpp for GGUF, hf for safetensors.",
    )
    llama_library: str = _setting(
        "auto",
        path_or("auto", "native", "cuda", "vulkan", "ready-made"),
        "Which llama.cpp is used: native (compiled here), cuda or vulkan (ready-made, for GPUs), ready-made (for "
        "CPUs), or the path of a libllama; auto takes the first of them that runs here.",
    )
    threads: int | None = _setting(
        None, or_word(whole(1, 1024), "auto"), "CPU threads; auto takes every core.", harmless=has_cores
    )
    mlock: bool = _setting(
        False,
        SWITCH,
        "Lock weights in RAM, so that they are never swapped out, where the limit of the system allows it.",
    )
    flash_attention: str = _harmless(
        "auto",
        one_of("auto", "on", "off"),
        "Whether llama.cpp computes attention in one pass; auto changes to what is quicker for the work at hand.",
    )
    device: str = _harmless(
        "auto",
        pattern(r"auto|cpu|mps|cuda(:\d{1,3})?", "one of auto, cpu, mps, cuda, cuda:1 and so on"),
        "Where the hf engine computes; auto takes a GPU if there is one.",
    )
    dtype: str = _harmless(
        "auto",
        one_of("auto", "float32", "bfloat16", "float16"),
        "Numbers the hf engine computes with; auto takes the model's own, and float32 on a CPU.",
    )
    quantization: str = _harmless(
        str(Quantization.NONE),
        one_of(*Quantization),
        "Bits that the hf engine rounds the weights of a model's layers to when it loads them.",
    )
    attention: str = _harmless(
        "auto", one_of("auto", *AttentionTier), "How the hf engine computes attention; auto takes the fastest."
    )
    residency: str = _harmless(
        str(Residency.AUTO),
        pattern(
            r"auto|full|partial(:\d{1,5},\d{1,5})?|ffn|stream",
            "auto, full, partial, partial:FIRST,LAST, ffn or stream",
        ),
        "Weights that the hf engine keeps on a GPU, while others pass through it from RAM; partial: those of "
        "the first and last layers; auto: what fits.",
    )
    gpu_memory: int | None = _setting(
        None, or_word(BYTES, "auto"), "Most memory of a GPU that the hf engine uses; auto: what is free."
    )
    gpu_layers: int | None = _harmless(
        None,
        or_word(layers(), "auto"),
        "Layers of a GGUF model to put on GPUs that llama.cpp can use (all: every one); auto: as many as fit.",
    )
    cpu_moe: int = _harmless(
        0, layers(), "Layers, from the first on, whose experts stay in RAM when the rest of them is on a GPU."
    )
    tensor_split: tuple[float, ...] | None = _harmless(
        None, or_word(SHARES, "auto"), "How layers are shared out among several GPUs; auto: by their free memory."
    )
    replicas: tuple[int, int] = _setting(
        (2, 2),
        span(1, 1000),
        "Servers that `emberkeep cluster serve` keeps running; of two numbers, such as 2-8, as many as there "
        "is work for.",
    )
    cluster_gpus: float = _setting(0.0, share(0, 64), "GPUs that Ray gives to each replica, which sees no others.")
    cluster_backends: tuple[str, ...] = _setting(
        (),
        NAMES,
        "Backends of `emberkeep api list`, one for each replica in turn; none: all have the same backend.",
    )
    cluster_address: str | None = _setting(
        None,
        or_word(TEXT, "none"),
        "Address of a Ray that runs already, such as 10.0.0.1:6379; none: one is started for this machine alone.",
    )

    @property
    def local_model(self) -> str:
        """The model that is loaded where one runs here; `model` says whether it was named."""
        return self.model or DEFAULT_MODEL

    @property
    def draft_model(self) -> str | None:
        """The model that drafts; None where none does."""
        return None if self.speculation in ("auto", OFF) else self.speculation

    def __repr__(self) -> str:
        values = ", ".join(f"{key}={value!r}" for key, value in public_values(self).items())
        return f"Config({values})"


FIELDS: Mapping[str, Field[Any]] = {entry.name: entry for entry in fields(Config)}


def placed_by_itself(config: Config) -> Config:
    """For another model: what is said of adapters, drafts and layers is said of the first one."""
    return replace(
        config,
        lora=(),
        speculation=OFF if config.speculation == OFF else "auto",
        gpu_layers=None,
        cpu_moe=0,
        tensor_split=None,
        residency=str(Residency.AUTO),
    )


def memory_file(config: Config) -> Path:
    return config.data_dir / "memory.sqlite3"


def is_harmless(key: str, value: object) -> bool:
    """A file of the current folder may say it, whoever wrote it; `value` as it is written there."""
    harmless: Callable[[object], bool] | None = FIELDS[key].metadata["harmless"]
    return harmless is not None and harmless(value)


def show_value(config: Config, key: str) -> str:
    """A value as a person reads it, secrets masked."""
    return kind_of(key).show(getattr(config, key))


def public_values(config: Config) -> dict[str, Json]:
    """Every setting as JSON, secrets masked."""
    return {key: kind_of(key).public(getattr(config, key)) for key in FIELDS}


def kind_of(key: str) -> Kind:
    kind = FIELDS[key].metadata["kind"]
    assert isinstance(kind, Kind)
    return kind
