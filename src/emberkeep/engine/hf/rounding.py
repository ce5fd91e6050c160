"""Which weights are rounded to fewer bits when they are loaded, and how large they are then. Without torch."""

from __future__ import annotations

from emberkeep.types.models import Quantization

_GROUPS = (64, 32)
"""Inputs that share a scale in four bits, the first that divides a row; the products' kernels know both."""
_LEAST = 32
"""Rows and columns of a weight that is worth it; and what kernels want a row to be a multiple of."""


def is_rounded(outputs: int, inputs: int) -> bool:
    """Of a linear part's weight in a layer."""
    return min(outputs, inputs) >= _LEAST and inputs % _LEAST == 0


def int4_group(inputs: int) -> int:
    """Of a row that `is_rounded`."""
    return next(group for group in _GROUPS if inputs % group == 0)


def rounded_bytes(kind: Quantization, outputs: int, inputs: int, width: int) -> int:
    """Of codes, scales and zero points, where numbers with a fraction have `width` bytes."""
    match kind:
        case Quantization.INT8:
            return outputs * (inputs + width)
        case Quantization.INT4:
            return outputs * (inputs // 2 + 2 * width * (inputs // int4_group(inputs)))
    return outputs * inputs * width
