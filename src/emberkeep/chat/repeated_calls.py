"""Calls that repeat the one before them.

A small model that was made to call a tool likes to write the same call again and again. A call is held back for as
long as it may turn out to be such a one.
"""

from __future__ import annotations

from emberkeep.values import dataclass


@dataclass(slots=True)
class RepeatedCalls:
    """One answer's calls, piece by piece. Without `is_watching` everything passes."""

    is_watching: bool
    _before: tuple[str, str] | None = None
    _latest: tuple[str, str] | None = None
    is_held: bool = False
    """Nothing of the latest call has passed yet: so far it is the one before it."""

    def add(self, name: str | None, arguments: str) -> tuple[str | None, str] | None:
        """A piece of a call, with its name if it begins there: what passes of it and of what was held before."""
        if not self.is_watching:
            return name, arguments
        if name is not None:
            self._before, self._latest = self._latest, (name, "")
            self.is_held = self._before is not None and self._before[0] == name
        assert self._latest is not None
        self._latest = self._latest[0], self._latest[1] + arguments
        if not self.is_held:
            return name, arguments
        assert self._before is not None
        self.is_held = self._before[1].startswith(self._latest[1])
        return None if self.is_held else self._latest

    @property
    def is_repeated(self) -> bool:
        """The latest call, if it is over, is the one before it."""
        return self.is_held and self._latest == self._before
