"""Models larger than the GPU: weights that wait in RAM and pass through a few slots on the device.

    units    0 1 2 | 3 4 5 6 ... 60 | 61 62 63        layers, or their feed-forward parts, in the order of a step
             stay        pass           stay

    copies      | 3 -> a | 4 -> b |     5 -> a |     6 -> b |         on a stream of their own
    compute              |    3   |    4    |   5    |   6   |

A unit's weights lie together, so that one copy brings them all; a slot is filled again as soon as its unit was
computed, with the unit that comes next: after the last one that is the first of the next step. Steps are
recorded with their copies (`cuda_graphs`) where everything waits in pinned memory.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from emberkeep.engine.hf.device import kv_bytes_per_token, state_reserve, weights_budget
from emberkeep.engine.hf.host_memory import HostMemory
from emberkeep.engine.hf.residency import (
    FEED_FORWARD,
    LayerBytes,
    Placing,
    ResidencyPlan,
    plan_host,
    plan_residency,
)
from emberkeep.engine.hf.weights_file import WeightsFile
from emberkeep.errors import EngineError
from emberkeep.files import private_folder
from emberkeep.types.models import Residency
from emberkeep.types.request import Json
from emberkeep.values import dataclass

log = logging.getLogger("emberkeep.engine")
_ALIGNED = 256
"""Bytes: where a tensor begins within its unit."""


# ── from where they are to where they belong ──


class Weights(Protocol):
    """Where weights come from. See `Checkpoint`."""

    def fill(self, modules: Iterable[tuple[str, nn.Module]], converting: torch.device) -> None: ...

    def tie(self, network: Any) -> None: ...


def place_layers(
    network: Any, device: torch.device, placing: Placing, weights: Weights | None = None
) -> LayerStream | None:
    """Bring a network to its device, as much of it as may be there.

    With `weights` nothing of the network is in RAM yet: it comes layer by layer. Blocks. Raises EngineError.
    """
    prefix, layers = _layers(network)
    budget = weights_budget(device, placing.gpu_memory)
    text = network.config.get_text_config(decoder=True)
    context = min(placing.context, getattr(text, "max_position_embeddings", None) or placing.context)
    reserve = state_reserve(device, placing.gpu_memory, context * kv_bytes_per_token(text, network.dtype))
    plan = plan_residency(layer_bytes(layers), _rest_bytes(network, layers), budget, placing, reserve)
    stream = LayerStream(plan, device, placing) if plan.streamed else None
    try:
        for index, layer in enumerate(layers):
            if weights is not None:
                weights.fill(layer.named_modules(prefix=f"{prefix}.{index}"), device)
            if stream is not None and index in plan.streamed:
                stream.take(layer)
            layer.to(device)
        if weights is not None:
            # Last: until then the device has room for what is in hand while weights are converted.
            inside = f"{prefix}."
            weights.fill(((n, m) for n, m in network.named_modules() if not n.startswith(inside)), device)
            weights.tie(network)
        network.to(device)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # others look at what is free
        if stream is not None:
            stream.start()
    except BaseException:
        if stream is not None:
            stream.close()
        raise
    return stream


def _layers(network: Any) -> tuple[str, list[nn.Module]]:
    """And what their names begin with."""
    count = network.config.get_text_config(decoder=True).num_hidden_layers
    for name, module in network.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return name, list(module)
    return "", []


def layer_bytes(layers: Sequence[nn.Module]) -> list[LayerBytes]:
    inner = [feed_forward_of(layer) for layer in layers]
    within = [0 if part is None else _module_bytes(part) for part in inner]
    return [LayerBytes(_module_bytes(layer) - part, part) for layer, part in zip(layers, within, strict=True)]


def feed_forward_of(layer: nn.Module) -> nn.Module | None:
    for name in FEED_FORWARD:
        part = getattr(layer, name, None)
        if isinstance(part, nn.Module):
            return part
    return None


# ── how it passes ──


class LayerStream:
    """The weights of modules that are computed in this order, in every step. Belongs to the engine's thread.

    They lie in pinned memory if there is enough of it, else in any, and on disk where RAM has no room. On a CPU
    the slots are RAM too: that is of use to tests only.
    """

    def __init__(self, plan: ResidencyPlan, device: torch.device, placing: Placing) -> None:
        """Raises EngineError where there is no room for what waits."""
        self.plan = plan
        self._device = device
        self._memory = HostMemory(is_pinned=device.type == "cuda")
        self.host = plan_host(plan.units, placing.settled().ram or 0, _free_disk(placing.spill))
        self._file: WeightsFile | None = None
        if self.host.on_disk and placing.spill is not None:
            buffers = [self._memory.allocate(size) for size in self.host.buffers]
            self._staging = buffers[0]
            """Where a unit is put together before it is written."""
            sizes = [plan.units[number] for number in self.host.on_disk]
            self._file = WeightsFile(placing.spill, sizes, buffers)
        self._units: list[_Unit] = []
        self._slots = [_Slot(torch.empty(size, dtype=torch.uint8, device=device)) for size in plan.slots]
        self._where: dict[int, int] = {}
        """In which slot each unit is, or is on its way to."""
        self._next = 0
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.copied_bytes = 0
        self.missed = 0
        """Units that were not on their way when they were wanted."""
        self._hooks: list[Any] = []

    def take(self, layer: nn.Module) -> None:
        """The next layer of those that pass: its weights, or those of its feed-forward part, are held here from
        now on, and nothing of them is left in it. Blocks. Raises EngineError."""
        module, index = self._module(layer), len(self._units)
        self._units.append(self._take(module, index))
        self._bind(index, 0)
        self._hooks += [
            module.register_forward_pre_hook(lambda *_: self._enter(index)),
            module.register_forward_hook(lambda *_: self._leave(index)),
        ]

    def start(self) -> None:
        """Once everything was taken. Raises EngineError."""
        if self._file is not None:
            self._file.start()
        self._start_from(0)
        log.info(
            "%.1f GB of weights stay on %s, %.1f GB pass through it in every step; %.1f GB of them wait on disk",
            self.plan.resident_bytes / 1e9,
            self._device,
            self.plan.passing_bytes / 1e9,
            self.host.disk_bytes / 1e9,
        )

    def stats(self) -> dict[str, Json]:
        """May be asked by any thread."""
        return {
            "residency": self.plan.mode,
            "resident_bytes": self.plan.resident_bytes,
            "slot_bytes": self.plan.slot_bytes,
            "passing_bytes": self.plan.passing_bytes,
            "streamed_units": len(self.plan.units),
            "units_in_ram": len(self.plan.units) - len(self.host.on_disk),
            "units_on_disk": len(self.host.on_disk),
            "ram_bytes": self.host.ram_bytes,
            "disk_bytes": self.host.disk_bytes,
            "pinned": self._memory.is_pinned,
            "copied_bytes": self.copied_bytes,
            "read_bytes": self._file.read_bytes if self._file else 0,
            "missed_units": self.missed,
        }

    # ── steps that are recorded: each begins and ends with the first units in the slots ──

    @property
    def can_record(self) -> bool:
        return self._copies is not None and self._file is None and self._memory.is_pinned

    def rewind(self) -> None:
        """Before a step is recorded, or a recorded one is replayed: what comes next on the device finds the first
        units in their slots."""
        if any(self._where.get(number) != number for number in range(len(self._slots))):
            self._start_from(0)
        for slot in self._slots:
            if slot.copied is not None:
                torch.cuda.current_stream(self._device).wait_event(slot.copied)
            slot.copied = slot.computed = None

    def end_recording(self) -> None:
        """Before the end of what is recorded: it ends when the copies do. Nothing of it has been done."""
        if self._passes and self._copies is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._copies)
            self.copied_bytes -= self.plan.passing_bytes
        for slot in self._slots:
            slot.copied = slot.computed = None

    def give_up_recording(self) -> None:
        """It failed in the middle: the next step begins anew."""
        self._where.clear()
        for slot in self._slots:
            slot.copied = slot.computed = None

    def replayed(self) -> None:
        """A recorded step was told to the device."""
        if self._passes:
            self.copied_bytes += self.plan.passing_bytes

    @property
    def _passes(self) -> bool:
        return len(self._units) > len(self._slots)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._file is not None:
            self._file.close()
        if self._copies is not None:
            with suppress(RuntimeError):
                self._copies.synchronize()  # they read what is given back here
        self._units.clear()
        self._slots.clear()

    def _module(self, layer: nn.Module) -> nn.Module:
        if self.plan.mode is not Residency.FFN:
            return layer
        part = feed_forward_of(layer)
        if part is None:
            raise EngineError("This model's feed-forward parts are not known here: choose another --residency.")
        return part

    def _take(self, module: nn.Module, index: int) -> _Unit:
        size = self.plan.units[index]
        in_file = self.host.on_disk.index(index) if index in self.host.on_disk else None
        host = self._memory.allocate(size) if in_file is None else self._staging
        unit, offset = _Unit(size, [], host if in_file is None else None, in_file), 0
        for owner, name, tensor in _tensors(module):
            place = _Place(owner, name, offset, tensor.dtype, tensor.shape)
            place.view(host).copy_(tensor)
            unit.places.append(place)
            offset += _flat_bytes(tensor)
        if self._file is not None and in_file is not None:
            self._file.write(in_file, host[:size])
        return unit

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
        if not self._passes:
            return
        number = self._where.pop(index)
        if self._copies is not None:
            self._slots[number].computed = torch.cuda.current_stream(self._device).record_event()
        # The first units come into the slots that recorded steps expect them in; a file is read in order.
        is_first = self._next < len(self._slots) and self._file is None
        self._start(number if is_first else self._next, number)
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
        unit = self._units[index]
        if unit.host is not None:
            self._copy(unit.host, number)
        elif self._file is not None and unit.in_file is not None:
            try:
                buffer = self._file.take(unit.in_file)
            except EngineError:
                self._where.clear()  # the next step begins anew
                raise
            try:
                self._copy(buffer.memory[: unit.size], number)
            finally:
                self._file.give_back(buffer, self._slots[number].copied)
        self._where[index] = number
        self.copied_bytes += unit.size

    def _copy(self, host: torch.Tensor, number: int) -> None:
        slot = self._slots[number]
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
    size: int
    places: list[_Place]
    host: torch.Tensor | None
    """None: it lies in the file."""
    in_file: int | None
    """Its number there."""


def _free_disk(folder: Path | None) -> int:
    with suppress(OSError):
        return shutil.disk_usage(private_folder(folder)).free if folder is not None else 0
    return 0


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


def _rest_bytes(network: nn.Module, layers: Sequence[nn.Module]) -> int:
    """Bytes of what is no layer; what is tied counts once."""
    inside = {id(tensor) for layer in layers for *_, tensor in _tensors(layer)}
    sizes = {id(tensor): _flat_bytes(tensor) for *_, tensor in _tensors(network)}
    return sum(size for tensor, size in sizes.items() if tensor not in inside)
