"""Own kernels for CUDA: one token per sequence goes into the paged pool, and attends to what is there.

A sequence's blocks are shared between `splits` programs per KV head, so that a single long sequence keeps the
whole device busy; a second kernel joins what they found. Lengths and tables are read on the device: the launch is
the same for every step, and can be replayed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from emberkeep.engine.hf.attention import AttentionOptions
from emberkeep.engine.hf.pool import BLOCK

_PROGRAMS = 264
"""About two per multiprocessor of a large device."""
_LEAST_ROWS = 16
"""Of a matrix product: fewer query heads per KV head are padded to so many."""


@triton.jit
def _split_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    length_ptr,
    part_ptr,
    stat_ptr,
    scale,
    softcap,
    window,
    q_row,
    q_head,
    k_cell,
    k_head,
    v_cell,
    v_head,
    table_row,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_CAP: tl.constexpr,
):
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(length_ptr + row)
    first = tl.maximum(length - window, 0) // TOKENS
    tiles = tl.cdiv(length, TOKENS) - first
    each = tl.cdiv(tiles, SPLITS)
    begin = first + split * each
    end = tl.minimum(begin + each, first + tiles)
    rows, width, value = tl.arange(0, ROWS), tl.arange(0, WIDTH_PAD), tl.arange(0, VALUE_PAD)
    q = tl.load(
        q_ptr + row * q_row + (head * GROUP + rows[:, None]) * q_head + width[None, :],
        mask=(rows[:, None] < GROUP) & (width[None, :] < WIDTH),
        other=0.0,
    )
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, VALUE_PAD], tl.float32)
    for tile in range(begin, end):
        block = tl.load(table_ptr + row * table_row + tile).to(tl.int64)
        cells = block * TOKENS + tl.arange(0, TOKENS)
        positions = tile * TOKENS + tl.arange(0, TOKENS)
        seen = (positions < length) & (positions >= length - window)
        k = tl.load(
            k_ptr + cells[:, None] * k_cell + head * k_head + width[None, :],
            mask=seen[:, None] & (width[None, :] < WIDTH),
            other=0.0,
        )
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if HAS_CAP:
            ratio = scores / softcap
            scores = softcap * (1 - 2 / (tl.exp(2 * ratio) + 1))
        scores = tl.where(seen[None, :], scores, float("-inf"))
        highest = tl.maximum(best, tl.max(scores, 1))
        shrink = tl.exp(best - highest)
        weights = tl.exp(scores - highest[:, None])
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(
            v_ptr + cells[:, None] * v_cell + head * v_head + value[None, :],
            mask=seen[:, None] & (value[None, :] < VALUE),
            other=0.0,
        )
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        best = highest
    place = ((row * HEADS + head) * SPLITS + split) * ROWS + rows
    tl.store(part_ptr + place[:, None] * VALUE_PAD + value[None, :], mixed)
    tl.store(stat_ptr + place * 2, best)
    tl.store(stat_ptr + place * 2 + 1, total)


@triton.jit
def _join_kernel(
    part_ptr,
    stat_ptr,
    sink_ptr,
    out_ptr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    row, query = tl.program_id(0), tl.program_id(1)
    head, member = query // GROUP, query % GROUP
    splits, value = tl.arange(0, SPLITS), tl.arange(0, VALUE_PAD)
    place = ((row * HEADS + head) * SPLITS + splits) * ROWS + member
    best = tl.load(stat_ptr + place * 2)
    total = tl.load(stat_ptr + place * 2 + 1)
    highest = tl.max(best, 0)
    if HAS_SINKS:
        sink = tl.load(sink_ptr + query).to(tl.float32)
        highest = tl.maximum(highest, sink)
    share = tl.where(best == float("-inf"), 0.0, tl.exp(best - highest))
    parts = tl.load(part_ptr + place[:, None] * VALUE_PAD + value[None, :])
    denominator = tl.sum(total * share, 0)
    if HAS_SINKS:
        denominator += tl.exp(sink - highest)
    mixed = tl.sum(parts * share[:, None], 0) / denominator
    tl.store(
        out_ptr + (row * HEADS * GROUP + query) * VALUE + value,
        mixed.to(out_ptr.dtype.element_ty),
        mask=value < VALUE,
    )


@triton.jit
def _store_kernel(
    k_ptr,
    v_ptr,
    cell_ptr,
    keys_ptr,
    values_ptr,
    k_row,
    k_head,
    v_row,
    v_head,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE: tl.constexpr,
    KEYS_PAD: tl.constexpr,
    VALUES_PAD: tl.constexpr,
):
    row = tl.program_id(0)
    cell = tl.load(cell_ptr + row)
    k_at, v_at = tl.arange(0, KEYS_PAD), tl.arange(0, VALUES_PAD)
    k_there, v_there = k_at < HEADS * WIDTH, v_at < HEADS * VALUE
    k = tl.load(k_ptr + row * k_row + k_at // WIDTH * k_head + k_at % WIDTH, mask=k_there)
    v = tl.load(v_ptr + row * v_row + v_at // VALUE * v_head + v_at % VALUE, mask=v_there)
    tl.store(keys_ptr + cell * HEADS * WIDTH + k_at, k, mask=k_there)
    tl.store(values_ptr + cell * HEADS * VALUE + v_at, v, mask=v_there)


def store_rows(
    k: torch.Tensor, v: torch.Tensor, cells: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """Put `[heads, rows, width]` keys and values of new tokens into their cells, in one launch for both."""
    heads, rows, width = k.shape
    _store_kernel[(rows,)](
        k,
        v,
        cells,
        keys,
        values,
        k.stride(1),
        k.stride(0),
        v.stride(1),
        v.stride(0),
        HEADS=heads,
        WIDTH=width,
        VALUE=v.shape[2],
        KEYS_PAD=triton.next_power_of_2(heads * width),
        VALUES_PAD=triton.next_power_of_2(heads * v.shape[2]),
    )


@dataclass(frozen=True, slots=True)
class PagedKv:
    """One layer's state of several sequences."""

    keys: torch.Tensor
    values: torch.Tensor
    """Both `[cells, heads, width]`."""
    tables: torch.Tensor
    """A row of block numbers for each sequence."""
    lengths: torch.Tensor
    """How many tokens each sequence has, the new one included."""


def decode_attention(query: torch.Tensor, paged: PagedKv, options: AttentionOptions) -> torch.Tensor:
    """Of `[rows, heads, width]` queries, one per sequence."""
    keys, values, tables, sinks = paged.keys, paged.values, paged.tables, options.sinks
    rows, query_heads, width = query.shape
    heads, value_width = values.shape[1], values.shape[2]
    group = query_heads // heads
    splits = max(1, min(128, triton.next_power_of_2(-(-_PROGRAMS // (rows * heads)))))
    padded = max(_LEAST_ROWS, triton.next_power_of_2(group))
    value_pad = max(16, triton.next_power_of_2(value_width))
    parts = torch.empty((rows, heads, splits, padded, value_pad), dtype=torch.float32, device=query.device)
    stats = torch.empty((rows, heads, splits, padded, 2), dtype=torch.float32, device=query.device)
    out = torch.empty((rows, query_heads, value_width), dtype=values.dtype, device=query.device)
    sizes: dict[str, Any] = {"HEADS": heads, "GROUP": group, "ROWS": padded, "SPLITS": splits}
    _split_kernel[(rows, heads, splits)](
        query,
        keys,
        values,
        tables,
        paged.lengths,
        parts,
        stats,
        options.scale,
        options.softcap or 1.0,
        options.window or 1 << 30,
        query.stride(0),
        query.stride(1),
        keys.stride(0),
        keys.stride(1),
        values.stride(0),
        values.stride(1),
        tables.stride(0),
        WIDTH=width,
        WIDTH_PAD=max(16, triton.next_power_of_2(width)),
        VALUE=value_width,
        VALUE_PAD=value_pad,
        TOKENS=BLOCK,
        HAS_CAP=options.softcap is not None,
        num_warps=4,
        num_stages=3,
        **sizes,
    )
    _join_kernel[(rows, query_heads)](
        parts,
        stats,
        sinks if sinks is not None else stats,
        out,
        VALUE=value_width,
        VALUE_PAD=value_pad,
        HAS_SINKS=sinks is not None,
        **sizes,
    )
    return out
