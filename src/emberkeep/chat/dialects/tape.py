"""Text that is still being written, and readers that wait for more of it.

A reader is a generator. It yields when the text that it needs has not come yet, and is resumed when there is more,
or when nothing more will come. It decides only by text that can no longer change, so it does not matter in which
pieces the text comes.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]

_BLANKS = re.compile(r"\s*")


class Tape:
    """A reader moves only `at`, and keeps no places: what lies before `at` may be dropped whenever it waits."""

    def __init__(self, text: str = "", at: int = 0) -> None:
        self.text = text
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
        found = yield from self.sees(*options)
        self.at += len(found)
        return found

    def skip(self, pattern: re.Pattern[str] = _BLANKS) -> Reading[None]:
        """Read everything that `pattern`, a repeated set of characters, matches."""
        while True:
            match = pattern.match(self.text, self.at)
            assert match
            self.at = match.end()
            if self.at < len(self.text) or self.is_over:
                return
            yield

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
