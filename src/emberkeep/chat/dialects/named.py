"""Calls whose name stands before their arguments: in steps, after a marker, in Gemma's notation, in Python's."""

from __future__ import annotations

import ast
import json
import re

from emberkeep.chat.dialects.json_calls import Arguments, as_json
from emberkeep.chat.dialects.reader import Calls, NoCall, Reading, Tape
from emberkeep.types.request import Json, Tool
from emberkeep.values import dataclass

_COUNTED = re.compile(r"^functions\.|:\d+$")
"""Kimi: `functions.get_weather:0`."""


def arguments_of(tape: Tape, calls: Calls, name: str, end: str) -> Reading[None]:
    """The object that comes next, of a call of this name. Raises NoCall where there is none."""
    calls.set_name(name)
    yield from tape.skip()
    yield from Arguments(calls).read(tape, end)
    if not calls.is_open:
        raise NoCall
    if not tape.is_cut_here:
        calls.end()


@dataclass(frozen=True, slots=True)
class CallSteps:
    """`begin`, something or nothing, `name`, the name, `arguments`, the arguments, `end`; again for every call."""

    begin: str
    name: str
    arguments: str
    end: str


STEPS = {
    steps.begin: steps
    for steps in (
        CallSteps("<｜tool▁call▁begin｜>", "", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),  # DeepSeek R1, V3
        CallSteps("<|tool_call_begin|>", "", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),  # Kimi K2
        CallSteps("<|tool_call:begin|>", "<|tool_call:name|>", "<|tool_call:args|>", "<|tool_call:end|>"),  # Solar
    )
}


def stepped_call(tape: Tape, calls: Calls, steps: CallSteps) -> Reading[None]:
    """A call whose `begin` has been read."""
    if steps.name:
        yield from tape.until(steps.name)
    name, _ = yield from tape.until(steps.arguments)
    if name == "function":  # DeepSeek V3: the kind of tool comes first, and the arguments are fenced
        name, _ = yield from tape.until("\n")
        yield from tape.takes("```json")
    yield from arguments_of(tape, calls, _COUNTED.sub("", name.strip()), steps.end)
    yield from tape.until(steps.end)


def mistral_call(tape: Tape, calls: Calls, end: str) -> Reading[None]:
    """`get_weather[ARGS]{...}`, also with an id in between, or with nothing."""
    name, stop = yield from tape.until("[ARGS]", "[CALL_ID]", "{")
    if stop == "[CALL_ID]":
        yield from tape.until("[ARGS]")
    elif stop == "{":
        tape.at -= 1
    yield from arguments_of(tape, calls, name.strip(), end)


def harmony_call(tape: Tape, calls: Calls, end: str) -> Reading[None]:
    """`get_weather<|channel|>commentary json<|message|>{...}<|call|>`, the name's prefix having been read."""
    name, stop = yield from tape.until("<|", " ")
    if stop == "<|":
        tape.at -= len(stop)
    yield from tape.until("<|message|>")
    yield from arguments_of(tape, calls, name, end)
    yield from tape.skip()
    yield from tape.takes(end)


# ── Gemma 4's own notation: `call:get_weather{city:<|"|>Paris<|"|>,days:3}` ──


_QUOTE = '<|"|>'
_GEMMA_TOKEN = re.compile(
    r"""<\|"\|>(?P<text>.*?)<\|"\|> | (?P<string>"(?:[^"\\]|\\.)*") | (?P<key>[\w.\-]+)(?=\s*:)""",
    re.DOTALL | re.VERBOSE,
)


def gemma_call(tape: Tape, calls: Calls, end: str) -> Reading[None]:
    """One call, which is passed on as a whole: its values are no JSON while they are written."""
    yield from tape.takes("call:")
    name, stop = yield from tape.until("{", end)
    if stop != "{":
        raise NoCall
    calls.set_name(name.strip())
    body = yield from _gemma_body(tape, end)
    calls.add_call(calls.tool.name, body)


def _gemma_body(tape: Tape, end: str) -> Reading[str]:
    """The end marker means nothing inside of a string."""
    body = "{"
    while True:
        text, stop = yield from tape.until(_QUOTE, end)
        if stop != _QUOTE:
            break
        string, closing = yield from tape.until(_QUOTE)
        body += text + _QUOTE + string + closing
    if tape.is_cut_here and not stop:
        raise NoCall
    written = _GEMMA_TOKEN.sub(_as_json, body + text)
    try:
        json.loads(written)
    except (ValueError, RecursionError):
        raise NoCall from None
    return written


def _as_json(token: re.Match[str]) -> str:
    if token["string"] is not None:
        return token["string"]
    key = token["key"]
    return as_json(token["text"] if key is None else key)


# ── Python: `get_weather(city="Paris", days=3)` ──


_QUIET = re.compile(r"[^'\"()\[\]{}]+")
_PLAIN = re.compile(r"[^'\"\\]+")
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED = frozenset("\\'\"abfnrtvxuUN01234567\n")
_CONSTANTS = {"true": True, "false": False, "null": None}


def python_call(tape: Tape, calls: Calls, name: str) -> Reading[None]:
    """What stands in the parentheses that come next. Raises NoCall."""
    calls.set_name(name)
    text = yield from _in_parentheses(tape)
    try:
        written = as_json(_arguments(calls.tool, text))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise NoCall from None
    calls.add_call(name, written)


def _arguments(tool: Tool, text: str) -> dict[str, Json]:
    call = ast.parse("f" + _ESCAPE.sub(_mend, text), mode="eval").body
    if not isinstance(call, ast.Call):
        raise ValueError("not a call")
    arguments = _by_name(tool, [_value(node) for node in call.args])
    for keyword in call.keywords:
        if keyword.arg is None:
            raise ValueError("not a plain argument")
        arguments[keyword.arg] = _value(keyword.value)
    return arguments


def _mend(escape: re.Match[str]) -> str:
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
