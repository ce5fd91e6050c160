"""A fixed pool of blocks of token cells, shared by sequences, copied only on write.

    cells    0 ........ 31 | 32 ....... 63 | 64 ....... 95 | ...
    blocks        0        |       1       |       2       |

A sequence is a table of blocks and a length. Sequences that share a prefix share its blocks; a block that only
one sequence has is written in place, any other is copied first. `BlockPool` knows nothing about tensors: `Copy`
says which cells `KvMemory` has to copy.

`KvMemory` holds every layer's keys and values, by cell. Each layer has two streams, its keys and its values:
rows of `[heads, width]` by cell. Streams of one shape are one tensor, so that moving a range in or out is one
operation for all layers of a usual model.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import MutableSequence, Sequence
from dataclasses import field

import numpy as np
import numpy.typing as npt
import torch

from emberkeep.values import dataclass

BLOCK = 32
"""Tokens: small enough that a branch copies little, large enough that tables stay short."""

Cells = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Copy:
    """A block that must be copied before the next write to `target`."""

    source: int
    target: int


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence, of which the first `length` cells are in use."""

    blocks: MutableSequence[int] = field(default_factory=lambda: array("i"))
    """An array: NumPy reads it without looking at every number."""
    length: int = 0
    shown: int = 0
    """The device knows so many of its blocks (`DeviceTables`)."""
    is_rewritten: bool = True
    """What the device knows of it is not only short of some."""

    def hide(self, first: int) -> None:
        """The blocks from this one on are others now."""
        if first < self.shown:
            self.shown, self.is_rewritten = first, True

    def cells(self, start: int, end: int) -> Cells:
        """Where the positions [start, end) are."""
        positions, first = np.arange(start, end), start // BLOCK
        blocks = np.array(self.blocks_of(start, end), np.int64)
        return blocks[positions // BLOCK - first] * BLOCK + positions % BLOCK

    def blocks_of(self, start: int, end: int) -> Sequence[int]:
        return self.blocks[start // BLOCK : -(-end // BLOCK)]

    def place(self, start: int, end: int) -> slice | Cells:
        """Where the positions [start, end) are: as a slice, if these lie one after the other."""
        begin = self.run(start, end)
        return self.cells(start, end) if begin is None else slice(begin, begin + end - start)

    def run(self, start: int, end: int) -> int | None:
        """The first cell of [start, end), if these lie one after the other."""
        first, last = start // BLOCK, (end - 1) // BLOCK
        begin = self.blocks[first]
        if self.blocks[last] - begin != last - first:
            return None
        if (np.diff(np.array(self.blocks[first : last + 1])) != 1).any():
            return None
        return begin * BLOCK + start % BLOCK


class BlockPool:
    """Who uses which block. No sequence owns the first one: what must be written somewhere goes there."""

    def __init__(self, cells: int) -> None:
        self.blocks = -(-cells // BLOCK)
        self._users = np.zeros(1 + self.blocks, np.int32)
        self._users[0] = 1
        self._counts = memoryview(self._users)
        """The same, for a look at one of them."""
        self.free = self.blocks
        self.copied = 0
        """Blocks copied because a sequence wrote into one that it shared."""

    @property
    def total_cells(self) -> int:
        """Including the block that no sequence owns."""
        return (self.blocks + 1) * BLOCK

    def count_needed(self, table: BlockTable, end: int) -> int:
        """Blocks that `grow` would take."""
        more = max(-(-end // BLOCK) - len(table.blocks), 0)
        return more + self._writes_into_shared(table, end)

    def grow(self, table: BlockTable, end: int) -> list[Copy] | None:
        """Make room for [table.length, end) that is the table's own; None, and nothing changed, without room."""
        if self.count_needed(table, end) > self.free:
            return None
        copies = []
        if self._writes_into_shared(table, end):
            shared = table.blocks[-1]
            (own,) = self._take(1, near=shared)
            copies.append(Copy(shared, own))
            self._users[shared] -= 1
            self.copied += 1
            table.blocks[-1] = own
            table.hide(len(table.blocks) - 1)
        more = -(-end // BLOCK) - len(table.blocks)
        if more > 0:
            table.blocks.extend(self._take(more, near=table.blocks[-1] if table.blocks else 0))
        table.length = end
        return copies

    def regrow(self, table: BlockTable, start: int, end: int) -> list[Copy] | None:
        """Trim the table to `start`, and grow it to `end`; None, and nothing changed, without room."""
        kept = -(-start // BLOCK)
        freed = int((self._users[_indices(table.blocks[kept:])] == 1).sum())
        if self.count_needed(BlockTable(table.blocks[:kept], start), end) > self.free + freed:
            return None
        self.trim(table, start)
        return self.grow(table, end)

    def grow_all(self, tables: Sequence[BlockTable], ends: Sequence[int]) -> list[Copy] | None:
        """As `grow` for each of these; None, and nothing changed, where there is no room for all."""
        more = [(t, end) for t, end in zip(tables, ends, strict=True) if not self._has(t, end)]
        if more and sum(self.count_needed(table, end) for table, end in more) > self.free:
            return None
        copies: list[Copy] = []
        for table, end in more:
            copies += self.grow(table, end) or ()
        for table, end in zip(tables, ends, strict=True):
            table.length = end
        return copies

    def reserve(self, tables: Sequence[BlockTable], counts: Sequence[int], longest: int) -> list[Copy] | None:
        """As `grow_all`, for so many more cells of each, which are not in use yet, up to `longest`."""
        lengths = [table.length for table in tables]
        ends = [length + more for length, more in zip(lengths, counts, strict=True)]
        copies = self.grow_all(tables, ends) if max(ends) <= longest else None
        if copies is not None:
            for table, length in zip(tables, lengths, strict=True):
                table.length = length
        return copies

    def _has(self, table: BlockTable, end: int) -> bool:
        """Whether what is asked for, mostly one more cell, is there already."""
        blocks = table.blocks
        return end <= len(blocks) * BLOCK and (not table.length % BLOCK or self._counts[blocks[-1]] == 1)

    def share(self, source: BlockTable, end: int) -> BlockTable:
        """A new table that begins with the first `end` cells of `source`. Nothing is copied."""
        blocks = source.blocks[: -(-end // BLOCK)]
        self._users[_indices(blocks)] += 1
        return BlockTable(blocks, end)

    def trim(self, table: BlockTable, length: int) -> None:
        """Give back what is beyond `length` cells."""
        keep = -(-length // BLOCK)
        if len(table.blocks) > keep:
            blocks = _indices(table.blocks[keep:])
            self._users[blocks] -= 1
            self.free += int((self._users[blocks] == 0).sum())
            del table.blocks[keep:]
            table.hide(keep)
        table.length = min(table.length, length)

    def stats(self) -> dict[str, int]:
        """What sharing saves is `references - used_blocks`: blocks that sequences use count once for each."""
        users = self._users[1:]
        return {
            "block_tokens": BLOCK,
            "blocks": self.blocks,
            "used_blocks": self.blocks - self.free,
            "shared_blocks": int((users > 1).sum()),
            "references": int(users.sum()),
            "copied_blocks": self.copied,
        }

    def _writes_into_shared(self, table: BlockTable, end: int) -> bool:
        is_partial = table.length % BLOCK != 0 and end > table.length
        return is_partial and self._counts[table.blocks[-1]] > 1

    def _take(self, count: int, near: int) -> list[int]:
        """Free blocks, after `near` if they are free there: what lies together is read without gathering."""
        following = range(near + 1, near + 1 + count)
        ends_before = following.stop <= len(self._users)
        is_free = near and ends_before and not self._users[near + 1 : following.stop].any()
        taken = list(following) if is_free else self._from_largest_gap(count)
        self._users[_indices(taken)] = 1
        self.free -= count
        return taken

    def _from_largest_gap(self, count: int) -> list[int]:
        """`count` free blocks: from the middle of the largest gap, so that its neighbours can grow, or any."""
        free = np.flatnonzero(self._users == 0)
        borders = np.flatnonzero(np.diff(free) > 1) + 1  # of gaps
        starts, ends = np.r_[0, borders], np.r_[borders, len(free)]
        widest = int((ends - starts).argmax())
        largest = free[starts[widest] : ends[widest]]
        begin = 0 if largest[0] == 1 else (len(largest) - count) // 2
        blocks = free[:count] if len(largest) < count else largest[begin : begin + count]
        taken: list[int] = blocks.tolist()
        return taken


def _indices(blocks: Sequence[int]) -> npt.NDArray[np.intp]:
    return np.array(blocks, np.intp)


@dataclass(frozen=True, slots=True)
class StreamShape:
    """What a layer's keys, or its values, of one token consist of."""

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
class StreamGroup:
    """Streams of one shape, in the order in which they lie in their tensor: (layer, is keys)."""

    shape: StreamShape
    streams: tuple[tuple[int, bool], ...]


def group_streams(layers: Sequence[LayerShape]) -> tuple[StreamGroup, ...]:
    """Keys of all layers first, then values: what is quantised alike lies together."""
    found: dict[StreamShape, list[tuple[int, bool]]] = {}
    for is_keys in (True, False):
        for index, layer in enumerate(layers):
            found.setdefault(layer.keys if is_keys else layer.values, []).append((index, is_keys))
    return tuple(StreamGroup(shape, tuple(streams)) for shape, streams in found.items())


class Scratch:
    """Memory that is used again and again: fresh pages may take longer than what is computed in them."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._parts: dict[str, torch.Tensor] = {}
        self._dtype, self._device = dtype, device

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Contiguous, with anything in it; what was taken by that name before is no longer valid."""
        size = math.prod(shape)
        part = self._parts.get(name)
        if part is None or len(part) < size:
            part = self._parts[name] = torch.empty(size, dtype=self._dtype, device=self._device)
        return part[:size].view(shape)


class KvMemory:
    """Belongs to the engine's thread. `cells` rows for every stream, allocated once."""

    def __init__(self, layers: Sequence[LayerShape], cells: int, dtype: torch.dtype, device: torch.device) -> None:
        self.groups = group_streams(layers)
        self.dtype = dtype
        self.device = device
        self.scratch = Scratch(dtype, device)
        self._tensors = [
            torch.zeros((len(g.streams), cells, g.shape.heads, g.shape.width), dtype=dtype, device=device)
            for g in self.groups
        ]
        tensors = {
            stream: tensor[index]
            for g, tensor in zip(self.groups, self._tensors, strict=True)
            for index, stream in enumerate(g.streams)
        }
        self.keys = [tensors[index, True] for index in range(len(layers))]
        """Per layer, `[cells, heads, width]`."""
        self.values = [tensors[index, False] for index in range(len(layers))]

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
        """One `[streams, tokens, heads, width]` per group_streams: views of what lies together, else copies."""
        if isinstance(cells, slice):
            return [tensor[:, cells] for tensor in self._tensors]
        return [tensor.index_select(1, cells) for tensor in self._tensors]

    def read_ranges(self, cells: torch.Tensor | slice, rows: Sequence[torch.Tensor]) -> None:
        """Copies of several ranges of one length, in memory that is there:
        `[ranges, streams, tokens, heads, width]`."""
        for given, target in zip(self.read(cells), rows, strict=True):
            target.transpose(0, 1).copy_(given.unflatten(1, target.shape[:3:2]))

    def write_ranges(self, cells: torch.Tensor | slice, rows: Sequence[torch.Tensor]) -> None:
        """As `write`, of several ranges of one length: `[ranges, streams, tokens, heads, width]`."""
        for tensor, given in zip(self._tensors, rows, strict=True):
            if isinstance(cells, slice):
                tensor[:, cells].unflatten(1, given.shape[:3:2]).copy_(given.transpose(0, 1))
            else:
                tensor.index_copy_(1, cells, given.transpose(0, 1).flatten(1, 2))

    def write(self, cells: torch.Tensor | slice, rows: Sequence[torch.Tensor]) -> None:
        for tensor, given in zip(self._tensors, rows, strict=True):
            if isinstance(cells, slice):
                tensor[:, cells].copy_(given)
            else:
                tensor.index_copy_(1, cells, given)
