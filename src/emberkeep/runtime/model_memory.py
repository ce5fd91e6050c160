"""How much memory a model takes, told from its files; and whether there is so much beside others."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from emberkeep.backend.model_pool import Fits, Need
from emberkeep.config.machine import total_ram
from emberkeep.config.settings import PREFILL_SLICE, Config
from emberkeep.models.embedding import embedding_profile
from emberkeep.models.layer_sizes import layer_sizes
from emberkeep.models.library import ModelFile
from emberkeep.models.parts import part_files
from emberkeep.models.profile import ModelProfile, profile_of
from emberkeep.runtime.placement import context_length, engine_cells, live_kv_bytes
from emberkeep.types.models import Quantization

_F32 = 4
_WIDTHS = 64
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
    return rows * cells * _F32 + rows * width * _WIDTHS + logits * _F32 + _BESIDES


def gpu_bytes() -> int:
    """What the GPUs have that llama.cpp or PyTorch use here; 0 without any."""
    return sum(total for _, total in _gpus())


def free_on_gpus() -> int:
    return sum(free for free, _ in _gpus())


def _gpus() -> list[tuple[int, int]]:
    """Free and all bytes of each."""
    from emberkeep.engine.llamacpp.model import gpus

    torch = sys.modules.get("torch")  # it is slow to import, and there once a model of its kind was loaded
    if torch is not None and torch.cuda.is_available():
        return [torch.cuda.mem_get_info(device) for device in range(torch.cuda.device_count())]
    return [(gpu.free, gpu.total) for gpu in gpus()]
