"""Cuts an answer, while it is being written, into reasoning, tool calls and text.

    opening ──> reasoning ──> after ──> beginning ──> answer <──> call
       └────────────────────────────────────┘

Each state is a method that takes what it can from the front of the buffer. It returns True when it handed
over to another state, and False when it needs more text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from emberkeep.chat.dialects import (
    BARE,
    MARKED_DIALECTS,
    REASONING,
    TAGGED,
    Dialect,
    ParsedCall,
    Reasoning,
    held_suffix,
    may_be_call,
)


class Kind(Enum):
    TEXT = auto()
    REASONING = auto()
    CALLS = auto()
    CUT_CALL = auto()  # the beginning of a call; its name may be missing
    HIDDEN = auto()  # markers, and the blanks around them


@dataclass(frozen=True, slots=True)
class Section:
    kind: Kind
    text: str
    end: int
    """Where it ends, in characters from the beginning of the stream."""
    calls: tuple[ParsedCall, ...] = ()


_STARTS = tuple(dialect.start for dialect in MARKED_DIALECTS)
_START = re.compile("|".join(map(re.escape, _STARTS)))
_BY_START = {dialect.start: dialect for dialect in MARKED_DIALECTS}
_OPENINGS = tuple(block.start for block in REASONING)


class Sections:
    """Every character fed comes out in exactly one section, in order.

    `tools`: names of the tools that may be called; none, and nothing is taken for a call.
    `opened`: the reasoning block that the prompt has begun already.
    """

    def __init__(self, tools: frozenset[str], opened: Reasoning | None) -> None:
        self._tools = tools
        self._block = opened
        self._buffer = ""
        self._taken = 0
        self._out: list[Section] = []
        self._called = False
        self._body = _Body(BARE, 0)
        self._state: Callable[[], bool] = self._reasoning_start if opened else self._opening

    def feed(self, text: str) -> list[Section]:
        """Sections that are certain now."""
        self._buffer += text
        while self._buffer and self._state():
            pass
        return self._emitted()

    def finish(self, *, cut: bool = False) -> list[Section]:
        """The rest: nothing more will be written. `cut`: although more was to come."""
        while self._buffer and self._state == self._call:
            body = self._body.without_partial_end(self._buffer)
            if not (self._take_calls(body, len(self._buffer)) or (cut and self._take_cut_call(body))):
                self._not_a_call()
            while self._buffer and self._state():
                pass
        if cut and self._tools and self._state in (self._opening, self._answer):
            self._take_cut_marker()
        if self._buffer:
            self._take(len(self._buffer), self._kind_of_rest())
        return self._emitted()

    def _emitted(self) -> list[Section]:
        out, self._out = self._out, []
        return out

    def _take(self, length: int, kind: Kind, calls: tuple[ParsedCall, ...] = ()) -> None:
        if not length:
            return
        text, self._buffer = self._buffer[:length], self._buffer[length:]
        self._taken += length
        self._out.append(Section(kind, text, self._taken, calls))

    def _kind_of_rest(self) -> Kind:
        if self._state in (self._reasoning_start, self._reasoning):
            return Kind.REASONING if self._buffer.strip() else Kind.HIDDEN
        blank_after_something = (self._block or self._called) and not self._buffer.strip()
        return Kind.HIDDEN if blank_after_something else Kind.TEXT

    # ── the states ──

    def _opening(self) -> bool:
        text = self._buffer.lstrip()
        self._block = next((block for block in REASONING if text.startswith(block.start)), None)
        if self._block:
            self._take(len(self._buffer) - len(text) + len(self._block.start), Kind.HIDDEN)
            return self._go(self._reasoning_start)
        if not text and not self._tools:
            # The first token counts: blanks before a reasoning block are rare, and harmless as text.
            self._take(len(self._buffer), Kind.TEXT)
        if any(opening.startswith(text) for opening in _OPENINGS):
            return False
        return self._go(self._beginning)

    def _reasoning_start(self) -> bool:
        self._take_blanks()
        return self._go(self._reasoning)

    def _reasoning(self) -> bool:
        assert self._block
        before, end, _ = self._buffer.partition(self._block.end)
        if end:
            self._take(len(before.rstrip()), Kind.REASONING)
            self._take(self._buffer.index(end) + len(end), Kind.HIDDEN)
            return self._go(self._after_reasoning)
        self._take_settled((self._block.end,), Kind.REASONING)
        return False

    def _after_reasoning(self) -> bool:
        self._take_blanks()
        return self._go(self._beginning) if self._buffer else False

    def _beginning(self) -> bool:
        text = self._buffer.lstrip()
        if not self._tools:
            return self._go(self._answer)
        if not text:
            return False
        if text[0] in "{[":
            self._body = _Body(BARE, 0)
            return self._go(self._call)
        return self._go(self._answer)

    def _answer(self) -> bool:
        if not self._tools:
            self._take(len(self._buffer), Kind.TEXT)
            return False
        start = _START.search(self._buffer)
        if start is None:
            self._take_settled(_STARTS, Kind.TEXT)
            return False
        before = len(self._buffer[: start.start()].rstrip())
        self._take(before, Kind.TEXT)
        self._body = _Body(_BY_START[start[0]], start.end() - before)
        return self._go(self._call)

    def _call(self) -> bool:
        body = self._body
        if not may_be_call(self._buffer, body.start):
            return self._not_a_call()
        end = body.find_end(self._buffer)
        if end is None:
            return False
        whole = end + len(body.dialect.end)
        return self._take_calls(self._buffer[body.start : end], whole) or self._not_a_call()

    # ── what they share ──

    def _go(self, state: Callable[[], bool]) -> bool:
        self._state = state
        return True

    def _take_blanks(self) -> None:
        self._take(len(self._buffer) - len(self._buffer.lstrip()), Kind.HIDDEN)

    def _take_settled(self, markers: tuple[str, ...], kind: Kind) -> None:
        """All but what may turn out to be a marker, or blanks before one."""
        settled = self._buffer[: len(self._buffer) - held_suffix(self._buffer, markers)]
        self._take(len(settled.rstrip()), kind)

    def _take_calls(self, text: str, length: int) -> bool:
        calls = self._body.dialect.parse(text, self._tools)
        if not calls:
            return False
        self._called = True
        self._take(length, Kind.CALLS, calls)
        return self._go(self._answer)

    def _take_cut_call(self, body: str) -> bool:
        """JSON without tags may as well be the answer, so there it takes a known name to make it a call."""
        dialect = self._body.dialect
        call = dialect.begun(body, self._tools)
        if call is None and dialect is not TAGGED:
            return False
        self._take(len(self._buffer), Kind.CUT_CALL, (call,) if call else ())
        return True

    def _take_cut_marker(self) -> None:
        if marker := held_suffix(self._buffer, (TAGGED.start,)):
            self._take(len(self._buffer[:-marker].rstrip()), Kind.TEXT)
            self._take(len(self._buffer), Kind.CUT_CALL)

    def _not_a_call(self) -> bool:
        """Pass the marker on as text, and read on behind it."""
        self._take(self._body.start, Kind.TEXT)
        return self._go(self._answer)


class _Body:
    """What follows a dialect's start marker, from `start` on in a growing buffer."""

    def __init__(self, dialect: Dialect, start: int) -> None:
        self.dialect = dialect
        self.start = start
        self._at = start
        self._in_string = False
        self._border = re.compile(f'"|{re.escape(dialect.end)}') if dialect.end else None

    def find_end(self, buffer: str) -> int | None:
        """Where the end marker begins. One that stands inside a JSON string is part of the string.

        Goes on where the last call stopped, so a long body is scanned once.
        """
        while self._border:
            pattern = _IN_STRING if self._in_string else self._border
            match = pattern.search(buffer, self._at)
            if match is None:
                self._at = self._where_to_go_on(buffer)
                return None
            if match[0] == self.dialect.end:
                return match.start()
            self._at = match.end()
            self._in_string ^= match[0] == '"'
        return None

    def _where_to_go_on(self, buffer: str) -> int:
        """Before a backslash or an end marker of which only the beginning has come."""
        if self._in_string:
            return len(buffer) - buffer.endswith("\\", self._at)
        return max(self._at, len(buffer) - len(self.dialect.end) + 1)

    def without_partial_end(self, buffer: str) -> str:
        body = buffer[self.start :]
        return body[: len(body) - held_suffix(body, (self.dialect.end,))]


_IN_STRING = re.compile(r'"|\\.', re.DOTALL)
