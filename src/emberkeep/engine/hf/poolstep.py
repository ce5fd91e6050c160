"""A step whose attention reads the pool."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from emberkeep.engine.hf.attention import Options, attend_pool
from emberkeep.engine.hf.step import Step
from emberkeep.types import AttentionTier


@dataclass(slots=True)
class PoolStep(Step):
    tier: AttentionTier = AttentionTier.PLAIN

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: Options
    ) -> torch.Tensor:
        return attend_pool(self, self.tier, query, options)
