"""How fast a device moves bytes when nothing else is to be done, and how much of its memory is in use."""

from __future__ import annotations

from time import perf_counter

import torch

from emberkeep.engine.hf.device import chosen_device


def synchronize(device: torch.device) -> None:
    """Blocks until the device has done everything that it was asked to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


class DeviceLimits:
    """Each measurement allocates its own buffers and blocks."""

    def __init__(self, device: str) -> None:
        self._device = chosen_device(device)

    def settle(self) -> None:
        synchronize(self._device)

    def read_speed(self, size: int) -> float:
        """Bytes per second read and written within the device's own memory."""
        source = torch.ones(size, dtype=torch.uint8, device=self._device)
        return 2 * self._copied_per_second(source, torch.empty_like(source))

    def load_speed(self, size: int) -> float:
        """Bytes per second from RAM to the device, by the fastest way there is (pinned pages on CUDA)."""
        source = torch.ones(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        return self._copied_per_second(source, torch.empty(size, dtype=torch.uint8, device=self._device))

    def _copied_per_second(self, source: torch.Tensor, target: torch.Tensor) -> float:
        target.copy_(source)  # the first time also brings pages in
        self.settle()
        begin = perf_counter()
        target.copy_(source, non_blocking=True)
        self.settle()
        return source.numel() / (perf_counter() - begin)

    # ── memory; None where the device does not count ──

    def allocated_bytes(self) -> int | None:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else None

    def peak_bytes(self) -> int | None:
        """The most that was allocated since `forget_peak`."""
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else None

    def forget_peak(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
