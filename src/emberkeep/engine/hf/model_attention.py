"""The fastest attention here, put into a model of transformers that somebody else has loaded, and taken out
again.

transformers looks up attention, and the mask for it, by a name that a model's configuration holds. Here there
is a name for each kind that can be stood in for; its mask is that kind's own, so that whatever is not computed
here is passed on to it as if nothing had been installed. On CUDA, a mask is compared once per step with what
the kernel computes: left padding, then everything up to the token itself, or a window of it. What differs is
passed on.
"""

from __future__ import annotations

import sys
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from emberkeep.engine.hf.attention import KNOWN, AttentionOptions
from emberkeep.engine.hf.network import has_choice
from emberkeep.errors import EngineError
from emberkeep.values import dataclass

_PREFIX = "emberkeep_over_"
_MASKS = {"sdpa": sdpa_mask, "eager": eager_mask}
"""What can be stood in for, each with what makes its masks."""
_LAYOUT = "_emberkeep_layout"
_WIDEST = 256
_HARMLESS = KNOWN | {"is_causal"}
"""Arguments that are known here, or change nothing."""

_installed: WeakKeyDictionary[PreTrainedModel, list[tuple[Any, str]]] = WeakKeyDictionary()
"""The configurations of a model, each with what it said before."""


def install(model: PreTrainedModel) -> None:
    """Changes the model's configuration; once more changes nothing. Raises EngineError."""
    if model in _installed:
        return
    if model.device.type not in ("cpu", "cuda"):
        raise EngineError(f"There is no flash attention on {model.device.type}: move the model to cpu or cuda.")
    if not has_choice(model):
        raise EngineError(f"{type(model).__name__} computes attention in its own way: use it as it is.")
    before = [(config, str(config._attn_implementation)) for config in _configs(model)]
    if unknown := sorted({kind for _, kind in before} - _MASKS.keys()):
        raise EngineError(
            f"This model's attention is {unknown[0]}, which is not stood in for: call "
            'model.set_attn_implementation("sdpa") first.'
        )
    for config, kind in before:
        config._attn_implementation_internal = _PREFIX + kind
    _installed[model] = before


def uninstall(model: PreTrainedModel) -> None:
    """Everything is as it was before; of a model without it, nothing changes."""
    for config, kind in _installed.pop(model, []):
        config._attn_implementation_internal = kind


def _configs(model: PreTrainedModel) -> list[Any]:
    """The model and every model in it whose attention can be chosen; each once."""
    models = (part for part in model.modules() if isinstance(part, PreTrainedModel) and has_choice(part))
    return list({id(part.config): part.config for part in models}.values())


# ── what transformers calls ──


@dataclass(frozen=True, slots=True)
class _Layout:
    """A mask in a few numbers."""

    first: tuple[int, ...]
    """The first key that each sequence sees."""
    start: int
    """The key that belongs to the first query."""
    window: int | None


def _make_mask(kind: str, *given: Any, **named: Any) -> torch.Tensor | None:
    mask: torch.Tensor | None = _MASKS[kind](*given, **named)
    if mask is not None and mask.device.type == "cuda" and not torch.compiler.is_compiling():
        seen = mask if mask.dtype == torch.bool else mask == 0
        # With its version: a model that writes into the mask makes it another one.
        setattr(mask, _LAYOUT, (mask._version, read_layout(seen, named.get("local_size"))))
    return mask


def _layout_of(mask: torch.Tensor) -> _Layout | None:
    version, layout = getattr(mask, _LAYOUT, (None, None))
    return layout if version == mask._version else None


def read_layout(seen: torch.Tensor, window: int | None) -> _Layout | None:
    """Read a mask `[sequences, 1, queries, keys]`; None for one that is of another kind. Blocks."""
    if seen.ndim != 4 or seen.shape[1] != 1:
        return None
    _, _, queries, keys = seen.shape
    by_key = torch.arange(keys, device=seen.device)
    anyone = seen[:, 0].any(1)
    first = anyone.int().argmax(1)
    last = int((by_key * anyone).max())
    start = last - queries + 1
    if start < 0:
        return None
    at = start + torch.arange(queries, device=seen.device)[:, None]
    causal = (by_key >= first[:, None, None]) & (by_key <= at)
    for width in (None, window):
        expected = causal if width is None else causal & (by_key > at - width)
        if torch.equal(expected[:, None], seen):
            return _Layout(tuple(first.tolist()), start, width)
    return None


def _attend(
    kind: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **given: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As every attention of transformers: `[sequences, heads, tokens, width]` in, heads after tokens out."""
    mixed = None
    # To eager attention a mask of booleans is a mask of ones to add.
    is_odd = kind == "eager" and attention_mask is not None and attention_mask.dtype == torch.bool
    if not is_odd and _is_known(query, key, value, given):
        if query.device.type == "cuda" and _has_kernel():
            mixed = _attend_own(module, query, key, value, attention_mask, given)
        elif not (given.get("softcap") or given.get("s_aux") is not None):
            mixed = _attend_flash(module, query, key, value, attention_mask, given)
    if mixed is not None:
        return mixed, None
    result: tuple[torch.Tensor, torch.Tensor | None] = _original(kind, module)(
        module, query, key, value, attention_mask, **given
    )
    return result


for _kind in _MASKS:
    AttentionInterface.register(_PREFIX + _kind, partial(_attend, _kind))
    AttentionMaskInterface.register(_PREFIX + _kind, partial(_make_mask, _kind))


def _is_known(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, given: dict[str, Any]) -> bool:
    """Whether nothing is asked for that the attention here does not compute."""
    learns = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    unknown = (name for name, each in given.items() if name not in _HARMLESS and isinstance(each, torch.Tensor))
    asked = given.get("dropout") or given.get("output_attentions") or given.get("cache") is not None
    is_plain = query.dtype == key.dtype == value.dtype and query.shape[0] == key.shape[0]
    return is_plain and not (learns or asked or next(unknown, None) or torch.compiler.is_compiling())


def _original(kind: str, module: torch.nn.Module) -> Any:
    home = sys.modules[type(module).__module__]
    if kind == "eager":
        return home.eager_attention_forward
    return getattr(home, "ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)[kind]


def _is_causal(module: torch.nn.Module, given: dict[str, Any]) -> bool:
    asked = given.get("is_causal")
    return bool(getattr(module, "is_causal", True) if asked is None else asked)


def _attend_flash(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    given: dict[str, Any],
) -> torch.Tensor:
    """By torch's own kernels, without writing keys and values out for every query head."""
    count, is_causal = query.shape[2], False
    if mask is None and count > 1 and _is_causal(module, given):
        key, value, is_causal = key[:, :, :count], value[:, :, :count], True
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(query.dtype)
    mixed = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=is_causal,
        scale=given.get("scaling"),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return mixed.transpose(1, 2).contiguous()


# ── the kernel ──


@lru_cache(1)
def _has_kernel() -> bool:
    return find_spec("triton") is not None and torch.cuda.get_device_capability() >= (8, 0)


def _attend_own(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    given: dict[str, Any],
) -> torch.Tensor | None:
    """None for what the kernel does not compute."""
    count = query.shape[2]
    if mask is not None:
        layout = _layout_of(mask)
    elif count == 1 or _is_causal(module, given):
        layout = _Layout((0,) * len(query), 0 if count > 1 else key.shape[2] - 1, None)
    else:
        layout = None
    widths = (query.shape[-1], value.shape[-1])
    if layout is None or len(layout.first) != len(query) or layout.start + count > key.shape[2]:
        return None
    if max(widths) > _WIDEST or query.shape[1] % key.shape[1] or key.stride(-1) != 1 or value.stride(-1) != 1:
        return None
    read = AttentionOptions.read(given, query.shape[-1])
    options = AttentionOptions(read.scale, layout.window, read.softcap or None, read.sinks)
    mixed = query.new_zeros((len(query), count, query.shape[1], value.shape[-1]))
    for number, first in enumerate(layout.first):
        # Queries of padding see nothing, and nothing sees them.
        skipped = max(first - layout.start, 0)
        mixed[number, skipped:] = _attend_sequence(
            query[number, :, skipped:],
            key[number, :, first : layout.start + count],
            value[number, :, first : layout.start + count],
            options,
        )
    return mixed


def _attend_sequence(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    """Attend with `[heads, tokens, width]`, whose last key belongs to the last query; heads after tokens out."""
    # Needs Triton, which comes with torch for CUDA only.
    from emberkeep.engine.hf.kernels import PagedKv, choose_splits, choose_tiles, paged_attention

    heads, count, width = query.shape
    device = torch.cuda.get_device_properties(query.device)
    row_bytes = max(width, value.shape[-1]) * 2 * query.element_size()
    shape = choose_tiles(count, heads // len(key), row_bytes, device.shared_memory_per_block_optin)
    tiles, table = _place_tiles(count, key.shape[1], shape.tokens, query.device)
    splits = choose_splits(len(tiles) * len(key), device.multi_processor_count)
    paged = PagedKv(key.transpose(0, 1), value.transpose(0, 1), table, tiles)
    return paged_attention(query.transpose(0, 1), paged, options, shape, splits)


@lru_cache(16)
def _place_tiles(count: int, keys: int, each: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Where queries are, and that block n of the keys is block n: the same in every layer of a step."""
    from emberkeep.engine.hf.pool import BLOCK

    first = range(0, count, each)
    tiles = [(row, min(each, count - row), 0, keys - count + row) for row in first]
    table = torch.arange(-(-keys // BLOCK), dtype=torch.int32, device=device)[None]
    return torch.tensor(tiles, dtype=torch.int64, device=device), table
