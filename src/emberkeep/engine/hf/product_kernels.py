"""Products of few rows with a weight, which take as long as reading the weight does.

A weight is read by many programs, each of which has some of its outputs and some of its inputs; what they find
is left as parts, for whatever comes next to sum up. A library's product of few rows takes a fifth longer, and
needs a kernel more to sum up.

    x [rows, inputs]      weight [outputs, inputs], or codes of four bits, two to a byte (see `quantize`)
    parts [splits, rows, outputs], in float32
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from emberkeep.values import dataclass

_LEAST_CAPABILITY = (9, 0)


@triton.jit
def wait_for_previous(IS_EARLY: tl.constexpr):
    """Before anything is read or written that the kernel before may write or read: in every program, first."""
    if IS_EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@cache
def early(device: torch.device) -> dict[str, Any]:
    """How a kernel that calls `wait_for_previous` is launched."""
    if not _is_possible(device):
        return {"IS_EARLY": False}
    return {"IS_EARLY": True, "launch_pdl": True}


def _is_possible(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None or os.environ.get("TRITON_INTERPRET") == "1":
        return False
    has_waits = hasattr(getattr(tl.extra, "cuda", None), "gdc_wait")
    return has_waits and torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY


FEW_ROWS = 16
"""Up to so many, a product with a plain weight is faster here than in a library."""
FEW_INT4_ROWS = 64
_OUTPUTS, _INPUTS = 64, 64
"""A program has so many at once."""
_ROW_INPUTS = 1024
_MANY_OUTPUTS = 8192
_PER_PROCESSOR = 2
"""Programs that a multiprocessor should have at least."""
_MOST_SPLITS, _MOST_INT4_SPLITS = 4, 8
_IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True, slots=True)
class ProductParts:
    """A product that is not summed up yet."""

    parts: torch.Tensor
    """`[splits, rows, outputs]`, contiguous, in float32 or in the model's dtype."""
    bias: torch.Tensor | None = None
    """Still to be added."""

    @property
    def rows(self) -> int:
        return self.parts.shape[1]

    @property
    def outputs(self) -> int:
        return self.parts.shape[2]


@triton.jit
def load_sum(x_ptr, bias_ptr, place, at, mask, part, dtype, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr):
    """The numbers at `place` of a product's parts, `part` apart, with its bias at `at`: rounded as the product."""
    total = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(x_ptr + split * part + place, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias_ptr + at, mask=mask, other=0.0).to(tl.float32)
    return total.to(dtype).to(tl.float32)


# ── plain weights ──


@triton.jit
def _rows_kernel(
    x_ptr,
    weight_ptr,
    part_ptr,
    rows,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SPLIT: tl.constexpr,
    PRODUCTS: tl.constexpr,
    EACH: tl.constexpr,
    ROWS: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    wait_for_previous(IS_EARLY)
    split = tl.program_id(1)
    product = tl.program_id(0) * PRODUCTS + tl.arange(0, PRODUCTS)
    row = tl.arange(0, ROWS)
    is_product, is_row = product < OUTPUTS, row < rows
    total = tl.zeros([PRODUCTS, ROWS], tl.float32)
    for begin in range(split * SPLIT, split * SPLIT + SPLIT, EACH):
        at = begin + tl.arange(0, EACH)
        is_there = at < INPUTS
        weight = tl.load(
            weight_ptr + product[:, None].to(tl.int64) * INPUTS + at[None, :],
            mask=is_product[:, None] & is_there[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        x = tl.load(
            x_ptr + row[None, :] * INPUTS + at[:, None], mask=is_row[None, :] & is_there[:, None], other=0.0
        )
        total = tl.dot(weight, x, total, input_precision="ieee")
    place = split * rows * OUTPUTS + row[None, :] * OUTPUTS + product[:, None]
    tl.store(part_ptr + place, total, mask=is_row[None, :] & is_product[:, None])


@triton.jit
def _row_kernel(
    x_ptr,
    weight_ptr,
    part_ptr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    PRODUCTS: tl.constexpr,
    EACH: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    wait_for_previous(IS_EARLY)
    product = tl.program_id(0) * PRODUCTS + tl.arange(0, PRODUCTS)
    is_product = product < OUTPUTS
    total = tl.zeros([PRODUCTS, EACH], tl.float32)
    for begin in range(0, INPUTS, EACH):
        at = begin + tl.arange(0, EACH)
        is_there = at < INPUTS
        weight = tl.load(
            weight_ptr + product[:, None].to(tl.int64) * INPUTS + at[None, :],
            mask=is_product[:, None] & is_there[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        x = tl.load(x_ptr + at, mask=is_there, other=0.0).to(tl.float32)
        total += weight.to(tl.float32) * x[None, :]
    tl.store(part_ptr + product, tl.sum(total, 1), mask=is_product)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> ProductParts:
    """`x @ weight.T` of at most `FEW_ROWS` rows; everything is contiguous."""
    (rows, inputs), outputs = x.shape, len(weight)
    if rows == 1:
        parts = x.new_empty((1, 1, outputs), dtype=torch.float32)
        each = min(_ROW_INPUTS, triton.next_power_of_2(inputs))
        wide = 4 if outputs > _MANY_OUTPUTS else 1
        _row_kernel[(triton.cdiv(outputs, wide),)](
            x,
            weight,
            parts,
            OUTPUTS=outputs,
            INPUTS=inputs,
            PRODUCTS=wide,
            EACH=each,
            num_warps=4,
            num_stages=3,
            **early(x.device),
        )
        return ProductParts(parts, bias)
    steps = min(triton.cdiv(inputs, _INPUTS), _MOST_SPLITS)
    splits = _splits(triton.cdiv(outputs, _OUTPUTS), steps, x.device)
    parts = x.new_empty((splits, rows, outputs), dtype=torch.float32)
    _rows_kernel[(triton.cdiv(outputs, _OUTPUTS), splits)](
        x,
        weight,
        parts,
        rows,
        OUTPUTS=outputs,
        INPUTS=inputs,
        SPLIT=triton.cdiv(triton.cdiv(inputs, _INPUTS), splits) * _INPUTS,
        PRODUCTS=_OUTPUTS,
        EACH=_INPUTS,
        ROWS=FEW_ROWS,
        num_warps=4,
        num_stages=6 if x.dtype.itemsize == 2 else 3,
        **early(x.device),
    )
    return ProductParts(parts, bias)


def _splits(programs: int, most: int, device: torch.device) -> int:
    return max(min(triton.cdiv(_PER_PROCESSOR * _processors(device), programs), most), 1)


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


# ── weights in four bits ──


@triton.jit
def _numbers(codes, DTYPE: tl.constexpr, IS_ASM: tl.constexpr):
    """The numbers of the lower and the upper four bits of every byte, plus 128.

    A number below 16 that is written into the low bits of 128 as bfloat16 has it makes the sum of both: converting
    every one of them would take longer than reading them.
    """
    if IS_ASM:
        low, high = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 low, high;
            and.b32 low, $4, 0x0F0F0F0F;
            shr.u32 high, $4, 4;
            and.b32 high, high, 0x0F0F0F0F;
            prmt.b32 $0, low, 0x43434343, 0x4140;
            prmt.b32 $1, low, 0x43434343, 0x4342;
            prmt.b32 $2, high, 0x43434343, 0x4140;
            prmt.b32 $3, high, 0x43434343, 0x4342;
            }
            """,
            "=r,=r,=r,=r,r",
            [codes],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        low, high = ((codes & 15) + 128).to(DTYPE), ((codes >> 4) + 128).to(DTYPE)
    return low, high


@triton.jit
def _int4_kernel(
    x_ptr,
    code_ptr,
    scale_ptr,
    zero_ptr,
    part_ptr,
    rows,
    scale_row,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    SPLIT: tl.constexpr,
    PRODUCTS: tl.constexpr,
    ROWS: tl.constexpr,
    IS_ASM: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    wait_for_previous(IS_EARLY)
    split = tl.program_id(1)
    product = tl.program_id(0) * PRODUCTS + tl.arange(0, PRODUCTS)
    half: tl.constexpr = GROUP // 2
    row, at = tl.arange(0, ROWS), tl.arange(0, half)
    is_product, is_row = product < OUTPUTS, row < rows
    dtype = x_ptr.dtype.element_ty
    total = tl.zeros([PRODUCTS, ROWS], tl.float32)
    for group in range(split * SPLIT, min(split * SPLIT + SPLIT, INPUTS // GROUP)):
        codes = tl.load(
            code_ptr + product[:, None].to(tl.int64) * (INPUTS // 2) + group * half + at[None, :],
            mask=is_product[:, None],
            other=0,
            eviction_policy="evict_first",
        )
        scale = tl.load(scale_ptr + group * scale_row + product, mask=is_product, other=0.0).to(tl.float32)
        zero = tl.load(zero_ptr + group * scale_row + product, mask=is_product, other=0.0).to(tl.float32)
        x = x_ptr + row[None, :] * INPUTS + group * GROUP + at[:, None]
        first = tl.load(x, mask=is_row[None, :], other=0.0)
        second = tl.load(x + half, mask=is_row[None, :], other=0.0)
        low, high = _numbers(codes, dtype, IS_ASM)
        origin = (zero + 128).to(dtype)[:, None]  # differences of whole numbers as small as these are exact
        found = tl.dot(low - origin, first, input_precision="ieee")
        found = tl.dot(high - origin, second, found, input_precision="ieee")
        total += found * scale[:, None]
    place = split * rows * OUTPUTS + row[None, :] * OUTPUTS + product[:, None]
    tl.store(part_ptr + place, total, mask=is_row[None, :] & is_product[:, None])


def int4_product(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bias: torch.Tensor | None
) -> ProductParts:
    """As `product`, of at most `FEW_INT4_ROWS` rows. `scales` and `zeros` have one stride: `[groups, outputs]`."""
    (rows, inputs), outputs, groups = x.shape, len(codes), len(scales)
    splits = _splits(triton.cdiv(outputs, _OUTPUTS), min(groups, _MOST_INT4_SPLITS), x.device)
    parts = x.new_empty((splits, rows, outputs), dtype=torch.float32)
    _int4_kernel[(triton.cdiv(outputs, _OUTPUTS), splits)](
        x,
        codes,
        scales,
        zeros,
        parts,
        rows,
        scales.stride(0),
        OUTPUTS=outputs,
        INPUTS=inputs,
        GROUP=inputs // groups,
        SPLIT=triton.cdiv(groups, splits),
        PRODUCTS=_OUTPUTS,
        ROWS=max(triton.next_power_of_2(rows), 16),
        IS_ASM=_is_asm(x),
        num_warps=4,
        num_stages=3,
        **early(x.device),
    )
    return ProductParts(parts, bias)


def _is_asm(x: torch.Tensor) -> bool:
    return x.dtype == torch.bfloat16 and torch.version.hip is None and not _IS_INTERPRETED


@triton.jit
def _dequantise_kernel(
    code_ptr,
    scale_ptr,
    zero_ptr,
    weight_ptr,
    scale_row,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    PRODUCTS: tl.constexpr,
    IS_ASM: tl.constexpr,
):
    group = tl.program_id(1)
    product = tl.program_id(0) * PRODUCTS + tl.arange(0, PRODUCTS)
    is_product = product < OUTPUTS
    half: tl.constexpr = GROUP // 2
    at = tl.arange(0, half)
    place = product[:, None].to(tl.int64) * (INPUTS // 2) + group * half + at[None, :]
    codes = tl.load(code_ptr + place, mask=is_product[:, None], other=0)
    scale = tl.load(scale_ptr + group * scale_row + product, mask=is_product, other=0.0).to(tl.float32)
    zero = tl.load(zero_ptr + group * scale_row + product, mask=is_product, other=0.0).to(tl.float32)
    dtype = weight_ptr.dtype.element_ty
    low, high = _numbers(codes, dtype, IS_ASM)
    target = weight_ptr + product[:, None].to(tl.int64) * INPUTS + group * GROUP + at[None, :]
    origin, scale = zero[:, None] + 128, scale[:, None]
    tl.store(target, ((low.to(tl.float32) - origin) * scale).to(dtype), mask=is_product[:, None])
    tl.store(target + half, ((high.to(tl.float32) - origin) * scale).to(dtype), mask=is_product[:, None])


def dequantise(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """The weight, `[outputs, inputs]`, in the dtype of its scales."""
    (outputs, half), groups = codes.shape, len(scales)
    weight = scales.new_empty((outputs, 2 * half))
    _dequantise_kernel[(triton.cdiv(outputs, _OUTPUTS), groups)](
        codes,
        scales,
        zeros,
        weight,
        scales.stride(0),
        OUTPUTS=outputs,
        INPUTS=2 * half,
        GROUP=2 * half // groups,
        PRODUCTS=_OUTPUTS,
        IS_ASM=_is_asm(weight),
        num_warps=4,
    )
    return weight


# ── summing up ──


@triton.jit
def _join_kernel(
    x_ptr,
    bias_ptr,
    out_ptr,
    part,
    OUTPUTS: tl.constexpr,
    ELEMENTS: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    wait_for_previous(IS_EARLY)
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    dtype = out_ptr.dtype.element_ty
    place = row * OUTPUTS + at
    total = load_sum(x_ptr, bias_ptr, place, at, at < OUTPUTS, part, dtype, SPLITS, HAS_BIAS)
    tl.store(out_ptr + place, total.to(dtype), mask=at < OUTPUTS)


def join(given: ProductParts, dtype: torch.dtype) -> torch.Tensor:
    """`[rows, outputs]`."""
    out = given.parts.new_empty((given.rows, given.outputs), dtype=dtype)
    _join_kernel[(given.rows, triton.cdiv(given.outputs, _ROW_INPUTS))](
        given.parts,
        given.parts if given.bias is None else given.bias,
        out,
        out.numel(),
        OUTPUTS=given.outputs,
        ELEMENTS=_ROW_INPUTS,
        SPLITS=len(given.parts),
        HAS_BIAS=given.bias is not None,
        **early(out.device),
    )
    return out
