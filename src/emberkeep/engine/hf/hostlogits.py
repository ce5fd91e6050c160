"""Logits on their way from the device to whoever samples."""

from __future__ import annotations

import torch

from emberkeep.engine.base import Logits


class HostLogits:
    """Belongs to the engine's thread. What was taken for one step is overwritten by the next."""

    def __init__(self, device: torch.device, rows: int, width: int) -> None:
        self._buffer = (
            torch.empty((rows, width), dtype=torch.float32, pin_memory=True) if device.type == "cuda" else None
        )

    def take(self, logits: torch.Tensor, already: int) -> Logits:
        """Rows of the model's dtype as float32. Blocks until they are there.

        `already`: rows that were taken for this step before.
        """
        if self._buffer is None:
            rows: Logits = logits.float().cpu().numpy()
            return rows
        target = self._buffer[already : already + len(logits)]
        target.copy_(logits, non_blocking=True)
        torch.cuda.current_stream(logits.device).synchronize()
        taken: Logits = target.numpy()
        return taken
