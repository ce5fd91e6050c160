"""Settings that are tables of their own: `[mcp.servers.NAME]` and `[backends.NAME]`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from emberkeep.types import Json, RemoteModel

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")
_MASK = "***"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class McpServer:
    """A server whose tools can be called here: a program (`command`) or an address (`url`)."""

    name: str
    command: tuple[str, ...] = ()
    """The program and its arguments."""
    url: str | None = None
    """Of a server that speaks streamable HTTP."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Its environment, besides a few harmless variables of ours. `$NAME` stands for the variable of that name."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Sent with every request; `$NAME` as in `env`."""
    cwd: Path | None = None
    timeout_s: float = 60.0
    """Longest time one call may take, or the start."""
    trusted: bool = False
    """Its tools run without asking."""
    tools: tuple[str, ...] = ()
    """Those that are used; none named means all."""

    def settled(self, base: Path) -> McpServer:
        return self if self.cwd is None else McpServer(**{**_values(self), "cwd": base / self.cwd.expanduser()})


def check_name(name: str) -> str:
    """Of a server or a model: it becomes part of tools' names. Raises ValueError."""
    if _NAME.fullmatch(name) is None or "__" in name:
        raise ValueError
    return name


def parse_servers(value: object) -> tuple[McpServer, ...]:
    """Raises ValueError."""
    if not isinstance(value, Mapping) or set(value) - {"servers"}:
        raise ValueError
    return _parse_table(value.get("servers", {}), McpServer, _SERVER_PARSERS, _is_usable)


def parse_remotes(value: object) -> tuple[RemoteModel, ...]:
    """Raises ValueError."""
    return _parse_table(value, RemoteModel, _REMOTE_PARSERS, lambda remote: True)


def settle_servers(servers: tuple[McpServer, ...], base: Path) -> tuple[McpServer, ...]:
    return tuple(server.settled(base) for server in servers)


def show_names(entries: tuple[Any, ...]) -> str:
    return ", ".join(entry.name for entry in entries) or "none"


def public_servers(servers: tuple[McpServer, ...]) -> Json:
    """Values of variables and headers may be keys."""
    return [_public(server) for server in servers]


def _public(server: McpServer) -> dict[str, Json]:
    masked = {name: dict.fromkeys(getattr(server, name), _MASK) for name in ("env", "headers")}
    cwd = None if server.cwd is None else str(server.cwd)
    return {**_values(server), **masked, "cwd": cwd, "command": list(server.command), "tools": list(server.tools)}


def public_remotes(remotes: tuple[RemoteModel, ...]) -> Json:
    return [_values(remote) for remote in remotes]


def _values(entry: Any) -> dict[str, Any]:
    return {one.name: getattr(entry, one.name) for one in fields(entry)}


def _is_usable(server: McpServer) -> bool:
    return bool(server.command) != bool(server.url)


def _parse_table(
    value: object, made: Callable[..., T], parsers: Mapping[str, Callable[[Any], Any]], check: Callable[[T], bool]
) -> tuple[T, ...]:
    if not isinstance(value, Mapping):
        raise ValueError
    found = []
    for name, entry in value.items():
        if not isinstance(entry, Mapping) or set(entry) - set(parsers):
            raise ValueError
        one = made(name=check_name(str(name)), **{key: parsers[key](item) for key, item in entry.items()})
        if not check(one):
            raise ValueError
        found.append(one)
    return tuple(found)


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError
    return value.strip()


def _texts(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (_text(value),)
    if not isinstance(value, (list, tuple)):
        raise ValueError
    return tuple(_text(item) for item in value)


def _command(value: object) -> tuple[str, ...]:
    return tuple(shlex.split(_text(value))) if isinstance(value, str) else _texts(value)


def _pairs(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping) or not all(isinstance(item, (str, int, float)) for item in value.values()):
        raise ValueError
    return {str(key): str(item) for key, item in value.items()}


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError
    return value


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 86_400:
        raise ValueError
    return float(value)


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _url(value: object) -> str:
    text = _text(value)
    if not re.match(r"https?://\S+$", text):
        raise ValueError
    return text.rstrip("/")


_SERVER_PARSERS: Mapping[str, Callable[[Any], Any]] = {
    "command": _command,
    "url": _url,
    "env": _pairs,
    "headers": _pairs,
    "cwd": lambda value: Path(_text(value)),
    "timeout_s": _seconds,
    "trusted": _flag,
    "tools": _texts,
}
_REMOTE_PARSERS: Mapping[str, Callable[[Any], Any]] = {
    "backend": _text,
    "model": _text,
    "base_url": _url,
    "api_key_env": _text,
    "max_tokens": _count,
    "ctx": _count,
    "description": _text,
}
