"""Own kernels for what stands between the matrix products of a layer: one launch where torch takes several."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_ELEMENTS = 1024


@triton.jit
def _norm_kernel(x_ptr, weight_ptr, out_ptr, eps, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH_PAD)
    x = tl.load(x_ptr + row * WIDTH + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    normal = (x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + at, (normal * weight).to(dtype), mask=at < WIDTH)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Of `[rows, width]`, contiguous."""
    rows, width = x.shape
    out = torch.empty_like(x)
    padded = triton.next_power_of_2(width)
    _norm_kernel[(rows,)](
        x, weight, out, eps, WIDTH=width, WIDTH_PAD=padded, num_warps=min(max(padded // 512, 1), 16)
    )
    return out


@triton.jit
def _gate_kernel(x_ptr, out_ptr, WIDTH: tl.constexpr, ELEMENTS: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    gate = tl.load(x_ptr + row * 2 * WIDTH + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * WIDTH + WIDTH + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    opened = (gate / (1 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + at, (opened * up).to(dtype), mask=at < WIDTH)


def silu_gate(gate_and_up: torch.Tensor) -> torch.Tensor:
    """Of `[rows, 2 * width]`, contiguous: SiLU of the first half times the second."""
    rows, width = gate_and_up.shape[0], gate_and_up.shape[1] // 2
    out = gate_and_up.new_empty((rows, width))
    _gate_kernel[(rows, triton.cdiv(width, _ELEMENTS))](gate_and_up, out, WIDTH=width, ELEMENTS=_ELEMENTS)
    return out


@triton.jit
def _rotate_kernel(
    x_ptr,
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
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTATED: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head, at = tl.arange(0, HEADS_PAD)[:, None], tl.arange(0, WIDTH_PAD)[None, :]
    is_there = (head < QUERIES + 2 * HEADS) & (at < WIDTH)
    half: tl.constexpr = ROTATED // 2
    other = tl.where(at < half, at + half, tl.where(at < ROTATED, at - half, at))
    begin = x_ptr + row * (QUERIES + 2 * HEADS) * WIDTH + head * WIDTH
    x = tl.load(begin + at, mask=is_there, other=0.0).to(tl.float32)
    partner = tl.load(begin + other, mask=is_there, other=0.0).to(tl.float32)
    if HAS_NORM:
        dtype = keys_ptr.dtype.element_ty
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
    dtype = query_ptr.dtype.element_ty
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
    """Of queries and keys, head by head."""

    queries: torch.Tensor
    keys: torch.Tensor
    eps: float


def rotate_and_store(
    product: torch.Tensor,
    rotation: tuple[torch.Tensor, torch.Tensor],
    norms: HeadNorms | None,
    cells: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """Of `[rows, (queries + 2 * heads) * width]`, contiguous: the rotated queries, as `[rows, queries, width]`.
    Keys, rotated, and values go into their cells. `rotation`: cosines and sines, `[rows, rotated]` with one
    stride."""
    (rows, channels), (_, heads, width) = product.shape, keys.shape
    queries = channels // width - 2 * heads
    query = product.new_empty((rows, queries, width))
    cos, sin = rotation
    _rotate_kernel[(rows,)](
        product,
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
        QUERIES=queries,
        HEADS=heads,
        WIDTH=width,
        ROTATED=cos.shape[1],
        HEADS_PAD=triton.next_power_of_2(queries + 2 * heads),
        WIDTH_PAD=triton.next_power_of_2(width),
        HAS_NORM=norms is not None,
    )
    return query
