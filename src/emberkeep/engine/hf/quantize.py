"""Weights in eight or four bits, and the products with them: as AWQ checkpoints have them, or rounded when they
are loaded.

    int8   weight = code * scale             one scale for each output, codes from -127 to 127
    int4   weight = (code - zero) * scale    for every group of inputs

An AWQ checkpoint holds, for each matrix, codes of four bits, eight to an int32. There are two layouts of it:

    gemm  codes [inputs, outputs / 8], in an order of their own; zeros and scales by [group, output]
    gemv  codes [outputs, inputs / 8]; zeros and scales by [output, group], padded

Here there is one: codes by [output, inputs / 2], where a byte of a group of 128 inputs holds number n and
number n + 64 of them, so that both halves of a group are read as they lie; scales and zeros by [group, output].

Only the linear parts of layers are rounded: embeddings and the output keep their bits, and so do the experts of
mixtures, which transformers holds as one tensor that its kernels read whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from emberkeep.engine.hf.residency import int4_group, is_rounded
from emberkeep.errors import EngineError, ModelBroken
from emberkeep.types.models import Quantization
from emberkeep.values import dataclass

_PER_WORD = 8
_GEMM_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight outputs the lowest four bits of a word belong to, the next four, ..."""
_TENSORS = ("qweight", "qzeros", "scales")


@dataclass(frozen=True, slots=True)
class AwqFormat:
    group: int
    """Inputs that share a scale; -1: all."""
    is_gemv: bool
    has_zeros: bool = True

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> AwqFormat:
        """From a configuration's `quantization_config`. Raises ModelBroken."""
        bits, version = fields.get("bits", fields.get("w_bit", 4)), str(fields.get("version", "gemm")).lower()
        if bits != 4 or version not in ("gemm", "gemv"):
            raise ModelBroken(
                f"This model's weights are in AWQ's layout {version} with {bits} bits, and only gemm and gemv "
                "with 4 are known here: choose another file of it."
            )
        group = int(fields.get("group_size", fields.get("q_group_size", 128)))
        return cls(group, version == "gemv", bool(fields.get("zero_point", True)))


class Int4Linear(nn.Module):
    """In place of an `nn.Linear`. Its codes are never changed."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        super().__init__()
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        self.register_buffer("zeros", zeros)
        self.register_buffer("bias", bias)
        self.out_features, self.in_features = len(codes), 2 * codes.shape[1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not has_kernels(self.codes.device, self.group):
            return linear(x, self.dequantized(), self.bias)
        # Needs Triton, which comes with torch for CUDA only.
        from emberkeep.engine.hf.product_kernels import FEW_INT4_ROWS, dequantise, int4_product, join

        rows = x.flatten(0, -2)
        if len(rows) > FEW_INT4_ROWS:
            return linear(x, dequantise(self.codes, self.scales, self.zeros), self.bias)
        found = int4_product(rows.contiguous(), self.codes, self.scales, self.zeros, self.bias)
        return join(found, x.dtype).view(*x.shape[:-1], self.out_features)

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.in_features // len(self.scales)

    def dequantized(self) -> torch.Tensor:
        """The weight as it was, `[outputs, inputs]`, in the dtype of the scales."""
        pairs = self.codes.unflatten(1, (len(self.scales), -1))
        numbers = torch.cat([pairs & 15, pairs >> 4], dim=-1).to(self.scales.dtype)
        return ((numbers - self.zeros.T[..., None]) * self.scales.T[..., None]).flatten(1)


_KERNEL_GROUPS = (32, 64, 128, 256)


def has_kernels(device: torch.device, group: int) -> bool:
    """Whether products with such weights have kernels of their own; else they are made whole for every product."""
    return group in _KERNEL_GROUPS and _runs_kernels(device)


@cache
def _runs_kernels(device: torch.device) -> bool:
    """Before Ampere, devices multiply no bfloat16."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def from_awq(
    tensors: Mapping[str, torch.Tensor], bias: torch.Tensor | None, form: AwqFormat, dtype: torch.dtype
) -> Int4Linear:
    """Make it of one matrix's `qweight`, `qzeros` and `scales`, on their device. Raises ModelBroken."""
    codes, zeros, scales = (tensors[name] for name in _TENSORS)
    if form.is_gemv:
        numbers = _unpack(codes, range(_PER_WORD))
        count = 1 if form.group == -1 else numbers.shape[1] // form.group
        zero_points, scales = _unpack(zeros, range(_PER_WORD))[:, :count], scales[:, :count]
    else:
        numbers, zero_points = (_unpack(words, _GEMM_ORDER).T for words in (codes, zeros))
        scales = scales.T
    # Numbers are by output and input now, the others by output and group.
    outputs, inputs = numbers.shape
    groups = scales.shape[1]
    if scales.shape != zero_points.shape or len(scales) != outputs or inputs % groups or inputs // groups % 2:
        raise ModelBroken("The shapes of this model's quantised weights do not belong together: pull it again.")
    if not form.has_zeros:
        zero_points = torch.full_like(zero_points, 8)
    packed = pack_codes(numbers, groups)
    scales, zero_points = (part.T.to(dtype).contiguous() for part in (scales, zero_points))
    return Int4Linear(packed, scales, zero_points, bias if bias is None else bias.to(dtype))


def pack_codes(numbers: torch.Tensor, groups: int) -> torch.Tensor:
    """`[outputs, inputs]` numbers below 16, two to a byte, in rows of so many groups."""
    halves = numbers.unflatten(1, (groups, 2, -1))
    return (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1).contiguous()


def _unpack(words: torch.Tensor, order: Any) -> torch.Tensor:
    """`[rows, words]` of int32 as `[rows, 8 * words]` numbers below 16."""
    places = [list(order).index(number) for number in range(_PER_WORD)]
    parts = [(words >> 4 * place & 15).to(torch.uint8) for place in places]
    return torch.stack(parts, dim=-1).flatten(1)


def int4_count(network: nn.Module) -> int:
    """How many weights are in four bits."""
    return sum(2 * part.codes.numel() for part in network.modules() if isinstance(part, Int4Linear))


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
