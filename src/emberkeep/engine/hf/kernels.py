"""Own kernels for CUDA: new tokens go into the paged pool, and attend to what is there, without gathering
blocks.

Queries are computed in tiles: a few neighbouring tokens of one sequence, with all query heads that share a KV
head, are the rows of one matrix product. A tile's keys are shared between `splits` programs, so that a few
tokens after a long prefix keep the whole device busy; a second kernel joins what they found. Where everything
lies is read on the device: a launch depends on the number of rows only, and can be replayed.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from emberkeep.engine.hf.attention import AttentionOptions
from emberkeep.engine.hf.pool import BLOCK
from emberkeep.engine.hf.product_kernels import early, wait_for_previous
from emberkeep.errors import EngineError
from emberkeep.values import dataclass

_MOST_SPLITS = 64
FEW_TOKENS = 32
"""Up to so many, each may be of another sequence."""
_LEAST_ROWS = 16
"""A matrix product has no fewer."""
_OVER = 1.2
"""Programs per processor that are not too many: a second round takes as long as the first."""
_LOG2_E = 1.4426950408889634
_LEAST_ASSEMBLER = (12, 9)
"""Before it, ptxas lets these kernels read registers that nothing was written to, where the width of values is
no power of two: a wrong sum, or an access that ends the process."""


def check_assembler(device: torch.device) -> None:
    """Raises EngineError where Triton's assembler is known to get these kernels wrong."""
    if torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] != 9:
        return
    version = triton.knobs.nvidia.ptxas.version
    if tuple(int(part) for part in version.split(".")) < _LEAST_ASSEMBLER:
        raise EngineError(
            f"ptxas {version} assembles them wrongly: install torch 2.13, or name a newer one in TRITON_PTXAS_PATH"
        )


@triton.jit
def _see(
    q,
    k_ptr,
    v_ptr,
    table_ptr,
    tile,
    row_position,
    last,
    best,
    total,
    mixed,
    scale,
    softcap,
    window,
    k_cell,
    v_cell,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    """One tile of keys. `IS_WHOLE`: every row sees all of them."""
    width, value = tl.arange(0, WIDTH_PAD), tl.arange(0, VALUE_PAD)
    positions = tile * KEYS + tl.arange(0, KEYS)
    if IS_WHOLE:
        block = tl.load(table_ptr + positions // BLOCK_TOKENS).to(tl.int64)
    else:
        block = tl.load(table_ptr + positions // BLOCK_TOKENS, mask=positions < last, other=0).to(tl.int64)
    cells = block * BLOCK_TOKENS + positions % BLOCK_TOKENS
    k_at = k_ptr + cells[None, :] * k_cell + width[:, None]
    v_at = v_ptr + cells[:, None] * v_cell + value[None, :]
    if IS_WHOLE and WIDTH == WIDTH_PAD:
        k = tl.load(k_at)
    elif IS_WHOLE:
        k = tl.load(k_at, mask=width[:, None] < WIDTH, other=0.0)
    else:
        k = tl.load(k_at, mask=(positions[None, :] < last) & (width[:, None] < WIDTH), other=0.0)
    scores = tl.dot(q, k, input_precision="ieee") * scale
    if HAS_CAP:
        ratio = scores / softcap
        scores = softcap * (1 - 2 / (tl.exp(2 * ratio) + 1)) * 1.4426950408889634
    if not IS_WHOLE:
        seen = (positions[None, :] <= row_position[:, None]) & (
            positions[None, :] > row_position[:, None] - window
        )
        scores = tl.where(seen, scores, float("-inf"))
    highest = tl.maximum(best, tl.max(scores, 1))
    # A row that has seen nothing yet has no highest score.
    base = tl.where(highest == float("-inf"), 0.0, highest)
    shrink = tl.exp2(best - base)
    weights = tl.exp2(scores - base[:, None])
    total = total * shrink + tl.sum(weights, 1)
    if IS_WHOLE and VALUE == VALUE_PAD:
        v = tl.load(v_at)
    elif IS_WHOLE:
        v = tl.load(v_at, mask=value[None, :] < VALUE, other=0.0)
    else:
        v = tl.load(v_at, mask=(positions[:, None] < last) & (value[None, :] < VALUE), other=0.0)
    mixed = tl.dot(weights.to(v.dtype), v, mixed * shrink[:, None], input_precision="ieee")
    return highest, total, mixed


@triton.jit
def _tile_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    tile_ptr,
    sink_ptr,
    part_ptr,
    stat_ptr,
    out_ptr,
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
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    wait_for_previous(IS_EARLY)
    # The last tiles of a prompt see most: they begin first.
    number, head, split = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_row = tl.load(tile_ptr + number * 4)
    count = tl.load(tile_ptr + number * 4 + 1)
    if count == 0:
        return
    sequence = tl.load(tile_ptr + number * 4 + 2)
    position = tl.load(tile_ptr + number * 4 + 3)
    last = position + count
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(position - window + 1, 0) // KEYS
    each = tl.cdiv(tl.cdiv(last, KEYS) - first, SPLITS)
    begin = first + split * each
    end = tl.minimum(begin + each, tl.cdiv(last, KEYS))
    rows, width, value = tl.arange(0, ROWS), tl.arange(0, WIDTH_PAD), tl.arange(0, VALUE_PAD)
    token, query = rows // GROUP, head * GROUP + rows % GROUP
    is_used = token < count
    if TOKENS * GROUP < ROWS:
        is_used = is_used & (rows < TOKENS * GROUP)
    q = tl.load(
        q_ptr + (first_row + token[:, None]) * q_row + query[:, None] * q_head + width[None, :],
        mask=is_used[:, None] & (width[None, :] < WIDTH),
        other=0.0,
    )
    row_position = position + token
    table_ptr += sequence * table_row
    k_ptr += head * k_head
    v_ptr += head * v_head
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, VALUE_PAD], tl.float32)
    masked = begin
    if not HAS_WINDOW:
        masked = tl.maximum(tl.minimum((position + 1) // KEYS, end), begin)
        for tile in range(begin, masked):
            best, total, mixed = _see(
                q, k_ptr, v_ptr, table_ptr, tile, row_position, last, best, total, mixed, scale, softcap, window,
                k_cell, v_cell, WIDTH, WIDTH_PAD, VALUE, VALUE_PAD, BLOCK_TOKENS, KEYS, HAS_CAP, True,
            )  # fmt: skip
    for tile in range(masked, end):
        best, total, mixed = _see(
            q, k_ptr, v_ptr, table_ptr, tile, row_position, last, best, total, mixed, scale, softcap, window,
            k_cell, v_cell, WIDTH, WIDTH_PAD, VALUE, VALUE_PAD, BLOCK_TOKENS, KEYS, HAS_CAP, False,
        )  # fmt: skip
    place = (first_row + token) * HEADS * GROUP + query
    if SPLITS == 1:
        if HAS_SINKS:
            sink = tl.load(sink_ptr + query, mask=is_used, other=0.0).to(tl.float32) * 1.4426950408889634
            highest = tl.maximum(best, sink)
            shrink = tl.exp2(best - highest)
            total = total * shrink + tl.exp2(sink - highest)
            mixed = mixed * shrink[:, None]
        tl.store(
            out_ptr + place[:, None] * VALUE + value[None, :],
            (mixed / total[:, None]).to(out_ptr.dtype.element_ty),
            mask=is_used[:, None] & (value[None, :] < VALUE),
        )
    else:
        place = place * SPLITS + split
        tl.store(part_ptr + place[:, None] * VALUE_PAD + value[None, :], mixed, mask=is_used[:, None])
        tl.store(stat_ptr + place * 2, best, mask=is_used)
        tl.store(stat_ptr + place * 2 + 1, total, mask=is_used)


@triton.jit
def _join_kernel(
    part_ptr,
    stat_ptr,
    sink_ptr,
    out_ptr,
    QUERIES: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    wait_for_previous(IS_EARLY)
    row, query = tl.program_id(0), tl.program_id(1)
    splits, value = tl.arange(0, SPLITS), tl.arange(0, VALUE_PAD)
    place = (row * QUERIES + query) * SPLITS + splits
    best = tl.load(stat_ptr + place * 2)
    total = tl.load(stat_ptr + place * 2 + 1)
    highest = tl.max(best, 0)
    if HAS_SINKS:
        sink = tl.load(sink_ptr + query).to(tl.float32) * 1.4426950408889634
        highest = tl.maximum(highest, sink)
    share = tl.where(best == float("-inf"), 0.0, tl.exp2(best - highest))
    parts = tl.load(part_ptr + place[:, None] * VALUE_PAD + value[None, :])
    denominator = tl.sum(total * share, 0)
    if HAS_SINKS:
        denominator += tl.exp2(sink - highest)
    mixed = tl.sum(parts * share[:, None], 0) / denominator
    tl.store(
        out_ptr + (row * QUERIES + query) * VALUE + value,
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
class TileShape:
    """How queries are cut into tiles, and their keys."""

    tokens: int
    """The most that one tile has."""
    rows: int
    """A matrix product has so many: at least the tokens of a tile times the query heads that share a KV head."""
    keys: int
    warps: int
    stages: int


_DECODING = ((16, 64, 4, 2), (16, 32, 4, 2), (16, 32, 4, 1))
_FILLING = ((128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 8, 2), (64, 32, 4, 3), (64, 32, 4, 2), *_DECODING)
"""Rows, keys, warps and stages, the fastest first."""


def choose_tiles(tokens: int, group: int, row_bytes: int, shared_bytes: int) -> TileShape:
    """For a sequence that may have so many tokens in a step, with `group` query heads per KV head, keys and values
    of `row_bytes` together at most, and so much shared memory: 227 KiB of the latest devices, 64 KiB of the
    oldest."""
    least = max(_LEAST_ROWS, triton.next_power_of_2(group))
    shapes = [
        TileShape(max(rows, least) // group, max(rows, least), keys, warps, stages)
        for rows, keys, warps, stages in (_DECODING if tokens <= FEW_TOKENS else _FILLING)
    ]
    fitting = (s for s in shapes if (s.rows + s.stages * s.keys) * row_bytes <= shared_bytes)
    return next(fitting, shapes[-1])


@dataclass(frozen=True, slots=True)
class PagedKv:
    """One layer's state of several sequences."""

    keys: torch.Tensor
    values: torch.Tensor
    """Both `[cells, heads, width]`."""
    tables: torch.Tensor
    """A row of block numbers for each sequence."""
    tiles: torch.Tensor
    """For each: first row, tokens, row of `tables`, first position. Those with 0 tokens are skipped."""


def choose_splits(programs: int, processors: int) -> int:
    """How many programs share the keys of one tile, so that all processors are busy: a power of 2."""
    splits = 1
    while splits < _MOST_SPLITS and programs * splits * 2 <= processors * _OVER:
        splits *= 2
    return splits


def paged_attention(
    query: torch.Tensor, paged: PagedKv, options: AttentionOptions, shape: TileShape, splits: int
) -> torch.Tensor:
    """Compute attention of `[rows, heads, width]` queries."""
    keys, values, sinks = paged.keys, paged.values, options.sinks
    rows, queries, width = query.shape
    heads, value_width = values.shape[1], values.shape[2]
    group, tiles = queries // heads, len(paged.tiles)
    value_pad = max(16, triton.next_power_of_2(value_width))
    out = torch.empty((rows, queries, value_width), dtype=values.dtype, device=query.device)
    parts = stats = out
    if splits > 1:
        parts = torch.empty((rows, queries, splits, value_pad), dtype=torch.float32, device=query.device)
        stats = torch.empty((rows, queries, splits, 2), dtype=torch.float32, device=query.device)
    of_values: dict[str, Any] = {"VALUE": value_width, "VALUE_PAD": value_pad, "SPLITS": splits}
    of_values["HAS_SINKS"] = sinks is not None
    scale = options.scale if options.softcap is not None else options.scale * _LOG2_E
    _tile_kernel[(tiles, heads, splits)](
        query,
        keys,
        values,
        paged.tables,
        paged.tiles,
        sinks if sinks is not None else out,
        parts,
        stats,
        out,
        scale,
        options.softcap or 1.0,
        options.window or 1 << 30,
        query.stride(0),
        query.stride(1),
        keys.stride(0),
        keys.stride(1),
        values.stride(0),
        values.stride(1),
        paged.tables.stride(0),
        HEADS=heads,
        GROUP=group,
        TOKENS=shape.tokens,
        ROWS=shape.rows,
        WIDTH=width,
        WIDTH_PAD=max(16, triton.next_power_of_2(width)),
        BLOCK_TOKENS=BLOCK,
        KEYS=shape.keys,
        HAS_CAP=options.softcap is not None,
        HAS_WINDOW=options.window is not None,
        num_warps=shape.warps,
        num_stages=shape.stages,
        **of_values,
        **early(query.device),
    )
    if splits > 1:
        sink_scores = sinks if sinks is not None else out
        _join_kernel[(rows, queries)](
            parts, stats, sink_scores, out, QUERIES=queries, **of_values, **early(query.device)
        )
    return out


@triton.jit
def _take_kernel(token_ptr, source_ptr, chosen_ptr, count, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    source = tl.load(source_ptr + at, at < count, other=-1)
    chosen = tl.load(chosen_ptr + source, source >= 0, other=0)
    tl.store(token_ptr + at, chosen, source >= 0)


def take_tokens(tokens: torch.Tensor, sources: torch.Tensor, chosen: torch.Tensor) -> None:
    """Put `chosen[source]` in the place of every token whose source is not negative."""
    _take_kernel[(triton.cdiv(len(tokens), 256),)](tokens, sources, chosen, len(tokens), SIZE=256)
