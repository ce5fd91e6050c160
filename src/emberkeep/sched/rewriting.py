"""A text that an answer writes again with changes: where in it the answer is, and what it changes.

    old text   def add ( self , count ) : self . count
    answer     def add ( self , quantity ) : self .           next: quantity
                                ^ differs, and goes on one token later

While an answer goes on as the old text does, what stands there comes next. Where it differs, the old text is
looked for again a few tokens later; and what was written instead is expected where the same stands from then on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field

from emberkeep.kv.drafts.ngram_index import MAX_MATCH, NgramIndex
from emberkeep.values import dataclass

_AHEAD = 32
"""Tokens of the old text that may have been left out where the answer goes on with it."""
_LONGEST_CHANGE = 24
"""Tokens that are written instead; after more of them the old text is no longer looked for."""
_COMES_AGAIN = 8
"""Tokens of a change that is expected again."""
_DOUBT = 4
"""A token that differs leaves so small a part of what spoke for the place."""
_FOUND_AGAIN = 2
"""Tokens that must agree where the answer goes on with the old text; after fewer it is drafted as a guess."""

Tokens = tuple[int, ...]


@dataclass(slots=True)
class _Change:
    """What is being written instead of what stands at `place`."""

    place: int
    written: list[int] = field(default_factory=list)


class Rewriting:
    """Belongs to one thread."""

    def __init__(self, text: NgramIndex) -> None:
        self.matched = 0
        """How many of the latest tokens speak for it: those since the last change, and a part of those before."""
        self._text = text
        self._place: int | None = None
        """Where in the old text that stands which comes next."""
        self._due: Tokens = ()
        """What is expected before it, as the rest of `_change`."""
        self._change: _Change | None = None
        self._known: dict[int, dict[Tokens, Tokens]] = {}
        """What was changed, and into what; by its first token."""

    @property
    def is_followed(self) -> bool:
        return self._place is not None

    def begin(self, place: int, matched: int) -> None:
        """The answer goes on there, after so many tokens that agree."""
        self._place, self.matched = place, matched
        self._due, self._change = (), None

    def add(self, tokens: Iterable[int]) -> None:
        """The answer went on with these."""
        for token in tokens:
            if self._place is None:
                return
            if self._due:
                self._go_on_in_change(token)
            elif self._change is None:
                self._go_on(token)
            else:
                self._change.written.append(token)
                self._find_again()

    def draft(self, limit: int) -> list[int]:
        """What comes next, as far as the old text says it."""
        if (place := self._place) is None:
            return []
        old = self._text.read(place, limit)
        tokens, at = list(self._due), 0
        while at < len(old) and len(tokens) < limit:
            before, after = self._expected(old, at)
            tokens += after
            at += len(before)
        return tokens[:limit]

    def _go_on(self, token: int) -> None:
        assert self._place is not None
        old = self._text.read(self._place, _COMES_AGAIN)
        before, after = self._expected(old, 0)
        if after[:1] == (token,):
            self._agrees()
            self._due = after[1:]
            self._change = _Change(self._place, [token]) if self._due else None
            self._place += len(before)
        elif old[:1] == [token]:
            del self._known[token][before]  # not any more
            self._agrees()
            self._place += 1
        else:
            self._differs(_Change(self._place, [token]))

    def _go_on_in_change(self, token: int) -> None:
        assert self._change is not None
        self._change.written.append(token)
        if token == self._due[0]:
            self._due = self._due[1:]
            self._agrees()
            if not self._due:
                self._change = None
        else:
            self._due = ()
            self._differs(self._change)

    def _agrees(self) -> None:
        self.matched = min(self.matched + 1, MAX_MATCH)

    def _differs(self, change: _Change) -> None:
        self._change = change
        self.matched = min(self.matched, MAX_MATCH) // _DOUBT
        self._find_again()

    def _find_again(self) -> None:
        """Where the answer goes on with the old text; a guess, until enough of it agrees."""
        assert self._change is not None
        written = self._change.written
        if len(written) > _LONGEST_CHANGE:
            self._place = self._change = None
            return
        old = self._text.read(self._change.place, _AHEAD + len(written))
        ends = [end for end, token in enumerate(old, 1) if token == written[-1]]
        one_for_one = min(len(written), len(old))
        agree, _, end = max(
            ((_common_suffix(old[:end], written), -abs(end - one_for_one), end) for end in ends),
            default=(0, 0, one_for_one),
        )
        self._place = self._change.place + end
        if not agree:
            self.matched //= _DOUBT
        if agree >= _FOUND_AGAIN:
            self.matched += agree
            self._learn(tuple(old[: end - agree]), tuple(written[:-agree]), written[-agree])
            self._change = None

    def _learn(self, before: Tokens, after: Tokens, following: int) -> None:
        if not before or not after:
            before, after = (*before, following), (*after, following)
        if len(before) <= _COMES_AGAIN and len(after) <= _COMES_AGAIN:
            self._known.setdefault(before[0], {})[before] = after

    def _expected(self, old: list[int], at: int) -> tuple[Tokens, Tokens]:
        """What stands at a place of the old text, as far as it goes together, and what is expected instead."""
        for before, after in self._known.get(old[at], {}).items() if at < len(old) else ():
            if tuple(old[at : at + len(before)]) == before:
                return before, after
        return (same := tuple(old[at : at + 1])), same


def _common_suffix(a: list[int], b: list[int]) -> int:
    count = 0
    while count < min(len(a), len(b)) and a[-1 - count] == b[-1 - count]:
        count += 1
    return count
