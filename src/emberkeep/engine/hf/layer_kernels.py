"""Own kernels for what stands between the matrix products of a layer: one launch where torch takes several."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from emberkeep.engine.hf.product_kernels import FEW_ROWS, ProductParts, early, load_sum, wait_for_previous
from emberkeep.values import dataclass

_ELEMENTS = 1024


@triton.jit
def _norm_kernel(
    x_ptr, weight_ptr, out_ptr, eps, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, IS_EARLY: tl.constexpr
):
    wait_for_previous(IS_EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH_PAD)
    x = tl.load(x_ptr + row * WIDTH + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    normal = (x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + at, (normal * weight).to(dtype), mask=at < WIDTH)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Norm `[rows, width]`, contiguous."""
    rows, width = x.shape
    out = torch.empty_like(x)
    padded = triton.next_power_of_2(width)
    _norm_kernel[(rows,)](
        x, weight, out, eps, WIDTH=width, WIDTH_PAD=padded, num_warps=_norm_warps(rows, padded), **early(x.device)
    )
    return out


def _norm_warps(rows: int, width: int) -> int:
    """Few rows leave most of a device alone: each takes as many warps as have something to do."""
    each = 128 if rows <= FEW_ROWS else 512
    return min(max(width // each, 1), 16)


@triton.jit
def _add_norm_kernel(
    x_ptr,
    bias_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    part,
    eps,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    wait_for_previous(IS_EARLY)
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH_PAD)
    is_there, place = at < WIDTH, row * WIDTH + at
    dtype = out_ptr.dtype.element_ty
    added = load_sum(x_ptr, bias_ptr, place, at, is_there, part, dtype, SPLITS, HAS_BIAS)
    x = (tl.load(residual_ptr + place, mask=is_there, other=0.0).to(tl.float32) + added).to(dtype).to(tl.float32)
    tl.store(residual_ptr + place, x.to(dtype), mask=is_there)
    weight = tl.load(weight_ptr + at, mask=is_there, other=0.0).to(tl.float32)
    normal = (x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)).to(dtype).to(tl.float32)
    tl.store(out_ptr + place, (normal * weight).to(dtype), mask=is_there)


def add_norm(residual: torch.Tensor, added: ProductParts, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Changes `residual`, `[rows, width]` and contiguous: `added` is added to it. Its norm is returned."""
    rows, width = residual.shape
    out = torch.empty_like(residual)
    padded = triton.next_power_of_2(width)
    _add_norm_kernel[(rows,)](
        added.parts,
        added.parts if added.bias is None else added.bias,
        residual,
        weight,
        out,
        residual.numel(),
        eps,
        WIDTH=width,
        WIDTH_PAD=padded,
        SPLITS=len(added.parts),
        HAS_BIAS=added.bias is not None,
        num_warps=_norm_warps(rows, padded),
        **early(out.device),
    )
    return out


@triton.jit
def _gate_kernel(
    x_ptr,
    bias_ptr,
    out_ptr,
    part,
    WIDTH: tl.constexpr,
    ELEMENTS: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    wait_for_previous(IS_EARLY)
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    dtype = out_ptr.dtype.element_ty
    place, is_there = row * 2 * WIDTH + at, at < WIDTH
    gate = load_sum(x_ptr, bias_ptr, place, at, is_there, part, dtype, SPLITS, HAS_BIAS)
    up = load_sum(x_ptr, bias_ptr, place + WIDTH, at + WIDTH, is_there, part, dtype, SPLITS, HAS_BIAS)
    opened = (gate / (1 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + at, (opened * up).to(dtype), mask=is_there)


def silu_gate(gate_and_up: ProductParts, dtype: torch.dtype) -> torch.Tensor:
    """Take from a product of `2 * width` outputs SiLU of the first half times the second."""
    rows, width = gate_and_up.rows, gate_and_up.outputs // 2
    out = gate_and_up.parts.new_empty((rows, width), dtype=dtype)
    _gate_kernel[(rows, triton.cdiv(width, _ELEMENTS))](
        gate_and_up.parts,
        gate_and_up.parts if gate_and_up.bias is None else gate_and_up.bias,
        out,
        2 * out.numel(),
        WIDTH=width,
        ELEMENTS=_ELEMENTS,
        SPLITS=len(gate_and_up.parts),
        HAS_BIAS=gate_and_up.bias is not None,
        **early(out.device),
    )
    return out


@triton.jit
def _rotate_kernel(
    x_ptr,
    bias_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cell_ptr,
    query_ptr,
    keys_ptr,
    values_ptr,
    eps,
    cos_row,
    part,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTATED: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    HAS_NORM: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    wait_for_previous(IS_EARLY)
    row = tl.program_id(0).to(tl.int64)
    head, at = tl.arange(0, HEADS_PAD)[:, None], tl.arange(0, WIDTH_PAD)[None, :]
    is_there = (head < QUERIES + 2 * HEADS) & (at < WIDTH)
    half: tl.constexpr = ROTATED // 2
    other = tl.where(at < half, at + half, tl.where(at < ROTATED, at - half, at))
    begin = row * (QUERIES + 2 * HEADS) * WIDTH
    own, paired = head * WIDTH + at, head * WIDTH + other
    dtype = query_ptr.dtype.element_ty
    x = load_sum(x_ptr, bias_ptr, begin + own, own, is_there, part, dtype, SPLITS, HAS_BIAS)
    partner = load_sum(x_ptr, bias_ptr, begin + paired, paired, is_there, part, dtype, SPLITS, HAS_BIAS)
    if HAS_NORM:
        shrink = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None]
        is_query, is_normed = head < QUERIES, head < QUERIES + HEADS
        weight = tl.where(
            is_query,
            tl.load(q_norm_ptr + at, mask=at < WIDTH, other=0.0).to(tl.float32),
            tl.load(k_norm_ptr + at, mask=at < WIDTH, other=0.0).to(tl.float32),
        )
        partner_weight = tl.where(
            is_query,
            tl.load(q_norm_ptr + other, mask=at < WIDTH, other=0.0).to(tl.float32),
            tl.load(k_norm_ptr + other, mask=at < WIDTH, other=0.0).to(tl.float32),
        )
        x = tl.where(is_normed, (x * shrink).to(dtype).to(tl.float32) * weight, x)
        partner = tl.where(is_normed, (partner * shrink).to(dtype).to(tl.float32) * partner_weight, partner)
    cos = tl.load(cos_ptr + row * cos_row + at, mask=at < ROTATED, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + row * cos_row + at, mask=at < ROTATED, other=0.0).to(tl.float32)
    turned = x * cos + tl.where(at < half, -partner, partner) * sin
    cell = tl.load(cell_ptr + row)
    tl.store(
        query_ptr + row * QUERIES * WIDTH + head * WIDTH + at,
        turned.to(dtype),
        mask=is_there & (head < QUERIES),
    )
    is_key = (head >= QUERIES) & (head < QUERIES + HEADS)
    tl.store(
        keys_ptr + cell * HEADS * WIDTH + (head - QUERIES) * WIDTH + at, turned.to(dtype), mask=is_there & is_key
    )
    tl.store(
        values_ptr + cell * HEADS * WIDTH + (head - QUERIES - HEADS) * WIDTH + at,
        x.to(dtype),
        mask=is_there & (head >= QUERIES + HEADS),
    )


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """The norms of queries and keys, head by head."""

    queries: torch.Tensor
    keys: torch.Tensor
    eps: float


def rotate_and_store(
    product: ProductParts,
    rotation: tuple[torch.Tensor, torch.Tensor],
    norms: HeadNorms | None,
    cells: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """Take a product of `(queries + 2 * heads) * width` outputs: the rotated queries, as `[rows, queries, width]`.
    Keys, rotated, and values go into their cells. `rotation`: cosines and sines, `[rows, rotated]` with one
    stride."""
    rows, (_, heads, width) = product.rows, keys.shape
    queries = product.outputs // width - 2 * heads
    query = keys.new_empty((rows, queries, width))
    cos, sin = rotation
    _rotate_kernel[(rows,)](
        product.parts,
        product.parts if product.bias is None else product.bias,
        cos,
        sin,
        norms.queries if norms else cos,
        norms.keys if norms else cos,
        cells,
        query,
        keys,
        values,
        norms.eps if norms else 0.0,
        cos.stride(0),
        rows * product.outputs,
        QUERIES=queries,
        HEADS=heads,
        WIDTH=width,
        ROTATED=cos.shape[1],
        HEADS_PAD=triton.next_power_of_2(queries + 2 * heads),
        WIDTH_PAD=triton.next_power_of_2(width),
        HAS_NORM=norms is not None,
        SPLITS=len(product.parts),
        HAS_BIAS=product.bias is not None,
        **early(query.device),
    )
    return query
