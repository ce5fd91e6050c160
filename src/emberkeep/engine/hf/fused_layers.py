"""Layers of the usual make, computed in fewer steps than transformers takes.

Usual is: a norm, attention with rotated queries and keys, a residual; a norm, a gated feed-forward part, a
residual. Products that read the same input become one, and so does what stands between products. That a layer is
such a one is not taken from its name: it must have these parts and no others, and must compute the same.

What stands between products has kernels of its own: one launch where torch takes several.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import nn
from torch.nn.functional import linear

from emberkeep.engine.hf.attention import AttentionOptions
from emberkeep.engine.hf.product_kernels import (
    FEW_INT4_ROWS,
    FEW_ROWS,
    ProductParts,
    dequantise,
    early,
    int4_product,
    load_sum,
    product,
    wait_for_previous,
)
from emberkeep.engine.hf.quantize import Int4Linear, has_kernels
from emberkeep.engine.hf.usual_layers import is_usual, linear_parts, norm_of
from emberkeep.values import dataclass

_ELEMENTS = 1024
"""A program has so many at once."""


class FusedLayer:
    """Shares the layer's weights, which from then on are parts of larger ones.

    The norm that the next layer begins with comes with the residual that this one ends with: `step.normed`.
    """

    def __init__(self, layer: Any, index: int, options: AttentionOptions, following: Any | None) -> None:
        """Only for a layer that `is_usual`, and for a layer `following` it that is so too."""
        attention, feed_forward = layer.self_attn, layer.mlp
        self._index, self._options = index, options
        self._first_norm = norm_of(layer.input_layernorm)
        self._second_norm = norm_of(layer.post_attention_layernorm)
        self._next_norm = norm_of(following.input_layernorm) if following is not None else None
        self._head_norms: HeadNorms | None = None
        if hasattr(attention, "q_norm"):
            self._head_norms = HeadNorms(
                attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.variance_epsilon
            )
        self._heads = Product([attention.q_proj, attention.k_proj, attention.v_proj])
        self._gates = Product([feed_forward.gate_proj, feed_forward.up_proj])
        self._mixed, self._down = Product([attention.o_proj]), Product([feed_forward.down_proj])

    def __call__(
        self, hidden_states: torch.Tensor, *_: Any, past_key_values: Any, position_embeddings: Any, **__: Any
    ) -> torch.Tensor:
        """As the layer's own `forward`, of a batch of one. Changes `hidden_states`."""
        step = past_key_values.step  # over the pool
        step.layer = self._index
        keys, values = step.memory.keys[self._index], step.memory.values[self._index]
        rotation = position_embeddings[0][0], position_embeddings[1][0]
        residual = hidden_states[0]
        normed = rms_norm(residual, *self._first_norm) if step.normed is None else step.normed
        heads = self._heads(normed)
        query = rotate_and_store(heads, rotation, self._head_norms, step.cells, keys, values)
        mixed = step.attend(query.transpose(0, 1)[None], self._options).flatten(1)
        normed = self._mixed.add_to(residual, mixed, self._second_norm)
        opened = silu_gate(self._gates(normed), residual.dtype)
        step.normed = self._down.add_to(residual, opened, self._next_norm)
        return hidden_states


class Product:
    """With the weights of some linear parts, which become views of one weight. The kind of kernel that computes it
    depends on the number of rows."""

    def __init__(self, parts: Sequence[nn.Linear] | Sequence[Int4Linear]) -> None:
        self._bias = _join_bias(parts)
        self._codes: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        if isinstance(parts[0], Int4Linear):
            self._codes = _join_codes([each for each in parts if isinstance(each, Int4Linear)])
        else:
            self._weight = _join_weights([each for each in parts if isinstance(each, nn.Linear)])

    def __call__(self, x: torch.Tensor) -> ProductParts:
        if self._codes is not None and len(x) <= FEW_INT4_ROWS:
            return int4_product(x, *self._codes, self._bias)
        if self._codes is None and len(x) <= FEW_ROWS:
            return product(x, self._weight, self._bias)
        return ProductParts(linear(x, self._whole(), self._bias)[None])

    def add_to(
        self, residual: torch.Tensor, x: torch.Tensor, norm: tuple[torch.Tensor, float] | None
    ) -> torch.Tensor | None:
        """Changes `residual`. Its norm, if one is wanted."""
        few = FEW_ROWS if self._codes is None else FEW_INT4_ROWS
        if norm is not None and (len(x) <= few or self._bias is not None):
            return add_norm(residual, self(x), *norm)
        if self._bias is not None:
            residual.add_(linear(x, self._whole(), self._bias))
        else:
            residual.addmm_(x, self._whole().t())
        return None if norm is None else rms_norm(residual, *norm)

    def _whole(self) -> torch.Tensor:
        return self._weight if self._codes is None else dequantise(*self._codes)


def fuse(layers: Sequence[nn.Module], options: Sequence[AttentionOptions]) -> list[FusedLayer] | None:
    """None unless all of them are usual; whether they compute the same is for `agree` to say."""
    if not layers or not all(is_usual(layer, each) for layer, each in zip(layers, options, strict=True)):
        return None
    if not all(_are_alike(linear_parts(layer)) for layer in layers):
        return None
    following = [*layers[1:], None]
    return [
        FusedLayer(layer, index, each, after)
        for index, (layer, each, after) in enumerate(zip(layers, options, following, strict=True))
    ]


def _are_alike(products: Sequence[nn.Module]) -> bool:
    """Whether one kernel can compute several of them."""
    if all(isinstance(each, Int4Linear) for each in products):
        groups = {(each.codes.device, each.group) for each in products if isinstance(each, Int4Linear)}
        return all(has_kernels(*each) for each in groups)
    return all(type(each) is nn.Linear for each in products)


def _join_weights(products: Sequence[nn.Linear]) -> torch.Tensor:
    if len(products) == 1:
        return products[0].weight.data
    weight = torch.cat([each.weight.data for each in products])
    for each, part in zip(products, weight.split(_outputs(products)), strict=True):
        each.weight.data = part
    return weight


def _join_codes(products: Sequence[Int4Linear]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    codes, outputs = torch.cat([each.codes for each in products]), _outputs(products)
    scales, zeros = (torch.cat([getattr(each, name) for each in products], dim=1) for name in ("scales", "zeros"))
    parts = zip(codes.split(outputs), scales.split(outputs, dim=1), zeros.split(outputs, dim=1), strict=True)
    for each, part in zip(products, parts, strict=True):
        each.codes, each.scales, each.zeros = part
    return codes, scales, zeros


def _join_bias(products: Sequence[nn.Linear] | Sequence[Int4Linear]) -> torch.Tensor | None:
    if all(each.bias is None for each in products):
        return None
    bias = torch.cat([_bias(each) for each in products])
    for each, part in zip(products, bias.split(_outputs(products)), strict=True):
        if each.bias is not None:
            each.bias.data = part
    return bias


def _outputs(products: Sequence[nn.Linear] | Sequence[Int4Linear]) -> list[int]:
    return [each.out_features for each in products]


def _bias(product: nn.Linear | Int4Linear) -> torch.Tensor:
    if product.bias is not None:
        return product.bias.data
    like = product.scales if isinstance(product, Int4Linear) else product.weight
    return like.new_zeros(product.out_features)


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
