"""Calls as JSON objects: `{"name": ..., "arguments": {...}}`, and what models make of that."""

from __future__ import annotations

import json
import re

from emberkeep.chat.dialects.calls import Calls, NoCall, as_json, is_text
from emberkeep.chat.dialects.json_text import JsonText, NotJson, json_value
from emberkeep.chat.dialects.tape import Reading, Tape

_NAMES = frozenset({"name", "tool_name", "function_name", "tool", "function"})
_ARGUMENTS = frozenset({"arguments", "parameters", "args", "tool_input"})
_WRAPPERS = frozenset({"function", "tool_call", "function_call", "tool_calls"})
_FIRST_KEYS = _NAMES | _ARGUMENTS | _WRAPPERS | {"type", "id", "tool_call_id"}
_MAX_DEPTH = 2
"""Wrappers around a call: `{"tool_calls": [{"type": "function", "function": {...}}]}`."""
_COMMAS = re.compile(r"[\s,]*")
# Models write newlines into strings, which strict JSON forbids.
_LENIENT = json.JSONDecoder(strict=False)


class Arguments:
    """Of one call: held back until the call has its name, and until it is clear that they are an object."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._held = ""
        self.is_given = False

    def put(self, text: str) -> None:
        self._held += text
        self.release()

    def release(self) -> None:
        if not self._calls.is_open:
            if self._calls.name is None or len(self._held.rstrip()) < len("{}"):
                return
            self._calls.open()
        self._calls.add(self._held)
        self._held = ""

    def read(self, tape: Tape, end: str) -> Reading[None]:
        """Raises NoCall for anything but an object; what goes wrong after its beginning stays as it was written,
        up to `end`."""
        self.is_given = True
        text = JsonText(tape, self.put)
        try:
            yield from text.read()
        except NotJson:
            if not self._calls.is_open:
                raise NoCall from None
            if not tape.is_cut_here:
                lacks_only_brackets = text.missing and (yield from _is_at_end(tape, end))
                self.put(text.missing if lacks_only_brackets else (yield from _rest(tape, end)))

    def read_any(self, tape: Tape, end: str) -> Reading[None]:
        """An object, or one that was written as a string; null and "" stand for none."""
        if (yield from tape.char()) == "{":
            yield from self.read(tape, end)
            return
        self.is_given = True
        value = yield from json_value(tape)
        if isinstance(value, str):
            text, value = value, _LENIENT.decode(value) if value.strip() else None
            if isinstance(value, dict):
                self.put(text if _is_strict(text) else as_json(value))
                return
        if value is not None:
            raise NoCall
        self.put("{}")


def _is_at_end(tape: Tape, end: str) -> Reading[bool]:
    if not (yield from tape.char()):
        return True
    return bool(end) and bool((yield from tape.sees(end)))


def _rest(tape: Tape, end: str) -> Reading[str]:
    if not end:
        return (yield from tape.rest())
    text, stop = yield from tape.until(end)
    tape.at -= len(stop)
    return text


def _is_strict(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return is_text(text)


def call_object(
    tape: Tape, calls: Calls, end: str = "", *, is_open: bool = False, depth: int = 0
) -> Reading[None]:
    """One object. Raises NoCall. `is_open`: its brace has been read. `depth`: of wrappers around it."""
    if not is_open and not (yield from tape.takes("{")):
        raise NoCall
    try:
        yield from _members(tape, calls, end, depth)
    except (NoCall, NotJson, ValueError, RecursionError):
        if not calls.is_open:
            raise NoCall from None
        # Nothing but the end of the object lacks, which small models often forget.
    if calls.is_open and not tape.is_cut_here:
        calls.end()


def _members(tape: Tape, calls: Calls, end: str, depth: int) -> Reading[None]:
    arguments = Arguments(calls)
    begun = calls.begun
    # Qwen 2.5: its template tells it to write two braces.
    is_doubled = yield from tape.takes("{")
    key = yield from _key(tape)
    if key not in _FIRST_KEYS and not calls.any_name:
        raise NoCall
    while key is not None:
        if key in _WRAPPERS and depth < _MAX_DEPTH and (yield from tape.sees("{", "[")):
            yield from _wrapped(tape, calls, end, depth + 1)
        else:
            yield from _member(tape, calls, key, arguments, end)
        key = yield from _key(tape)
    if is_doubled:
        yield from tape.takes("}")
    if calls.begun == begun:
        if calls.name is None or not (calls.any_name or arguments.is_given):
            raise NoCall
        calls.open()
        calls.add("{}")


def _key(tape: Tape) -> Reading[str | None]:
    """The next one, up to its value; None at the end of the object."""
    yield from tape.skip(_COMMAS)
    if (yield from tape.takes("}")):
        return None
    if (yield from tape.char()) != '"':
        raise NoCall
    key: str = yield from json_value(tape)
    yield from tape.skip()
    if not (yield from tape.takes(":")):
        raise NoCall
    yield from tape.skip()
    return key


def _member(tape: Tape, calls: Calls, key: str, arguments: Arguments, end: str) -> Reading[None]:
    char = yield from tape.char()
    if key in _ARGUMENTS and not arguments.is_given:
        yield from arguments.read_any(tape, end)
    elif key in _NAMES and char == '"' and calls.name is None:
        calls.named((yield from json_value(tape)))
        arguments.release()
    elif char == "{" and calls.any_name and calls.knows(key):
        calls.named(key)
        yield from arguments.read(tape, end)
    else:
        yield from json_value(tape)


def _wrapped(tape: Tape, calls: Calls, end: str, depth: int) -> Reading[None]:
    """`{"type": "function", "function": {...}}`, `{"tool_calls": [{...}, {...}]}`."""
    is_list = yield from tape.takes("[")
    yield from tape.skip()
    yield from call_object(tape, calls, end, depth=depth)
    while is_list:
        yield from tape.skip(_COMMAS)
        if (yield from tape.takes("]")):
            return
        yield from call_object(tape, calls, end, depth=depth)
