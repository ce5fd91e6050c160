"""Prefixes to have ready: what `--warm` and `[[warm]]` may say."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from emberkeep.errors import ConfigError
from emberkeep.types import Json, Ttl

_KEYS = ("system", "prompt", "messages", "tools", "file", "ttl")
_SHOWN_CHARS = 60
_PATH = re.compile(r"\S*/\S+|\S+\.(json|txt|md)")
"""What nobody would write as a system prompt."""


@dataclass(frozen=True, slots=True)
class WarmPrefix:
    """One of `system`, `prompt`, `messages`, or tools alone; raw, as it was written."""

    system: str | None = None
    """A system message, as chats begin with it."""
    prompt: str | None = None
    """A text as `/v1/completions` gets it."""
    messages: tuple[Json, ...] = ()
    tools: tuple[Json, ...] = ()
    ttl: Ttl | None = None
    file: Path | None = None
    """Where the rest is still to be read from."""
    text_or_file: str | None = None
    """A flag's or variable's value, until it is known which of the two it is."""

    def settled(self, base: Path) -> WarmPrefix:
        """With its file read; relative paths start at `base`. Raises ConfigError."""
        if self.text_or_file is not None:
            return self._settled_text(self.text_or_file, base)
        if self.file is None:
            return self
        path = base / self.file.expanduser()
        text = _read(path)
        if path.suffix != ".json":
            return replace(self, system=text, file=None)
        try:
            content = json.loads(text)
            read = parse_prefix(content)
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{path} is not a prefix to warm: give a JSON object with system, prompt, messages or tools."
            ) from error
        return replace(read, ttl=self.ttl or read.ttl, tools=self.tools or read.tools)

    def _settled_text(self, value: str, base: Path) -> WarmPrefix:
        try:
            is_file = (base / Path(value).expanduser()).is_file()
        except (OSError, ValueError, RuntimeError):  # too long for a path, and so a text
            is_file = False
        if is_file:
            return WarmPrefix(file=Path(value)).settled(base)
        if _PATH.fullmatch(value):
            raise ConfigError(f"There is no file {value} to warm: name one that exists, or give a text.")
        return WarmPrefix(system=value)


def parse_prefixes(value: object) -> tuple[WarmPrefix, ...]:
    """Raises ValueError."""
    listed = list(value) if isinstance(value, (list, tuple)) else [value]
    return tuple(_parse(item) for item in listed)


def show_prefixes(prefixes: tuple[WarmPrefix, ...]) -> str:
    return "; ".join(_shown(prefix) for prefix in prefixes) or "none"


def settle_prefixes(prefixes: tuple[WarmPrefix, ...], base: Path) -> tuple[WarmPrefix, ...]:
    return tuple(prefix.settled(base) for prefix in prefixes)


def _parse(item: object) -> WarmPrefix:
    if isinstance(item, WarmPrefix):
        return item
    if isinstance(item, str) and item.strip():
        return WarmPrefix(text_or_file=item)
    return parse_prefix(item)


def parse_prefix(item: object) -> WarmPrefix:
    """Raises ValueError."""
    if not isinstance(item, Mapping) or not item or set(item) - set(_KEYS):
        raise ValueError
    values: dict[str, Any] = dict(item)
    given = [key for key in ("system", "prompt", "messages", "file") if key in values]
    if len(given) > 1 or not (given or values.get("tools")):
        raise ValueError
    if any(not isinstance(values.get(key, ""), str) for key in ("system", "prompt", "file")):
        raise ValueError
    if any(not isinstance(values.get(key, []), list) for key in ("messages", "tools")):
        raise ValueError
    return WarmPrefix(
        system=values.get("system"),
        prompt=values.get("prompt"),
        messages=tuple(values.get("messages", ())),
        tools=tuple(values.get("tools", ())),
        ttl=Ttl(values["ttl"]) if "ttl" in values else None,
        file=Path(values["file"]) if "file" in values else None,
    )


def _shown(prefix: WarmPrefix) -> str:
    text = prefix.system or prefix.prompt or f"{len(prefix.messages)} messages, {len(prefix.tools)} tools"
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_CHARS else line[: _SHOWN_CHARS - 1] + "…"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"Cannot read {path}, which should be warmed: {reason}.") from error
