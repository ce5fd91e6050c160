"""Which code computes attention: what there is on a device, and which of it is in use."""

from __future__ import annotations

import torch

from emberkeep.errors import EngineError
from emberkeep.types import AttentionTier


class Tiers:
    """See `Attention`. The fastest one is used unless another was asked for."""

    def __init__(self, device: torch.device, wanted: AttentionTier | None) -> None:
        own = (AttentionTier.OWN,) if device.type == "cuda" else ()
        self.available: tuple[AttentionTier, ...] = (*own, AttentionTier.FLASH, AttentionTier.PLAIN)
        self._tier = self.available[0]
        if wanted is not None:
            self.switch(wanted)

    @property
    def tier(self) -> AttentionTier:
        return self._tier

    def switch(self, tier: AttentionTier) -> None:
        if tier not in self.available:
            there = ", ".join(self.available)
            raise EngineError(f"There is no attention of the tier {tier} on this device: choose one of {there}.")
        self._tier = tier
