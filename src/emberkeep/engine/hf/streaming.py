"""Models larger than the GPU: weights that wait in RAM and pass through a few slots on the device.

    units    0 1 2 | 3 4 5 6 ... 60 | 61 62 63        layers, or their feed-forward parts, in the order of a step
             stay        pass           stay

    copies      | 3 -> a | 4 -> b |     5 -> a |     6 -> b |         on a stream of their own
    compute              |    3   |    4    |   5    |   6   |

A unit's weights lie together, so that one copy brings them all; a slot is filled again as soon as its unit was
computed, with the unit that comes next: after the last one that is the first of the next step.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from emberkeep.engine.hf.device import weights_budget
from emberkeep.errors import EngineError
from emberkeep.types import Json, Residency

log = logging.getLogger("emberkeep.engine")

SLOTS = 2
_ALIGNED = 256
"""Bytes: where a tensor begins within its unit."""
_GB = 1e9


# ── what stays and what passes ──


@dataclass(frozen=True, slots=True)
class Placing:
    """Which weights may be where."""

    residency: Residency = Residency.AUTO
    keep_first: int | None = None
    keep_last: int | None = None
    gpu_memory: int | None = None
    """Most bytes of the device that are used in all; None: what is free."""


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
    slot_bytes: int
    """Of the slots together."""
    passing_bytes: int
    """That one step copies."""

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
    slots = min(SLOTS, len(passing)) * max(passing, default=0)
    return ResidencyPlan(mode, streamed, resident, slots, sum(passing))


def layer_bytes(layers: Sequence[nn.Module]) -> list[LayerBytes]:
    inner = [feed_forward_of(layer) for layer in layers]
    within = [0 if part is None else _module_bytes(part) for part in inner]
    return [LayerBytes(_module_bytes(layer) - part, part) for layer, part in zip(layers, within, strict=True)]


def feed_forward_of(layer: nn.Module) -> nn.Module | None:
    for name in ("mlp", "feed_forward", "block_sparse_moe", "ffn"):
        part = getattr(layer, name, None)
        if isinstance(part, nn.Module):
            return part
    return None


def place_layers(network: Any, device: torch.device, placing: Placing) -> LayerStream | None:
    """Bring a network that is in RAM to its device, as much of it as may be there. Raises EngineError."""
    count = network.config.get_text_config(decoder=True).num_hidden_layers
    layers = next(
        (list(m) for m in network.modules() if isinstance(m, nn.ModuleList) and len(m) == count), list[nn.Module]()
    )
    sizes = layer_bytes(layers)
    rest = _module_bytes(network) - sum(each.all for each in sizes)
    budget = weights_budget(device, placing.gpu_memory) if device.type == "cuda" else sys.maxsize
    plan = plan_residency(sizes, rest, budget, placing)
    stream = LayerStream(plan, layers, device) if plan.streamed else None
    network.to(device)
    return stream


# ── how it passes ──


class LayerStream:
    """The weights of modules that are computed in this order, in every step. Belongs to the engine's thread.

    They lie in pinned memory if there is enough of it, else in any. On a CPU the slots are RAM too: that is of use
    to tests only.
    """

    def __init__(self, plan: ResidencyPlan, layers: Sequence[nn.Module], device: torch.device) -> None:
        """Takes the weights out of `layers`. Blocks while it copies them. Raises EngineError."""
        self.plan = plan
        self._device = device
        self.is_pinned = device.type == "cuda"
        modules = [self._module(layers[index]) for index in plan.streamed]
        self._units = [self._take(module) for module in modules]
        most = max(len(unit.host) for unit in self._units)
        count = min(SLOTS, len(self._units))
        self._slots = [_Slot(torch.empty(most, dtype=torch.uint8, device=device)) for _ in range(count)]
        self._where: dict[int, int] = {}
        """In which slot each unit is, or is on its way to."""
        self._next = 0
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.copied_bytes = 0
        self.missed = 0
        """Units that were not on their way when they were wanted."""
        self._hooks = [
            hook
            for index, module in enumerate(modules)
            for hook in (
                module.register_forward_pre_hook(lambda *_, index=index: self._enter(index)),
                module.register_forward_hook(lambda *_, index=index: self._leave(index)),
            )
        ]
        self._start_from(0)
        for index in range(len(self._units)):
            self._bind(index, 0)  # nothing of the originals is held any more

    def stats(self) -> dict[str, Json]:
        return {
            "residency": self.plan.mode,
            "streamed_units": len(self._units),
            "resident_bytes": self.plan.resident_bytes,
            "slot_bytes": self.plan.slot_bytes,
            "passing_bytes": self.plan.passing_bytes,
            "pinned": self.is_pinned,
            "copied_bytes": self.copied_bytes,
            "missed_units": self.missed,
        }

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._units.clear()
        self._slots.clear()

    def _module(self, layer: nn.Module) -> nn.Module:
        if self.plan.mode is not Residency.FFN:
            return layer
        part = feed_forward_of(layer)
        if part is None:
            raise EngineError("This model's feed-forward parts are not known here: choose another --residency.")
        return part

    def _take(self, module: nn.Module) -> _Unit:
        places = list(_tensors(module))
        host = self._host_memory(_module_bytes(module))
        unit, offset = _Unit(host, []), 0
        for owner, name, tensor in places:
            place = _Place(owner, name, offset, tensor.dtype, tensor.shape)
            place.view(host).copy_(tensor)
            unit.places.append(place)
            offset += _flat_bytes(tensor)
        return unit

    def _host_memory(self, size: int) -> torch.Tensor:
        if self.is_pinned:
            try:
                return torch.empty(size, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                log.warning("weights lie in memory that is not pinned, so copies are slower: %s", error)
                self.is_pinned = False
        return torch.empty(size, dtype=torch.uint8)

    def _enter(self, index: int) -> None:
        if index not in self._where:
            self.missed += 1
            self._start_from(index)
        number = self._where[index]
        slot = self._slots[number]
        if slot.copied is not None:
            torch.cuda.current_stream(self._device).wait_event(slot.copied)
        self._bind(index, number)

    def _leave(self, index: int) -> None:
        if len(self._units) == len(self._slots):
            return  # all of them have a slot
        number = self._where.pop(index)
        if self._copies is not None:
            self._slots[number].computed = torch.cuda.current_stream(self._device).record_event()
        self._start(self._next, number)
        self._next = (self._next + 1) % len(self._units)

    def _start_from(self, index: int) -> None:
        """The slots are filled with this unit and those that follow it."""
        if self._copies is not None:
            self._copies.wait_stream(torch.cuda.current_stream(self._device))
        self._where.clear()
        for number in range(len(self._slots)):
            self._start((index + number) % len(self._units), number)
        self._next = (index + len(self._slots)) % len(self._units)

    def _start(self, index: int, number: int) -> None:
        host, slot = self._units[index].host, self._slots[number]
        self._where[index] = number
        self.copied_bytes += len(host)
        if self._copies is None:
            slot.memory[: len(host)].copy_(host)
            return
        if slot.computed is not None:
            self._copies.wait_event(slot.computed)
        with torch.cuda.stream(self._copies):
            slot.memory[: len(host)].copy_(host, non_blocking=True)
            slot.copied = self._copies.record_event()

    def _bind(self, index: int, number: int) -> None:
        """The unit's weights are what is in the slot."""
        memory = self._slots[number].memory
        for place in self._units[index].places:
            place.bind(memory)


@dataclass(slots=True)
class _Slot:
    memory: torch.Tensor
    copied: Any = None
    """An event, once something was copied into it."""
    computed: Any = None
    """An event, once what was in it was used."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor belongs, and where it is within its unit."""

    owner: nn.Module
    name: str
    offset: int
    dtype: torch.dtype
    shape: torch.Size

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        size = self.shape.numel() * self.dtype.itemsize
        return memory[self.offset : self.offset + size].view(self.dtype).view(self.shape)

    def bind(self, memory: torch.Tensor) -> None:
        view = self.view(memory)
        parameter = self.owner._parameters.get(self.name)
        if parameter is not None:
            parameter.data = view
        else:
            self.owner._buffers[self.name] = view


@dataclass(slots=True)
class _Unit:
    host: torch.Tensor
    places: list[_Place]


def _tensors(module: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Each with the module that holds it and its name there."""
    for owner in module.modules():
        for name, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is not None:
                yield owner, name, tensor


def _flat_bytes(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // _ALIGNED) * _ALIGNED


def _module_bytes(module: nn.Module) -> int:
    return sum(_flat_bytes(tensor) for *_, tensor in _tensors(module))
