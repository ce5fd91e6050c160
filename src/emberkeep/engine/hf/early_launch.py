"""Kernels that are launched while the one before them still runs, and wait for it themselves.

Between two small kernels a device is idle for as long as one of them takes. A kernel that is launched early is on
the device, with its addresses computed, when what it reads is there. Devices before Hopper cannot do it.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

_LEAST_CAPABILITY = (9, 0)


@triton.jit
def wait_for_previous(IS_EARLY: tl.constexpr):
    """Before anything is read or written that the kernel before may write or read: in every program, first."""
    if IS_EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@cache
def early(device: torch.device) -> dict[str, Any]:
    """How a kernel that calls `wait_for_previous` is launched."""
    if not _is_possible(device):
        return {"IS_EARLY": False}
    return {"IS_EARLY": True, "launch_pdl": True}


def _is_possible(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None or os.environ.get("TRITON_INTERPRET") == "1":
        return False
    has_waits = hasattr(getattr(tl.extra, "cuda", None), "gdc_wait")
    return has_waits and torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY
