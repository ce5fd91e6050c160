"""Plain weights that are rounded to eight or four bits when they are loaded.

    int8   weight = code * scale             one scale for each output, codes from -127 to 127
    int4   weight = (code - zero) * scale    as AWQ has them, for every group of inputs (see `int4`)

Only the linear parts of layers are: embeddings and the output keep their bits, and so do the experts of mixtures,
which transformers holds as one tensor that its kernels read whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from emberkeep.engine.hf.int4 import Int4Linear, pack_codes
from emberkeep.engine.hf.rounding import int4_group, is_rounded
from emberkeep.errors import EngineError
from emberkeep.types.models import Quantization

_FEW_ROWS = 8
"""Up to so many, torch's product of eight bits on a CPU is faster than making the weight whole first."""


class Int8Linear(nn.Module):
    """In place of an `nn.Linear`. Its codes are never changed."""

    codes: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        self.register_buffer("bias", bias)
        self.out_features, self.in_features = codes.shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.numel() // self.in_features
        if rows > _FEW_ROWS or x.device.type != "cpu":
            return linear(x, self.dequantized(), self.bias)
        # Rows that are no multiple of 32 numbers it computes wrong: `is_rounded` has none.
        found: torch.Tensor = torch._weight_int8pack_mm(x.reshape(rows, -1).contiguous(), self.codes, self.scales)
        if self.bias is not None:
            found = found + self.bias
        return found.view(*x.shape[:-1], self.out_features)

    def dequantized(self) -> torch.Tensor:
        """The weight, `[outputs, inputs]`, in the dtype of the scales."""
        return self.codes.to(self.scales.dtype) * self.scales[:, None]

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def round_linear(
    weight: torch.Tensor, bias: torch.Tensor | None, kind: Quantization, dtype: torch.dtype
) -> Int8Linear | Int4Linear:
    """What stands in for a linear part with this weight, on the device that the weight is on."""
    kept = None if bias is None else bias.to(dtype)
    if kind is Quantization.INT4:
        return _round_int4(weight.float(), kept, dtype)
    wide = weight.float()
    # Codes are of the scales as they are kept: rounding these would be an error more.
    scales = _above_zero(wide.abs().amax(1) / 127, dtype)
    codes = (wide / scales.float()[:, None]).round().clamp(-127, 127).to(torch.int8)
    return Int8Linear(codes, scales, kept)


def _round_int4(weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> Int4Linear:
    groups = weight.unflatten(1, (-1, int4_group(weight.shape[1])))
    least, most = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = _above_zero((most - least) / 15, dtype)
    wide = scales.float()
    zeros = (-least / wide).round().clamp(0, 15)
    codes = (groups / wide[..., None] + zeros[..., None]).round().clamp(0, 15).to(torch.uint8)
    packed = pack_codes(codes.flatten(1), groups.shape[1])
    return Int4Linear(packed, scales.T.contiguous(), zeros.to(dtype).T.contiguous(), bias)


def _above_zero(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    kept = scales.to(dtype)
    return torch.where(kept > 0, kept, torch.finfo(dtype).tiny)


def round_layers(network: Any, kind: Quantization) -> None:
    """Replace the linear parts of its layers, one after the other; on the meta device, too. Changes the network.

    Raises EngineError for a network that has none.
    """
    found = _linear_parts(network)
    if not found:
        raise EngineError(f"This model has no weights that --quantization {kind} could round: leave it out.")
    for owner, name in found.values():
        part = getattr(owner, name)
        setattr(owner, name, round_linear(part.weight.data, part.bias, kind, part.weight.dtype))


def _linear_parts(network: Any) -> dict[int, tuple[nn.Module, str]]:
    """Each by the module that holds it and its name there: those of lists, which layers are, or are in."""
    lists = (module for module in network.modules() if isinstance(module, nn.ModuleList))
    return {
        id(part): (owner, name)
        for layers in lists
        for owner in layers.modules()
        for name, part in owner.named_children()
        if type(part) is nn.Linear and is_rounded(part.out_features, part.in_features)
    }


def rounded_count(network: nn.Module) -> int:
    """How many weights there are beside the network's parameters."""
    parts = _rounded(network)
    return sum(p.out_features * p.in_features + (0 if p.bias is None else p.bias.numel()) for p in parts)


def weights_bytes(network: nn.Module) -> int:
    buffers = (buffer for part in _rounded(network) for buffer in part.buffers(recurse=False))
    return sum(tensor.numel() * tensor.element_size() for tensor in (*network.parameters(), *buffers))


def _rounded(network: nn.Module) -> Iterator[Int8Linear | Int4Linear]:
    return (part for part in network.modules() if isinstance(part, Int8Linear | Int4Linear))
