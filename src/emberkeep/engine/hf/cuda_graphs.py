"""Steps on CUDA, recorded once for a few numbers of tokens and replayed.

A step of few tokens is hundreds of small kernels, and launching them from Python takes ten times as long as
running them. What changes from step to step (tokens, positions, cells, tables, tiles) lies in tensors that are
filled before the replay; tokens that a recorded step has room for and that are not there write to the block that
no sequence owns. Small operations between the matrix products are compiled into few kernels while a step is
recorded; a recorded step does not run Python again, so nothing of the model stays changed."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from emberkeep.engine.base import Rows
from emberkeep.engine.hf.attention import AttentionOptions
from emberkeep.engine.hf.fused_layers import FusedLayer
from emberkeep.engine.hf.kernels import PagedKv, choose_splits, choose_tiles, paged_attention, store_rows
from emberkeep.engine.hf.network import Network
from emberkeep.engine.hf.pool import BLOCK, BlockTable, KvMemory
from emberkeep.engine.hf.streaming import LayerStream
from emberkeep.values import dataclass

_WARM_UPS = 3
_TILE_NUMBERS = 4
_FINER = 128
"""Rows from which on a step takes about as long as it has rows: what it has room for and lacks is not free."""


@dataclass(frozen=True, slots=True)
class StepSize:
    """What a recorded step has room for."""

    rows: int
    outputs: int
    """Rows after which there are logits."""
    sequences: int
    blocks: int
    """Of the longest sequence."""


class StepBatch:
    """The tensors of a step, and its attention over the pool."""

    def __init__(self, memory: KvMemory, size: StepSize, group: int) -> None:
        """`group`: query heads per KV head."""
        heads = max(g.shape.heads for g in memory.groups)
        self.size = size
        self.memory = memory
        device = torch.cuda.get_device_properties(memory.device)
        row_bytes = max(g.shape.width for g in memory.groups) * 2 * memory.dtype.itemsize
        self._shape = choose_tiles(size.rows, group, row_bytes, device.shared_memory_per_block_optin)
        most_tiles = size.rows // self._shape.tokens + min(size.sequences, size.rows)
        counts = (size.rows, size.rows, size.rows, size.outputs, 1, _TILE_NUMBERS * most_tiles)
        self._host = torch.zeros(sum(counts), dtype=torch.int64).pin_memory()
        self._host_tables = torch.zeros((size.sequences, size.blocks), dtype=torch.int32).pin_memory()
        self._inputs = torch.zeros_like(self._host, device=memory.device)
        self._tables = torch.zeros_like(self._host_tables, device=memory.device)
        self.tokens, self.positions, self.cells, self.wanted, self.live, tiles = self._inputs.split(counts)
        self._tiles = tiles.view(-1, _TILE_NUMBERS)
        self._views = [part.numpy() for part in self._host.split(counts)]
        self._views[-1] = self._views[-1].reshape(-1, _TILE_NUMBERS)
        self._table_views = self._host_tables.numpy()
        programs = max(size.rows // self._shape.tokens, min(size.rows, size.sequences)) * heads
        self._splits = choose_splits(programs, device.multi_processor_count)
        self.layer = -1
        """The one that attention is computed in."""
        self.normed: torch.Tensor | None = None
        """What the layer before has computed of the next one."""

    def fill(self, batch: Sequence[Rows], tables: Sequence[BlockTable]) -> None:
        """Nothing of the latest step may still be running."""
        self._host.zero_()
        tokens, positions, cells, wanted, live, tiles = self._views
        end = outputs = tile = 0
        each = self._shape.tokens
        for index, (rows, table) in enumerate(zip(batch, tables, strict=True)):
            begin, end = end, end + len(rows.tokens)
            tokens[begin:end] = rows.tokens
            self._table_views[index, : len(table.blocks)] = table.blocks
            wanted[outputs : outputs + rows.outputs] = range(end - rows.outputs, end)
            outputs += rows.outputs
            if end - begin == 1:
                positions[begin] = at = rows.start
                cells[begin] = table.blocks[at // BLOCK] * BLOCK + at % BLOCK
                tiles[tile] = (begin, 1, index, at)
                tile += 1
                continue
            positions[begin:end] = np.arange(rows.start, rows.start + end - begin)
            cells[begin:end] = table.cells(rows.start, rows.start + end - begin)
            first = np.arange(0, end - begin, each)
            part = tiles[tile : tile + len(first)]
            part[:, 0], part[:, 2], part[:, 3] = begin + first, index, rows.start + first
            part[:, 1] = np.minimum(each, end - begin - first)
            tile += len(first)
        live[0] = end
        self._inputs.copy_(self._host, non_blocking=True)
        self._tables[: len(batch)].copy_(self._host_tables[: len(batch)], non_blocking=True)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.layer = layer
        store_rows(keys[0], values[0], self.cells, self.memory.keys[layer], self.memory.values[layer])

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        return self.attend_pool(query, options)

    def attend_pool(self, query: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        keys, values = self.memory.keys[self.layer], self.memory.values[self.layer]
        paged = PagedKv(keys, values, self._tables, self._tiles)
        return paged_attention(query[0].transpose(0, 1), paged, options, self._shape, self._splits)


class StepGraphs:
    """A recorded step for each of a few numbers of tokens. Belongs to the engine's thread."""

    def __init__(
        self,
        network: Network,
        memory: KvMemory,
        largest: StepSize,
        group: int,
        fused: Sequence[FusedLayer] | None,
        stream: LayerStream | None,
    ) -> None:
        """`fused`: what computes the layers; None: their own code, in parts compiled. `stream`: of weights that
        pass, which are copied within the recorded steps; nothing is compiled then. Blocks for seconds while it
        compiles and records. Raises what torch raises where it cannot."""
        self._network = network
        self._stream = stream
        self.layers = "plain" if stream else "fused" if fused else "compiled"
        """What computes them."""
        self._graphs: list[tuple[StepBatch, torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]] = []
        pool = None
        with (
            nullcontext()
            if stream
            else use_fused(network.layers, fused)
            if fused
            else compile_parts(network.layers)
        ):
            # The largest first: the others find room in what it has let go of.
            for rows in reversed(_sizes(largest.rows)):
                outputs, sequences = min(rows, largest.outputs), min(rows, largest.sequences)
                batch = StepBatch(memory, StepSize(rows, outputs, sequences, largest.blocks), group)
                graph, logits, likeliest = self._record(batch, pool)
                pool = graph.pool()
                self._graphs.insert(0, (batch, graph, logits, likeliest))

    def run(self, batch: Sequence[Rows], tables: Sequence[BlockTable]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of every row that wants them, in float32, and the tokens with the highest: valid until the next
        call."""
        count, outputs = sum(len(rows.tokens) for rows in batch), sum(rows.outputs for rows in batch)
        step, graph, logits, likeliest = next(
            entry for entry in self._graphs if entry[0].size.rows >= count and entry[0].size.outputs >= outputs
        )
        step.fill(batch, tables)
        if self._stream is not None:
            self._stream.rewind()
            self._stream.replayed()
        graph.replay()
        return logits[:outputs], likeliest[:outputs]

    def _record(self, batch: StepBatch, pool: object) -> tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]:
        batch.fill([], [])
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(1 if self._stream else _WARM_UPS):
                self._network.run(batch, batch.tokens, batch.positions, batch.wanted)
        torch.cuda.current_stream().wait_stream(stream)
        if self._stream is not None:
            self._stream.rewind()
        graph = torch.cuda.CUDAGraph()
        # Other engines' threads may prepare memory meanwhile; what Python lets go of here may be such memory.
        with _without_collection(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            logits = self._network.run(batch, batch.tokens, batch.positions, batch.wanted).float()
            likeliest = logits.argmax(-1)
            if self._stream is not None:
                self._stream.end_recording()
        return graph, logits, likeliest


@contextmanager
def _without_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _sizes(most: int) -> list[int]:
    """Powers of two, from `_FINER` on also what lies halfway between two of them, and the most there can be."""
    sizes = [1]
    while sizes[-1] < most:
        last = sizes[-1]
        is_power = last & (last - 1) == 0
        following = 2 * last if last < _FINER else 3 * last // 2 if is_power else 4 * last // 3
        sizes.append(min(following, most))
    return sizes


_ROTATE = "apply_rotary_pos_emb"
"""What transformers calls the function in each of its model files that rotates queries and keys."""


@contextmanager
def use_fused(layers: Sequence[torch.nn.Module], fused: Sequence[FusedLayer]) -> Iterator[None]:
    """Within it, `fused` compute what the layers would."""
    for layer, own in zip(layers, fused, strict=True):
        layer.forward = own
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


@contextmanager
def compile_parts(layers: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Within it, norms, feed-forward parts and rotations of these layers run compiled.

    Mixtures do not: compiled, transformers would ask the device how many tokens each expert has.
    """
    parts = [part for layer in layers for part in layer.children() if not hasattr(part, "layer_idx")]
    parts = [part for part in parts if not hasattr(part, "experts")]
    homes = {sys.modules[type(part).__module__] for layer in layers for part in layer.children()}
    replaced: list[tuple[Any, str, Any]] = []
    try:
        for part in parts:
            _replace(replaced, part, "forward", _compile(part.forward))
        for home in homes:
            if hasattr(home, _ROTATE):
                _replace(replaced, home, _ROTATE, _compile(getattr(home, _ROTATE)))
        yield
    finally:
        for owner, name, before in reversed(replaced):
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


def _replace(replaced: list[tuple[Any, str, Any]], owner: Any, name: str, by: Any) -> None:
    replaced.append((owner, name, vars(owner).get(name)))
    setattr(owner, name, by)


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(function, dynamic=True)
    return compiled
