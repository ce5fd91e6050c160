"""Where a text is split before a tokenizer sees it, so that none costs more than its length is worth.

An ordinary text is never split, so its ids are what the tokenizer says about it in one call. Where a text is
split depends only on what stands before, so that a text that grows keeps the ids of its beginning.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise

from emberkeep.text import alternatives
from emberkeep.values import dataclass

MAX_MATCH = 1 << 15
"""How many characters one match of a pre-tokenizer may span."""

MAX_SPECIALS = 256
"""Special tokens in one piece of a long text."""


@dataclass(frozen=True, slots=True)
class Run:
    """Characters of one kind in a row, which are split after every `limit` of them.

    `pattern` matches all of them where there are two or more: one that asks for `limit` is tried again at every
    character of a run that is too short, and holds the interpreter's lock meanwhile.
    """

    pattern: re.Pattern[str]
    limit: int

    def splits(self, text: str) -> Iterator[int]:
        for match in self.pattern.finditer(text):
            yield from range(match.start() + self.limit, match.end(), self.limit)


RUNS = (Run(re.compile(r"\s\s+"), 255), Run(re.compile(r"\d\d+"), 255))
"""Blanks, and digits, which are mostly grouped by three."""

_BREAK = re.compile(r"\n(?=[^\s/])|[!-/:-@\[-`{-~][ \t](?=\S)")
"""No pre-tokenizer's match goes over this. Blanks alone are none (EXAONE's goes over words), nor are ends of lines
(Tekken's goes over lines of slashes)."""

_WORD_END = re.compile(r"(?<=\w)(?=[ \t!-&(-/:-@\[-`{-~])")
"""Where nearly every pre-tokenizer begins anew. Not before an apostrophe, which may belong to the word."""

_LOOK_BACK = 1024


class TextSplitter:
    """Splits the texts for one vocabulary. May be used from any thread.

    A piece ends after `MAX_SPECIALS` of `specials`, the texts of the special tokens that will be looked for in it
    (`strips`: some of them take the blanks around them away), inside of long `runs`, and, with
    `limits_matches`, before a match of a pre-tokenizer could become longer than `MAX_MATCH`.
    """

    def __init__(
        self,
        specials: Collection[str] = (),
        *,
        strips: bool = False,
        runs: Sequence[Run] = (),
        limits_matches: bool = False,
    ) -> None:
        self._special = alternatives(specials)
        self._longest_special = max(map(len, specials), default=0)
        self._strips = strips
        self._runs = runs
        self._limits_matches = limits_matches

    def pieces(self, text: str) -> list[str]:
        """Together they are `text`."""
        splits = [split for start, end in self._parts(text) for split in (*self._inside(text, start, end), end)]
        return [text[start:end] for start, end in pairwise([0, *splits])]

    def _parts(self, text: str) -> Iterator[tuple[int, int]]:
        """What lies between the splits that do not depend on the length of a match."""
        splits = {*self._after_runs(text), *(self._after_specials(text) if len(text) > MAX_MATCH else ())}
        return pairwise(sorted({0, *splits, len(text)}))

    def _after_runs(self, text: str) -> Iterator[int]:
        for run in self._runs:
            for split in run.splits(text):
                yield self._outside_special(text, split, split - run.limit)

    def _after_specials(self, text: str) -> Iterator[int]:
        """Nothing changes there: what stands between two special tokens is tokenized on its own anyway."""
        count = 0
        for match in self._special.finditer(text) if self._special else ():
            count += 1
            if count >= MAX_SPECIALS and not (self._strips and text[match.end() : match.end() + 1].isspace()):
                yield match.end()
                count = 0

    def _inside(self, text: str, start: int, end: int) -> Iterator[int]:
        """Splits between `start` and `end` where a match could be too long."""
        while self._limits_matches and end - start > MAX_MATCH:
            at = _last(_BREAK, text, start, start + MAX_MATCH)
            if at is None:
                at = self._outside_special(text, _near(text, start + MAX_MATCH), start)
                yield at
            start = at

    def _outside_special(self, text: str, split: int, start: int) -> int:
        """`split`, or where the special token begins that it would divide, if that is after `start`."""
        nearby = max(start + 1, split - self._longest_special + 1)
        for match in (
            self._special.finditer(text, nearby, split + self._longest_special - 1) if self._special else ()
        ):
            if match.start() < split < match.end():
                return match.start()
        return split


def _near(text: str, end: int) -> int:
    """The last end of a word shortly before `end`, else `end`, or less where that would divide a character."""
    word_end = _last(_WORD_END, text, end - _LOOK_BACK, end)
    if word_end is not None:
        return word_end
    return next((at for at in range(end, end - _LOOK_BACK, -1) if not _divides(text, at)), end)


def _divides(text: str, at: int) -> bool:
    """Whether a mark would lose its letter there, or a line end its half."""
    return text[at - 1 : at + 1] == "\r\n" or unicodedata.category(text[at]) in ("Mn", "Mc", "Me", "Cf")


def _last(pattern: re.Pattern[str], text: str, start: int, end: int) -> int | None:
    """Where the last match between them ends."""
    for begin in range(end - _LOOK_BACK, start - _LOOK_BACK, -_LOOK_BACK):
        # A match and what it looks at may lie across the border of two stretches.
        near = pattern.finditer(text, max(start, begin), min(end, begin + _LOOK_BACK + 2))
        ends = [match.end() for match in near if match.end() > start]
        if ends:
            return ends[-1]
    return None
