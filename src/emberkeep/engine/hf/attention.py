"""What a layer asks of its attention, and how that is computed of keys and values that lie by cell.

On a CPU the rows of a prompt are computed in two parts, of which neither needs a mask. Sequences that each have a
few rows are computed together: an operation for each of them takes longer than reading its keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from emberkeep.engine.hf.pool import BLOCK, BlockTable, Scratch
from emberkeep.errors import EngineError
from emberkeep.values import dataclass

_LONGEST_IN_CROWD, _MOST_IN_CROWD = 1024, 4
"""Longer sequences take longer to copy than to be read one by one."""
_MANY_ROWS = 16
"""So many of a sequence need no mask for what was there before."""
_FEW_ROWS, _FEW_SCORES = 64, 1 << 17
"""Fewer rows of a sequence than these, with so many scores of each head, are quicker by matrix products."""
KNOWN = {"scaling", "dropout", "sliding_window", "softcap", "s_aux", "position_ids", "cache_position"}
"""What models hand to attention; dropout, positions and their cache change nothing here."""


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What a layer asks of its attention."""

    scale: float
    window: int | None = None
    """Tokens that a token sees, itself included; None: all."""
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    """Per head, a score that takes part in the softmax and belongs to no token."""

    @classmethod
    def read(cls, given: Mapping[str, Any], width: int) -> AttentionOptions:
        """From what transformers hands to attention by name, for heads of `width`.

        Raises EngineError for a tensor that is not known here: it may change what is computed.
        """
        if unknown := [name for name, o in given.items() if isinstance(o, torch.Tensor) and name not in KNOWN]:
            raise EngineError(
                f"This model's attention takes arguments that are not known here: {', '.join(unknown)}."
            )
        scaling = given.get("scaling")
        scale = width**-0.5 if scaling is None else float(scaling)
        return cls(scale, given.get("sliding_window"), given.get("softcap"), given.get("s_aux"))

    def first_seen(self, position: int) -> int:
        return max(position - self.window + 1, 0) if self.window else 0

    @property
    def is_plain_only(self) -> bool:
        return self.softcap is not None or self.sinks is not None


@dataclass(frozen=True, slots=True)
class Span:
    """The rows [begin, end) of the batch: tokens of one sequence, in order of their positions."""

    begin: int
    end: int
    table: BlockTable
    start: int
    """The first token's position."""
    positions: torch.Tensor | None = None
    """Given for every token where they do not follow each other."""

    @property
    def last(self) -> int:
        """Every token sees positions before this one only."""
        return self.start + (self.end - self.begin) if self.positions is None else int(self.positions[-1]) + 1


@dataclass(frozen=True, slots=True)
class Crowd:
    """Spans of few rows, of sequences of about one length: their attention is one operation, over copies of what
    they see. Sequences that are shorter than the longest end with what is masked."""

    rows: torch.Tensor | None
    """Where it has rows in the batch; None: every row, one for each sequence."""
    queries: torch.Tensor
    """`[sequences * most]`: rows again, the last one repeated where a span has fewer."""
    picked: torch.Tensor
    """Which of these are not repeated."""
    cells: torch.Tensor
    """`[sequences * longest]`"""
    mask: torch.Tensor
    """`[sequences, 1, most, longest]`: what is added to scores."""

    @classmethod
    def of(cls, spans: Sequence[Span], rows: int, dtype: torch.dtype) -> Crowd:
        """Make it of spans of a batch of so many rows."""
        most, longest = max(span.end - span.begin for span in spans), max(span.last for span in spans)
        begins, ends, starts = np.array([(span.begin, span.end, span.start) for span in spans]).T[:, :, None]
        queries = np.minimum(begins + np.arange(most), ends - 1)
        picked = np.flatnonzero(np.diff(queries, axis=1, prepend=-1))
        # A cell of its own in place of those that a sequence lacks: others' may hold anything.
        cells = np.stack([np.resize(span.table.cells(0, span.last), longest) for span in spans])
        hidden = np.arange(longest) > (starts - begins + queries)[:, :, None]
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(torch.from_numpy(hidden), float("-inf"))
        chosen = queries.flatten()[picked]
        is_all = most == 1 and np.array_equal(chosen, np.arange(rows))
        asked, kept, read = (torch.from_numpy(each) for each in (queries.flatten(), picked, cells.flatten()))
        return cls(None if is_all else torch.from_numpy(chosen), asked, kept, read, mask[:, None])


def find_crowds(spans: Sequence[Span], dtype: torch.dtype) -> tuple[list[Crowd], list[Span]]:
    """What is computed together, and the other spans in their order."""
    groups: list[list[Span]] = []
    alone = []
    for span in sorted(spans, key=lambda span: -span.last):
        if span.last > _LONGEST_IN_CROWD or span.end - span.begin > _MOST_IN_CROWD or span.positions is not None:
            alone.append(span)
        elif groups and 2 * span.last > groups[-1][0].last - BLOCK:
            groups[-1].append(span)
        else:
            groups.append([span])
    alone += [group[0] for group in groups if len(group) == 1]
    crowds = (sorted(group, key=lambda span: span.begin) for group in groups if len(group) > 1)
    alone.sort(key=lambda span: span.begin)
    return [Crowd.of(crowd, spans[-1].end, dtype) for crowd in crowds], alone


def attend_crowd(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    crowd: Crowd,
    options: AttentionOptions,
    scratch: Scratch,
) -> torch.Tensor:
    """`[rows, heads, width]` of the rows of a crowd. `keys` and `values` are those of a layer, by cell."""
    count, _, most, longest = crowd.mask.shape
    there = []
    for name, stream in (("keys", keys), ("values", values)):
        memory = scratch.take(name, count * longest, *stream.shape[1:])
        torch.index_select(stream, 0, crowd.cells, out=memory)
        there.append(memory.view(count, longest, *stream.shape[1:]).transpose(1, 2))
    if crowd.rows is None:
        asked = query.transpose(0, 2)
    else:
        asked = query[0].transpose(0, 1)[crowd.queries].view(count, most, *query.shape[1::2]).transpose(1, 2)
    mixed = scaled_dot_product_attention(
        asked,
        there[0],
        there[1],
        attn_mask=crowd.mask,
        scale=options.scale,
        enable_gqa=query.shape[1] != keys.shape[1],
    ).transpose(1, 2)
    return mixed.flatten(0, 1) if crowd.rows is None else mixed.flatten(0, 1)[crowd.picked]


def visible(span: Span, first: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Which keys (from position `first` on) each token of the span sees; None: all."""
    if span.end - span.begin == 1:
        return None
    if span.positions is None:
        queries = torch.arange(span.start, span.last, device=device)[:, None]
    else:
        queries = span.positions[:, None]
    keys = torch.arange(first, span.last, device=device)[None]
    seen = keys <= queries
    return seen if window is None else seen & (keys > queries - window)


def attend_flash(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    span: Span,
    first: int,
    options: AttentionOptions,
) -> torch.Tensor:
    """By torch's own kernels: flash attention where the device has it."""
    count, past = span.end - span.begin, span.start - first
    keys, values = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
    window, is_row_by_row = options.window, span.positions is None
    if count >= _MANY_ROWS and past and not window and is_row_by_row and _has_sums(query, values):
        return _attend_past_and_own(query, keys, values, past, options.scale)[0].transpose(0, 1)
    is_whole = is_row_by_row and count == keys.shape[2] and not (window and count > window)
    mask = None if is_whole or count == 1 else _bias(span, first, options.window, query.device)
    mixed = scaled_dot_product_attention(
        query,
        keys,
        values,
        attn_mask=mask,
        is_causal=is_whole and count > 1,
        scale=options.scale,
        enable_gqa=query.shape[1] != keys.shape[1],
    )
    return mixed[0].transpose(0, 1)


def _has_sums(query: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether there is flash attention that gives the sums of its weights, too, and products round as it does."""
    is_alike = query.shape[-1] == values.shape[-1]
    return is_alike and query.device.type == "cpu" and query.dtype == torch.float32


def _attend_past_and_own(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, past: int, scale: float
) -> torch.Tensor:
    """Attend without a mask: all rows see what was there before, and each sees its own part up to itself. Both
    results count as much as the sums of their weights."""
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    count, total = query.shape[2], keys.shape[2]
    if count < _FEW_ROWS and count * total <= _FEW_SCORES:
        return _attend_by_products(query, keys[0], values[0], past, scale)
    mixed, sums = attend(query, keys[:, :, past:], values[:, :, past:], is_causal=True, scale=scale)
    before, sums_before = attend(query, keys[:, :, :past], values[:, :, :past], scale=scale)
    share = (sums_before - sums).sigmoid_()[..., None].to(mixed.dtype)
    return mixed.lerp_(before, share)


def _attend_by_products(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, past: int, scale: float
) -> torch.Tensor:
    heads, count, width = query.shape[1:]
    asked = query[0].reshape(len(keys), -1, width)
    scores = torch.bmm(asked, keys.transpose(1, 2)).mul_(scale)
    hidden = scores.new_full((count, count), float("-inf")).triu_(1)
    scores.view(heads, count, -1)[..., past:].add_(hidden)
    return torch.bmm(scores.softmax(-1), values).view(1, heads, count, width)


def _bias(span: Span, first: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    if device.type == "cuda" and span.positions is None and window is None:
        # Said in two numbers: no mask is written, and the fastest kernel can be used.
        return causal_lower_right(span.end - span.begin, span.last - first)
    return visible(span, first, window, device)


def attend_plain(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: torch.Tensor | None,
    options: AttentionOptions,
) -> torch.Tensor:
    """By two matrix products and a softmax in float32: any device, and everything a layer may ask for."""
    heads, count = query.shape[1], query.shape[2]
    groups = heads // keys.shape[1]
    grouped = query[0].unflatten(0, (keys.shape[1], groups))
    scores = torch.einsum("hgqd,khd->hgqk", grouped, keys).float() * options.scale
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    if options.sinks is not None:
        sinks = options.sinks.float().view(keys.shape[1], groups, 1, 1).expand(-1, -1, count, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1)[..., : len(keys)].to(values.dtype)
    return torch.einsum("hgqk,khd->qhgd", weights, values).flatten(1, 2)
