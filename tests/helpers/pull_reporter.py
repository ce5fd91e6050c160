"""A pull that is watched."""

from __future__ import annotations

from emberkeep.models.spec import Silent


class Watching(Silent):
    """Keeps what it is told, and stops the pull like Ctrl-C after so many bytes, or in a step."""

    def __init__(self, stop_after: int | None = None, stop_in: str | None = None) -> None:
        self.sentences: list[str] = []
        self.seen: list[tuple[str, int, int | None]] = []
        self._stop_after = stop_after
        self._stop_in = stop_in

    def say(self, sentence: str) -> None:
        self.sentences.append(sentence)

    def progress(self, step: str, done: int, total: int | None) -> None:
        self.seen.append((step, done, total))
        if step == self._stop_in or (self._stop_after is not None and done >= self._stop_after):
            raise KeyboardInterrupt
