"""One attempt to read tool calls behind a marker."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto

from emberkeep.chat.dialects import CallPiece, Calls, Dialect, NoCall, Tape
from emberkeep.types import Tool


class Outcome(Enum):
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
        self._tape = Tape(at=start)
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
        return self._calls.taken()

    def dropped(self) -> int:
        """How much of the buffer was read; the caller drops it."""
        read, self._tape.at = self._tape.at, 0
        return read

    def go_on(self, buffer: str, *, is_over: bool, is_cut: bool) -> Outcome:
        self._tape.text = buffer
        self._tape.is_over, self._tape.is_cut = is_over, is_cut
        try:
            next(self._reading)
        except StopIteration:
            return self._outcome()
        except NoCall as reason:
            self.quoted_until = reason.quoted_until
            return self._outcome()
        return Outcome.WAITS

    def _outcome(self) -> Outcome:
        calls, is_cut = self._calls, self._tape.is_cut_here
        if is_cut and calls.name is not None and not calls.is_open and calls.any_name:
            calls.open()
        if calls.is_open and is_cut:
            return Outcome.CUT
        if calls.begun:
            return Outcome.ENDED
        return Outcome.CUT if is_cut and calls.any_name else Outcome.NO_CALL
