"""Steps that are taken for nothing while nothing waits: what measures an engine in gaps takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from emberkeep.engine.base import Capabilities, Logits, Outcome, Rows


class Interrupted(Exception):
    """Something waits for the thread that measures."""


class Steps(Protocol):
    """What of an engine a measurement needs."""

    @property
    def capabilities(self) -> Capabilities: ...

    def evaluate(self, batch: Sequence[Rows]) -> Outcome: ...

    def logits(self, index: int, row: int = 0) -> Logits: ...

    def trim(self, sequence: int, start: int) -> None: ...

    def step_seconds(self, rows: int, depth: int, outputs: int) -> float | None: ...


class IdleSteps:
    """The steps of an engine, until something waits: then Interrupted is raised in place of the next one."""

    def __init__(self, engine: Steps, is_wanted: Callable[[], bool]) -> None:
        self._engine = engine
        self._is_wanted = is_wanted

    def give_way(self) -> None:
        """Raises Interrupted if something waits."""
        if self._is_wanted():
            raise Interrupted

    @property
    def capabilities(self) -> Capabilities:
        return self._engine.capabilities

    def evaluate(self, batch: Sequence[Rows]) -> Outcome:
        self.give_way()
        return self._engine.evaluate(batch)

    def logits(self, index: int, row: int = 0) -> Logits:
        return self._engine.logits(index, row)

    def trim(self, sequence: int, start: int) -> None:
        self._engine.trim(sequence, start)

    def step_seconds(self, rows: int, depth: int, outputs: int) -> float | None:
        return self._engine.step_seconds(rows, depth, outputs)
