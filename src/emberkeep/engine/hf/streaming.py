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
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from threading import Condition, Thread
from typing import Any

import torch
from torch import nn

from emberkeep.engine.hf.residency import FEED_FORWARD, Placing, ResidencyPlan, plan_host
from emberkeep.engine.hf.staging import HostMemory
from emberkeep.errors import EngineError
from emberkeep.files import private_folder
from emberkeep.types.models import Residency
from emberkeep.types.request import Json
from emberkeep.values import dataclass

log = logging.getLogger("emberkeep.engine")
_ALIGNED = 256
"""Bytes: where a tensor begins within its unit."""
_PAGE = 4096
"""Bytes: where a unit begins within the file."""


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
        stay, passing, on_disk = self.plan.resident_bytes, self.plan.passing_bytes, self.host.disk_bytes
        text = "%.1f GB of weights stay on %s, %.1f GB pass through it in every step; %.1f GB of them wait on disk"
        log.info(text, stay / 1e9, self._device, passing / 1e9, on_disk / 1e9)

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
        is_on_disk, offset = index in self.host.on_disk, 0
        host = self._staging if is_on_disk else self._memory.allocate(size)
        unit = _Unit(size, [], None if is_on_disk else host)
        for owner, name, tensor in tensors_of(module):
            place = _Place(owner, name, offset, tensor.dtype, tensor.shape)
            place.view(host).copy_(tensor)
            unit.places.append(place)
            offset += flat_bytes(tensor)
        if self._file is not None and is_on_disk:
            self._file.write(self.host.on_disk.index(index), host[:size])
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
        elif self._file is not None:
            try:
                buffer = self._file.take(self.host.on_disk.index(index))
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


def feed_forward_of(layer: nn.Module) -> nn.Module | None:
    parts = (getattr(layer, name, None) for name in FEED_FORWARD)
    return next((part for part in parts if isinstance(part, nn.Module)), None)


def _free_disk(folder: Path | None) -> int:
    with suppress(OSError):
        return shutil.disk_usage(private_folder(folder)).free if folder is not None else 0
    return 0


def tensors_of(module: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Each with the module that holds it and its name there."""
    for owner in module.modules():
        for name, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is not None:
                yield owner, name, tensor


def flat_bytes(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // _ALIGNED) * _ALIGNED


@dataclass(slots=True)
class ReadBuffer:
    memory: torch.Tensor
    copied: Any = None
    """An event of CUDA, after which the buffer may be filled again; None: it may be at once."""


class WeightsFile:
    """First every part is written, then parts are taken, all by one thread; another one reads.

    The file has no name, so nothing is left of it when the process ends, however that happens.
    """

    def __init__(self, folder: Path, sizes: Sequence[int], buffers: Sequence[torch.Tensor]) -> None:
        """Each of the `buffers` is as large as the largest part. Raises EngineError."""
        self._sizes = sizes
        self._offsets = [0, *accumulate(-(-size // _PAGE) * _PAGE for size in sizes)]
        try:
            self._file = tempfile.TemporaryFile(dir=private_folder(folder), buffering=0)  # noqa: SIM115
        except OSError as error:
            raise _failed("written to", error) from error
        self._changed = Condition()
        # Everything below is changed only while it is held.
        self._free = deque(ReadBuffer(memory) for memory in buffers)
        self._ready: deque[ReadBuffer] = deque()
        self._wanted = 0
        """The part that `take` is to give next, unless it is asked for another."""
        self._next = 0
        """The part that is read next."""
        self._run = 0
        """Parts are read in their order within a run; another one begins where `take` leaves it."""
        self._error: Exception | None = None
        self._is_closed = False
        self.read_bytes = 0
        self._thread = Thread(target=self._read_ahead, name="emberkeep-weights", daemon=True)

    def write(self, number: int, part: torch.Tensor) -> None:
        """Blocks. Raises EngineError."""
        data, offset = memoryview(part.numpy()), self._offsets[number]
        try:
            while data:
                written = os.pwrite(self._file.fileno(), data, offset)
                data, offset = data[written:], offset + written
        except OSError as error:
            raise _failed("written to", error) from error

    def start(self) -> None:
        """Once every part was written."""
        self._thread.start()

    def take(self, number: int) -> ReadBuffer:
        """The buffer that begins with this part; it is the caller's until `give_back`.

        Blocks until it is read: not for long, if it is the part behind the one that was taken before. What could
        not be read ahead is tried once more. Raises EngineError, after which any part may be asked for.
        """
        with self._changed:
            if number != self._wanted:
                self._run += 1
                self._wanted = self._next = number
                self._free += self._ready
                self._ready.clear()
            self._error = None
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._ready or self._error or self._is_closed)
            if self._is_closed:
                raise EngineError("The model is being closed.")
            if self._error is not None and not self._ready:
                raise _failed("read from", self._error) from self._error
            self._wanted = (number + 1) % len(self._sizes)
            return self._ready.popleft()

    def give_back(self, buffer: ReadBuffer, copied: Any = None) -> None:
        """`copied`: an event of CUDA, after which nothing reads the buffer."""
        buffer.copied = copied
        with self._changed:
            self._free.append(buffer)
            self._changed.notify_all()

    def close(self) -> None:
        """Blocks until the thread has ended, which takes one read at most."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        self._file.close()

    # ── in the thread ──

    def _read_ahead(self) -> None:
        while begun := self._begin_reading():
            number, buffer, run = begun
            error: Exception | None = None
            try:
                if buffer.copied is not None:
                    buffer.copied.synchronize()
                self._fill(buffer.memory, number)
            except (OSError, RuntimeError) as failed:
                error = failed
            with self._changed:
                is_wanted = run == self._run
                if error is None:
                    self.read_bytes += self._sizes[number]
                elif is_wanted:
                    self._error, self._next = error, number
                (self._ready if is_wanted and error is None else self._free).append(buffer)
                self._changed.notify_all()

    def _begin_reading(self) -> tuple[int, ReadBuffer, int] | None:
        """Waits for a buffer: it, the part that comes into it, and the run. None: the file is being closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or (self._free and self._error is None))
            if self._is_closed:
                return None
            number = self._next
            self._next = (number + 1) % len(self._sizes)
            return number, self._free.popleft(), self._run

    def _fill(self, memory: torch.Tensor, number: int) -> None:
        data, offset = memoryview(memory.numpy())[: self._sizes[number]], self._offsets[number]
        while data:
            count = os.preadv(self._file.fileno(), [data], offset)
            if not count:
                raise OSError("the file has become shorter")
            data, offset = data[count:], offset + count


def _failed(what: str, error: Exception) -> EngineError:
    reason = getattr(error, "strerror", None) or error
    return EngineError(
        f"Weights that RAM has no room for cannot be {what} disk ({reason}): check the disk of the data folder, "
        "or choose a smaller model."
    )
