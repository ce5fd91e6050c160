"""An answer, while it is being written, cut into reasoning, tool calls and text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from enum import Enum, auto
from functools import lru_cache

from emberkeep.chat.dialects.reader import Attempt, AttemptState, CallPiece, Dialect
from emberkeep.chat.dialects.table import (
    BARE,
    MARKED_DIALECTS,
    REASONING,
    STRAY_ENDS,
    TAGGED,
    Reasoning,
    tag_dialects,
)
from emberkeep.text import alternatives
from emberkeep.types.request import Tool
from emberkeep.values import dataclass


class SectionKind(Enum):
    TEXT = auto()
    REASONING = auto()
    AROUND_REASONING = auto()  # its markers, and the blanks beside them
    CALLS = auto()
    CUT_CALL = auto()  # the beginning of a call; its name may be missing
    HIDDEN = auto()  # blanks around calls, and what stands around messages


@dataclass(frozen=True, slots=True)
class AnswerSection:
    kind: SectionKind
    text: str
    end: int
    """Where it ends, in characters from the beginning of the stream."""
    pieces: tuple[CallPiece, ...] = ()
    is_end: bool = False
    """No more calls follow without another marker."""


def pieces_of(sections: Iterable[AnswerSection]) -> list[CallPiece]:
    return [piece for section in sections for piece in section.pieces]


def text_of(sections: Iterable[AnswerSection], kind: SectionKind) -> str:
    return "".join(section.text for section in sections if section.kind is kind)


class Markers:
    """Finds one of many strings in a text that is still being written.

    None of them is a part of another, so the first to be complete is also the first to begin.
    """

    def __init__(self, texts: Iterable[str], others: Markers | None = None) -> None:
        """`others`: these too, which are known already."""
        texts = [text for text in texts if text]
        pattern = alternatives(texts)
        assert pattern
        self._any = pattern
        self._others = others
        self._beginnings = frozenset(text[:length] for text in texts for length in range(1, len(text)))
        self._longest = max(map(len, self._beginnings), default=0)

    def search(self, text: str) -> re.Match[str] | None:
        own = self._any.search(text)
        other = self._others.search(text) if self._others else None
        return own if other is None or (own and own.start() < other.start()) else other

    def find_all(self, text: str) -> list[re.Match[str]]:
        """In order."""
        others = self._others.find_all(text) if self._others else ()
        return sorted([*self._any.finditer(text), *others], key=re.Match.start)

    def held(self, text: str) -> int:
        """How many characters at the end of `text` may be the beginning of a marker."""
        lengths = range(min(self._longest, len(text)), 0, -1)
        own = next((length for length in lengths if text[-length:] in self._beginnings), 0)
        return max(own, self._others.held(text)) if self._others else own


_STARTS = Markers([*(dialect.start for dialect in MARKED_DIALECTS), *STRAY_ENDS])
_CUT_START = Markers([TAGGED.start])
_OPENINGS = Markers(block.start for block in REASONING)
_ENDS = {block: Markers([block.end]) for block in REASONING}
_MAX_IN_VAIN = 1 << 18
"""Characters of one answer that may be read as a call in vain, and again as text. Then it has no more calls."""
_MAX_AT_END = 32
"""Attempts that may fail because the answer has ended."""
_MAX_LAST_CALLS = 8
"""Calls at the end of reasoning that was not ended."""
_REMEMBERED_TOOLS = 8
"""Sets of tools whose markers need not be made again for the next request."""
_BETWEEN_CALLS = re.compile(r"[\s,;]*")


class Sections:
    """Cuts an answer, while it is being written, into reasoning, tool calls and text. Every character fed comes
    out in exactly one section, in order.

        opening ──> reasoning ──> after ──> beginning ──> answer <──> call
           └────────────────────────────────────┘          └─> quoted

    Each state is a method that takes what it can from the front of the buffer. It returns True when it handed over
    to another state, and False when it needs more text.

    `tools`: those that may be called, by name; none, and nothing is taken for a call.
    `opened`: the reasoning block that the prompt has begun already.
    `framing`: what stands around messages; the first begins another one.
    """

    def __init__(self, tools: Mapping[str, Tool], opened: Reasoning | None, framing: tuple[str, ...] = ()) -> None:
        self._tools = tools
        self._framing = framing
        self._names = tuple(tools)
        self._markers = _markers(self._names, framing)
        self._block = opened
        self._buffer = ""
        self._taken = 0
        self._last = ""
        """Character that was taken."""
        self._out: list[AnswerSection] = []
        self._called = False
        self._has_said = False
        self._thought: list[str] = []
        self._attempt: Attempt | None = None
        self._quote_end: Markers | None = None
        self._in_vain = 0
        self._at_end = 0
        self._is_over = False
        self._is_cut = False
        self._state: Callable[[], bool] = self._reasoning_start if opened else self._opening

    def feed(self, text: str) -> list[AnswerSection]:
        """Sections that are certain now."""
        self._buffer += text
        return self._advance()

    def finish(self, *, cut: bool = False) -> list[AnswerSection]:
        """The rest: nothing more will be written. `cut`: although more was to come."""
        self._is_over, self._is_cut = True, cut
        out = self._advance()
        if cut and self._tools and self._state in (self._opening, self._answer, self._after_bare):
            self._take_cut_marker()
        if self._buffer:
            self._take(len(self._buffer), self._kind_of_rest())
        out += self._take_out()
        if not cut and self._tools and self._state == self._reasoning:
            self._take_last_thought()
        return out + self._take_out()

    def read_whole(self, text: str) -> list[AnswerSection]:
        """All sections of an answer that is complete; nothing may have been fed before."""
        return self.feed(text) + self.finish()

    def _advance(self) -> list[AnswerSection]:
        while (self._buffer or self._attempt) and self._state():
            pass
        return self._take_out()

    def _take_out(self) -> list[AnswerSection]:
        out, self._out = self._out, []
        return out

    def _take(self, length: int, kind: SectionKind) -> None:
        if length:
            self._out.append(self._cut_off(length, kind))
            self._has_said |= kind is SectionKind.TEXT
            if kind is SectionKind.REASONING:
                self._thought.append(self._out[-1].text)

    def _cut_off(
        self, length: int, kind: SectionKind, pieces: tuple[CallPiece, ...] = (), is_end: bool = False
    ) -> AnswerSection:
        text, self._buffer = self._buffer[:length], self._buffer[length:]
        self._taken += length
        self._last = text[-1:] or self._last
        return AnswerSection(kind, text, self._taken, pieces, is_end)

    def _kind_of_rest(self) -> SectionKind:
        is_blank = not self._buffer.strip()
        if self._state in (self._reasoning_start, self._reasoning):
            return SectionKind.AROUND_REASONING if is_blank else SectionKind.REASONING
        if is_blank and self._called:
            return SectionKind.HIDDEN
        return SectionKind.AROUND_REASONING if is_blank and self._block else SectionKind.TEXT

    # ── the states ──

    def _opening(self) -> bool:
        text = self._buffer.lstrip()
        self._block = next((block for block in REASONING if text.startswith(block.start)), None)
        if self._block:
            self._take(len(self._buffer) - len(text) + len(self._block.start), SectionKind.AROUND_REASONING)
            return self._go(self._reasoning_start)
        if not text and not self._tools:
            # The first token counts: blanks before a reasoning block are rare, and harmless as text.
            self._take(len(self._buffer), SectionKind.TEXT)
        if not self._is_over and _OPENINGS.held(text) == len(text):
            return False
        return self._go(self._beginning)

    def _reasoning_start(self) -> bool:
        self._take_blanks()
        return self._go(self._reasoning) if self._buffer else False

    def _reasoning(self) -> bool:
        assert self._block
        before, end, _ = self._buffer.partition(self._block.end)
        if end:
            self._take(len(before.rstrip()), SectionKind.REASONING)
            self._take(self._buffer.index(end) + len(end), SectionKind.AROUND_REASONING)
            return self._go(self._after_reasoning)
        self._take_settled(_ENDS[self._block], SectionKind.REASONING)
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
            return self._try(BARE, 0)
        return self._go(self._answer)

    def _answer(self) -> bool:
        if not self._markers:
            self._take(len(self._buffer), SectionKind.TEXT)
            return False
        marker = self._markers.search(self._buffer)
        if marker is None:
            self._take_settled(self._markers, SectionKind.TEXT)
            return False
        if marker[0] in _tags(self._names) and (self._last + self._buffer[: marker.start()]).endswith("`"):
            # A tag in a line of code is an example of how a call is written.
            self._take(marker.end(), SectionKind.TEXT)
            return True
        before = len(self._buffer[: marker.start()].rstrip())
        self._take(before, SectionKind.TEXT)
        if marker[0] in self._framing:
            self._take(marker.end() - before, SectionKind.HIDDEN)
            return self._go(self._opening if marker[0] == self._framing[0] else self._answer)
        if marker[0] in STRAY_ENDS:
            self._take(marker.end() - before, SectionKind.HIDDEN if self._called else SectionKind.TEXT)
            return True
        return self._try(_dialects(self._names)[marker[0]], marker.end() - before)

    def _call(self) -> bool:
        attempt = self._attempt
        assert attempt
        state = attempt.resume(self._buffer, is_over=self._is_over, is_cut=self._is_cut)
        if state is AttemptState.NO_CALL:
            return self._not_a_call(attempt)
        if state is AttemptState.CUT:
            self._attempt = None
            self._out.append(self._cut_off(len(self._buffer), SectionKind.CUT_CALL, attempt.pieces()))
            return self._go(self._answer)
        is_end = state is AttemptState.ENDED
        if attempt.has_begun:
            self._out.append(self._cut_off(attempt.drop_read(), SectionKind.CALLS, attempt.pieces(), is_end))
        if not is_end:
            return False
        self._attempt, self._called = None, True
        return self._go(self._answer if attempt.dialect.end else self._after_bare)

    def _after_bare(self) -> bool:
        """Another one may follow, behind a comma or a semicolon."""
        between = _BETWEEN_CALLS.match(self._buffer)
        assert between
        following = self._buffer[between.end() : between.end() + 1]
        if not following:
            return False
        return self._try(BARE, between.end()) if following == "{" else self._go(self._answer)

    def _quoted(self) -> bool:
        """Code in the answer, in which markers mean nothing."""
        assert self._quote_end
        end = self._quote_end.search(self._buffer)
        if end is None:
            self._take_settled(self._quote_end, SectionKind.TEXT)
            return False
        self._take(end.end(), SectionKind.TEXT)
        return self._go(self._answer)

    # ── what they share ──

    def _go(self, state: Callable[[], bool]) -> bool:
        self._state = state
        return True

    def _try(self, dialect: Dialect, start: int) -> bool:
        self._attempt = Attempt(dialect, start, self._tools, is_first=not self._has_said)
        return self._go(self._call)

    def _not_a_call(self, attempt: Attempt) -> bool:
        """Pass the marker on as text, and read on behind it."""
        self._attempt = None
        self._in_vain += attempt.read
        self._at_end += self._is_over
        if self._in_vain > _MAX_IN_VAIN or self._at_end > _MAX_AT_END:
            self._markers = None
        self._take(attempt.start, SectionKind.TEXT)
        self._quote_end = Markers([attempt.quoted_until]) if attempt.quoted_until else None
        return self._go(self._quoted if self._quote_end else self._answer)

    def _take_blanks(self) -> None:
        self._take(len(self._buffer) - len(self._buffer.lstrip()), SectionKind.AROUND_REASONING)

    def _take_settled(self, markers: Markers, kind: SectionKind) -> None:
        """All but what may turn out to be a marker, or blanks before one."""
        settled = self._buffer[: len(self._buffer) - markers.held(self._buffer)]
        self._take(len(settled.rstrip()), kind)

    def _take_last_thought(self) -> None:
        """Calls with which an answer ends are meant, also where the model forgot to end its reasoning first."""
        thought = "".join(self._thought)
        markers = _markers(self._names, ())
        for marker in markers.find_all(thought)[-_MAX_LAST_CALLS:] if markers else ():
            reader = Sections(self._tools, None)
            sections = reader.read_whole(thought[marker.start() :])
            self._in_vain += reader._in_vain
            if all(section.kind in (SectionKind.CALLS, SectionKind.HIDDEN) for section in sections):
                self._out.append(self._cut_off(0, SectionKind.CALLS, tuple(pieces_of(sections)), is_end=True))
            if self._out or self._in_vain > _MAX_IN_VAIN:
                return

    def _take_cut_marker(self) -> None:
        if marker := _CUT_START.held(self._buffer):
            self._take(len(self._buffer[:-marker].rstrip()), SectionKind.TEXT)
            self._take(len(self._buffer), SectionKind.CUT_CALL)


@lru_cache(maxsize=_REMEMBERED_TOOLS)
def _dialects(names: tuple[str, ...]) -> Mapping[str, Dialect]:
    """Those of a request with tools of these names, by their start markers."""
    return {dialect.start: dialect for dialect in (*MARKED_DIALECTS, *tag_dialects(names))}


@lru_cache(maxsize=_REMEMBERED_TOOLS)
def _tags(names: tuple[str, ...]) -> frozenset[str]:
    """Markers of tools that are called as tags."""
    return frozenset(_dialects(names).keys() - _dialects(()).keys())


@lru_cache(maxsize=_REMEMBERED_TOOLS)
def _markers(names: tuple[str, ...], framing: tuple[str, ...]) -> Markers | None:
    """What begins calls to tools of these names, and what stands around messages. None: there is nothing."""
    own = [*framing, *_tags(names)]
    known = _STARTS if names else None
    return Markers(own, known) if own else known
