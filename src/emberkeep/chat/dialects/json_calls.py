"""Calls as JSON objects: `{"name": ..., "arguments": {...}}`, and what models make of that and of JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from emberkeep.chat.dialects.reader import Calls, NoCall, Reading, Tape
from emberkeep.types.request import Json

_NAMES = frozenset({"name", "tool_name", "function_name", "tool", "function"})
_ARGUMENTS = frozenset({"arguments", "parameters", "args", "tool_input"})
_WRAPPERS = frozenset({"function", "tool_call", "function_call", "tool_calls"})
_FIRST_KEYS = _NAMES | _ARGUMENTS | _WRAPPERS | {"type", "id", "tool_call_id"}
_MAX_DEPTH = 2
"""Wrappers around a call: `{"tool_calls": [{"type": "function", "function": {...}}]}`."""
_COMMAS = re.compile(r"[\s,]*")
# Models write newlines into strings, which strict JSON forbids.
_LENIENT = json.JSONDecoder(strict=False)


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
        calls.set_name((yield from json_value(tape)))
        arguments.release()
    elif char == "{" and calls.any_name and calls.knows(key):
        calls.set_name(key)
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


class Arguments:
    """Those of one call: they are held back until it has its name, and until they are surely an object."""

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


# ── JSON, passed on while it is written ──


class NotJson(Exception):
    """The next character cannot stand there in JSON."""


_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SCALAR = re.compile(r"[-+.0-9A-Za-z]*")
_NUMBER_OR_WORD = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?\Z|true\Z|false\Z|null\Z")
_ESCAPE = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})')
_BLANKS = re.compile(r"[ \t\r\n]*")
_SHORT = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
_CLOSERS = {"{": "}", "[": "]"}

Put = Callable[[str], None]


class JsonText:
    """One JSON value: every piece goes to `put` as soon as it is read.

    Strings are repaired where models often break them: line breaks and other control characters, and backslashes
    that escape nothing. Where a value breaks off or breaks JSON's rules, `missing` would complete it.
    """

    def __init__(self, tape: Tape, put: Put) -> None:
        self._tape = tape
        self._put = put
        self._open: list[str] = []
        self._between_values = False

    @property
    def missing(self) -> str:
        """The brackets that lack; "" where more than brackets lacks."""
        return "".join(reversed(self._open)) if self._between_values else ""

    def read(self) -> Reading[None]:
        """Raises NotJson, also where the text is over before the value is."""
        yield from self._value()
        while self._open:
            self._between_values = True
            yield from self._blanks()
            char = yield from self._tape.char()
            if char == self._open[-1]:
                self._pass(1)
                self._open.pop()
            elif char == ",":
                yield from self._comma()
            else:
                raise NotJson

    def _comma(self) -> Reading[None]:
        """With the next member or item; one that nothing follows is dropped."""
        held: list[str] = []
        put, self._put = self._put, held.append
        self._pass(1)
        yield from self._blanks()
        self._put = put
        closes = (yield from self._tape.char()) == self._open[-1]
        put("".join(held)[closes:])
        if closes:
            return
        self._between_values = False
        if self._open[-1] == "}":
            yield from self._key()
        yield from self._value()

    def _value(self) -> Reading[None]:
        """A scalar, or all the opening brackets up to one."""
        while True:
            char = yield from self._tape.char()
            if char not in _CLOSERS or not char:
                break
            self._pass(1)
            self._open.append(_CLOSERS[char])
            yield from self._blanks()
            closer = yield from self._tape.char()
            if closer == self._open[-1]:
                return
            if char == "{":
                yield from self._key()
        yield from (self._string() if char == '"' else self._scalar())

    def _key(self) -> Reading[None]:
        yield from self._string()
        yield from self._blanks()
        if (yield from self._tape.char()) != ":":
            raise NotJson
        self._pass(1)
        yield from self._blanks()

    def _scalar(self) -> Reading[None]:
        text = yield from self._tape.word(_SCALAR)
        self._tape.at -= len(text)
        if not _NUMBER_OR_WORD.match(text):
            raise NotJson
        self._pass(len(text))

    def _string(self) -> Reading[None]:
        if (yield from self._tape.char()) != '"':
            raise NotJson
        self._pass(1)
        while True:
            char = yield from self._tape.char()
            if not char:
                raise NotJson
            if char == '"':
                self._pass(1)
                return
            if char == "\\":
                yield from self._escape()
            elif char < " ":
                self._tape.at += 1
                self._put(_SHORT.get(char) or f"\\u{ord(char):04x}")
            else:
                plain = _PLAIN.match(self._tape.text, self._tape.at)
                assert plain
                self._pass(len(plain[0]))

    def _escape(self) -> Reading[None]:
        two = yield from self._tape.ahead(2)
        if two == "\\":
            raise NotJson
        text = (yield from self._tape.ahead(6)) if two == "\\u" else two
        if _ESCAPE.match(text):
            self._pass(len(text))
        else:
            self._tape.at += 1
            self._put("\\\\")

    def _blanks(self) -> Reading[None]:
        if blanks := (yield from self._tape.word(_BLANKS)):
            self._put(blanks)

    def _pass(self, length: int) -> None:
        if length:
            self._put(self._tape.text[self._tape.at : self._tape.at + length])
            self._tape.at += length


def json_value(tape: Tape) -> Reading[Json]:
    """A whole value. Raises NotJson."""
    pieces: list[str] = []
    yield from JsonText(tape, pieces.append).read()
    return json.loads("".join(pieces))


def as_json(value: Json) -> str:
    """As it may be sent. Raises ValueError for numbers that JSON does not have."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if is_text(text) else json.dumps(value)


def is_text(text: str) -> bool:
    """Half of a character (a lone surrogate), which JSON can name, is no text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
