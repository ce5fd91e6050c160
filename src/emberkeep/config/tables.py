"""Settings that are tables: `[mcp.servers.NAME]`, `[backends.NAME]`, `[[hygiene]]` and `[[warm]]`."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from emberkeep.config.kinds import MASK, Kind, parse_text, pattern, public_url
from emberkeep.errors import ConfigError
from emberkeep.text import did_you_mean, shorten
from emberkeep.types.hygiene import HygieneAction, HygieneRule, HygieneWhere, as_written
from emberkeep.types.models import RemoteModel
from emberkeep.types.request import Json, Ttl
from emberkeep.values import dataclass

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")
_OURS = ("auto", "local")
"""What `backend` can be besides the name of a model that runs elsewhere."""

T = TypeVar("T")
Parsers = Mapping[str, tuple[Callable[[Any], Any], str]]
"""For each key what reads its value or raises ValueError, and what it accepts in words."""


@dataclass(frozen=True, slots=True)
class McpServer:
    """A server whose tools can be called here: a program (`command`) or an address (`url`)."""

    name: str
    command: tuple[str, ...] = ()
    """The program and its arguments."""
    url: str | None = None
    """The address of a server that speaks streamable HTTP."""
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Its environment, besides a few harmless variables of ours. `$NAME` stands for the variable of that name."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Sent with every request; `$NAME` as in `env`."""
    cwd: Path | None = None
    """None: the current folder."""
    timeout_s: float = 60.0
    """Longest time one call may take, or the start."""
    trusted: bool | tuple[str, ...] = False
    """What it offers runs without asking; or only these of its tools do."""
    tools: tuple[str, ...] = ()
    """Those that are used; none named means all."""

    def trusts(self, tool: str) -> bool:
        """By the name that the server gives it."""
        return self.trusted if isinstance(self.trusted, bool) else tool in self.trusted

    def settle(self, base: Path) -> McpServer:
        """A program starts in `base` unless `cwd` says otherwise, and not where the user stands: `npx`,
        `python -m` and others run what they find in the current folder. `$NAME` in `cwd` is a variable's value."""
        if self.url is not None:
            return self
        return replace(self, cwd=base / Path(os.path.expandvars(self.cwd or "")).expanduser())


def check_name(name: str) -> str:
    """The name of a server or a model, which becomes part of tools' names. Raises ValueError."""
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


def _public_server(server: McpServer) -> dict[str, Json]:
    """Values of variables and headers may be keys."""
    masked = {name: dict.fromkeys(getattr(server, name), MASK) for name in ("env", "headers")}
    cwd = None if server.cwd is None else str(server.cwd)
    url = None if server.url is None else public_url(server.url)
    lists = {"command": list(server.command), "tools": list(server.tools)}
    return {**_values(server), **masked, **lists, "cwd": cwd, "url": url}


def public_remotes(remotes: Iterable[RemoteModel]) -> Json:
    return [
        {**_values(remote), "base_url": None if remote.base_url is None else public_url(remote.base_url)}
        for remote in remotes
    ]


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
            hint = did_you_mean(str(key), known, f"it has {', '.join(known)}.")
            raise ConfigError(f"[{table}] has no key {key!r}: {hint}")


def _texts(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (parse_text(value),)
    if not isinstance(value, (list, tuple)):
        raise ValueError
    return tuple(parse_text(item) for item in value)


def _command(value: object) -> tuple[str, ...]:
    words = tuple(shlex.split(parse_text(value))) if isinstance(value, str) else _texts(value)
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


def _url(value: object) -> str:
    text = parse_text(value)
    if not re.match(r"https?://\S+$", text) or not text.isprintable():
        raise ValueError
    return text.rstrip("/")


_ADDRESS = "an address that begins with http:// or https://"
_SERVER_PARSERS: Parsers = {
    "command": (_command, "a program with its arguments, as a text or a list of texts"),
    "url": (_url, _ADDRESS),
    "env": (_pairs, "a table of variables and their values"),
    "headers": (_pairs, "a table of headers and their values"),
    "cwd": (lambda value: Path(parse_text(value)), "a path"),
    "timeout_s": (_seconds, "seconds, more than 0 and at most 86400"),
    "trusted": (_trust, "true or false, or a list of tools' names"),
    "tools": (_texts, "a list of tools' names"),
}
_REMOTE_PARSERS: Parsers = {
    "backend": (parse_text, "a text"),
    "model": (parse_text, "a text"),
    "base_url": (_url, _ADDRESS),
    # Keys look different: one that was pasted here is not taken for a name, and so never shown.
    "api_key_env": (
        pattern(r"[A-Z][A-Z0-9_]{0,63}", "").parse,
        "the name of the variable that holds the key, such as OPENAI_API_KEY",
    ),
    "max_tokens": (_count, "a whole number from 1 on"),
    "ctx": (_count, "a whole number from 1 on"),
    "description": (parse_text, "a text"),
}


def _show_names(entries: Iterable[Any]) -> str:
    return ", ".join(entry.name for entry in entries) or "none"


SERVERS = Kind(
    parse_servers,
    "tables [mcp.servers.NAME], each with command (and env, cwd) or url (and headers), timeout_s, trusted, tools",
    "table",
    _show_names,
    settle=lambda servers, base: tuple(server.settle(base) for server in servers),
    public=lambda servers: [_public_server(server) for server in servers],
    hides=True,
)
REMOTES = Kind(
    parse_remotes,
    "tables [backends.NAME], each with backend, model, base_url, api_key_env, max_tokens, ctx, description",
    "table",
    _show_names,
    public=public_remotes,
    hides=True,
)


# ── rules of prefix hygiene ──


def _parse_rules(value: object) -> tuple[HygieneRule, ...]:
    """Raises ConfigError, and ValueError for what are no tables at all."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, (Mapping, HygieneRule)) for item in value):
        raise ValueError
    rules = tuple(item if isinstance(item, HygieneRule) else _parse_rule(item) for item in value)
    names = [rule.name for rule in rules]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"Two [[hygiene]] rules are called {name}: give each its own name.")
    return rules


def _parse_rule(item: Mapping[str, Any]) -> HygieneRule:
    _check_keys("[hygiene]", item, _RULE_PARSERS)
    given = {key: _parse_value("[hygiene]", key, value, _RULE_PARSERS) for key, value in item.items()}
    if "name" not in given:
        raise ConfigError("[[hygiene]] needs a name, by which answers say that it was used.")
    try:
        return as_written(given["name"], given.get("pattern"), given.get("where"), given.get("action"))
    except ValueError as error:
        raise ConfigError(f"The [[hygiene]] rule {given['name']} {error}.") from error


_RULE_PARSERS: Parsers = {
    "name": (lambda value: check_name(parse_text(value)), "a name of up to 32 letters, digits, - and single _"),
    "pattern": (parse_text, "a regular expression"),
    "where": (lambda value: HygieneWhere(value), f"one of {', '.join(HygieneWhere)}"),
    "action": (lambda value: HygieneAction(value), f"one of {', '.join(HygieneAction)}"),
}
HYGIENE = Kind(
    _parse_rules,
    "a list of tables with name, pattern, where and action",
    "table",
    _show_names,
    public=lambda rules: [_values(rule) for rule in rules],
)


# ── prefixes to have ready: what `--warm` and `[[warm]]` may say ──

_PREFIX_KEYS = ("system", "prompt", "messages", "tools", "file", "ttl")
_SHOWN_CHARS = 60
_PATH = re.compile(r"\S*/\S+|\S+\.(json|txt|md)")
"""What no system prompt looks like."""


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

    def settle(self, base: Path) -> WarmPrefix:
        """With its file read; relative paths start at `base`. Raises ConfigError."""
        if self.text_or_file is not None:
            return self._settle_text(self.text_or_file, base)
        if self.file is None:
            return self
        path = base / self.file.expanduser()
        text = _read(path)
        if path.suffix != ".json":
            return replace(self, system=text, file=None)
        try:
            content = json.loads(text)
            read = _parse_prefix(content)
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{path} is not a prefix to warm: give a JSON object with system, prompt, messages or tools."
            ) from error
        return replace(read, ttl=self.ttl or read.ttl, tools=self.tools or read.tools)

    def _settle_text(self, value: str, base: Path) -> WarmPrefix:
        try:
            is_file = (base / Path(value).expanduser()).is_file()
        except (OSError, ValueError, RuntimeError):  # too long for a path, and so a text
            is_file = False
        if is_file:
            return WarmPrefix(file=Path(value)).settle(base)
        if _PATH.fullmatch(value):
            raise ConfigError(f"There is no file {value} to warm: name one that exists, or give a text.")
        return WarmPrefix(system=value)


def _parse_prefixes(value: object) -> tuple[WarmPrefix, ...]:
    """Raises ValueError."""
    listed = list(value) if isinstance(value, (list, tuple)) else [value]
    return tuple(_parse_one(item) for item in listed)


def _parse_one(item: object) -> WarmPrefix:
    if isinstance(item, WarmPrefix):
        return item
    if isinstance(item, str) and item.strip():
        return WarmPrefix(text_or_file=item)
    return _parse_prefix(item)


def _parse_prefix(item: object) -> WarmPrefix:
    """Raises ValueError."""
    if not isinstance(item, Mapping) or not item or set(item) - set(_PREFIX_KEYS):
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


def _shown_prefix(prefix: WarmPrefix) -> str:
    unread = prefix.text_or_file or (prefix.file and f"the file {prefix.file}")
    sizes = f"{len(prefix.messages)} messages, {len(prefix.tools)} tools"
    text = prefix.system or prefix.prompt or unread or sizes
    return shorten(" ".join(text.split()), _SHOWN_CHARS)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"Cannot read {path}, which should be warmed: {reason}.") from error


def _show_prefixes(prefixes: Iterable[WarmPrefix]) -> str:
    return "; ".join(_shown_prefix(prefix) for prefix in prefixes) or "none"


PREFIXES = Kind(
    _parse_prefixes,
    "a text, a file, or a list of tables with system, prompt, messages, tools, file and ttl",
    "text|file",
    _show_prefixes,
    settle=lambda prefixes, base: tuple(prefix.settle(base) for prefix in prefixes),
    public=_show_prefixes,
    is_list=True,
)
