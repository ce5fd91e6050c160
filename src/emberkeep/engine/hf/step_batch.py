"""What a step on CUDA is given: tensors that are filled before it is launched, and that a recorded one reads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

import numpy as np
import torch

from emberkeep.engine.base import MOST_BIASED, Bias, Rows
from emberkeep.engine.hf.attention import AttentionOptions
from emberkeep.engine.hf.choosing import NUMBERS, numbers_of
from emberkeep.engine.hf.kernels import (
    FEW_TOKENS,
    PagedKv,
    choose_splits,
    choose_tiles,
    paged_attention,
    store_rows,
)
from emberkeep.engine.hf.pool import BLOCK, BlockTable, KvMemory
from emberkeep.values import dataclass

_TILE_NUMBERS = 4
MOST_STEPS = 4
"""Steps that are launched together, at most."""


@dataclass(frozen=True, slots=True)
class StepSize:
    """What a recorded step has room for."""

    rows: int
    outputs: int
    """Rows after which there are logits."""
    sequences: int
    blocks: int
    """Blocks of the longest sequence."""
    decodes: bool = False
    """Many rows, each of another sequence."""


class DeviceTables:
    """Every sequence's blocks, as kernels read them: a row for each sequence."""

    def __init__(self, sequences: int, blocks: int, device: torch.device) -> None:
        self.rows = torch.zeros((sequences, blocks), dtype=torch.int32, device=device)
        self._host = torch.zeros_like(self.rows, device="cpu").pin_memory()
        self._views = self._host.numpy()
        self._copied = torch.cuda.Event()

    def show(self, batch: Sequence[Rows], tables: Sequence[BlockTable]) -> None:
        """What is launched from now on finds these as they are."""
        changed = [
            (rows.sequence, table)
            for rows, table in zip(batch, tables, strict=True)
            if table.shown < len(table.blocks)
        ]
        if not changed:
            return
        if any(table.is_rewritten for _, table in changed):
            self._copied.synchronize()  # what is on its way must not change; more blocks do no harm
        for sequence, table in changed:
            table.is_rewritten = False
            self._views[sequence, table.shown : len(table.blocks)] = table.blocks[table.shown :]
            table.shown = len(table.blocks)
        first, last = min(sequence for sequence, _ in changed), max(sequence for sequence, _ in changed)
        self.rows[first : last + 1].copy_(self._host[first : last + 1], non_blocking=True)
        self._copied.record()


class DeviceBiases:
    """What is added to the logits of every sequence whose tokens are chosen on the device."""

    def __init__(self, sequences: int, device: torch.device) -> None:
        shape = (sequences, MOST_BIASED)
        self._shown: list[Bias] = [()] * sequences
        self._host = [torch.full(shape, -1, dtype=kind).pin_memory() for kind in (torch.int64, torch.float32)]
        self.ids, self.values = (host.to(device, copy=True) for host in self._host)
        self._copied = torch.cuda.Event()

    def show(self, sequence: int, bias: Bias) -> None:
        """What is launched from now on finds it."""
        if not bias or self._shown[sequence] is bias:
            return
        self._copied.synchronize()
        self._shown[sequence] = bias
        ids, values = (host[sequence] for host in self._host)
        ids.fill_(-1)
        ids[: len(bias)] = torch.tensor([token for token, _ in bias])
        values[: len(bias)] = torch.tensor([by for _, by in bias])
        self.ids[sequence].copy_(ids, non_blocking=True)
        self.values[sequence].copy_(values, non_blocking=True)
        self._copied.record()


class _HostInputs:
    """What a step's inputs are copied from."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.all = torch.zeros(sum(counts), dtype=torch.int64).pin_memory()
        *views, tiles, numbers = [part.numpy() for part in self.all.split(counts)]
        self.views = [*views, tiles.reshape(-1, _TILE_NUMBERS)]
        self.numbers = numbers.view(np.float64).reshape(-1, NUMBERS)


class StepBatch:
    """The tensors of a step, and its attention over the pool."""

    def __init__(
        self, memory: KvMemory, tables: DeviceTables, biases: DeviceBiases, size: StepSize, group: int
    ) -> None:
        """`group`: query heads per KV head."""
        heads = max(g.shape.heads for g in memory.groups)
        self.size = size
        self.memory = memory
        device = torch.cuda.get_device_properties(memory.device)
        row_bytes = max(g.shape.width for g in memory.groups) * 2 * memory.dtype.itemsize
        most_tokens = 1 if size.decodes else size.rows
        self._shape = choose_tiles(most_tokens, group, row_bytes, device.shared_memory_per_block_optin)
        most_tiles = size.rows // self._shape.tokens + min(size.sequences, size.rows)
        rows = [size.rows] * 4
        counts = (*rows, size.outputs, 1, _TILE_NUMBERS * most_tiles, NUMBERS * size.outputs)
        # One is filled while the steps of two flights may still have to copy from theirs: the others have landed.
        flying = 2 * MOST_STEPS if size.decodes or size.rows <= FEW_TOKENS else 2
        self._hosts = cycle([_HostInputs(counts) for _ in range(flying + 1)])
        self._inputs = torch.zeros(sum(counts), dtype=torch.int64, device=memory.device)
        self._tables, self.biases = tables, biases
        *parts, tiles, numbers = self._inputs.split(counts)
        self.tokens, self.positions, self.cells, self.sources, self.wanted, self.live = parts
        self._tiles = tiles.view(-1, _TILE_NUMBERS)
        self.numbers = numbers.view(torch.float64).view(-1, NUMBERS)
        """How tokens are chosen: a row for each of `wanted`."""
        programs = max(size.rows // self._shape.tokens, min(size.rows, size.sequences)) * heads
        self._splits = choose_splits(programs, device.multi_processor_count)
        self.layer = -1
        """The one that attention is computed in."""
        self.normed: torch.Tensor | None = None
        """What the layer before has computed of the next one."""

    def fill(
        self, batch: Sequence[Rows], tables: Sequence[BlockTable], sources: Sequence[int] = (), further: int = 0
    ) -> None:
        """`sources`: so many tokens `further` each, of those that the latest step chose these; none: as they are
        given."""
        host = next(self._hosts)
        host.all.zero_()
        self._tables.show(batch, tables)
        host.views[3][:] = host.numbers[:, -1] = -1
        self._fill_numbers(host, batch, further)
        if all(len(rows.tokens) == rows.outputs == 1 for rows in batch):
            self._fill_decoding(host, batch, tables, sources, further)
        else:
            self._fill_any(host, batch, tables)
        self._inputs.copy_(host.all, non_blocking=True)

    def _fill_numbers(self, host: _HostInputs, batch: Sequence[Rows], further: int) -> None:
        places, numbers, output = [], [], 0
        for rows in batch:
            how = rows.choosing
            if how is not None and (how.bias or how.temperature) and not how.is_adjusted:
                self.biases.show(rows.sequence, how.bias)
                places.append(output)
                numbers.append(numbers_of(how, rows.sequence, further))
            output += rows.outputs
        if places:
            host.numbers[places] = numbers

    def _fill_decoding(
        self,
        host: _HostInputs,
        batch: Sequence[Rows],
        tables: Sequence[BlockTable],
        sources: Sequence[int],
        further: int,
    ) -> None:
        tokens, positions, cells, from_latest, wanted, live, tiles = host.views
        count = len(batch)
        starts = [rows.start + further for rows in batch]
        block = [table.blocks[start // BLOCK] for start, table in zip(starts, tables, strict=True)]
        at = np.array(starts, np.int64)
        if further:
            from_latest[:count] = sources
        else:
            tokens[:count] = [rows.tokens[0] for rows in batch]
        positions[:count] = at
        cells[:count] = np.array(block, np.int64) * BLOCK + at % BLOCK
        wanted[:count] = tiles[:count, 0] = np.arange(count)
        tiles[:count, 1], tiles[:count, 2], tiles[:count, 3] = 1, [rows.sequence for rows in batch], at
        live[0] = count

    def _fill_any(self, host: _HostInputs, batch: Sequence[Rows], tables: Sequence[BlockTable]) -> None:
        tokens, positions, cells, _, wanted, live, tiles = host.views
        end = outputs = tile = 0
        each = self._shape.tokens
        for rows, table in zip(batch, tables, strict=True):
            begin, end = end, end + len(rows.tokens)
            tokens[begin:end] = rows.tokens
            wanted[outputs : outputs + rows.outputs] = range(end - rows.outputs, end)
            outputs += rows.outputs
            positions[begin:end] = np.arange(rows.start, rows.start + end - begin)
            cells[begin:end] = table.cells(rows.start, rows.start + end - begin)
            first = np.arange(0, end - begin, each)
            part = tiles[tile : tile + len(first)]
            part[:, 0], part[:, 2], part[:, 3] = begin + first, rows.sequence, rows.start + first
            part[:, 1] = np.minimum(each, end - begin - first)
            tile += len(first)
        live[0] = end

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.layer = layer
        store_rows(keys[0], values[0], self.cells, self.memory.keys[layer], self.memory.values[layer])

    def attend(self, query: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        keys, values = self.memory.keys[self.layer], self.memory.values[self.layer]
        paged = PagedKv(keys, values, self._tables.rows, self._tiles)
        return paged_attention(query[0].transpose(0, 1), paged, options, self._shape, self._splits)
