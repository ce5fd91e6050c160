"""Where a GGUF model is put, from its header, the settings and the GPUs that are here; how long contexts are, and
how much memory models take."""

from __future__ import annotations

import logging
import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from emberkeep.backend.model_pool import Fits, Need
from emberkeep.config.machine import total_ram
from emberkeep.config.settings import PREFILL_SLICE, Config
from emberkeep.engine.hf.residency import FEED_FORWARD, LayerBytes, is_rounded, rounded_bytes
from emberkeep.errors import EngineError, ModelBroken
from emberkeep.models.checks import check_adapter
from emberkeep.models.digest import weights_digest
from emberkeep.models.gguf import GgufHeader
from emberkeep.models.library import ModelFile
from emberkeep.models.parts import part_files
from emberkeep.models.profile import (
    CONFIG,
    F16_BYTES,
    WEIGHTS,
    ModelKind,
    ModelProfile,
    embedding_profile,
    folder_files,
    profile_of,
    read_json,
    read_tensor_shapes,
)
from emberkeep.types.models import Quantization
from emberkeep.types.request import Json
from emberkeep.values import dataclass

if TYPE_CHECKING:
    from emberkeep.engine.llamacpp.context import LlamaSettings
    from emberkeep.engine.llamacpp.gpus import Gpu, ModelBytes, Placement
    from emberkeep.engine.llamacpp.model import Adapter, LlamaModel

log = logging.getLogger("emberkeep")

E = TypeVar("E")

_LAYER = re.compile(r"blk\.(\d+)\.(?P<experts>ffn_(up|down|gate|gate_up)_(ch|)exps)?")
_BLOCK_BYTES = {"f16": 64, "q8_0": 34, "q4_0": 18}
"""The size of 32 numbers."""
_DEFAULT_CONTEXT = 32_768
"""Cap on a context that was not asked for: models that allow a million tokens exist, machines for them less so."""
_KV_SHARE_OF_RAM = 4
"""At most this part of RAM, or of what is for models, for the KV cells of the engine, unless a single context
needs more."""
_WIDE_STEP = 2048
"""Prompt tokens that a GPU may evaluate in one step, where memory allows."""
_F32 = 4
_WIDTHS = 16
"""Rows of the width of the model that a step holds at a time, about."""


def live_kv_bytes(shape: ModelProfile, kv_type: str) -> int:
    """The bytes of a token's state in all layers, as the engine holds it."""
    halves = F16_BYTES * 32
    return -(-shape.kv_bytes_per_token * _BLOCK_BYTES[kv_type] // halves)


def place(
    config: Config, headers: Sequence[GgufHeader], shape: ModelProfile, settings: LlamaSettings, kv_bytes: int
) -> tuple[Placement, LlamaSettings]:
    """Where the model goes, and the settings with as many cells as there is room for then.

    `headers`: of the model and its adapters; `kv_bytes`: of a token in all layers. Raises EngineError.
    """
    from emberkeep.engine.llamacpp.gpus import ON_CPU, Placement, gpus, share_layers

    found = gpus()
    _check(config, shape, found)
    if not found:
        return ON_CPU, settings
    placement, planned = _with_widest_steps(
        config,
        shape,
        settings,
        lambda each: _fitting(config, headers, shape, each, kv_bytes, found),
    )
    why = "as many as fit: gpu_layers says another number"
    if config.gpu_layers is not None:
        fits = placement.count
        shares = share_layers(found, config.tensor_split)
        placement, why = Placement(shape.layers, config.gpu_layers, shares, config.cpu_moe), "as asked"
        if fits != placement.count or planned.cells != settings.cells:
            planned = settings
    names = ", ".join(f"{gpu.name} ({gpu.description})" for gpu in found)
    log.info("%d of %d layers are on %s, %s", placement.count, shape.layers + 1, names, why)
    return placement, planned


def _with_widest_steps(
    config: Config,
    shape: ModelProfile,
    settings: LlamaSettings,
    plan: Callable[[LlamaSettings], tuple[Placement, LlamaSettings]],
) -> tuple[Placement, LlamaSettings]:
    """Steps as long as suit the model on GPUs, if all of it goes there and neither layers nor cells pay for it.

    Experts gain most: each sees a few of a step's tokens, and those in RAM are copied for every step. What is kept
    as snapshots is kept where steps end, so they stay short. A CPU is no quicker with longer ones.
    """
    placement, planned = plan(settings)
    has_snapshots = shape.kind in (ModelKind.RECURRENT, ModelKind.HYBRID) or shape.sliding_window is not None
    if has_snapshots or placement.gpu_layers <= shape.layers:
        return placement, planned
    for batch in (_WIDE_STEP, _WIDE_STEP // 2):
        same, wide = plan(replace(settings, batch=max(batch, settings.batch)))
        if same == placement and wide.cells == planned.cells:
            return same, wide
    return placement, planned


def _fitting(
    config: Config,
    headers: Sequence[GgufHeader],
    shape: ModelProfile,
    settings: LlamaSettings,
    kv_bytes: int,
    found: Sequence[Gpu],
) -> tuple[Placement, LlamaSettings]:
    """Rather all layers and fewer cells than the other way round, as long as one context has room."""
    from emberkeep.engine.llamacpp.gpus import plan_placement

    for contexts in range(settings.cells // settings.context, 0, -1):
        smaller = replace(settings, cells=contexts * settings.context)
        size = bytes_on_gpus(headers, shape, smaller, kv_bytes)
        placement = plan_placement(size, found, config.tensor_split, config.cpu_moe)
        if placement.gpu_layers > shape.layers:
            break
    return placement, smaller if placement.gpu_layers else settings


def _check(config: Config, shape: ModelProfile, found: Sequence[Gpu]) -> None:
    if not found:
        for key in ("gpu_layers", "cpu_moe", "tensor_split"):
            if getattr(config, key):
                log.warning("llama.cpp finds no GPU that it can use: %s changes nothing", key)
    elif config.cpu_moe and not shape.expert_count:
        log.warning("this model has no experts: cpu_moe changes nothing")
    if found and len(config.tensor_split or ()) > len(found):
        names = ", ".join(gpu.name for gpu in found)
        raise EngineError(
            f"tensor_split has {len(config.tensor_split or ())} shares, and the GPUs here are {names}: "
            f"give {len(found)} at most."
        )


def open_placed(
    load: Callable[[Placement], LlamaModel],
    placement: Placement,
    open_engine: Callable[[LlamaModel], E],
    *,
    is_planned: bool,
) -> tuple[E, LlamaModel, Placement]:
    """A model where it was placed; where that was planned and memory does not suffice, with fewer layers on GPUs.

    Raises ModelError, EngineError.
    """
    while True:
        try:
            model = load(placement)
            return open_engine(model), model, placement
        except (EngineError, ModelBroken) as error:
            if not is_planned or not placement.gpu_layers:
                raise
            placement = replace(placement, gpu_layers=placement.count // 2)
            log.warning("%s So %d layers are put on the GPU.", error, placement.gpu_layers)


def bytes_on_gpus(
    headers: Iterable[GgufHeader], shape: ModelProfile, settings: LlamaSettings, kv_bytes: int
) -> ModelBytes:
    """What a model takes of the GPUs' memory, wherever its layers go. Pure.

    Every layer with keys and values is counted as if it saw the whole context.
    """
    from emberkeep.engine.llamacpp.gpus import ModelBytes, PlacedLayer

    tensors = [tensor for header in headers for tensor in header.tensors]
    # They stay in RAM, unless they are the output as well.
    embeddings = "token_embd." if any(tensor.name == "output.weight" for tensor in tensors) else None
    weights, experts, output, width = [0] * shape.layers, [0] * shape.layers, 0, 0
    for tensor in tensors:
        match = _LAYER.match(tensor.name)
        if match is None:
            output += 0 if embeddings and tensor.name.startswith(embeddings) else tensor.size
        elif int(match[1]) < shape.layers:
            (experts if match["experts"] else weights)[int(match[1])] += tensor.size
            width = max(width, *tensor.shape[:2], 0)
    heads = max(sum(shape.kv_heads), 1)
    layers = (
        PlacedLayer(size, routed, settings.cells * kv_bytes * own // heads)
        for size, routed, own in zip(weights, experts, shape.kv_heads, strict=True)
    )
    mask = settings.batch * settings.cells * _F32
    rows = settings.batch * width * _WIDTHS * _F32
    logits = (settings.sequences + 1) * shape.vocab_size * _F32
    return ModelBytes(tuple(layers), output, mask + rows + logits)


def read_adapters(config: Config, model: GgufHeader, digests: Path) -> tuple[list[GgufHeader], list[Adapter]]:
    """The adapters of a model, which fit it, and their headers. Blocks. Raises ModelNotFound, ModelBroken."""
    from emberkeep.engine.llamacpp.model import Adapter

    headers = [check_adapter(lora.path, model) for lora in config.lora]
    return headers, [Adapter(weights_digest(lora.path, digests), lora.scale, lora.path) for lora in config.lora]


def gguf_details(shape: ModelProfile, placement: Placement, digest: str) -> dict[str, Json]:
    """What the card of a model in llama.cpp tells, whether it writes or embeds."""
    return {
        "engine": "llamacpp",
        "architecture": shape.architecture,
        "parameters": shape.parameters,
        "quantisation": shape.quantisation,
        "trained_context": shape.context_length,
        "gpu_layers": placement.count,
        "weights_sha256": digest,
    }


def checked_context(config: Config, trained: int) -> int:
    """As `context_length`; more than the model was trained for is said in the log."""
    if config.ctx is not None and config.ctx > trained:
        log.warning("a context of %d tokens is more than the %d this model was trained for", config.ctx, trained)
    return context_length(config, trained)


def context_length(config: Config, trained: int) -> int:
    """The longest prompt and answer of a model that was trained for so many tokens."""
    return min(trained, _DEFAULT_CONTEXT) if config.ctx is None else config.ctx


def engine_cells(config: Config, bytes_per_token: int, context: int, most: int | None = None) -> int:
    """Room for `parallel` full contexts if RAM allows, and always for one."""
    affordable = (config.model_memory or total_ram()) // _KV_SHARE_OF_RAM // max(bytes_per_token, 1)
    return max(context, min(config.parallel * context, affordable, most or affordable))


# ── how much memory a model takes, told from its files; and whether there is so much beside others ──


_LAYER_WIDTHS = 64
"""Bytes for each row of a step and each number of its width, about: what layers have in hand at a time."""
_BESIDES = 64 << 20
"""Vocabulary, templates, threads."""


def memory_for_models(config: Config) -> int:
    """What stored state and other programs leave of RAM, unless it is said."""
    return config.model_memory or total_ram() // 8 * 5


def room_for_models(config: Config, free_on_gpus: Callable[[], int]) -> Fits:
    """RAM is planned: weights that are mapped from a file do not count as used, and are slow without it. What GPUs
    have left they tell."""
    budget = memory_for_models(config)

    def fits(new: Need, held: Sequence[Need]) -> bool:
        has_ram = new.ram + sum(need.ram for need in held) <= budget
        return has_ram and (not new.gpu or new.gpu <= free_on_gpus())

    return fits


def needed_memory(config: Config, model: ModelFile, gpu_bytes: Callable[[], int]) -> Need:
    """`gpu_bytes`: what all GPUs have. Blocks. Raises ModelError."""
    total = model_bytes(config, model)
    may_use_gpu = config.device != "cpu" if _runs_in_torch(config, model) else config.gpu_layers != 0
    on_gpu = min(total, gpu_bytes()) if may_use_gpu else 0
    return Need(total - on_gpu, on_gpu)


def model_bytes(config: Config, model: ModelFile) -> int:
    """What its weights, the cells for its state and a step take. Blocks. Raises ModelError."""
    if embedding_profile(model.path) is not None:
        return weight_bytes(model.path) + _BESIDES  # it holds no state between its steps
    shape = profile_of(model.path)
    widened = 2 if _runs_in_torch(config, model) else 1  # it computes in 32 bits on a CPU
    per_token = live_kv_bytes(shape, config.kv_type) * widened
    cells = engine_cells(config, per_token, context_length(config, shape.context_length))
    if model.is_folder and config.quantization != Quantization.NONE:
        dtype = "float32" if config.dtype == "auto" else config.dtype
        weights = layer_sizes(model.path, dtype, Quantization(config.quantization)).all
    else:
        weights = weight_bytes(model.path) * widened
    return weights + cells * per_token + _step_bytes(config, shape, cells)


def weight_bytes(path: Path) -> int:
    """The size of a model's files."""
    files = path.glob("*.safetensors") if path.is_dir() else part_files(path)
    return sum(file.stat().st_size for file in files)


def _runs_in_torch(config: Config, model: ModelFile) -> bool:
    return config.engine == "hf" or model.is_folder


def _step_bytes(config: Config, shape: ModelProfile, cells: int) -> int:
    rows = max(PREFILL_SLICE, 2 * config.parallel)
    # A layer has about 12 weights for each pair of numbers of its width, and is four times as wide inside.
    width = 4 * math.isqrt(shape.parameters // max(shape.layers, 1) // 12)
    logits = (2 * config.parallel + 1) * shape.vocab_size
    return rows * cells * _F32 + rows * width * _LAYER_WIDTHS + logits * _F32 + _BESIDES


def gpu_bytes() -> int:
    """What the GPUs have that llama.cpp or PyTorch use here; 0 without any."""
    return sum(total for _, total in _gpus())


def free_on_gpus() -> int:
    return sum(free for free, _ in _gpus())


def _gpus() -> list[tuple[int, int]]:
    """Free and all bytes of each."""
    from emberkeep.engine.llamacpp.gpus import gpus

    torch = sys.modules.get("torch")  # it is slow to import, and there once a model of its kind was loaded
    if torch is not None and torch.cuda.is_available():
        return [torch.cuda.mem_get_info(device) for device in range(torch.cuda.device_count())]
    return [(gpu.free, gpu.total) for gpu in gpus()]


# ── how large the layers of a folder's model are, read from headers alone ──


_NUMBERED = re.compile(r"(?P<above>.+?)\.(?P<number>\d+)\.(?P<part>[^.]+)\.")
_WITH_FRACTION = ("F64", "F32", "F16", "BF16")
_BYTES = {"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2}
"""Bytes of numbers that stay as they are; others have one."""
_BY_NAME = {"float32": 4, "bfloat16": 2, "float16": 2}
_PACKED_ZEROS, _PER_WORD = ".qzeros", 8
"""AWQ's zero points, eight in a word, become numbers with a fraction."""
_EXPERTS = ".experts."


@dataclass(frozen=True, slots=True)
class LayerSizes:
    layers: tuple[LayerBytes, ...]
    rest: int
    """Bytes of what is no layer."""
    context: int
    """Tokens that the model was trained for."""
    kv_bytes_per_token: int

    @property
    def all(self) -> int:
        return self.rest + sum(layer.all for layer in self.layers)


def layer_sizes(folder: Path, dtype: str, rounding: Quantization = Quantization.NONE) -> LayerSizes:
    """In bytes, where numbers with a fraction become `dtype` (`auto`: the model's own), and matrices of layers are
    rounded. Raises ModelNotFound, ModelBroken."""
    width = _BY_NAME.get(_own_dtype(folder) if dtype == "auto" else dtype, 2)
    profile = profile_of(folder)
    count = profile.layers
    sizes: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])
    rest = 0
    for file in folder_files(folder, (WEIGHTS,)):
        for name, (kind, shape) in read_tensor_shapes(file).items():
            found, size = _NUMBERED.match(name), _bytes(name, kind, math.prod(shape), width)
            if found is not None and kind in _WITH_FRACTION and _is_linear(name, shape):
                outputs, inputs = shape
                size = rounded_bytes(rounding, outputs, inputs, width)
            if found is None:
                rest += size
            elif int(found["number"]) < count:  # some models have more, which only train them
                sizes[int(found["number"])][found["part"] in FEED_FORWARD] += size
    layers = tuple(LayerBytes(*sizes[number]) for number in range(count))
    return LayerSizes(layers, rest, profile.context_length, profile.kv_bytes_per_token)


def _own_dtype(folder: Path) -> str:
    config = read_json(folder / CONFIG)
    inner = config.get("text_config")
    both = (config, inner if isinstance(inner, dict) else {})
    names = (each.get(key) for each in both for key in ("dtype", "torch_dtype"))
    return next((name for name in names if isinstance(name, str)), "bfloat16")


def _is_linear(name: str, shape: Sequence[int]) -> bool:
    """Experts are put together into one tensor, which keeps its bits."""
    return len(shape) == 2 and name.endswith(".weight") and _EXPERTS not in name and is_rounded(*shape)


def _bytes(name: str, kind: str, numbers: int, width: int) -> int:
    if name.endswith(_PACKED_ZEROS):
        return numbers * _PER_WORD * width
    return numbers * (width if kind in _WITH_FRACTION else _BYTES.get(kind, 1))
