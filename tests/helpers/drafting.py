"""Corpora that draft what they are told to draft, and a small engine that drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from emberkeep.engine.base import KvUnit, Outcome, Rows
from emberkeep.engine.fake import FakeEngine
from emberkeep.kv.ngram_index import Continuation
from emberkeep.token_arrays import TokenArray
from emberkeep.types.lineage import Lineage
from helpers.scheduling import Recorder, Rig

PROMPT = [53 + i % 61 for i in range(70)]
LONG = 60

Drafts = Callable[[list[int], int], list[int]]
"""From the latest tokens (at most 32) and the most that may be drafted."""


class ToldCorpus:
    """Says of all its drafts that they have matched for long, so that they are tried."""

    def __init__(self, drafts: Drafts = lambda latest, limit: [], path: list[int] | None = None) -> None:
        self._drafts = drafts
        self._path = path or []
        self.asked = 0

    def prepare(self, lineage: Lineage) -> None:
        pass

    def add(self, lineage: Lineage, tokens: TokenArray, new_from: int) -> None:
        pass

    def find(self, lineage: Lineage, context: TokenArray, limit: int) -> Continuation | None:
        self.asked += 1
        tokens = self._drafts(context.tolist(), limit)[:limit]
        return Continuation(np.array(tokens, np.int32), 32, (0.99,) * len(tokens), 0) if tokens else None

    def path(self, lineage: Lineage, tokens: TokenArray, limit: int) -> TokenArray:
        return np.array(self._path[:limit], np.int32)


def knows(text: list[int]) -> Drafts:
    """What really follows, wherever the latest tokens stand in `text`."""

    def drafts(latest: list[int], limit: int) -> list[int]:
        for length in (8, 4, 2):
            suffix = latest[-length:]
            for end in range(length, len(text)):
                if text[end - length : end] == suffix:
                    return text[end : end + limit]
        return []

    return drafts


def wrong_at(text: list[int], place: int, by: int = 1) -> Drafts:
    """Right up to a token of each draft."""
    right = knows(text)

    def drafts(latest: list[int], limit: int) -> list[int]:
        tokens = right(latest, limit)
        return [token + by * (i == place) for i, token in enumerate(tokens)]

    return drafts


class SmallEngine(FakeEngine):
    """Drafts what the fake engine answers, unless it has other weights; state of its own kind."""

    def __init__(self, *, weights: str = "fake", cells: int = 1 << 15, **settings: int) -> None:
        super().__init__(weights=weights, cells=cells, kv_unit=KvUnit.RANGE, **settings)
        self._name += ", small"

    def evaluate(self, batch: Sequence[Rows]) -> Outcome:
        assert all(len(rows.tokens) for rows in batch), "a real engine does not know what to do with nothing"
        return super().evaluate(batch)


def answer_of(prompt=PROMPT, max_new=LONG, corpus=None, draft=None, engine=None, **more) -> Recorder:
    with Rig(engine=engine, corpus=corpus, draft=draft) as rig:
        return rig.run(prompt, max_new=max_new, **more)
