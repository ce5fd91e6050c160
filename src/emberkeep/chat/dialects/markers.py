"""Finding one of many strings in a text that is still being written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator


class Markers:
    """None of them is a part of another, so the first to be complete is also the first to begin."""

    def __init__(self, texts: Iterable[str]) -> None:
        texts = [text for text in texts if text]
        self._any = re.compile("|".join(map(re.escape, texts)))
        self._beginnings = frozenset(text[:length] for text in texts for length in range(1, len(text)))
        self._longest = max(map(len, self._beginnings), default=0)

    def search(self, text: str) -> re.Match[str] | None:
        return self._any.search(text)

    def find_all(self, text: str) -> Iterator[re.Match[str]]:
        return self._any.finditer(text)

    def held(self, text: str) -> int:
        """How many characters at the end of `text` may be the beginning of a marker."""
        lengths = range(min(self._longest, len(text)), 0, -1)
        return next((length for length in lengths if text[-length:] in self._beginnings), 0)
