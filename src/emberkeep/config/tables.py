"""Settings that are tables of their own: `[mcp.servers.NAME]` and `[backends.NAME]`."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from emberkeep.errors import ConfigError
from emberkeep.types import Json, RemoteModel

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")
_MASK = "***"
_OURS = ("auto", "local")
"""What `backend` can be besides the name of a model that runs elsewhere."""

T = TypeVar("T")
Parsers = Mapping[str, tuple[Callable[[Any], Any], str]]
"""Of each key: reads its value or raises ValueError, and what it accepts in words."""


@dataclass(frozen=True, slots=True)
class McpServer:
    """A server whose tools can be called here: a program (`command`) or an address (`url`)."""

    name: str
    command: tuple[str, ...] = ()
    """The program and its arguments."""
    url: str | None = None
    """Of a server that speaks streamable HTTP."""
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Its environment, besides a few harmless variables of ours. `$NAME` stands for the variable of that name."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Sent with every request; `$NAME` as in `env`."""
    cwd: Path | None = None
    timeout_s: float = 60.0
    """Longest time one call may take, or the start."""
    trusted: bool | tuple[str, ...] = False
    """What it offers runs without asking; or only these of its tools do."""
    tools: tuple[str, ...] = ()
    """Those that are used; none named means all."""

    def trusts(self, tool: str) -> bool:
        """By the name that the server gives it."""
        return self.trusted if isinstance(self.trusted, bool) else tool in self.trusted

    def settled(self, base: Path) -> McpServer:
        return self if self.cwd is None else McpServer(**{**_values(self), "cwd": base / self.cwd.expanduser()})


def check_name(name: str) -> str:
    """Of a server or a model: it becomes part of tools' names. Raises ValueError."""
    # With a _ at its end, one server's tools could be called as another's.
    if _NAME.fullmatch(name) is None or "__" in name or name.endswith("_"):
        raise ValueError
    return name


def parse_servers(value: object) -> tuple[McpServer, ...]:
    """Raises ConfigError, and ValueError for what is no table at all."""
    if not isinstance(value, Mapping):
        raise ValueError
    _check_keys("mcp", value, ("servers",))
    servers = _parse_table("mcp.servers", value.get("servers", {}), McpServer, _SERVER_PARSERS)
    for server, entry in zip(servers, value.get("servers", {}).values(), strict=True):
        _check_server(f"mcp.servers.{server.name}", entry)
    return servers


def parse_remotes(value: object) -> tuple[RemoteModel, ...]:
    """Raises ConfigError, and ValueError for what is no table at all."""
    if not isinstance(value, Mapping):
        raise ValueError
    for name, entry in value.items():
        if name in _OURS:
            raise ConfigError(f"[backends.{name}] cannot have this name: --backend {name} means something else.")
        if isinstance(entry, Mapping) and "backend" not in entry:
            raise ConfigError(f"[backends.{name}] needs backend: what the model is spoken to with.")
    return _parse_table("backends", value, RemoteModel, _REMOTE_PARSERS)


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
    url = None if server.url is None else public_url(server.url)
    lists = {"command": list(server.command), "tools": list(server.tools)}
    return {**_values(server), **masked, **lists, "cwd": cwd, "url": url}


def public_remotes(remotes: tuple[RemoteModel, ...]) -> Json:
    return [
        {**_values(remote), "base_url": None if remote.base_url is None else public_url(remote.base_url)}
        for remote in remotes
    ]


def public_url(url: str) -> str:
    """An address without what may be a key in it."""
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    shown = parts._replace(netloc=f"{_MASK}@{host}" if user else host, query=_MASK if parts.query else "")
    return shown.geturl()


def _values(entry: Any) -> dict[str, Any]:
    return {one.name: getattr(entry, one.name) for one in fields(entry)}


def _check_server(where: str, entry: Mapping[str, Any]) -> None:
    if ("command" in entry) == ("url" in entry):
        raise ConfigError(f"[{where}] needs either command, a program to start, or url, the address of a server.")
    kind, foreign = ("command", ("headers",)) if "command" in entry else ("url", ("env", "cwd"))
    for key in foreign:
        if key in entry:
            raise ConfigError(f"[{where}] has {kind}, and {key} is not for such a server: remove it.")


def _parse_table(where: str, value: object, made: Callable[..., T], parsers: Parsers) -> tuple[T, ...]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"[{where}] must hold one table for each name: [{where}.NAME].")
    return tuple(_parse_entry(where, str(name), entry, made, parsers) for name, entry in value.items())


def _parse_entry(where: str, name: str, entry: object, made: Callable[..., T], parsers: Parsers) -> T:
    table = f"{where}.{name}"
    try:
        check_name(name)
    except ValueError as error:
        raise ConfigError(
            f"[{table}] cannot have this name: take up to 32 letters, digits, - and single _."
        ) from error
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{table} must be a table with {', '.join(parsers)}.")
    _check_keys(table, entry, parsers)
    return made(name=name, **{key: _parse_value(table, key, item, parsers) for key, item in entry.items()})


def _parse_value(table: str, key: str, item: object, parsers: Parsers) -> Any:
    parse, accepts = parsers[key]
    try:
        return parse(item)
    except ValueError as error:
        # Not repeated: it may be a secret.
        raise ConfigError(f"[{table}] {key} must be {accepts}.") from error


def _check_keys(table: str, entry: Mapping[str, Any], known: Iterable[str]) -> None:
    for key in entry:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}."
            raise ConfigError(f"[{table}] has no key {key!r}: {hint}")


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
    words = tuple(shlex.split(_text(value))) if isinstance(value, str) else _texts(value)
    if not words:
        raise ValueError
    return words


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


def _trust(value: object) -> bool | tuple[str, ...]:
    """No single text, which could be meant as "yes"."""
    if isinstance(value, (bool, list)):
        return value if isinstance(value, bool) else _texts(value)
    raise ValueError


def _variable(value: object) -> str:
    """Keys look different: one that was pasted here is not taken for a name, and so never shown."""
    text = _text(value)
    if re.fullmatch(r"[A-Z][A-Z0-9_]{0,63}", text) is None:
        raise ValueError
    return text


def _url(value: object) -> str:
    text = _text(value)
    if not re.match(r"https?://\S+$", text) or not text.isprintable():
        raise ValueError
    return text.rstrip("/")


_ADDRESS = "an address that begins with http:// or https://"
_SERVER_PARSERS: Parsers = {
    "command": (_command, "a program with its arguments, as a text or a list of texts"),
    "url": (_url, _ADDRESS),
    "env": (_pairs, "a table of variables and their values"),
    "headers": (_pairs, "a table of headers and their values"),
    "cwd": (lambda value: Path(_text(value)), "a path"),
    "timeout_s": (_seconds, "seconds, more than 0 and at most 86400"),
    "trusted": (_trust, "true or false, or a list of tools' names"),
    "tools": (_texts, "a list of tools' names"),
}
_REMOTE_PARSERS: Parsers = {
    "backend": (_text, "a text"),
    "model": (_text, "a text"),
    "base_url": (_url, _ADDRESS),
    "api_key_env": (_variable, "the name of the variable that holds the key, such as OPENAI_API_KEY"),
    "max_tokens": (_count, "a whole number from 1 on"),
    "ctx": (_count, "a whole number from 1 on"),
    "description": (_text, "a text"),
}
