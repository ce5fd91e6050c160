"""What a llama.cpp engine needs of memory: from what it says that it allocated, and what a process or a GPU holds.

With a context nearly everything is allocated: weights, cells and buffers for the largest step. In RAM, pages count
when they are touched: those of weights and cells when the engine is open, those of buffers in a step. On a GPU all
of it counts at once, and only scratch of the kernels comes later.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from emberkeep.config.machine import resident_ram, total_ram
from emberkeep.engine.base import Footprint
from emberkeep.engine.llamacpp.context import LlamaSettings, score_bytes
from emberkeep.engine.llamacpp.model import Gpu, LlamaModel, gpus
from emberkeep.engine.llamacpp.shared_library import Buffer, llama

_OF_STEPS = ("compute", "output")
"""Kinds of buffers that are not touched before a step needs them."""
_F32 = 4
_UNPACKED = 4
"""So many times as large are keys and values as f16, at most."""


def footprint_of(
    model: LlamaModel,
    settings: LlamaSettings,
    told: Sequence[Buffer],
    kv_bytes_per_token: int,
    has_scores: bool,
) -> Footprint | None:
    """Of an engine that is open, idle, and has taken a step. None where it does not say what is on a GPU.

    `told`: what was allocated for it. `has_scores`: it may be opened without flash attention, although it was
    opened with it or with fewer cells.
    """
    if model.offloads:
        return on_gpu(model, settings, told, kv_bytes_per_token, gpus())
    later = _sum(told, _OF_STEPS) + (score_bytes(model, settings) if has_scores else 0)
    least = int(llama().llama_model_size(model.handle)) + settings.cells * kv_bytes_per_token
    held = max(sum(buffer.size for buffer in told) - _sum(told, _OF_STEPS), least)
    return Footprint(
        device="cpu",
        capacity=total_ram(),
        # The process has more than the buffers: vocabulary, threads and what they compute with. It may have less:
        # weights that are mapped come when they are used.
        fixed=max(resident_ram() or 0, model.resident_before + held) + later,
        per_step_token=kv_bytes_per_token,  # what a step computed is copied out of the context
        per_context_token=0,
        per_pair=0,
        per_logits_row=0,
    )


def on_gpu(
    model: LlamaModel,
    settings: LlamaSettings,
    told: Sequence[Buffer],
    kv_bytes_per_token: int,
    found: Sequence[Gpu],
) -> Footprint | None:
    """Of the GPU in use that has least free: what a step adds, it adds on each of them. None where it is not told
    which has what, or what is free."""
    used = {gpu.name: sum(buffer.size for buffer in told if _is_on(gpu, buffer)) for gpu in found}
    tightest = min((gpu for gpu in found if used[gpu.name] and gpu.total), key=lambda gpu: gpu.free, default=None)
    if tightest is None:
        return None
    fixed = used[tightest.name]
    is_packed = settings.kv_type != "f16"
    return Footprint(
        device=tightest.name,
        # A driver that cannot tell says that everything is free.
        capacity=min(fixed + tightest.free, tightest.total),
        fixed=fixed,
        per_step_token=_scratch(model),
        # Flash attention unpacks the keys and values of a layer.
        per_context_token=_UNPACKED * kv_bytes_per_token / _number(model, "block_count", 1) if is_packed else 0,
        per_pair=0,
        per_logits_row=0,
        in_ram=sum(buffer.size for buffer in told) - sum(used.values()),
    )


def _is_on(gpu: Gpu, buffer: Buffer) -> bool:
    return buffer.place == gpu.name or buffer.place.startswith(f"{gpu.name}_")


def _scratch(model: LlamaModel) -> int:
    """What kernels have in hand for a token: the input and the output of the widest product, which experts have
    several times."""
    width, wide = _number(model, "embedding_length", 0), _number(model, "feed_forward_length", 0)
    experts, of_one = _number(model, "expert_used_count", 0), _number(model, "expert_feed_forward_length", wide)
    return _F32 * max(width + (wide or 4 * width), experts * (width + of_one))


def _number(model: LlamaModel, key: str, otherwise: int) -> int:
    """The largest, where each layer has its own."""
    said = model.metadata(f"{model.metadata('general.architecture')}.{key}") or ""
    return max(map(int, re.findall(r"\d+", said)), default=otherwise)


def _sum(told: Iterable[Buffer], kinds: Sequence[str]) -> int:
    return sum(buffer.size for buffer in told if buffer.kind in kinds)
