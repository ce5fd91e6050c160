"""Which weights stay on the device, which pass through it, and where these wait. Pure, and without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from emberkeep.config import free_ram, total_ram
from emberkeep.errors import EngineError
from emberkeep.types import Residency

SLOTS = 2
"""Units that passing weights have room for on the device."""
_LEAST_RESERVE, _RESERVED_SHARE = 2 << 30, 10
"""Of RAM, what weights leave to others: so many bytes, or one part of so many."""
_GB = 1e9


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

    @property
    def ram_for_weights(self) -> int:
        if self.ram is not None:
            return self.ram
        total, free = total_ram(), free_ram()
        return max((total if free is None else free) - max(_LEAST_RESERVE, total // _RESERVED_SHARE), 0)


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
    """Of weights that stay on the device."""
    slots: tuple[int, ...]
    """Bytes of each."""
    passing_bytes: int
    """That one step copies."""

    @property
    def slot_bytes(self) -> int:
        return sum(self.slots)

    @property
    def device_bytes(self) -> int:
        return self.resident_bytes + self.slot_bytes


def plan_residency(
    layers: Sequence[LayerBytes], rest: int, budget: int, placing: Placing | None = None
) -> ResidencyPlan:
    """`rest`: bytes of what is no layer, which stays. `budget`: for weights, on the device. Pure.

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
        plan = _plan_partial(layers, rest, budget)
    if plan.device_bytes > budget:
        raise EngineError(
            f"The weights need {plan.device_bytes / _GB:.1f} GB of the device with --residency {plan.mode}, and "
            f"{max(budget, 0) / _GB:.1f} GB are there for them: choose {_way_out(placing)}a smaller model."
        )
    return plan


def _way_out(placing: Placing) -> str:
    return "" if placing.residency in (Residency.AUTO, Residency.STREAM) else "--residency auto, or "


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
    passing = [layers[i].feed_forward if mode is Residency.FFN else layers[i].all for i in streamed]
    resident = rest + sum(each.all for each in layers) - sum(passing)
    slots = (max(passing, default=0),) * min(SLOTS, len(passing))
    return ResidencyPlan(mode, streamed, resident, slots, sum(passing))
