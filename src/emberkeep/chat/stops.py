"""Where the text of an answer ends before the model ends it: at a stop string, or by its lines."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

_BLANKS = " \t"


class StopScanner:
    """Passes text on as soon as it cannot be the beginning of a stop string any more.

    The first stop string to be complete wins, so the outcome does not depend on how the text was cut.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._automata = [_Automaton(stop) for stop in stops if stop]
        self._firsts = frozenset(automaton.word[0] for automaton in self._automata)
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """The text that may be passed on, and the stop string that was completed right after it."""
        if not self._held and self._firsts.isdisjoint(text):
            return text, None
        pending = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            for automaton in self._automata:
                if automaton.step(char):
                    self._held = ""
                    return pending[: end - len(automaton.word)], automaton.word
        keep = max(automaton.matched for automaton in self._automata)
        passed = pending[: len(pending) - keep]
        self._held = pending[len(passed) :]
        return passed, None

    def flush(self) -> str:
        """What is still held back: the text has ended, so it is no stop string."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """Knuth-Morris-Pratt: the text ends with the first `matched` characters of `word`, and no more."""

    __slots__ = ("_fallback", "matched", "word")

    def __init__(self, word: str) -> None:
        self.word = word
        self.matched = 0
        self._fallback = _fallbacks(word)

    def step(self, char: str) -> bool:
        """Read one character; True when the word is complete."""
        while self.matched and self.word[self.matched] != char:
            self.matched = self._fallback[self.matched - 1]
        self.matched += self.word[self.matched] == char
        return self.matched == len(self.word)


def _fallbacks(word: str) -> list[int]:
    """For every beginning of `word`: the length of its longest proper border."""
    fallback = [0] * len(word)
    length = 0
    for i in range(1, len(word)):
        while length and word[i] != word[length]:
            length = fallback[length - 1]
        length += word[i] == word[length]
        fallback[i] = length
    return fallback


class LineLimit:
    """For editors, which want the rest of a block, and want it soon. Reads the text of one answer as it comes."""

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
