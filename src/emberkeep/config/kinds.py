"""What a setting may hold: how a value is read, how to say what is accepted, how it is shown."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from emberkeep.types.request import Json, Ttl
from emberkeep.values import dataclass

MASK = "***"


@dataclass(frozen=True, slots=True)
class Kind:
    """`parse` takes what a flag, a variable or a file holds; it raises ValueError for everything else."""

    parse: Callable[[object], Any]
    accepts: str
    type: str
    """In one word, for `--help`."""
    show: Callable[[Any], str] = str
    """What `parse` returned, as a person reads it."""
    word: str | None = None
    """What brings the default back, where there is such a word."""
    settle: Callable[[Any, Path], Any] = lambda value, base: value
    """What `parse` returned, with relative paths starting at `base`. May raise ConfigError."""
    public: Callable[[Any], Json] = lambda value: value
    """What `parse` returned as JSON, secrets masked."""
    hides: bool = False
    """Values may hold secrets: they are not repeated in errors."""
    is_list: bool = False


# ── texts, paths, lists ──


def _checked(parse: Callable[[object], Any], is_good: Callable[[Any], object]) -> Callable[[object], Any]:
    def check(value: object) -> Any:
        parsed = parse(value)
        if not is_good(parsed):
            raise ValueError
        return parsed

    return check


def parse_text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError
    return value.strip()


def _parse_secret(value: object) -> str | None:
    # An empty variable means "unset" to most shells and service managers; it must never count as a key.
    return None if value == "" else parse_text(value)


def _parse_path(value: object) -> Path:
    return Path(value if isinstance(value, Path) else parse_text(value)).expanduser()


def _parts(value: object) -> Sequence[object]:
    """The items of a list, or of a text with commas."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)):
        raise ValueError
    return parts


def _parse_names(value: object) -> tuple[str, ...]:
    return tuple(parse_text(part) for part in _parts(value) if part != "")


def public_url(url: str) -> str:
    """An address without what may be a key in it."""
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    shown = parts._replace(netloc=f"{MASK}@{host}" if user else host, query=MASK if parts.query else "")
    return shown.geturl()


def _is_shared_server(url: str) -> bool:
    parts = urlsplit(url)
    # A password with / or # in it ends the address too early, and what is left of it would be shown.
    is_whole = parts.port != 0 and "@" not in f"{parts.path}{parts.query}{parts.fragment}"
    is_known = parts.scheme in ("valkey", "valkeys", "redis", "rediss", "unix")
    return is_known and is_whole and bool(parts.hostname or parts.path)


TEXT = Kind(parse_text, "a text that is not empty", "text")
URL = replace(TEXT, show=public_url, public=public_url)
SHARED_SERVER = Kind(
    _checked(parse_text, _is_shared_server),
    "valkey://host:port, redis:// (with TLS valkeys:// or rediss://) or unix://path (in a password, %2F for /)",
    "url",
    show=public_url,
    public=public_url,
    hides=True,
)
SECRET = Kind(
    _parse_secret,
    "a text",
    "text",
    lambda value: "none" if value is None else MASK,
    public=lambda value: None if value is None else MASK,
    hides=True,
)
PATH = Kind(_parse_path, "a path", "path", settle=lambda path, base: base / path, public=str)
NAMES = Kind(
    _parse_names,
    "a list of names (in a variable: separated by commas)",
    "names",
    lambda names: ", ".join(names) or "none",
    public=list,
    is_list=True,
)
OTHERS = replace(
    NAMES,
    parse=lambda value: tuple(name for name in _parse_names(value) if name != "auto"),
    accepts="a list of names (in a variable: separated by commas), all, none, or auto",
    show=lambda names: ", ".join(names) or "auto",
    word="auto",
)
PATHS = Kind(
    lambda value: tuple(_parse_path(name) for name in _parse_names(value)),
    "a list of paths (in a variable: separated by commas)",
    "paths",
    lambda paths: ", ".join(map(str, paths)) or "none",
    settle=lambda paths, base: tuple(base / path for path in paths),
    public=lambda paths: [str(path) for path in paths],
    is_list=True,
)


def path_or(*words: str) -> Kind:
    """One of `words`, or the path of a file."""

    def settle(value: str, base: Path) -> str:
        return value if value in words else str(base / Path(value).expanduser())

    return replace(TEXT, settle=settle)


def one_of(*choices: str | int) -> Kind:
    """All of them texts, or all of them numbers."""
    parse, type_ = (_parse_int, "int") if isinstance(choices[0], int) else (parse_text, "word")
    return Kind(_checked(parse, choices.__contains__), f"one of {', '.join(map(str, choices))}", type_)


def pattern(regex: str, accepts: str) -> Kind:
    return Kind(_checked(parse_text, re.compile(regex).fullmatch), accepts, "word")


def or_word(kind: Kind, word: str, stands_for: Callable[[], Any] = lambda: None) -> Kind:
    def parse(value: object) -> Any:
        return stands_for() if value == word else kind.parse(value)

    def show(value: Any) -> str:
        return word if value is None else kind.show(value)

    def public(value: Any) -> Json:
        return None if value is None else kind.public(value)

    def settle(value: Any, base: Path) -> Any:
        return None if value is None else kind.settle(value, base)

    accepts = f"{kind.accepts}, or {word}"
    return Kind(parse, accepts, kind.type, show, word, settle=settle, public=public, hides=kind.hides)


# ── numbers and switches ──


def _parse_int(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError
    return int(value)


def _parse_float(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError
    return float(value)


def _show_float(value: float) -> str:
    return f"{value:g}"


def whole(low: int, high: int) -> Kind:
    parse = _checked(_parse_int, lambda number: low <= number <= high)
    return Kind(parse, f"a whole number from {low} to {high}", "int")


def share(low: float, high: float) -> Kind:
    parse = _checked(_parse_float, lambda number: low <= number <= high)
    return Kind(parse, f"a number from {low:g} to {high:g}", "number", _show_float)


def seconds(low: float, high: float) -> Kind:
    return replace(share(low, high), accepts=f"seconds from {low:g} to {high:g}", type="seconds")


def clamped_seconds(low: float, high: float) -> Kind:
    """What is out of bounds becomes the nearest bound: an interval that is too short would only burn time."""

    def parse(value: object) -> float:
        number = _parse_float(value)
        if math.isnan(number):
            raise ValueError
        return min(max(number, low), high)

    accepts = f"seconds; less than {low:g} means {low:g}, more than {high:g} means {high:g}"
    return Kind(parse, accepts, "seconds", _show_float)


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """Seconds of each class of TTL."""

    short: float = 300.0
    long: float = 3600.0
    extended: float = 86_400.0

    def by_class(self) -> dict[Ttl, float]:
        return {Ttl.SHORT: self.short, Ttl.LONG: self.long, Ttl.EXTENDED: self.extended}

    def __str__(self) -> str:
        return ", ".join(f"{name}={seconds:g}" for name, seconds in self.by_class().items())


_LIFETIME = clamped_seconds(2, 365 * 86_400)


def _parse_lifetimes(value: object) -> Lifetimes:
    """Classes that are not named keep their usual time."""
    if isinstance(value, Lifetimes):
        return value
    if isinstance(value, Mapping):
        pairs = list(value.items())
    else:
        parts = [parse_text(part).partition("=") for part in _parts(value)]
        pairs = [(name.strip(), seconds) for name, _, seconds in parts]
    return Lifetimes(**{str(Ttl(name)): _LIFETIME.parse(seconds) for name, seconds in pairs})


LIFETIMES = Kind(
    _parse_lifetimes,
    "a table of short, long and extended with seconds from 2 on, or short=300 (several: separated by commas)",
    "class=seconds",
    public=lambda times: {str(name): seconds for name, seconds in times.by_class().items()},
    is_list=True,
)


def span(low: int, high: int) -> Kind:
    """A whole number, or two of them: the least and the most."""
    number = whole(low, high)

    def parse(value: object) -> tuple[int, int]:
        least, dash, most = value.partition("-") if isinstance(value, str) else (value, "", "")
        numbers = number.parse(least), number.parse(most if dash else least)
        if numbers[0] > numbers[1]:
            raise ValueError
        return numbers

    def show(value: tuple[int, int]) -> str:
        return "-".join(map(str, dict.fromkeys(value)))

    return Kind(parse, f"{number.accepts}, or two such as 2-8", "int|int-int", show, public=show)


ALL_LAYERS = 100_000
"""More layers than any model has."""


def layers() -> Kind:
    counted = or_word(whole(0, ALL_LAYERS), "all", lambda: ALL_LAYERS)
    return replace(counted, show=lambda value: "all" if value == ALL_LAYERS else str(value), word=None)


def _parse_shares(value: object) -> tuple[float, ...]:
    shares = tuple(_parse_float(part) for part in _parts(value))
    if not all(0 <= each < math.inf for each in shares) or not 0 < sum(shares) < math.inf:
        raise ValueError
    return shares


_SWITCHED = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)


def _parse_switch(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if not isinstance(value, str) or value.lower() not in _SWITCHED:
        raise ValueError
    return _SWITCHED[value.lower()]


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(I?B)?|B)?", re.IGNORECASE)


def parse_size(value: object) -> int:
    """Bytes. `KiB MiB GiB TiB` and bare `K M G T` are powers of 1024, `KB MB GB TB` of 1000."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _SIZE.fullmatch(parse_text(value))
    if match is None:
        raise ValueError
    number, prefix, suffix = match.groups()
    if prefix is None:
        return int(number)
    base = 1000 if (suffix or "").upper() == "B" else 1024
    return int(float(number) * base ** (1 + "KMGT".index(prefix.upper())))


def readable_size(count: float) -> str:
    """Bytes as people say them, in powers of 1024."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" or count >= 10 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


SHARES = Kind(
    _parse_shares,
    "shares such as 3,1",
    "shares",
    lambda shares: ",".join(map(_show_float, shares)),
    public=list,
)
SWITCH = Kind(_parse_switch, "true or false", "switch", lambda value: "true" if value else "false")
BYTES = Kind(parse_size, "a size such as 512MiB, 4GiB or a number of bytes", "size", readable_size)


# ── LoRA adapters: `--lora FILE[:SCALE]` and `lora = [...]` ──


@dataclass(frozen=True, slots=True)
class LoraFile:
    path: Path
    scale: float = 1.0

    def __str__(self) -> str:
        return str(self.path) if self.scale == 1 else f"{self.path}:{self.scale:g}"


def _parse_loras(value: object) -> tuple[LoraFile, ...]:
    parts = [value] if isinstance(value, Path) else _parts(value)
    return tuple(_parse_lora(part) for part in parts if part != "")


def _parse_lora(value: object) -> LoraFile:
    if isinstance(value, Path):
        return LoraFile(value.expanduser())
    text = parse_text(value)
    path, colon, scale = text.rpartition(":")
    try:
        number = float(scale)
    except ValueError:
        return LoraFile(Path(text).expanduser())  # a path may hold colons
    if not path or not colon or not math.isfinite(number):
        raise ValueError
    return LoraFile(Path(path).expanduser(), number)


LORAS = Kind(
    _parse_loras,
    "a list of files, each with :SCALE behind it if wanted (in a variable: separated by commas)",
    "file[:scale]",
    lambda files: ", ".join(map(str, files)) or "none",
    settle=lambda files, base: tuple(replace(file, path=base / file.path) for file in files),
    public=lambda files: [str(file) for file in files],
    is_list=True,
)


# ── aliases: `--aliases NAME=MODEL,...` and `[aliases]` ──


@dataclass(frozen=True, slots=True)
class Alias:
    name: str
    model: str

    def __str__(self) -> str:
        return f"{self.name}={self.model}"


def _parse_aliases(value: object) -> tuple[Alias, ...]:
    if isinstance(value, Mapping):
        return tuple(Alias(parse_text(name), parse_text(model)) for name, model in value.items())
    return tuple(_parse_alias(part) for part in _parts(value) if part != "")


def _parse_alias(value: object) -> Alias:
    name, _, model = parse_text(value).partition("=")
    return Alias(parse_text(name), parse_text(model))


ALIASES = Kind(
    _parse_aliases,
    "a table of names and the models that they mean, or NAME=MODEL (several: separated by commas)",
    "name=model",
    lambda aliases: ", ".join(map(str, aliases)) or "none",
    public=lambda aliases: {alias.name: alias.model for alias in aliases},
    is_list=True,
)


# ── values that a file may hold which its user has not agreed to ──


def is_model_name(value: object) -> bool:
    """It names an installed model, and none by where its files are, whatever lies in the current folder."""
    name = value.strip() if isinstance(value, str) else "."
    return not ("/" in name or name.startswith(".") or name.endswith(".gguf"))


def is_name_here(value: object) -> bool:
    """Where a service answers, `:` in a name may choose who computes: an Ollama that runs here sends what
    `model:cloud` is asked to its maker."""
    return is_model_name(value) and ":" not in str(value)


def has_cores(value: object) -> bool:
    """Threads that have no core of their own wait for each other by spinning: with hundreds of them the machine is
    busy for minutes with one token."""
    return value == "auto" or (isinstance(value, int) and value <= (os.cpu_count() or 1))
