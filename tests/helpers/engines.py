"""Engines over every kind of state that there is, and what tests do with them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from emberkeep.engine.base import Engine, Outcome, Payload, Rows
from emberkeep.engine.fake import FakeEngine
from emberkeep.engine.step_table import StepTable
from helpers import tiny_gguf

TOKENS = np.random.default_rng(3).integers(40, 120, 1000, dtype=np.int32)
NOISE = 0.03

RANGE_KINDS = {
    "dense": tiny_gguf.dense,
    "latent": tiny_gguf.latent,
    "indexed": tiny_gguf.indexed,
    "several positions": tiny_gguf.several_positions,
    "scaled keys": tiny_gguf.scaled_keys,
}
SNAPSHOT_KINDS = {
    "recurrent": tiny_gguf.recurrent,
    "hybrid": tiny_gguf.hybrid,
    "sliding window": tiny_gguf.sliding_window,
    "hybrid window": tiny_gguf.hybrid_window,
}
KINDS = RANGE_KINDS | SNAPSHOT_KINDS

Tables = dict[bool, StepTable]
"""What steps take with flash attention and without: a choice for an engine of llama.cpp."""


def few_with_flash(few: int = 1) -> Tables:
    """Steps of up to `few` rows are computed with flash attention and others without, whatever changing takes."""
    hours = 1e7
    with_flash = StepTable((few, few + 1, 512), (64,), ((1.0, hours, hours),))
    return {True: with_flash, False: StepTable((1, 512), (64,), ((hours / 10, hours / 10),))}


def always(flash: bool) -> Tables:
    """From the first step on it is computed in this way."""
    return {flash: StepTable((1,), (64,), ((1.0,),)), not flash: StepTable((1,), (64,), ((1e7,),))}


def evaluate(engine: Engine, sequence: int, start: int, end: int, tokens: np.ndarray = TOKENS) -> np.ndarray:
    """In as few steps as possible; the logits after the last token."""
    step = engine.capabilities.batch
    for begin in range(start, end, step):
        stop = min(begin + step, end)
        outcome = engine.evaluate([Rows(sequence, begin, tokens[begin:stop], outputs=stop == end)])
        assert outcome is Outcome.DONE
    return engine.logits(0).copy()


def same(engine: Engine, a: np.ndarray, b: np.ndarray, noise: float = NOISE) -> bool:
    """The fake engine is exact; llama.cpp's sums depend a little on the shape of a batch."""
    return np.array_equal(a, b) if isinstance(engine, FakeEngine) else bool(np.abs(a - b).max() < noise)


def close(a: np.ndarray, b: np.ndarray) -> bool:
    """Up to a thousandth of the largest."""
    return bool(np.abs(a - b).max() < 1e-3 * float(np.abs(b).max()))


def exported(engine: Engine, sequence: int, start: int, end: int) -> Payload:
    (payload,) = engine.export_kv(sequence, (start, end)).payloads()
    return payload


def broken_payloads(payload: Payload) -> list[Payload]:
    data = bytes(payload)
    return [
        memoryview(b""),
        memoryview(data[:3]),
        memoryview(data[:-1]),
        memoryview(data + b"\0"),
        memoryview(bytes(len(data))),
        memoryview(b"\xff" * len(data)),
        memoryview(data[: len(data) // 2]),
        memoryview(data + data),
    ]


class RecordingEngine(FakeEngine):
    """Knows the shape of every batch: (sequence, start, length, wants logits)."""

    def __init__(self, **settings: int) -> None:
        super().__init__(**settings)
        self.shapes: list[list[tuple[int, int, int, bool]]] = []

    def evaluate(self, batch: Sequence[Rows]) -> Outcome:
        self.shapes.append([(rows.sequence, rows.start, len(rows.tokens), rows.outputs) for rows in batch])
        return super().evaluate(batch)
