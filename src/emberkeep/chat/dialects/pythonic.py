"""Calls as Python writes them: `get_weather(city="Paris", days=3)`."""

from __future__ import annotations

import ast
import re

from emberkeep.chat.dialects.calls import Calls, NoCall, as_json
from emberkeep.chat.dialects.tape import Reading, Tape
from emberkeep.types import Json, Tool

_QUIET = re.compile(r"[^'\"()\[\]{}]+")
_PLAIN = re.compile(r"[^'\"\\]+")
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED = frozenset("\\'\"abfnrtvxuUN01234567\n")
_CONSTANTS = {"true": True, "false": False, "null": None}


def python_call(tape: Tape, calls: Calls, name: str) -> Reading[None]:
    """What stands in the parentheses that come next. Raises NoCall."""
    calls.named(name)
    text = yield from _in_parentheses(tape)
    try:
        written = as_json(_arguments(calls.tool, text))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise NoCall from None
    calls.whole(name, written)


def _arguments(tool: Tool, text: str) -> dict[str, Json]:
    call = ast.parse("f" + _ESCAPE.sub(_mended, text), mode="eval").body
    if not isinstance(call, ast.Call):
        raise ValueError("not a call")
    arguments = _by_name(tool, [_value(node) for node in call.args])
    for keyword in call.keywords:
        if keyword.arg is None:
            raise ValueError("not a plain argument")
        arguments[keyword.arg] = _value(keyword.value)
    return arguments


def _mended(escape: re.Match[str]) -> str:
    """Python warns of a backslash that escapes nothing."""
    return escape[0] if escape[1] in _ESCAPED else "\\" + escape[0]


def _in_parentheses(tape: Tape) -> Reading[str]:
    length, depth = 0, 0
    while True:
        char = yield from tape.char(length)
        if not char:
            raise NoCall
        if char in "'\"":
            length = yield from _behind_string(tape, length + 1, char)
            continue
        quiet = _QUIET.match(tape.text, tape.at + length)
        length += len(quiet[0]) if quiet else 1
        depth += (char in "([{") - (char in ")]}")
        if depth == 0:
            text = tape.text[tape.at : tape.at + length]
            tape.at += length
            return text


def _behind_string(tape: Tape, length: int, quote: str) -> Reading[int]:
    while (char := (yield from tape.char(length))) != quote:
        if not char:
            raise NoCall
        plain = _PLAIN.match(tape.text, tape.at + length)
        length += len(plain[0]) if plain else 1 + (char == "\\")
    return length + 1


def _by_name(tool: Tool, values: list[Json]) -> dict[str, Json]:
    names = list(tool.parameters.get("properties", {}))
    if len(values) > len(names):
        raise ValueError("more values than parameters")
    return dict(zip(names, values, strict=False))


def _value(node: ast.expr) -> Json:
    """As `ast.literal_eval`, which knows no `true`. Raises ValueError for anything but plain values."""
    match node:
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
        case ast.Constant(value=str() | int() | float() | bool() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
    raise ValueError("not a plain value")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("not a plain key")
