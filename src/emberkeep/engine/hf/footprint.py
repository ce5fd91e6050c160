"""What a Hugging Face engine needs of memory.

What is always there is counted when it is opened. What a step adds is estimated, and measured with a few steps
when nothing waits: on CUDA torch counts every byte; in RAM only the pages of the whole process are counted, so
the larger of both numbers counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

import numpy as np
import torch

from emberkeep.config.machine import peak_ram, resident_ram, total_ram
from emberkeep.engine.base import Footprint, Rows
from emberkeep.engine.hf.device import RESERVE, STATE_SHARE, STEP_PART, free_bytes
from emberkeep.engine.hf.model_loader import HfModel, HfSettings
from emberkeep.engine.hf.pool import KvMemory, LayerShape
from emberkeep.engine.step_table import Stepper
from emberkeep.types.request import Json

_SMALLEST_BATCH = 512
_PROBES = (512, 2048)
"""Prompt tokens per step whose peaks are compared."""
_LONG_ENOUGH_S, _TIMED_ROWS = 1.0, 128
"""What the steps on a CPU take together, about, by what one of so many rows took: a gap may be short."""
_PER_ADJUSTED_TOKEN = 8
"""Bytes for each sequence and each token of the vocabulary: a count, and the logits as they are changed."""
_FEWEST_ROWS = 32
"""Fewer say nothing: a count of pages is off by some MiB."""


def affordable_cells(
    model: HfModel, layers: Sequence[LayerShape], dtype: torch.dtype, settings: HfSettings
) -> int:
    """Token cells for all sequences, if the device has room; at least enough to answer something."""
    device = model.network.device
    sequences, context = settings.sequences, settings.context
    if device.type != "cuda":
        return context
    per_token = sum(_channels(layer) for layer in layers) * dtype.itemsize
    per_sequence = _per_logits_row(model, dtype) + _PER_ADJUSTED_TOKEN * model.vocab.size
    steps = settings.batch * _per_step_token(model, dtype) + sequences * per_sequence
    free = (free_bytes(device, settings.gpu_memory) - RESERVE - steps) * STATE_SHARE
    return max(min(sequences * context, int(free / per_token)), 128)


def affordable_batch(model: HfModel, most: int, limit: int | None) -> int:
    """Tokens per step, up to `most`, so that a GPU of which at most `limit` is used has room for state besides."""
    device = model.network.device
    if device.type != "cuda":
        return most
    room = (free_bytes(device, limit) - RESERVE) / STEP_PART
    batch, each = most, _per_step_token(model, model.network.dtype)
    while batch > _SMALLEST_BATCH and batch * each > room:
        batch //= 2
    return max(batch, min(most, _SMALLEST_BATCH))


def cells_of_share(model: HfModel, share: float) -> int:
    """Token cells that fit into a share of what the device has free; at least enough to answer something."""
    device = model.network.device
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    return max(int(free * share) // max(model.kv_bytes_per_token, 1), 128)


def footprint(
    model: HfModel, memory: KvMemory, layers: Sequence[LayerShape], settings: HfSettings, *, has_masks: bool
) -> Footprint:
    """What an engine needs that was just opened; what a step adds is an estimate. `has_masks`: attention is told
    what each token sees by a mask, as it is written and as the kernel wants it."""
    device = memory.device
    if device.type == "cuda":
        capacity = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        capacity, fixed = min(capacity, settings.gpu_memory or capacity), torch.cuda.memory_allocated(device)
    else:
        capacity, fixed = total_ram(), resident_ram() or model.weights_bytes + memory.bytes
    return Footprint(
        device=str(device) if device.type == "cuda" else device.type,
        capacity=capacity,
        fixed=fixed,
        per_step_token=_per_step_token(model, memory.dtype),
        # Read together where a sequence's blocks lie apart.
        per_context_token=max(_channels(layer) for layer in layers) * memory.dtype.itemsize,
        per_pair=1 + memory.dtype.itemsize if has_masks else 0,
        per_logits_row=_per_logits_row(model, memory.dtype),
    )


def with_step(base: Footprint, step: Any) -> Footprint:
    """With what `measure_step` gave once. Raises ValueError, KeyError or TypeError for anything else."""
    found = replace(base, per_step_token=float(step["per_step_token"]), per_pair=float(step["per_pair"]))
    if not all(isfinite(each) and each >= 0 for each in (found.per_step_token, found.per_pair)):
        raise ValueError("This is not what a step adds.")
    return found


def measure_step(estimate: Footprint, device: torch.device, engine: Stepper, batch: int) -> dict[str, Json]:
    """What a step adds. `engine` is idle, and evaluates a few prompts; on a CPU none that would take long by its
    `step_seconds`. Raises what it raises."""
    if device.type == "cuda":
        per_step_token, per_pair = _measure(device, engine, batch)
    else:
        per_step_token, per_pair = _measure_ram(estimate, device, engine, batch), estimate.per_pair
    return {"per_step_token": per_step_token, "per_pair": per_pair}


def _channels(layer: LayerShape) -> int:
    return layer.keys.channels + layer.values.channels


def peak_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        peak = int(torch.cuda.max_memory_allocated(device))
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    return peak_ram()


def _measure(device: torch.device, engine: Stepper, batch: int) -> tuple[float, float]:
    most = min(batch, engine.capabilities.context // 2)  # both of them are in one sequence, too
    small, large = (min(tokens, most) for tokens in _PROBES)
    _peak_of(engine, device, small, 0)  # libraries allocate their workspaces once
    base = torch.cuda.memory_allocated(device)
    peaks = [_peak_of(engine, device, tokens, 0) - base for tokens in (small, large)]
    behind = _peak_of(engine, device, small, large) - base
    # Never less than nothing: what lay there before may have gone meanwhile, of another engine, say.
    each = max((peaks[1] - peaks[0]) / max(large - small, 1), peaks[1] / large, 0)
    return each, max(behind - peaks[0], 0) / (small * (small + large))


def _measure_ram(estimate: Footprint, device: torch.device, engine: Stepper, batch: int) -> float:
    tokens = _quick_rows(engine, min(batch, engine.capabilities.context))
    if tokens < _FEWEST_ROWS:
        return estimate.per_step_token
    _peak_of(engine, device, tokens, 0)  # libraries and threads allocate their workspaces once
    base = resident_ram() or 0
    beyond = _peak_of(engine, device, tokens, 0) - base
    each = beyond / tokens - estimate.per_context_token - tokens * estimate.per_pair
    return max(estimate.per_step_token, each)


def _quick_rows(engine: Stepper, most: int) -> int:
    """So many that two steps of them are quick; 0 where it is not known what a step takes."""
    seconds = engine.step_seconds(_TIMED_ROWS, 0, 0)
    return min(int(_TIMED_ROWS * _LONG_ENOUGH_S / 2 / seconds), most) if seconds else 0


def _peak_of(engine: Stepper, device: torch.device, tokens: int, before: int) -> int:
    """The most memory while a prompt of so many tokens is evaluated, `before` others coming first."""
    for start, count in ((0, before), (before, tokens)):
        peak_bytes(device)
        if count:
            engine.evaluate([Rows(0, start, np.zeros(count, np.int32), outputs=0)])
    peak = peak_bytes(device)
    engine.trim(0, 0)
    return peak or 0


def _per_step_token(model: HfModel, dtype: torch.dtype) -> int:
    """About the most that lives at once: what a layer's feed-forward part and its attention have in hand."""
    config = model.network.config.get_text_config(decoder=True)
    hidden = _first(config, 1024, "hidden_size", "n_embd", "d_model")
    wide = _first(config, 4 * hidden, "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
    return dtype.itemsize * (8 * hidden + 4 * wide)


def _per_logits_row(model: HfModel, dtype: torch.dtype) -> int:
    return model.vocab.size * (dtype.itemsize + 4)


def _first(config: Any, otherwise: int, *names: str) -> int:
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if isinstance(value, int)), otherwise)
