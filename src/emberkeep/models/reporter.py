"""How a pull tells the outside what it does."""

from __future__ import annotations

from typing import Protocol


class Reporter(Protocol):
    def say(self, sentence: str) -> None:
        """Something the user should read."""

    def progress(self, step: str, done: int, total: int | None) -> None:
        """`done` of `total` bytes of the named step; None while the total is unknown. Called often."""


class ClosingReporter(Reporter, Protocol):
    def close(self) -> None:
        """There is nothing more to tell."""


class Silent:
    def say(self, sentence: str) -> None:
        pass

    def progress(self, step: str, done: int, total: int | None) -> None:
        pass
