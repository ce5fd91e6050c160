"""An engine whose exports arrive late, as those of a GPU do."""

from __future__ import annotations

from collections.abc import Sequence

from emberkeep.engine.base import Exported, KvExport, Payload
from emberkeep.engine.fake import FakeEngine
from emberkeep.errors import EngineError


class LateExport:
    is_done = False

    def __init__(self, engine: LateEngine, copies: Exported) -> None:
        self._engine = engine
        self._copies = copies

    def payloads(self) -> list[Payload]:
        self._engine.asked += 1
        if self._engine.asked in self._engine.failing:
            raise EngineError("the device is gone")
        return self._copies.payloads()


class LateEngine(FakeEngine):
    """What it copies is never there before it is asked for."""

    def __init__(self, *, failing: Sequence[int] = (), **settings: int) -> None:
        super().__init__(**{"cells": 1 << 15} | settings)
        self.failing = failing
        """Which of the exports that were asked for fail, from 1 on."""
        self.begun = self.asked = self.copied_tokens = 0

    def export_kv(self, sequence: int, borders: Sequence[int], bits: int = 16) -> KvExport:
        self.begun += 1
        self.copied_tokens += borders[-1] - borders[0]
        return LateExport(self, super().export_kv(sequence, borders, bits))
