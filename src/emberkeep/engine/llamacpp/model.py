"""A loaded GGUF model, and where its layers are computed: on which GPUs, how many, and what of them stays in
RAM.

The GPUs are handed to llama.cpp as a list of our own, and so is how layers are shared out among them: what is
planned here is then what happens, and can be said in a fingerprint.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from emberkeep.config.machine import resident_ram
from emberkeep.engine.devices import Device
from emberkeep.engine.facts import Facts
from emberkeep.engine.llamacpp.c_api import BufferOverride, DeviceProps, Handle, ProgressCallback, defaults
from emberkeep.engine.llamacpp.shared_library import llama, start_backend, take_buffers, take_errors
from emberkeep.engine.llamacpp.vocab import LlamaVocab
from emberkeep.engine.locked_memory import CAN_TELL_MEMORY, added, lock_weights, private_memory
from emberkeep.errors import EngineError, ModelBroken, ModelNotFound
from emberkeep.values import dataclass

_CPU, _GPU, _INTEGRATED = 0, 1, 2
_LOAD_COPIED, _LOAD_LOCKED = 0, 2
"""Into memory of the process's own; the second locks a part of it."""
_EXPERTS = r"blk\.{layer}\.ffn_(up|down|gate|gate_up)_(ch|)exps"
"""As llama.cpp's own --n-cpu-moe has it."""
_MARGIN = 1 << 30
"""Of each GPU: what its driver and its other programs may want, and what estimates are wrong by."""
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


@dataclass(frozen=True, slots=True, order=True)
class Adapter:
    """A LoRA adapter, whose header was checked against the model's: llama.cpp trusts types and some shapes."""

    digest: str
    scale: float
    path: Path


Report = Callable[[float], None]


class EarlyWeights(Protocol):
    """Weights that began to be loaded before they were asked for, for a CPU and no GPU."""

    resident_before: int
    """What the process held then, in bytes."""

    def take(self, report: Report) -> Handle | None:
        """Blocks until they are there. None: they are not to be used."""


@dataclass(frozen=True, slots=True)
class WeightsLoading:
    """How weights come into memory."""

    repacks: bool = True
    """They are copied into the layout that the CPU's fastest kernels want."""
    locks: bool = False
    """What of them is in RAM is locked there, if the system allows it."""
    early: EarlyWeights | None = None
    """Those of the same file that are being loaded already."""


def load_weights(
    path: Path, placed: PlacementParams, report: Report | None, *, repacks: bool = True, locks: bool = False
) -> Handle | None:
    """Blocks. None where llama.cpp cannot, whose log says why."""
    params = defaults(llama().llama_model_default_params)
    placed.put_into(params)
    params.use_extra_bufts = repacks
    if locks:
        params.load_mode = _LOAD_COPIED if CAN_TELL_MEMORY else _LOAD_LOCKED
    if report is not None:
        params.progress_callback = ProgressCallback(lambda fraction, _: report(fraction) is None)
    handle: Handle | None = llama().llama_model_load_from_file(str(path).encode(), params)
    return handle


class LlamaModel:
    """Raises ModelNotFound, ModelBroken or EngineError. `close` frees the handle; contexts must be closed before.

    `adapters` apply to every context of it, in an order of their own: what they compute together depends on it.
    `report` is told meanwhile which part of the weights is loaded. `may_rewrite` and `facts`: as in `LlamaVocab`.
    """

    def __init__(
        self,
        path: Path,
        *,
        placement: Placement = ON_CPU,
        adapters: Sequence[Adapter] = (),
        loading: WeightsLoading | None = None,
        report: Report = lambda fraction: None,
        may_rewrite: bool = False,
        facts: Facts | None = None,
    ) -> None:
        self.path = path
        loading = loading or WeightsLoading()
        repacks, locks, early = loading.repacks, loading.locks, loading.early
        start_backend()
        if not path.is_file():
            raise ModelNotFound(f"There is no model file at {path}.")
        found = gpus()
        before = private_memory() if locks else []
        self.resident_before = resident_ram() or 0
        """What the process held without it, in bytes."""
        self.handle = (
            self._take(early, report) if early is not None and repacks and not locks and not found else None
        )
        if self.handle is None:
            take_errors()
            take_buffers()
            self.handle = load_weights(
                path, PlacementParams(placement, found), report, repacks=repacks, locks=locks
            )
        if not self.handle:
            way_out = "; try fewer --gpu-layers" if found and placement.gpu_layers else ""
            reason = take_errors() or "unknown format"
            raise ModelBroken(f"llama.cpp cannot load {path.name}: {reason}{way_out}.")
        if locks and CAN_TELL_MEMORY:
            lock_weights(added(before, private_memory()))
        self.offloads = bool(found and placement.gpu_layers)
        self.placement = placement.facts(found)
        """What is computed where, for fingerprints."""
        self.adapters = sorted(adapters)
        self._loaded_adapters = [self._load_adapter(adapter.path) for adapter in self.adapters]
        self.vocab = self._read_vocab(may_rewrite, facts)
        self.train_context: int = llama().llama_model_n_ctx_train(self.handle)

    def _take(self, early: EarlyWeights, report: Report) -> Handle | None:
        self.resident_before = min(self.resident_before, early.resident_before)
        return early.take(report)

    def _read_vocab(self, may_rewrite: bool, facts: Facts | None) -> LlamaVocab:
        try:
            pre = self.metadata("tokenizer.ggml.pre") or ""
            handle = llama().llama_model_get_vocab(self.handle)
            return LlamaVocab(handle, pre, may_rewrite=may_rewrite, facts=facts)
        except ModelBroken:
            self.close()
            raise

    def _load_adapter(self, path: Path) -> Handle:
        take_errors()
        loaded: Handle | None = llama().llama_adapter_lora_init(self.handle, str(path).encode())
        if not loaded:
            reason = take_errors() or "unknown format"
            self.close()
            raise EngineError(f"llama.cpp cannot use the adapter {path.name}, {reason}: leave --lora out.")
        return loaded

    def adapt(self, context: Handle) -> None:
        """Apply all adapters to a new context."""
        count = len(self._loaded_adapters)
        if count:
            scales = (adapter.scale for adapter in self.adapters)
            llama().llama_set_adapters_lora(
                context,
                (ctypes.c_void_p * count)(*self._loaded_adapters),
                count,
                (ctypes.c_float * count)(*scales),
            )

    @property
    def chat_template(self) -> str | None:
        source = llama().llama_model_chat_template(self.handle, None)
        return source.decode("utf-8", "replace") if source else None

    def metadata(self, key: str) -> str | None:
        buffer = ctypes.create_string_buffer(1 << 12)
        length = llama().llama_model_meta_val_str(self.handle, key.encode(), buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace") if length >= 0 else None

    def close(self) -> None:
        """Blocks while a text is being tokenized."""
        if self.handle:
            if hasattr(self, "vocab"):  # it may be what could not be read
                self.vocab.close()
            llama().llama_model_free(self.handle)
            self.handle = None


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
    return [_device(device, props) for device, props in _devices() if props.type != _CPU]


def _devices() -> list[tuple[Handle, DeviceProps]]:
    start_backend()
    found = []
    for index in range(llama().ggml_backend_dev_count()):
        device, props = llama().ggml_backend_dev_get(index), DeviceProps()
        llama().ggml_backend_dev_get_props(device, ctypes.byref(props))
        props.type = llama().ggml_backend_dev_type(device)
        found.append((device, props))
    return found


def _device(device: Handle, props: DeviceProps) -> Device:
    gpu = _gpu(device, props)
    backend = llama().ggml_backend_reg_name(llama().ggml_backend_dev_backend_reg(device))
    return Device(backend.decode("utf-8", "replace"), gpu.name, gpu.description, gpu.free, gpu.total)


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


class PlacementParams:
    """A placement as llama.cpp's parameters take it; they point into this object, so keep it for as long."""

    def __init__(self, placement: Placement, found: Sequence[Gpu]) -> None:
        self._gpu_layers = placement.gpu_layers
        # Without any layers they are left alone: llama.cpp would still compute on those that it was not denied.
        used = found if placement.gpu_layers else ()
        self._devices = (ctypes.c_void_p * (len(used) + 1))(*(gpu.handle for gpu in used), None) if found else None
        # It may read as many as it could ever have GPUs.
        self._split = (ctypes.c_float * max(llama().llama_max_devices(), len(found)))(*placement.split)
        cpu, in_ram = llama().ggml_backend_cpu_buffer_type(), placement.experts_in_ram() if found else ()
        overrides = [BufferOverride(_EXPERTS.format(layer=layer).encode(), cpu) for layer in in_ram]
        self._overrides = (BufferOverride * (len(overrides) + 1))(*overrides)

    def put_into(self, params: Any) -> None:
        """Nothing but the number of layers is said where there is nothing else to say."""
        params.n_gpu_layers = self._gpu_layers
        if self._devices is not None:
            params.devices = ctypes.cast(self._devices, ctypes.c_void_p)
        if any(self._split):
            params.tensor_split = self._split
        if len(self._overrides) > 1:
            params.tensor_buft_overrides = self._overrides
