"""Which weights are rounded to fewer bits when they are loaded, which stay on the device, which pass through
it, and where these wait. Pure, and without torch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from emberkeep.config.machine import free_ram, total_ram
from emberkeep.errors import EngineError
from emberkeep.types.models import Quantization, Residency
from emberkeep.values import dataclass

FEED_FORWARD = ("mlp", "feed_forward", "block_sparse_moe", "ffn")
"""What models call that part of a layer."""
SLOTS = 2
"""Units that passing weights have room for on the device."""
BUFFERS = 2
"""Units that are read from disk ahead."""
_LEAST_RESERVE, _RESERVED_SHARE = 2 << 30, 10
"""What weights leave of RAM to others: so many bytes, or one part of so many."""
_GB = 1e9
log = logging.getLogger("emberkeep.engine")


@dataclass(frozen=True, slots=True)
class Placing:
    """Which weights may be where."""

    residency: Residency = Residency.AUTO
    keep_first: int | None = None
    keep_last: int | None = None
    gpu_memory: int | None = None
    """Most bytes of the device that are used in all; None: what is free."""
    ram: int | None = None
    """Most bytes of RAM for weights that pass; None: what is free, less a reserve."""
    spill: Path | None = None
    """A folder, on whose disk weights may lie that RAM has no room for; None: none may."""
    promised_ram: int = 0
    """What others will take of the RAM that is free now."""
    context: int = 0
    """Tokens whose state should find room on the device beside weights that pass."""

    @property
    def lets_weights_pass(self) -> bool:
        """Whether some are to pass although they would fit."""
        return self.residency not in (Residency.AUTO, Residency.FULL) or bool(self.keep_first or self.keep_last)

    def in_unified_memory(self, size: int) -> Placing:
        """For a GPU that computes from RAM and weights of `size`: they stay where they are put once, whatever was
        asked for. Raises EngineError where they do not fit."""
        if self.lets_weights_pass:
            log.warning("every weight stays where it is, whatever residency says: this GPU computes from RAM")
        room = (self.settled().ram or 0) + self.promised_ram
        if size > room:
            raise EngineError(
                f"The weights need {size / _GB:.1f} GB of the RAM that this GPU shares, and {room / _GB:.1f} GB "
                "are free for them: close other programs, or choose a smaller model."
            )
        return replace(self, residency=Residency.FULL, keep_first=None, keep_last=None)

    def settled(self) -> Placing:
        """With what is free now, where nothing else was said: to be asked before anything is loaded."""
        if self.ram is not None:
            return self
        total, free = total_ram(), free_ram()
        reserve = max(_LEAST_RESERVE, total // _RESERVED_SHARE) + self.promised_ram
        return replace(self, ram=max((total if free is None else free) - reserve, 0))


@dataclass(frozen=True, slots=True)
class LayerBytes:
    attention: int
    """And whatever else of the layer is not its feed-forward part."""
    feed_forward: int

    @property
    def all(self) -> int:
        return self.attention + self.feed_forward


@dataclass(frozen=True, slots=True)
class ResidencyPlan:
    mode: Residency
    streamed: tuple[int, ...]
    """Numbers of the layers that pass, or whose feed-forward parts do."""
    resident_bytes: int
    """Bytes of weights that stay on the device."""
    units: tuple[int, ...]
    """Bytes of each of those that pass."""

    @property
    def passing_bytes(self) -> int:
        """That one step copies."""
        return sum(self.units)

    @property
    def slots(self) -> tuple[int, ...]:
        """Bytes of each."""
        return (max(self.units, default=0),) * min(SLOTS, len(self.units))

    @property
    def slot_bytes(self) -> int:
        return sum(self.slots)

    @property
    def device_bytes(self) -> int:
        return self.resident_bytes + self.slot_bytes


def plan_residency(
    layers: Sequence[LayerBytes], rest: int, budget: int, placing: Placing | None = None, for_state: int = 0
) -> ResidencyPlan:
    """`rest`: bytes of what is no layer, which stays. `budget`: for weights, on the device. `for_state`: how much
    of it is left to state where not all of them stay anyway. Pure.

    Raises EngineError for what does not fit.
    """
    placing = placing or Placing()
    wanted, has_kept = placing.residency, placing.keep_first is not None or placing.keep_last is not None
    if wanted is Residency.AUTO:
        fits = rest + sum(each.all for each in layers) <= budget
        wanted = Residency.FULL if fits and not has_kept else Residency.PARTIAL
    if wanted is not Residency.PARTIAL:
        streamed = () if wanted is Residency.FULL else tuple(range(len(layers)))
        plan = _plan(wanted, layers, rest, streamed)
    elif has_kept:
        first, last = placing.keep_first or 0, len(layers) - (placing.keep_last or 0)
        plan = _plan(wanted, layers, rest, tuple(range(first, last)))
    else:
        plan = _plan_partial(layers, rest, budget - for_state)
    if plan.device_bytes > budget:
        way_out = "" if placing.residency in (Residency.AUTO, Residency.STREAM) else "--residency auto, or "
        raise EngineError(
            f"The weights need {plan.device_bytes / _GB:.1f} GB of the device with --residency {plan.mode}, and "
            f"{max(budget, 0) / _GB:.1f} GB are there for them: choose {way_out}a smaller model."
        )
    return plan


def _plan_partial(layers: Sequence[LayerBytes], rest: int, budget: int) -> ResidencyPlan:
    """As many layers stay as fit, half of them the first ones and half the last."""
    plan = _plan(Residency.STREAM, layers, rest, tuple(range(len(layers))))
    for kept in range(1, len(layers)):
        first = -(-kept // 2)
        longer = _plan(Residency.PARTIAL, layers, rest, tuple(range(first, len(layers) - (kept - first))))
        if longer.device_bytes > budget:
            break
        plan = longer
    return plan


def _plan(mode: Residency, layers: Sequence[LayerBytes], rest: int, streamed: tuple[int, ...]) -> ResidencyPlan:
    units = tuple(layers[i].feed_forward if mode is Residency.FFN else layers[i].all for i in streamed)
    resident = rest + sum(each.all for each in layers) - sum(units)
    return ResidencyPlan(mode, streamed, resident, units)


# ── where what passes waits ──


@dataclass(frozen=True, slots=True)
class HostPlan:
    on_disk: tuple[int, ...]
    """Numbers of the units that lie in a file."""
    buffers: tuple[int, ...]
    """Bytes of each of those that such units are read into."""
    ram_bytes: int
    """Bytes of the units in RAM, and of the buffers."""
    disk_bytes: int


def plan_host(units: Sequence[int], ram: int, disk: int) -> HostPlan:
    """Units of these sizes wait in RAM; those that have no room there lie on disk, evenly among the others, so
    that one is read while others are copied. Pure. Raises EngineError where the disk has no room either."""
    plan = _host_plan(units, 0)
    for count in range(1, len(units) + 1):
        if plan.ram_bytes <= ram:
            break
        plan = _host_plan(units, count)
    if plan.ram_bytes > ram or plan.disk_bytes > disk:
        raise EngineError(
            f"The weights that pass through the device need {sum(units) / _GB:.1f} GB to wait in, and there are "
            f"{ram / _GB:.1f} GB of RAM and {disk / _GB:.1f} GB of disk for them: make room on the disk of the "
            "data folder, lower ram_budget, or choose a smaller model."
        )
    return plan


def _host_plan(units: Sequence[int], count: int) -> HostPlan:
    on_disk = tuple((2 * number + 1) * len(units) // (2 * count) for number in range(count))
    disk_bytes = sum(units[number] for number in on_disk)
    buffers = (max((units[number] for number in on_disk), default=0),) * min(BUFFERS, count)
    return HostPlan(on_disk, buffers, sum(units) - disk_bytes + sum(buffers), disk_bytes)


_GROUPS = (64, 32)
"""Inputs that share a scale in four bits, the first that divides a row; the products' kernels know both."""
_LEAST = 32
"""Rows and columns of a weight that is worth it; and what kernels want a row to be a multiple of."""


def is_rounded(outputs: int, inputs: int) -> bool:
    """Whether the weight of a layer's linear part is."""
    return min(outputs, inputs) >= _LEAST and inputs % _LEAST == 0


def int4_group(inputs: int) -> int:
    """How many inputs of a row that `is_rounded` share a scale."""
    return next(group for group in _GROUPS if inputs % group == 0)


def rounded_bytes(kind: Quantization, outputs: int, inputs: int, width: int) -> int:
    """Bytes of codes, scales and zero points, where numbers with a fraction have `width` bytes."""
    match kind:
        case Quantization.INT8:
            return outputs * (inputs + width)
        case Quantization.INT4:
            return outputs * (inputs // 2 + 2 * width * (inputs // int4_group(inputs)))
    return outputs * inputs * width
