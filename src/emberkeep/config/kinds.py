"""What a setting may hold: how a value is read, and how to say what is accepted."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emberkeep.config.lora import parse_loras, public_loras, settle_loras, show_loras
from emberkeep.config.tables import (
    parse_remotes,
    parse_servers,
    public_remotes,
    public_servers,
    public_url,
    settle_servers,
    show_names,
)
from emberkeep.config.warm import parse_prefixes, settle_prefixes, show_prefixes
from emberkeep.types import Json


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


def _parse_shares(value: object) -> tuple[float, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)):
        raise ValueError
    shares = tuple(_parse_float(part) for part in parts)
    if not all(0 <= each < math.inf for each in shares) or not 0 < sum(shares) < math.inf:
        raise ValueError
    return shares


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(I?B)?|B)?", re.IGNORECASE)


def _parse_switch(value: object) -> bool:
    words = {
        "true": True,
        "yes": True,
        "on": True,
        "1": True,
        "false": False,
        "no": False,
        "off": False,
        "0": False,
    }
    if isinstance(value, bool):
        return value
    if not isinstance(value, str) or value.lower() not in words:
        raise ValueError
    return words[value.lower()]


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


def readable_size(count: float) -> str:
    """Bytes as people say them, in powers of 1024."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" or count >= 10 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def whole(low: int, high: int) -> Kind:
    return Kind(_between(_parse_int, low, high), f"a whole number from {low} to {high}", "int")


def share(low: float, high: float) -> Kind:
    accepts = f"a number from {low:g} to {high:g}"
    return Kind(_between(_parse_float, low, high), accepts, "number", lambda value: f"{value:g}")


def seconds(low: float, high: float) -> Kind:
    accepts = f"seconds from {low:g} to {high:g}"
    return Kind(_between(_parse_float, low, high), accepts, "seconds", lambda value: f"{value:g}")


def clamped_seconds(low: float, high: float) -> Kind:
    """What is out of bounds becomes the nearest bound: an interval that is too short would only burn time."""

    def parse(value: object) -> float:
        number = _parse_float(value)
        if number != number:
            raise ValueError
        return min(max(number, low), high)

    accepts = f"seconds; less than {low:g} means {low:g}, more than {high:g} means {high:g}"
    return Kind(parse, accepts, "seconds", lambda value: f"{value:g}")


def _between(parse: Callable[[object], Any], low: float, high: float) -> Callable[[object], Any]:
    def checked(value: object) -> Any:
        number = parse(value)
        if not low <= number <= high:
            raise ValueError
        return number

    return checked


def or_word(kind: Kind, word: str, stands_for: Callable[[], Any]) -> Kind:
    def parse(value: object) -> Any:
        return stands_for() if value == word else kind.parse(value)

    def show(value: Any) -> str:
        return word if value is None else kind.show(value)

    def public(value: Any) -> Json:
        return None if value is None else kind.public(value)

    return Kind(parse, f"{kind.accepts}, or {word}", kind.type, show, word, public=public)


ALL = 100_000
"""More layers than any model has."""


def layers() -> Kind:
    def parse(value: object) -> int:
        return ALL if value == "all" else int(counted.parse(value))

    counted = whole(0, ALL)
    return Kind(parse, f"{counted.accepts}, or all", "int", lambda value: "all" if value == ALL else str(value))


def one_of(*words: str) -> Kind:
    def parse(value: object) -> str:
        if value not in words:
            raise ValueError
        return str(value)

    return Kind(parse, f"one of {', '.join(words)}", "word")


def one_number_of(*numbers: int) -> Kind:
    def parse(value: object) -> int:
        number = _parse_int(value)
        if number not in numbers:
            raise ValueError
        return number

    return Kind(parse, f"one of {', '.join(map(str, numbers))}", "int")


def spelled(pattern: str, accepts: str) -> Kind:
    def parse(value: object) -> str:
        text = _parse_text(value)
        if re.fullmatch(pattern, text) is None:
            raise ValueError
        return text

    return Kind(parse, accepts, "word")


_MASK = "***"


def _show_secret(value: str | None) -> str:
    return "none" if value is None else _MASK


def _show_names(value: tuple[str, ...]) -> str:
    return ", ".join(value) or "none"


TEXT = Kind(_parse_text, "a text that is not empty", "text")
URL = Kind(_parse_text, TEXT.accepts, TEXT.type, public_url, public=public_url)
SECRET = Kind(
    _parse_secret,
    "a text",
    "text",
    _show_secret,
    public=lambda value: None if value is None else "***",
    hides=True,
)
PATH = Kind(_parse_path, "a path", "path", settle=lambda path, base: base / path, public=str)
NAMES = Kind(
    _parse_names, "a list of names (in a variable: separated by commas)", "names", _show_names, public=list
)
PATHS = Kind(
    lambda value: tuple(_parse_path(name) for name in _parse_names(value)),
    "a list of paths (in a variable: separated by commas)",
    "paths",
    lambda paths: ", ".join(map(str, paths)) or "none",
    settle=lambda paths, base: tuple(base / path for path in paths),
    public=lambda paths: [str(path) for path in paths],
)
LORAS = Kind(
    parse_loras,
    "a list of files, each with :SCALE behind it if wanted (in a variable: separated by commas)",
    "file[:scale]",
    show_loras,
    settle=settle_loras,
    public=public_loras,
)
SHARES = Kind(
    _parse_shares,
    "shares such as 3,1",
    "shares",
    lambda shares: ",".join(f"{each:g}" for each in shares),
    public=list,
)
SERVERS = Kind(
    parse_servers,
    "tables [mcp.servers.NAME], each with command (and env, cwd) or url (and headers), timeout_s, trusted, tools",
    "table",
    show_names,
    settle=settle_servers,
    public=public_servers,
    hides=True,
)
REMOTES = Kind(
    parse_remotes,
    "tables [backends.NAME], each with backend, model, base_url, api_key_env, max_tokens, ctx, description",
    "table",
    show_names,
    public=public_remotes,
    hides=True,
)
PREFIXES = Kind(
    parse_prefixes,
    "a text, a file, or a list of tables with system, prompt, messages, tools, file and ttl",
    "text|file",
    show_prefixes,
    settle=settle_prefixes,
    public=show_prefixes,
)
SWITCH = Kind(_parse_switch, "true or false", "switch", lambda value: "true" if value else "false")
BYTES = Kind(parse_size, "a size such as 512MiB, 4GiB or a number of bytes", "size", readable_size)
