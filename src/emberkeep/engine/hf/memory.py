"""The tensors behind the pool: every layer's keys and values, by cell.

Each layer has two streams, its keys and its values: rows of `[heads, width]` by cell. Streams of one shape are one
tensor, so that moving a range in or out is one operation for all layers of a usual model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from emberkeep.engine.hf.pool import BLOCK, Copy


@dataclass(frozen=True, slots=True)
class StreamShape:
    """Of one token: a layer's keys or its values."""

    heads: int
    width: int

    @property
    def channels(self) -> int:
        return self.heads * self.width


@dataclass(frozen=True, slots=True)
class LayerShape:
    keys: StreamShape
    values: StreamShape


@dataclass(frozen=True, slots=True)
class Group:
    """Streams of one shape, in the order in which they lie in their tensor: (layer, is keys)."""

    shape: StreamShape
    streams: tuple[tuple[int, bool], ...]


def group(layers: Sequence[LayerShape]) -> tuple[Group, ...]:
    """Keys of all layers first, then values: what is quantised alike lies together."""
    found: dict[StreamShape, list[tuple[int, bool]]] = {}
    for is_keys in (True, False):
        for index, layer in enumerate(layers):
            found.setdefault(layer.keys if is_keys else layer.values, []).append((index, is_keys))
    return tuple(Group(shape, tuple(streams)) for shape, streams in found.items())


class KvMemory:
    """Belongs to the engine's thread. `cells` rows for every stream, allocated once."""

    def __init__(self, layers: Sequence[LayerShape], cells: int, dtype: torch.dtype, device: torch.device) -> None:
        self.groups = group(layers)
        self.dtype = dtype
        self.device = device
        self._tensors = [
            torch.zeros((len(g.streams), cells, g.shape.heads, g.shape.width), dtype=dtype, device=device)
            for g in self.groups
        ]
        places = {
            stream: tensor[index]
            for g, tensor in zip(self.groups, self._tensors, strict=True)
            for index, stream in enumerate(g.streams)
        }
        self.keys = [places[index, True] for index in range(len(layers))]
        """Per layer, `[cells, heads, width]`."""
        self.values = [places[index, False] for index in range(len(layers))]

    @property
    def bytes_per_token(self) -> int:
        return sum(len(g.streams) * g.shape.channels for g in self.groups) * self.dtype.itemsize

    @property
    def bytes(self) -> int:
        return sum(tensor.numel() for tensor in self._tensors) * self.dtype.itemsize

    def copy(self, copies: Sequence[Copy]) -> None:
        for copy in copies:
            source, target = copy.source * BLOCK, copy.target * BLOCK
            for tensor in self._tensors:
                tensor[:, target : target + BLOCK] = tensor[:, source : source + BLOCK]

    def read(self, cells: torch.Tensor | slice) -> list[torch.Tensor]:
        """One `[streams, tokens, heads, width]` per group: views of what lies together, else copies."""
        if isinstance(cells, slice):
            return [tensor[:, cells] for tensor in self._tensors]
        return [tensor.index_select(1, cells) for tensor in self._tensors]

    def write(self, cells: torch.Tensor | slice, rows: Sequence[torch.Tensor]) -> None:
        for tensor, given in zip(self._tensors, rows, strict=True):
            if isinstance(cells, slice):
                tensor[:, cells].copy_(given)
            else:
                tensor.index_copy_(1, cells, given)
