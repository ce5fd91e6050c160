"""Which device and which number format a model gets, how fast the device is, and how much of it is in use."""

from __future__ import annotations

import sys
from time import perf_counter
from typing import Any

import torch

from emberkeep.engine.devices import Device
from emberkeep.errors import EngineError


def choose_device(name: str) -> torch.device:
    """The device of that name; `auto` takes the fastest here. Raises EngineError for one that is not here."""
    if name == "auto":
        return torch.device(_fastest())
    kind, _, number = name.partition(":")
    here = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if int(number or 0) >= here.get(kind, 0):
        raise EngineError(f"There is no device {name} here: choose --device auto, or {_fastest()}.")
    return torch.device(kind, int(number or 0)) if kind == "cuda" else torch.device(kind)


def choose_dtype(name: str, device: torch.device, own: torch.dtype) -> torch.dtype:
    """`auto` takes the checkpoint's `own`, except on a CPU, which is slow with anything but float32."""
    if name != "auto":
        return getattr(torch, name)
    return torch.float32 if device.type == "cpu" else own


def _fastest() -> str:
    if torch.cuda.is_available():
        return "cuda:0"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def seen_devices() -> list[Device]:
    """The GPUs that this torch can compute on. Asking for its memory wakes each of them."""
    backend = "ROCm" if torch.version.hip else "CUDA"
    found = []
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        found.append(Device(backend, f"cuda:{number}", torch.cuda.get_device_name(number), free, total))
    if torch.backends.mps.is_available():
        total = torch.mps.recommended_max_memory()
        free = max(total - torch.mps.driver_allocated_memory(), 0)
        found.append(Device("Metal", "mps", "the GPU of this Mac", free, total))
    return found


def synchronize(device: torch.device) -> None:
    """Blocks until the device has done everything that it was asked to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


RESERVE, FOR_STATE = 1 << 30, 0.08
"""What weights leave of a GPU's free memory: bytes for libraries' workspaces, recorded steps and other users of
the device, and a share for state and for what a step has in hand."""


def free_bytes(device: torch.device, limit: int | None) -> int:
    """What may still be allocated on a GPU, of which at most `limit` is used in all."""
    free = int(torch.cuda.mem_get_info(device)[0])
    return free if limit is None else min(free, limit - torch.cuda.memory_allocated(device))


def weights_budget(device: torch.device, limit: int | None) -> int:
    """Bytes of a GPU that weights may take; without end for a device whose memory is RAM."""
    if device.type != "cuda" or shares_ram(device):
        return sys.maxsize
    return max(int(free_bytes(device, limit) * (1 - FOR_STATE)) - RESERVE, 0)


def shares_ram(device: torch.device) -> bool:
    """Whether it is a GPU that computes from RAM, so that there is nothing that weights would have to pass to."""
    if device.type == "cuda":
        return bool(torch.cuda.get_device_properties(device).is_integrated)
    return device.type == "mps"


class DeviceLimits:
    """How fast a device moves bytes when nothing else is to be done, and how much of its memory is in use.

    Each measurement allocates its own buffers and blocks.
    """

    def __init__(self, device: str) -> None:
        self._device = choose_device(device)

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


STATE_SHARE = 0.9
"""The share that is used of what a GPU has free beside the reserve: its allocator cannot use every byte."""
STEP_PART = 4
"""What a step has in hand takes at most one part of it of so many; the rest is for state."""


def state_reserve(device: torch.device, limit: int | None, size: int) -> int:
    """Bytes that weights leave to state of so many beyond the share that they always leave to it."""
    if device.type != "cuda":
        return 0
    needed = size / (STATE_SHARE * (1 - 1 / STEP_PART))
    return max(int(needed - FOR_STATE * free_bytes(device, limit)), 0)


def kv_bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """As the configuration says; 0 where it does not."""
    queries = getattr(config, "num_attention_heads", 0)
    if not queries:
        return 0
    heads = getattr(config, "num_key_value_heads", None) or queries
    width = getattr(config, "head_dim", None) or config.hidden_size // queries
    return int(2 * config.num_hidden_layers * heads * width * dtype.itemsize)
