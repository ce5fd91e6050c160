"""Driving an engine by hand, on its own thread."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from emberkeep.engine.base import Engine, Outcome, Rows
from emberkeep.errors import EngineError
from emberkeep.kv.keys import TokenArray


def fill(engine: Engine, sequence: int, tokens: TokenArray, largest: int) -> int:
    """Evaluate a prompt in slices of at most `largest` tokens; the token that follows it."""
    for start in range(0, len(tokens), largest):
        end = min(start + largest, len(tokens))
        step(engine, [Rows(sequence, start, tokens[start:end], want_logits=end == len(tokens))])
    return int(engine.logits(0).argmax())


def decode(engine: Engine, positions: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """Sequences 0, 1, ... go on by one token each; the tokens that follow."""
    placed = enumerate(zip(positions, chosen, strict=True))
    step(engine, [Rows(s, at, np.array([token], np.int32), want_logits=True) for s, (at, token) in placed])
    return [int(engine.logits(index).argmax()) for index in range(len(chosen))]


def step(engine: Engine, batch: Sequence[Rows]) -> None:
    if engine.evaluate(batch) is not Outcome.DONE:
        raise EngineError("The benchmark's prompts do not fit its context: choose smaller sizes.")
