"""The GPUs that llama.cpp sees, and what of a model they compute: how many layers, and what of them stays in RAM.

The GPUs are handed to llama.cpp as a list of our own, and so is how layers are shared out among them: what is
planned here is then what happens, and can be said in a fingerprint.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from emberkeep.engine.devices import Device
from emberkeep.engine.llamacpp.c_api import BufferOverride, DeviceProps, Handle
from emberkeep.engine.llamacpp.shared_library import llama, start_backend
from emberkeep.values import dataclass

_CPU, _GPU, _INTEGRATED = 0, 1, 2
_EXPERTS = r"blk\.{layer}\.ffn_(up|down|gate|gate_up)_(ch|)exps"
"""As llama.cpp's own --n-cpu-moe has it."""
_MARGIN = 1 << 30
"""Bytes left on each GPU for its driver, its other programs, and what estimates are wrong by."""
_GRID = 512 << 20
"""Free memory is rounded down to multiples of it, so that a few MiB more or less change no plan."""


@dataclass(frozen=True, slots=True)
class Gpu:
    handle: Handle
    name: str
    """As `CUDA0`."""
    description: str
    free: int
    """In bytes."""
    total: int


@dataclass(frozen=True, slots=True)
class PlacedLayer:
    weights: int
    """Without experts."""
    experts: int = 0
    state: int = 0
    """Its cells of the KV cache."""


@dataclass(frozen=True, slots=True)
class ModelBytes:
    layers: tuple[PlacedLayer, ...]
    output: int
    """What is computed after the last layer."""
    buffers: int
    """What each GPU needs to compute, whatever it computes."""


@dataclass(frozen=True, slots=True)
class Placement:
    layers: int = 0
    """That the model has, without the output."""
    gpu_layers: int = 0
    """The last so many of them, of which the output is one more; others are computed by the CPU."""
    split: tuple[float, ...] = ()
    """The share of each GPU, where there are several."""
    cpu_moe: int = 0
    """The first so many layers leave their experts in RAM."""

    @property
    def count(self) -> int:
        """How many layers are on GPUs, with the output."""
        return min(self.gpu_layers, self.layers + 1)

    def assign(self, count: int) -> list[int | None]:
        """Which of `count` GPUs computes each layer, and the output at last; None: the CPU does.

        llama.cpp's own arithmetic, in its precision.
        """
        on_gpus = self.count if count else 0
        borders = np.cumsum(np.array(self.split or [1.0], np.float32), dtype=np.float32)
        borders /= borders[-1]
        places = np.arange(on_gpus, dtype=np.float32) / np.float32(max(on_gpus, 1))
        on_cpu: list[int | None] = [None] * (self.layers + 1 - on_gpus)
        return on_cpu + [int(gpu) for gpu in np.searchsorted(borders, places, side="right")]

    def experts_in_ram(self) -> range:
        """The layers that are on a GPU but for their experts: of others the CPU has all in its own best format."""
        first = max(self.layers + 1 - self.gpu_layers, 0)
        return range(first, max(min(self.cpu_moe, self.layers), first))

    def facts(self, found: Sequence[Gpu]) -> object:
        """All that says what is computed where, for a fingerprint."""
        if not found or not self.gpu_layers:
            return "CPU"
        devices = [(gpu.name, gpu.description) for gpu in found]
        return devices, self.assign(len(found)), self.experts_in_ram()


ON_CPU = Placement()


def gpus() -> list[Gpu]:
    """Those that this llama.cpp and this machine have, as llama.cpp would choose them.

    One that two of its backends see counts once, and integrated ones only where there is no other.
    """
    for kind in (_GPU, _INTEGRATED):
        found: dict[object, Gpu] = {}
        for device, props in _devices():
            if props.type == kind:
                found.setdefault(props.device_id or device, _gpu(device, props))
        if found:
            return list(found.values())
    return []


def seen_devices() -> list[Device]:
    """All but the CPU that the backends of this llama.cpp see, also those that another one sees already."""
    found = [(_gpu(device, props), _backend(device)) for device, props in _devices() if props.type != _CPU]
    return [Device(backend, gpu.name, gpu.description, gpu.free, gpu.total) for gpu, backend in found]


def _devices() -> list[tuple[Handle, DeviceProps]]:
    start_backend()
    found = []
    for index in range(llama().ggml_backend_dev_count()):
        device, props = llama().ggml_backend_dev_get(index), DeviceProps()
        llama().ggml_backend_dev_get_props(device, ctypes.byref(props))
        props.type = llama().ggml_backend_dev_type(device)
        found.append((device, props))
    return found


def _backend(device: Handle) -> str:
    name: bytes = llama().ggml_backend_reg_name(llama().ggml_backend_dev_backend_reg(device))
    return name.decode("utf-8", "replace")


def _gpu(device: Handle, props: DeviceProps) -> Gpu:
    name, description = (text.decode("utf-8", "replace") for text in (props.name, props.description))
    return Gpu(device, name, description, props.memory_free, props.memory_total)


def plan_placement(
    model: ModelBytes, found: Sequence[Gpu], split: Sequence[float] | None, cpu_moe: int
) -> Placement:
    """As many layers as fit into the free memory of the GPUs. Pure."""
    free = [_usable(gpu) for gpu in found]
    shares = share_layers(found, split)
    for gpu_layers in range(len(model.layers) + 1 if any(free) else 0, 0, -1):
        placement = Placement(len(model.layers), gpu_layers, shares, cpu_moe)
        if _fits(model, placement, free):
            return placement
    return Placement(len(model.layers), 0, shares, cpu_moe)


def share_layers(found: Sequence[Gpu], split: Sequence[float] | None) -> tuple[float, ...]:
    """The share of each GPU, as it was asked for or by free memory; nothing where one has all. Pure."""
    if len(found) < 2:
        return ()
    shares = split or [float(_usable(gpu)) for gpu in found]
    return (*shares, *[0.0] * (len(found) - len(shares))) if any(shares) else (1.0,) * len(found)


def _usable(gpu: Gpu) -> int:
    return max(gpu.free // _GRID * _GRID - _MARGIN, 0)


def _fits(model: ModelBytes, placement: Placement, free: Sequence[int]) -> bool:
    """Buffers are counted for every GPU that computes anything."""
    in_ram = placement.experts_in_ram()
    sizes = [
        layer.weights + layer.state + (0 if number in in_ram else layer.experts)
        for number, layer in enumerate(model.layers)
    ]
    taken = [0] * len(free)
    for size, gpu in zip([*sizes, model.output], placement.assign(len(free)), strict=True):
        if gpu is not None:
            taken[gpu] = (taken[gpu] or model.buffers) + size
    return all(used <= room for used, room in zip(taken, free, strict=True))


def put_placement(params: Any, placement: Placement, found: Sequence[Gpu]) -> None:
    """Say it in llama.cpp's parameters, which keep alive what they point to; where there is nothing else to say,
    nothing but the number of layers."""
    params.n_gpu_layers = placement.gpu_layers
    if not found:
        return
    # Without any layers GPUs are denied: llama.cpp would still compute on them.
    handles = [gpu.handle for gpu in found] if placement.gpu_layers else []
    params.devices = ctypes.cast((ctypes.c_void_p * (len(handles) + 1))(*handles, None), ctypes.c_void_p)
    if any(placement.split):
        # It may read as many as it could ever have GPUs.
        params.tensor_split = (ctypes.c_float * max(llama().llama_max_devices(), len(found)))(*placement.split)
    if in_ram := placement.experts_in_ram():
        cpu = llama().ggml_backend_cpu_buffer_type()
        overrides = [BufferOverride(_EXPERTS.format(layer=layer).encode(), cpu) for layer in in_ram]
        params.tensor_buft_overrides = (BufferOverride * (len(overrides) + 1))(*overrides)
