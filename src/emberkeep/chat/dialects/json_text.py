"""JSON as models write it, passed on while it is written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from emberkeep.chat.dialects.tape import Reading, Tape
from emberkeep.types import Json


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
        while True:
            match = _SCALAR.match(self._tape.text, self._tape.at)
            assert match
            if match.end() < len(self._tape.text):
                break
            if self._tape.is_over:
                self._tape.ran_out = True
                break
            yield
        if not _NUMBER_OR_WORD.match(match[0]):
            raise NotJson
        self._pass(len(match[0]))

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
        while True:
            match = _BLANKS.match(self._tape.text, self._tape.at)
            assert match
            self._pass(len(match[0]))
            if self._tape.at < len(self._tape.text) or self._tape.is_over:
                return
            yield

    def _pass(self, length: int) -> None:
        if length:
            self._put(self._tape.text[self._tape.at : self._tape.at + length])
            self._tape.at += length


def json_value(tape: Tape) -> Reading[Json]:
    """A whole value. Raises NotJson."""
    pieces: list[str] = []
    yield from JsonText(tape, pieces.append).read()
    return json.loads("".join(pieces))
