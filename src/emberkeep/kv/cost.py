"""Load or recompute: both costs are measured while serving, not assumed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from emberkeep.kv.tree import Chunk, Segment


@dataclass(slots=True)
class Rate:
    """A running average of work per second; None until something was measured."""

    value: float | None = None

    def measure(self, amount: float, seconds: float) -> None:
        if seconds <= 0:
            return
        sample = amount / seconds
        self.value = sample if self.value is None else 0.8 * self.value + 0.2 * sample

    def seconds(self, amount: float) -> float:
        """Predicted time for `amount`; 0 while nothing is known."""
        return amount / self.value if self.value else 0.0


@dataclass(slots=True)
class CostModel:
    """Measured by the scheduler (evaluate, import) and the store (read)."""

    evaluate: Rate = field(default_factory=Rate)
    """Tokens per second of prompt evaluation."""
    import_: Rate = field(default_factory=Rate)
    """Bytes per second from RAM into the engine."""
    read: Rate = field(default_factory=Rate)
    """Bytes per second from disk into RAM."""

    def worth_loading(self, segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
        """The leading segments whose loading is predicted to be faster than evaluating their tokens.

        Only a suffix can be left to recomputation, because evaluation needs everything before it.
        """
        if self.evaluate.value is None:
            return segments
        best, best_saving, saving = 0, 0.0, 0.0
        for count, segment in enumerate(segments, 1):
            saving += self.evaluate.seconds(segment.end - segment.start) - self._load_seconds(segment.chunk)
            if saving >= best_saving:
                best, best_saving = count, saving
        return segments[:best]

    def is_worth_loading(self, chunks: Iterable[Chunk], tokens: int) -> bool:
        """Whether loading all of `chunks` is predicted to be faster than evaluating `tokens`."""
        if self.evaluate.value is None:
            return True
        return sum(self._load_seconds(chunk) for chunk in chunks) <= self.evaluate.seconds(tokens)

    def _load_seconds(self, chunk: Chunk) -> float:
        read = 0.0 if chunk.payload is not None else self.read.seconds(chunk.bytes)
        return read + self.import_.seconds(chunk.bytes)
