"""Ends of an answer that depend on its lines: for editors, which want the rest of a block, and want it soon."""

from __future__ import annotations

from time import monotonic

_BLANKS = " \t"


class LineLimit:
    """Reads the text of one answer as it comes. Not thread-safe."""

    def __init__(self, seconds: float | None, indent: int) -> None:
        """The answer ends with the first line that ends later than `seconds` after its first text, and before one
        that begins with fewer than `indent` blanks."""
        self._seconds = seconds
        self._indent = indent
        self._began: float | None = None
        self._blanks: int | None = None
        """At the beginning of the line, so far; None: something else has come, or it is the first line."""

    def feed(self, text: str) -> tuple[str, bool]:
        """The text that belongs to the answer, and whether the answer ends with it."""
        if self._began is None:
            self._began = monotonic()
        if self._indent:
            for place, char in enumerate(text):
                if self._is_outside(char):
                    return text[:place], True
        is_late = self._seconds is not None and "\n" in text and monotonic() - self._began > self._seconds
        return text, is_late

    def _is_outside(self, char: str) -> bool:
        """Whether this character shows that its line is not indented enough."""
        if self._blanks is not None:
            if char in _BLANKS:
                self._blanks += 1
                return False
            if self._blanks < self._indent:
                return True
            self._blanks = None
        if char == "\n":
            self._blanks = 0
        return False
