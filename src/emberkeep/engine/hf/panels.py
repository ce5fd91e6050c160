"""Weights of a model on a CPU as panels, and the products with them.

A weight `[outputs, inputs]` lies as torch made it for one row at a time: a product of eight rows takes three times
as long as reading it, because the library first copies it into an order of its own. Panels are that order:

    weight   [outputs, inputs]
    panels   [outputs / 48, inputs, 48]     48 outputs side by side, or 32

A product is a batch of small ones, which read every weight once and copy nothing. There is no second copy, but of
an output that is tied to the embeddings. Weights that one part of a model applies to inputs of one width, such as
those for queries, keys and values, lie one after the other and can be one product.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from emberkeep.engine.hf.pool import Scratch

_WIDTHS = (48, 32)
"""The first one is 6 % faster for prompts."""
LEAST = 1 << 15
"""Weights, of a matrix that is worth it."""
_MANY_ROWS = 64
"""Results for so many are worth the look for memory that is there."""


class PanelLinear(nn.Module):
    """In place of an `nn.Linear`. Its weights are never changed."""

    def __init__(self, joint: torch.Tensor, first: int, count: int, bias: torch.Tensor | None) -> None:
        """Its panels are `count` of those in `joint`, from the `first` on."""
        super().__init__()
        self.joint, self.first = joint, first
        self.panels = nn.Parameter(joint[first : first + count], requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.in_features, self.out_features = joint.shape[1], count * joint.shape[2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        columns = torch.bmm(rows.expand(len(self.panels), *rows.shape), self.panels)
        result = columns.transpose(0, 1).reshape(*x.shape[:-1], self.out_features)
        return result if self.bias is None else result.add_(self.bias)

    @property
    def weight(self) -> torch.Tensor:
        """A copy of it, `[outputs, inputs]`."""
        return self.panels.transpose(1, 2).flatten(0, 1)


def pack(network: nn.Module, least: int = LEAST) -> None:
    """Replace linear parts of a network on a CPU that have `least` weights or more. Changes the network.

    Only where torch multiplies with MKL: other libraries compute batches one by one.
    """
    if not torch.backends.mkl.is_available():
        return
    for owner in list(network.modules()):
        alike: dict[tuple[int, bool], list[tuple[str, nn.Linear]]] = {}
        for name, part in owner.named_children():
            if _can_pack(part, least):
                alike.setdefault((part.in_features, part.bias is None), []).append((name, part))
        for found in alike.values():
            _replace(owner, found)


def _can_pack(part: Any, least: int) -> bool:
    return (
        type(part) is nn.Linear
        and part.weight.dtype == torch.float32
        and part.weight.device.type == "cpu"
        and any(part.out_features % width == 0 for width in _WIDTHS)
        and part.weight.numel() >= least
    )


def _replace(owner: nn.Module, found: Sequence[tuple[str, nn.Linear]]) -> None:
    width = next((w for w in _WIDTHS if all(part.out_features % w == 0 for _, part in found)), None)
    if width is None:
        for each in found:
            _replace(owner, [each])
        return
    counts = [part.out_features // width for _, part in found]
    joint, first = torch.empty((sum(counts), found[0][1].in_features, width)), 0
    for (name, part), count in zip(found, counts, strict=True):
        joint[first : first + count].copy_(part.weight.data.unflatten(0, (count, width)).transpose(1, 2))
        setattr(owner, name, PanelLinear(joint, first, count, None if part.bias is None else part.bias.data))
        first += count


def has_panels(network: nn.Module) -> bool:
    return any(isinstance(part, PanelLinear) for part in network.modules())


class PanelProduct:
    """One product with the weights of several linear parts: at once where their panels lie together."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = parts
        self._width = math.gcd(*(part.out_features for part in parts))
        self._panels = _join(parts)

    def __call__(self, x: torch.Tensor, scratch: Scratch, name: str = "product") -> torch.Tensor:
        """Its outputs for `[rows, inputs]`, some side by side: `[pieces, rows, width]`, valid until memory of that
        `name` is taken again."""
        if self._panels is None:
            whole = torch.cat([part(x) for part in self._parts], -1)
            return whole.unflatten(-1, (-1, self._width)).transpose(0, 1)
        (pieces, _, width), rows = self._panels.shape, x.shape[0]
        if rows < _MANY_ROWS:
            return torch.bmm(x.expand(pieces, -1, -1), self._panels)
        return torch.bmm(x.expand(pieces, -1, -1), self._panels, out=scratch.take(name, pieces, rows, width))

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, scratch: Scratch) -> None:
        """Changes `residual`, `[rows, outputs]`."""
        added = self(x, scratch, "sum")  # `x` may be a product
        residual.view(-1, *added.shape[::2]).transpose(0, 1).add_(added)


def _join(parts: Sequence[Any]) -> torch.Tensor | None:
    """Their panels as one tensor, if they lie one after the other and nothing is added to their outputs."""
    first = last = getattr(parts[0], "first", 0)
    for part in parts:
        if not isinstance(part, PanelLinear) or part.joint is not parts[0].joint or part.first != last:
            return None
        if part.bias is not None:
            return None
        last += len(part.panels)
    joint: torch.Tensor = parts[0].joint
    return joint[first:last]
