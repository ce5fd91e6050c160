"""Stop strings in a stream of text, whatever pieces it comes in."""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """Passes text on as soon as it cannot be the beginning of a stop string any more.

    The first stop string to be complete wins, so the outcome does not depend on how the text was cut.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._automata = [_Automaton(stop) for stop in stops if stop]
        self._firsts = frozenset(automaton.word[0] for automaton in self._automata)
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """The text that may be passed on, and whether a stop string was completed right after it."""
        if not self._held and self._firsts.isdisjoint(text):
            return text, False
        pending = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            for automaton in self._automata:
                if automaton.step(char):
                    self._held = ""
                    return pending[: end - len(automaton.word)], True
        keep = max(automaton.matched for automaton in self._automata)
        passed = pending[: len(pending) - keep]
        self._held = pending[len(passed) :]
        return passed, False

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
