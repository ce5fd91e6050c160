"""How calls are read while the answer is still being written: the text, the calls found in it, and one attempt.

The function of a dialect is a generator. It yields when the text that it needs has not come yet, and is resumed
when there is more, or when nothing more will come. It decides only by text that can no longer change, so it does
not matter in which pieces the text comes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping
from enum import Enum, auto
from typing import TypeVar

from emberkeep.types.request import Tool
from emberkeep.values import dataclass

T = TypeVar("T")
Reading = Generator[None, None, T]
Read = Callable[["Tape", "Calls", str], Reading[None]]
"""Reads what follows a start marker, up to the end marker. Raises NoCall where it is no call."""

_BLANKS = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class Dialect:
    start: str
    end: str
    read: Read
    any_name: bool = True
    """The markers leave no doubt; otherwise only the name of a tool makes it a call."""


class AttemptState(Enum):
    WAITS = auto()  # for more text
    ENDED = auto()
    NO_CALL = auto()
    CUT = auto()  # in the middle of a call


class Attempt:
    def __init__(self, dialect: Dialect, start: int, tools: Mapping[str, Tool], *, is_first: bool) -> None:
        """`start`: how much of the buffer is the marker. `is_first`: the answer begins with it."""
        self.dialect = dialect
        self.start = start
        self.quoted_until = ""
        """Where it was no call: everything up to there is text, whatever it looks like."""
        self._tape = Tape(start)
        self._calls = Calls(tools, any_name=dialect.any_name, is_first=is_first)
        self._reading = dialect.read(self._tape, self._calls, dialect.end)

    @property
    def has_begun(self) -> bool:
        """It is a call for certain."""
        return self._calls.begun > 0

    @property
    def read(self) -> int:
        """How much of the buffer."""
        return self._tape.at

    def pieces(self) -> tuple[CallPiece, ...]:
        """Those that were read since the last time."""
        return self._calls.take_pieces()

    def drop_read(self) -> int:
        """How much of the buffer was read; the caller drops it."""
        read, self._tape.at = self._tape.at, 0
        return read

    def resume(self, buffer: str, *, is_over: bool, is_cut: bool) -> AttemptState:
        self._tape.text = buffer
        self._tape.is_over, self._tape.is_cut = is_over, is_cut
        try:
            next(self._reading)
        except StopIteration:
            return self._state_at_end()
        except NoCall as reason:
            self.quoted_until = reason.quoted_until
            return self._state_at_end()
        return AttemptState.WAITS

    def _state_at_end(self) -> AttemptState:
        calls, is_cut = self._calls, self._tape.is_cut_here
        if is_cut and calls.name is not None and not calls.is_open and calls.any_name:
            calls.open()
        if calls.is_open and is_cut:
            return AttemptState.CUT
        if calls.begun:
            return AttemptState.ENDED
        return AttemptState.CUT if is_cut and calls.any_name else AttemptState.NO_CALL


class Tape:
    """A reader moves only `at`, and keeps no places: what lies before `at` may be dropped whenever it waits."""

    def __init__(self, at: int) -> None:
        self.text = ""
        self.at = at
        self.is_over = False
        """Nothing more will come."""
        self.is_cut = False
        """Nothing more will come although there was more to say."""
        self.ran_out = False
        """A reader wanted more than there is."""

    @property
    def is_cut_here(self) -> bool:
        return self.is_cut and self.ran_out

    def ahead(self, count: int) -> Reading[str]:
        """The next `count` characters, fewer where the text is over. They stay unread."""
        while len(self.text) - self.at < count:
            if self.is_over:
                self.ran_out = True
                break
            yield
        return self.text[self.at : self.at + count]

    def char(self, offset: int = 0) -> Reading[str]:
        """The character at `at + offset`, "" where the text is over. It stays unread."""
        while len(self.text) - self.at <= offset:
            if self.is_over:
                self.ran_out = True
                break
            yield
        at = self.at + offset
        return self.text[at : at + 1]

    def sees(self, *options: str) -> Reading[str]:
        """The longest of `options` that comes next, which stays unread; "" for none of them."""
        longest = max(map(len, options))
        while True:
            rest = self.text[self.at : self.at + longest]
            may_grow = any(len(rest) < len(option) and option.startswith(rest) for option in options)
            if not may_grow or self.is_over:
                self.ran_out |= may_grow
                return max((option for option in options if rest.startswith(option)), key=len, default="")
            yield

    def takes(self, *options: str) -> Reading[str]:
        """As `sees`, and it is read."""
        option = yield from self.sees(*options)
        self.at += len(option)
        return option

    def skip(self, pattern: re.Pattern[str] = _BLANKS) -> Reading[None]:
        """Read everything that `pattern`, a repeated set of characters, matches."""
        while True:
            match = pattern.match(self.text, self.at)
            assert match
            self.at = match.end()
            if self.at < len(self.text) or self.is_over:
                return
            yield

    def word(self, pattern: re.Pattern[str]) -> Reading[str]:
        """As `skip`, and what was read."""
        seen = 0  # what came in earlier pieces is not read again
        while True:
            match = pattern.match(self.text, self.at + seen)
            assert match
            seen = match.end() - self.at
            if match.end() < len(self.text) or self.is_over:
                break
            yield
        self.ran_out |= match.end() == len(self.text)
        text, self.at = self.text[self.at : match.end()], match.end()
        return text

    def rest(self) -> Reading[str]:
        """Everything that is still to come."""
        while not self.is_over:
            yield
        self.ran_out = True
        text, self.at = self.text[self.at :], len(self.text)
        return text

    def until(self, *stops: str) -> Reading[tuple[str, str]]:
        """The text before the first of `stops`, and which one it is; both are read.

        The rest and "" where none of them comes. No stop may be the beginning of another.
        """
        pattern = re.compile("|".join(map(re.escape, stops)))
        longest = max(map(len, stops))
        seen = 0
        while True:
            match = pattern.search(self.text, self.at + seen)
            if match or self.is_over:
                break
            seen = max(0, len(self.text) - self.at - longest + 1)
            yield
        self.ran_out |= match is None
        text = self.text[self.at : match.start() if match else len(self.text)]
        self.at = match.end() if match else len(self.text)
        return text, match[0] if match else ""


class NoCall(Exception):
    """What is being read is not a call. `quoted_until`: and neither is anything up to there."""

    def __init__(self, quoted_until: str = "") -> None:
        self.quoted_until = quoted_until


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A call begins with its name, goes on with pieces of its arguments, and ends with `is_end`."""

    name: str | None = None
    arguments: str = ""
    is_end: bool = False


class Calls:
    """The calls of one block, while they are read."""

    def __init__(self, tools: Mapping[str, Tool], *, any_name: bool, is_first: bool) -> None:
        """`any_name`: its markers leave no doubt, so an unknown name is the caller's to answer. `is_first`: the
        answer begins with it."""
        self._tools = tools
        self.any_name = any_name
        self.is_first = is_first
        self._pieces: list[CallPiece] = []
        self.name: str | None = None
        """That of the call which is being read, once it is known."""
        self.is_open = False
        self.begun = 0

    @property
    def tool(self) -> Tool:
        assert self.name is not None
        return self._tools.get(self.name) or Tool(self.name)

    def knows(self, name: str) -> bool:
        return name in self._tools

    def set_name(self, name: str) -> None:
        """Raises NoCall where there is no such tool and there has to be one, or where it is no name at all."""
        if not name.isprintable() or not name or (name not in self._tools and not self.any_name):
            raise NoCall
        self.name = name

    def open(self) -> None:
        """It is a call for certain."""
        self._pieces.append(CallPiece(self.name))
        self.begun += 1
        self.is_open = True

    def add(self, arguments: str) -> None:
        if arguments:
            self._pieces.append(CallPiece(arguments=arguments))

    def end(self) -> None:
        self._pieces.append(CallPiece(is_end=True))
        self.is_open, self.name = False, None

    def add_call(self, name: str, arguments: str) -> None:
        self.set_name(name)
        self.open()
        self.add(arguments)
        self.end()

    def take_pieces(self) -> tuple[CallPiece, ...]:
        pieces, self._pieces = tuple(self._pieces), []
        return pieces
