"""Where a value comes from: a flag, else a variable, else a file, else the default.

Nothing is dropped silently: an unknown key is an error that names the nearest known one, and what a file of the
current folder says is left out with a warning where it could do harm and the user has not agreed to it.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import platformdirs

from emberkeep.config.kinds import readable_size
from emberkeep.config.settings import FIELDS, Config, is_harmless, kind_of
from emberkeep.errors import ConfigError
from emberkeep.files import locked, private_folder, replace_file
from emberkeep.types.request import Json
from emberkeep.values import dataclass

ENV_PREFIX = "EMBERKEEP_"
ENV_FILE = "EMBERKEEP_CONFIG"
ENV_TEST_PREFIX = "EMBERKEEP_TEST"
ARGUMENT = "argument"
FILE_NAMES = ("emberkeep.toml", "emberkeep.json")
_LARGEST_FILE = 16 << 20


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    config: Config
    origins: Mapping[str, str]
    """Where each value came from: `default`, `file PATH`, `env NAME`, `flag --NAME` or `argument`."""
    warning: str = ""
    """What a file says that is not trusted, and was left out; empty where there is no such thing."""

    @property
    def flags(self) -> frozenset[str]:
        """The settings that were given on the command line."""
        return frozenset(key for key, origin in self.origins.items() if origin.startswith("flag "))


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """What a file says, and the digest of the very bytes that say it."""

    path: Path
    settings: Mapping[str, object]
    digest: str
    left_out: tuple[str, ...] = ()
    """Its keys that do not count, because the user has not agreed to them."""

    @property
    def risky(self) -> tuple[str, ...]:
        """The keys that need the user's consent where the file was only found in the current folder."""
        return tuple(key for key, value in self.settings.items() if not is_harmless(key, value))

    def parsed(self, key: str) -> Any:
        """Relative paths and files in it are as they are written. Raises ConfigError."""
        return _parse(self.given(key))

    def public(self, key: str) -> Json:
        """The same as JSON, secrets masked. Raises ConfigError."""
        return kind_of(key).public(self.parsed(key))

    def given(self, key: str) -> _Given:
        return _Given(key, self.settings[key], f"file {self.path}", self.path.parent)


@dataclass(frozen=True, slots=True)
class _Given:
    """One value as it was written; relative paths start at `base`."""

    key: str
    value: object
    origin: str
    base: Path


def load_config(
    flags: Mapping[str, object],
    *,
    as_arguments: bool = False,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> LoadedConfig:
    """Settle every setting. Reads the file that is named, else the user's own and that of the current folder.

    A flag whose value is None was not given; the flag `config` names the file. `as_arguments`: they are those of
    a Python call, and errors do not speak of flags. Raises ConfigError.
    """
    env = os.environ if env is None else env
    cwd = Path.cwd() if cwd is None else cwd
    files = _config_files(flags.get("config"), env, cwd)
    values: dict[str, Any] = {}
    origins = dict.fromkeys(FIELDS, "default")
    layers = (*map(_from_file, files), _from_env(env, cwd), _from_flags(flags, as_arguments, cwd))
    for given in (given for layer in layers for given in layer):
        values[given.key] = kind_of(given.key).settle(_parse(given), given.base)
        origins[given.key] = given.origin
    for file in files:
        origins |= {key: f"{origins[key]} (that of {file.path} is not trusted)" for key in file.left_out}
    return LoadedConfig(Config(**values), origins, " ".join(_warning(file) for file in files if file.left_out))


def _warning(file: ConfigFile) -> str:
    return (
        f"{file.path} is not trusted, and what it says of {', '.join(file.left_out)} is left out: "
        "`emberkeep config trust` shows what it would do, and asks you."
    )


def _config_files(flag: object, env: Mapping[str, str], cwd: Path) -> list[ConfigFile]:
    """The one that is named; else the user's own, and over it the one that the user only stands beside."""
    named = flag or env.get(ENV_FILE)
    if named:
        return [read_config_file(cwd / Path(str(named)).expanduser())]
    own, here = file_in(platformdirs.user_config_path("emberkeep", appauthor=False)), file_in(cwd)
    files = [read_config_file(own)] if own else []
    if here and not (own and own.samefile(here)):
        files.append(_read_found(here))
    return files


def _read_found(path: Path) -> ConfigFile:
    """Without links: relative paths start where the file really is, and trust is in that one."""
    file = read_config_file(path.resolve())
    return file if is_trusted(file.path, file.digest) else replace(file, left_out=file.risky)


def file_in(folder: Path) -> Path | None:
    """The configuration file of a folder."""
    return next((path for name in FILE_NAMES if (path := folder / name).is_file()), None)


def read_config_file(path: Path) -> ConfigFile:
    """Raises ConfigError."""
    data = _read(path)
    settings = _parse_file(path, data)
    if isinstance(settings.get("models"), dict):
        raise ConfigError(f"[models] (file {path}) is gone: say models = [...], and aliases in [aliases].")
    for key in settings:
        if key not in FIELDS:
            gone = why_gone(key, f"{key} (file {path})")
            raise ConfigError(gone or f"Unknown key {key!r} in {path}{_nearest(key)}")
    return ConfigFile(path, settings, hashlib.sha256(data).hexdigest())


def _from_file(file: ConfigFile) -> Iterable[_Given]:
    return (file.given(key) for key in file.settings if key not in file.left_out)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_FILE + 1)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(
            f"Cannot read {path} ({reason}): name another file with --config or {ENV_FILE}."
        ) from error
    if len(data) > _LARGEST_FILE:
        raise ConfigError(f"{path} is larger than {readable_size(_LARGEST_FILE)}: that is no configuration file.")
    return data


def _parse_file(path: Path, data: bytes) -> Mapping[str, object]:
    readers = {".toml": tomllib.loads, ".json": json.loads}
    reader = readers.get(path.suffix)
    if reader is None:
        raise ConfigError(f"{path} is not a configuration file: give one that ends in .toml or .json.")
    try:
        content = reader(data.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid {path.suffix[1:].upper()}: {error}.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold one JSON object of settings.")
    return content


def _from_env(env: Mapping[str, str], cwd: Path) -> Iterable[_Given]:
    known = {_variable(key): key for key in FIELDS}
    for name in sorted(name for name in env if name.startswith(ENV_PREFIX)):
        if name == ENV_FILE or name.startswith(ENV_TEST_PREFIX):
            continue
        if name not in known:
            key = name.removeprefix(ENV_PREFIX).lower()
            unknown = f"Unknown environment variable {name}{_nearest(key, _variable)}"
            raise ConfigError(why_gone(key, name) or unknown)
        yield _Given(known[name], env[name], f"env {name}", cwd)


def _from_flags(flags: Mapping[str, object], as_arguments: bool, cwd: Path) -> Iterable[_Given]:
    for key, value in flags.items():
        if value is None or key == "config":
            continue
        if key not in FIELDS:
            raise ConfigError(why_gone(key, key) or f"Unknown setting {key!r}{_nearest(key)}")
        yield _Given(key, value, ARGUMENT if as_arguments else f"flag --{key.replace('_', '-')}", cwd)


def _variable(key: str) -> str:
    return ENV_PREFIX + key.upper()


def _nearest(key: str, write: Callable[[str], str] = str) -> str:
    match = difflib.get_close_matches(key, FIELDS, n=1)
    if match:
        return f": did you mean {write(match[0])}?"
    return ": remove it; `emberkeep config show` lists the known ones."


def _parse(given: _Given) -> Any:
    kind = kind_of(given.key)
    try:
        return kind.parse(given.value)
    except (ValueError, OverflowError) as error:
        shown = "***" if kind.hides else str(given.value) if isinstance(given.value, Path) else given.value
        where = "" if given.origin == ARGUMENT else f" ({given.origin})"
        raise ConfigError(f"{given.key} = {shown!r}{where} is not {kind.accepts}.") from error


# ── settings that there are no more, and what to use instead ──

REMOVED: Mapping[str, str] = {
    "accept_any_model": 'give a model the alias `*`: aliases = {"*" = "MODEL"}, or --aliases *=MODEL.',
    "allowed_hosts": "list names of hosts in allow.",
    "allowed_origins": "list origins of pages, such as http://localhost:3000, in allow.",
    "ask_permission": "say server_tools = ask.",
    "auto_truncate": "say too_long = truncate.",
    "chunk_size": "state is stored in chunks of 128 tokens.",
    "cluster_cpus": "set threads: each replica takes so many, or its share of the machine's cores.",
    "cluster_max_replicas": "say replicas = 2-8.",
    "cluster_replicas": "say replicas = 2, or 2-8.",
    "cluster_target": "another replica is started where more requests run than parallel says.",
    "connections": "half of the files that the process may open, and at most 1000, can be connections.",
    "consult_depth": "who is asked by a model cannot ask another; `--disable-tools models` lets none be asked.",
    "draft_max": "as many tokens are drafted as are worth it; speculation = off drafts none.",
    "draft_model": "say speculation = MODEL.",
    "drain_s": "running requests get 20 seconds to finish when the server stops.",
    "embeddings": "memory is searched by meaning, too, where the extra emberkeep[embeddings] is installed.",
    "evict": "say too_long = refuse (or evict, the default).",
    "exact": "say approximate = never.",
    "keep_first": "say residency = partial:FIRST,LAST.",
    "keep_last": "say residency = partial:FIRST,LAST.",
    "low_water": "messages leave until half of the context is free.",
    "memory_path": "the memory is memory.sqlite3 in data_dir; a link of that name may lead to another disk.",
    "notools": "say tools = off.",
    "num_blocks": "set gpu_memory: the memory of a GPU in which models and state may be.",
    "planning": "say memory_margin = off.",
    "prefill_slice": "steps are as long as suits the machine; a request says prefill_chunk_size for shorter ones.",
    "recall_tokens": "an eighth of the context is quoted, and 512 tokens at most; recall = off quotes nothing.",
    "remote_deadline_s": "a request waits half a second for the shared server.",
    "remote_password": "write it into remote, as in valkey://user:password@host:6379 (best in EMBERKEEP_REMOTE).",
    "remote_retries": "a request that a service failed is sent again twice.",
    "remote_user": "write it into remote, as in valkey://user:password@host:6379.",
    "remote_writes_per_s": "at most 256 MiB a second are written to the shared server.",
    "routing": "a request goes to the replica that knows its beginning, else to the one with the least to do.",
    "show_consulted": "a chat always shows what a model answered that another one asked.",
    "tool_output": "a model gets 8,000 characters of a tool's result at a time, and can ask for the rest.",
    "tool_turns": "a model has to answer after 16 rounds of tool calls.",
    "tracked_conversations": "16 conversations are looked after at a time.",
    "truncate_dimensions": "requests that ask for `dimensions` get them.",
    "ttl_extended_s": "say ttl = {extended = 86400}, or --ttl extended=86400.",
    "ttl_long_s": "say ttl = {long = 3600}, or --ttl long=3600.",
    "ttl_short_s": "say ttl = {short = 300}, or --ttl short=300.",
    "turns_to_cold": "an unused branch leaves RAM for the disk after four turns of its conversation.",
    "turns_to_warm": "an unused branch leaves the engine for RAM after two turns of its conversation.",
    "vector_budget": "vectors of embeddings take a twentieth of disk_budget.",
}
"""Each name with a sentence that goes on after "is gone: "."""


def why_gone(key: str, written: str) -> str | None:
    """What to tell who still uses a setting, as it was `written`; None where there never was such a setting."""
    instead = REMOVED.get(key)
    return None if instead is None else f"{written} is gone: {instead}"


# ── files of folders that the user has agreed to, each by its real path and the digest of its bytes ──
#
# <the user's data folder>/trusted.json    whatever data_dir says: a file must not choose who vouches for it


def is_trusted(path: Path, digest: str) -> bool:
    """The user has agreed to these very bytes at this place. What cannot be read vouches for nothing."""
    return _read_record(_record()).get(str(path)) == digest


def trust(path: Path, digest: str) -> None:
    """Raises OSError."""
    _change({str(path): digest})


def withdraw(path: Path) -> bool:
    """Whether there was something to withdraw. Raises OSError."""
    was_trusted = str(path) in _read_record(_record())
    if was_trusted:
        _change({str(path): None})
    return was_trusted


def _change(digests: Mapping[str, str | None]) -> None:
    record = _record()
    private_folder(record.parent)
    with locked(record.with_suffix(".lock")):
        entries = {**_read_record(record), **digests}
        kept = {name: digest for name, digest in entries.items() if digest is not None}
        replace_file(record, json.dumps(kept, indent=1).encode())


def _read_record(record: Path) -> Mapping[str, object]:
    try:
        content = json.loads(record.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _record() -> Path:
    return platformdirs.user_data_path("emberkeep", appauthor=False) / "trusted.json"
