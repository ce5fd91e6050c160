"""Decoding on CUDA: a few tokens, the whole step recorded once and replayed.

A step of a small batch is hundreds of small kernels, and launching them from Python takes ten times as long as
running them. What changes from step to step (tokens, positions, cells, tables, lengths) lies in tensors that are
filled before the replay. Small operations between the matrix products are compiled into few kernels while a step
is recorded; a recorded step does not run Python again, so nothing of the model stays changed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from emberkeep.engine.hf.attention import AttentionOptions
from emberkeep.engine.hf.kernels import PagedKv, decode_attention, store_rows
from emberkeep.engine.hf.network import Network
from emberkeep.engine.hf.pool import BLOCK, KvMemory
from emberkeep.engine.hf.step import DecodeRow

_WARM_UPS = 3
_WITH_DRAFTS = 32
"""Tokens of one step at least, whatever the number of sequences: one with its draft, or a few."""
_HEAD = 4
"""Numbers per row beside its table: token, position, cell, length."""


class DecodeBatch:
    """Tensors for a batch of at most `rows` sequences, and a step over them. A row that is not used writes to the
    block that no sequence owns."""

    def __init__(self, memory: KvMemory, rows: int, blocks: int) -> None:
        self.rows = rows
        self._memory = memory
        self._host = torch.zeros(rows * (_HEAD + blocks), dtype=torch.int64).pin_memory()
        self._inputs = torch.zeros_like(self._host, device=memory.device)
        self.tokens, self.positions, self.cells, self.lengths = self._inputs[: rows * _HEAD].view(_HEAD, rows)
        self.tables = self._inputs[rows * _HEAD :].view(rows, blocks)
        # Whatever a recorded step reads must live as long as it does.
        self.every_row = torch.arange(rows, device=memory.device)
        self.layer = -1

    def fill(self, rows: Sequence[DecodeRow]) -> None:
        """Nothing of the latest step may still be running."""
        host = self._host.numpy()
        heads, tables = (
            host[: self.rows * _HEAD].reshape(_HEAD, -1),
            host[self.rows * _HEAD :].reshape(self.rows, -1),
        )
        heads[:] = [[0], [0], [0], [1]]
        tables[:, 0] = 0
        for index, row in enumerate(rows):
            blocks = row.table.blocks
            cell = blocks[row.position // BLOCK] * BLOCK + row.position % BLOCK
            heads[:, index] = (row.token, row.position, cell, row.position + 1)
            tables[index, : len(blocks)] = blocks
        self._inputs.copy_(self._host, non_blocking=True)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.layer = layer
        store_rows(keys[0], values[0], self.cells, self._memory.keys[layer], self._memory.values[layer])

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        paged = PagedKv(self._memory.keys[self.layer], self._memory.values[self.layer], self.tables, self.lengths)
        return decode_attention(query[0].transpose(0, 1), paged, options)


class DecodeGraphs:
    """One recorded step for each of a few batch sizes. Belongs to the engine's thread."""

    def __init__(self, network: Network, memory: KvMemory, sequences: int, context: int) -> None:
        """Blocks for seconds while it compiles and records. Raises what torch raises where it cannot."""
        self._network = network
        self._graphs: list[tuple[DecodeBatch, torch.cuda.CUDAGraph, torch.Tensor]] = []
        self.rows = max(2 * sequences, _WITH_DRAFTS)
        """Most tokens of one step."""
        pool = None
        with fuse_kernels(network.layers):
            for rows in _sizes(self.rows):
                batch = DecodeBatch(memory, rows, -(-context // BLOCK))
                graph, logits = self._record(batch, pool)
                pool = graph.pool()
                self._graphs.append((batch, graph, logits))

    def run(self, rows: Sequence[DecodeRow]) -> torch.Tensor:
        """Logits of every row, in float32: valid until the next call."""
        batch, graph, logits = next(entry for entry in self._graphs if entry[0].rows >= len(rows))
        batch.fill(rows)
        graph.replay()
        return logits[: len(rows)]

    def _record(self, batch: DecodeBatch, pool: object) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        batch.fill([])
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                self._network.run(batch, batch.tokens, batch.positions, batch.every_row)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            logits = self._network.run(batch, batch.tokens, batch.positions, batch.every_row).float()
        return graph, logits


def _sizes(most: int) -> list[int]:
    """Powers of two, and the most there can be."""
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(2 * sizes[-1], most))
    return sizes


_ROTATE = "apply_rotary_pos_emb"
"""What transformers calls the function in each of its model files that rotates queries and keys."""


@contextmanager
def fuse_kernels(layers: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Within it, norms, feed-forward parts and rotations of these layers run compiled."""
    parts = [part for layer in layers for part in layer.children() if not hasattr(part, "layer_idx")]
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
    compiled: Callable[..., Any] = torch.compile(function, dynamic=False)
    return compiled
