"""Every setting, said once: name, default, what is accepted, help text; and where its value came from.

A value comes from a flag, else from `EMBERKEEP_<KEY>`, else from the configuration file, else it is the
default. Nothing is dropped silently: an unknown key is an error that names the nearest known one.
"""

from __future__ import annotations

import difflib
import ipaddress
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

import platformdirs

from emberkeep.errors import ConfigError
from emberkeep.types import Json

ENV_PREFIX = "EMBERKEEP_"
ENV_FILE = "EMBERKEEP_CONFIG"
ENV_TEST_PREFIX = "EMBERKEEP_TEST"
DEFAULT_MODEL = "smollm2-135m"
FILE_NAMES = ("emberkeep.toml", "emberkeep.json")

_RAM_IF_UNKNOWN = 8 << 30


# ── what is accepted ─────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Kind:
    """`parse` takes what a flag, a variable or a file holds; it raises ValueError for everything else."""

    parse: Callable[[object], Any]
    accepts: str


def _parse_text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError
    return value.strip()


def _parse_secret(value: object) -> str | None:
    # An empty variable means "unset" to most shells and service managers; it must never count as a key.
    return None if value == "" else _parse_text(value)


def _parse_path(value: object) -> Path:
    return Path(value if isinstance(value, Path) else _parse_text(value)).expanduser()


def _parse_names(value: object) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)):
        raise ValueError
    return tuple(_parse_text(part) for part in parts if part != "")


def _parse_int(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError
    return int(value)


def _parse_float(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError
    return float(value)


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(I?B)?|B)?", re.IGNORECASE)


def parse_size(value: object) -> int:
    """Bytes. `KiB MiB GiB TiB` and bare `K M G T` are powers of 1024, `KB MB GB TB` of 1000."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _SIZE.fullmatch(_parse_text(value))
    if match is None:
        raise ValueError
    number, prefix, suffix = match.groups()
    if prefix is None:
        return int(number)
    base = 1000 if (suffix or "").upper() == "B" else 1024
    return int(float(number) * base ** (1 + "KMGT".index(prefix.upper())))


def _whole(low: int, high: int) -> _Kind:
    return _Kind(_between(_parse_int, low, high), f"a whole number from {low} to {high}")


def _seconds(low: float, high: float) -> _Kind:
    return _Kind(_between(_parse_float, low, high), f"seconds from {low:g} to {high:g}")


def _between(parse: Callable[[object], Any], low: float, high: float) -> Callable[[object], Any]:
    def checked(value: object) -> Any:
        number = parse(value)
        if not low <= number <= high:
            raise ValueError
        return number

    return checked


def _or_word(kind: _Kind, word: str, stands_for: Callable[[], Any]) -> _Kind:
    def parse(value: object) -> Any:
        return stands_for() if value == word else kind.parse(value)

    return _Kind(parse, f"{kind.accepts}, or {word}")


def _one_of(*words: str) -> _Kind:
    def parse(value: object) -> str:
        if value not in words:
            raise ValueError
        return str(value)

    return _Kind(parse, f"one of {', '.join(words)}")


_TEXT = _Kind(_parse_text, "a text that is not empty")
_SECRET = _Kind(_parse_secret, "a text")
_PATH = _Kind(_parse_path, "a path")
_NAMES = _Kind(_parse_names, "a list of names (in a variable: separated by commas)")
_BYTES = _Kind(parse_size, "a size such as 512MB, 4GiB or a number of bytes")


# ── the settings ─────────────────────────────────────────────────────────────────────────────────


def total_ram() -> int:
    """Bytes of RAM of this machine, or of the container it is in."""
    try:
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        machine = _RAM_IF_UNKNOWN
    try:
        return min(machine, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):
        return machine


def _quarter_of_ram() -> int:
    return total_ram() // 4


def _user_data_dir() -> Path:
    return platformdirs.user_data_path("emberkeep", appauthor=False)


def _about(kind: _Kind, help: str) -> Mapping[str, object]:
    return {"kind": kind, "help": help}


@dataclass(frozen=True, slots=True, repr=False)
class Config:
    model: str = field(
        default=DEFAULT_MODEL, metadata=_about(_TEXT, "Model to load: an installed name or a .gguf file.")
    )
    host: str = field(default="127.0.0.1", metadata=_about(_TEXT, "Address to listen on."))
    port: int = field(
        default=8080, metadata=_about(_whole(0, 65535), "Port to listen on; 0 takes any free one.")
    )
    api_key: str | None = field(
        default=None,
        metadata=_about(_SECRET, "Key that clients must send; required when listening beyond this machine."),
    )
    data_dir: Path = field(
        default_factory=_user_data_dir,
        metadata=_about(_PATH, "Folder for models, stored state and chat history."),
    )
    ctx: int | None = field(
        default=None,
        metadata=_about(
            _or_word(_whole(128, 1 << 24), "auto", lambda: None),
            "Longest conversation in tokens; auto takes the model's own length, capped.",
        ),
    )
    parallel: int = field(
        default=4, metadata=_about(_whole(1, 256), "Requests that are generated at the same time.")
    )
    threads: int | None = field(
        default=None,
        metadata=_about(
            _or_word(_whole(1, 1024), "auto", lambda: None), "CPU threads; auto takes every core."
        ),
    )
    gpu_layers: int = field(
        default=0,
        metadata=_about(
            _whole(0, 100_000),
            "Layers to put on the GPU, where this build of llama.cpp has one; a large number means all.",
        ),
    )
    prefill_slice: int = field(
        default=512,
        metadata=_about(
            _whole(1, 1 << 16), "Most prompt tokens evaluated in one step, so that others are not held up."
        ),
    )
    ram_budget: int = field(
        default_factory=_quarter_of_ram,
        metadata=_about(
            _or_word(_BYTES, "auto", _quarter_of_ram),
            "RAM for stored prompt state; auto takes a quarter of the memory.",
        ),
    )
    disk_budget: int = field(default=20 << 30, metadata=_about(_BYTES, "Disk space for stored prompt state."))
    queue: int = field(
        default=64, metadata=_about(_whole(0, 100_000), "Requests that may wait before new ones are refused.")
    )
    deadline_s: float | None = field(
        default=None,
        metadata=_about(
            _or_word(_seconds(0.001, 86_400), "none", lambda: None), "Longest time one request may take."
        ),
    )
    drain_s: float = field(
        default=20.0,
        metadata=_about(_seconds(0, 86_400), "Time that running requests get to finish when the server stops."),
    )
    allowed_hosts: tuple[str, ...] = field(
        default=(),
        metadata=_about(_NAMES, "Names, besides this machine's own, that clients may call the server by."),
    )
    allowed_origins: tuple[str, ...] = field(
        default=(),
        metadata=_about(
            _NAMES, "Origins of web pages, such as http://localhost:3000, that may call the server."
        ),
    )
    log_level: str = field(
        default="info", metadata=_about(_one_of("debug", "info", "warning", "error"), "How much is logged.")
    )

    def __repr__(self) -> str:
        values = ", ".join(f"{key}={value!r}" for key, value in public_values(self).items())
        return f"Config({values})"


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    config: Config
    origins: Mapping[str, str]
    """Where each value came from: `default`, `file PATH`, `env NAME` or `flag --NAME`."""


_FIELDS: Mapping[str, Field[Any]] = {entry.name: entry for entry in fields(Config)}


def help_for(key: str) -> str:
    return str(_FIELDS[key].metadata["help"])


def accepts(key: str) -> str:
    return str(_kind(key).accepts)


def public_values(config: Config) -> dict[str, Json]:
    """Every setting as JSON, secrets masked."""
    return {key: _public(key, getattr(config, key)) for key in _FIELDS}


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


# ── loading ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Given:
    """One value as somebody wrote it; relative paths start at `base`."""

    key: str
    value: object
    origin: str
    base: Path


def load_config(
    flags: Mapping[str, object], *, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> LoadedConfig:
    """Settle every setting. Reads one file at most.

    A flag whose value is None was not given; the flag `config` names the file. Raises ConfigError.
    """
    env = os.environ if env is None else env
    cwd = Path.cwd() if cwd is None else cwd
    path = _config_file(flags.get("config"), env, cwd)
    values: dict[str, Any] = {}
    origins = dict.fromkeys(_FIELDS, "default")
    layers = (_from_file(path) if path else [], _from_env(env, cwd), _from_flags(flags, cwd))
    for given in (given for layer in layers for given in layer):
        values[given.key] = _parsed(given)
        origins[given.key] = given.origin
    return LoadedConfig(Config(**values), origins)


def _config_file(flag: object, env: Mapping[str, str], cwd: Path) -> Path | None:
    named = flag or env.get(ENV_FILE)
    if named:
        return cwd / Path(str(named)).expanduser()
    folders = (cwd, platformdirs.user_config_path("emberkeep", appauthor=False))
    candidates = (folder / name for folder in folders for name in FILE_NAMES)
    return next((path for path in candidates if path.is_file()), None)


def _from_file(path: Path) -> Iterable[_Given]:
    for key, value in _read_file(path).items():
        if key not in _FIELDS:
            raise ConfigError(f"Unknown key {key!r} in {path}{_nearest(key, _FIELDS)}")
        yield _Given(key, value, f"file {path}", path.parent)


def _read_file(path: Path) -> Mapping[str, object]:
    readers = {".toml": tomllib.loads, ".json": json.loads}
    reader = readers.get(path.suffix)
    if reader is None:
        raise ConfigError(f"{path} is not a configuration file: give one that ends in .toml or .json.")
    try:
        content = reader(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid {path.suffix[1:].upper()}: {error}.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold one JSON object of settings.")
    return content


def _from_env(env: Mapping[str, str], cwd: Path) -> Iterable[_Given]:
    known = {ENV_PREFIX + key.upper(): key for key in _FIELDS}
    for name in sorted(name for name in env if name.startswith(ENV_PREFIX)):
        if name == ENV_FILE or name.startswith(ENV_TEST_PREFIX):
            continue
        if name not in known:
            raise ConfigError(f"Unknown environment variable {name}{_nearest(name, known)}")
        yield _Given(known[name], env[name], f"env {name}", cwd)


def _from_flags(flags: Mapping[str, object], cwd: Path) -> Iterable[_Given]:
    for key, value in flags.items():
        if value is None or key == "config":
            continue
        if key not in _FIELDS:
            raise ConfigError(f"Unknown setting {key!r}{_nearest(key, _FIELDS)}")
        yield _Given(key, value, f"flag --{key.replace('_', '-')}", cwd)


def _nearest(name: str, known: Iterable[str]) -> str:
    match = difflib.get_close_matches(name, list(known), n=1)
    return f": did you mean {match[0]}?" if match else ": `emberkeep config show` lists the known ones."


def _parsed(given: _Given) -> Any:
    kind = _kind(given.key)
    try:
        value = kind.parse(given.value)
    except (ValueError, OverflowError) as error:
        shown = _public(given.key, given.value)
        raise ConfigError(f"{given.key} = {shown!r} ({given.origin}) is not {kind.accepts}.") from error
    return given.base / value if isinstance(value, Path) else value


def _kind(key: str) -> _Kind:
    kind = _FIELDS[key].metadata["kind"]
    assert isinstance(kind, _Kind)
    return kind


def _public(key: str, value: Any) -> Json:
    if _kind(key) is _SECRET and value is not None:
        return "***"
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value
