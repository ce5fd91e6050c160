"""Where a value comes from: a flag, else a variable, else the file, else the default.

Nothing is dropped silently: an unknown key is an error that names the nearest known one.
"""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from emberkeep.config.settings import FIELDS, Config, kind_of
from emberkeep.config.tables import spread_models
from emberkeep.errors import ConfigError

ENV_PREFIX = "EMBERKEEP_"
ENV_FILE = "EMBERKEEP_CONFIG"
ENV_TEST_PREFIX = "EMBERKEEP_TEST"
ARGUMENT = "argument"
FILE_NAMES = ("emberkeep.toml", "emberkeep.json")


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    config: Config
    origins: Mapping[str, str]
    """Where each value came from: `default`, `file PATH`, `env NAME`, `flag --NAME` or `argument`."""


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
    """Settle every setting. Reads one file at most.

    A flag whose value is None was not given; the flag `config` names the file. `as_arguments`: they are those of
    a Python call, and errors do not speak of flags. Raises ConfigError.
    """
    env = os.environ if env is None else env
    cwd = Path.cwd() if cwd is None else cwd
    path = _config_file(flags.get("config"), env, cwd)
    values: dict[str, Any] = {}
    origins = dict.fromkeys(FIELDS, "default")
    layers = (_from_file(path) if path else [], _from_env(env, cwd), _from_flags(flags, as_arguments, cwd))
    for given in (given for layer in layers for given in layer):
        values[given.key] = _parse(given)
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
    for key, value in spread_models(_read_file(path)).items():
        if key not in FIELDS:
            raise ConfigError(f"Unknown key {key!r} in {path}{_nearest(key)}")
        yield _Given(key, value, f"file {path}", path.parent)


def _read_file(path: Path) -> Mapping[str, object]:
    readers = {".toml": tomllib.loads, ".json": json.loads}
    reader = readers.get(path.suffix)
    if reader is None:
        raise ConfigError(f"{path} is not a configuration file: give one that ends in .toml or .json.")
    try:
        content = reader(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(
            f"Cannot read {path} ({reason}): name another file with --config or {ENV_FILE}."
        ) from error
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
            nearest = _nearest(name.removeprefix(ENV_PREFIX).lower(), _variable)
            raise ConfigError(f"Unknown environment variable {name}{nearest}")
        yield _Given(known[name], env[name], f"env {name}", cwd)


def _from_flags(flags: Mapping[str, object], as_arguments: bool, cwd: Path) -> Iterable[_Given]:
    for key, value in flags.items():
        if value is None or key == "config":
            continue
        if key not in FIELDS:
            raise ConfigError(f"Unknown setting {key!r}{_nearest(key)}")
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
        value = kind.parse(given.value)
    except (ValueError, OverflowError) as error:
        shown = "***" if kind.hides else str(given.value) if isinstance(given.value, Path) else given.value
        where = "" if given.origin == ARGUMENT else f" ({given.origin})"
        raise ConfigError(f"{given.key} = {shown!r}{where} is not {kind.accepts}.") from error
    return kind.settle(value, given.base)
