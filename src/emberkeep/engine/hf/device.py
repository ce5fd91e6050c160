"""Which device and which number format a model gets."""

from __future__ import annotations

import torch

from emberkeep.errors import EngineError


def chosen_device(name: str) -> torch.device:
    """The device of that name; `auto` takes the fastest here. Raises EngineError for one that is not here."""
    if name == "auto":
        return torch.device(_fastest())
    kind, _, number = name.partition(":")
    here = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if int(number or 0) >= here.get(kind, 0):
        raise EngineError(f"There is no device {name} here: choose --device auto, or {_fastest()}.")
    return torch.device(kind, int(number or 0)) if kind == "cuda" else torch.device(kind)


def chosen_dtype(name: str, device: torch.device, own: torch.dtype) -> torch.dtype:
    """`auto` takes the checkpoint's `own`, except on a CPU, which is slow with anything but float32."""
    if name != "auto":
        return getattr(torch, name)
    return torch.float32 if device.type == "cpu" else own


def _fastest() -> str:
    if torch.cuda.is_available():
        return "cuda:0"
    return "mps" if torch.backends.mps.is_available() else "cpu"
