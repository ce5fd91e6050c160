"""One forward pass over tokens of several sequences, laid one after the other: the model sees a batch of one.

    tokens      a a a a a | b | c c c            spans: a evaluates a prompt, b decodes, c evaluates a prompt
    positions   0 1 2 3 4 | 87| 128 129 130

Everything but attention treats tokens one by one, so nothing is padded. Keys and values go into the pool before
attention, which then reads each span's whole sequence from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Any, ClassVar

import torch
from transformers import Cache

from emberkeep.engine.hf.pool import BlockTable, KvMemory
from emberkeep.errors import EngineError
from emberkeep.values import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """The rows [begin, end) of the batch: tokens of one sequence, in order of their positions."""

    begin: int
    end: int
    table: BlockTable
    start: int
    """The first token's position."""
    positions: torch.Tensor | None = None
    """Of every token, where they do not follow each other."""

    @property
    def last(self) -> int:
        """Every token sees positions before this one only."""
        return self.start + (self.end - self.begin) if self.positions is None else int(self.positions[-1]) + 1


@dataclass(slots=True)
class Step:
    """What attention needs to know about the batch. `narrow` replaces it between layers."""

    memory: KvMemory
    spans: Sequence[Span]
    cells: torch.Tensor
    """Where each row's keys and values go."""
    layer: int = -1
    """The one that attention is computed in: its keys and values have just been written."""
    normed: torch.Tensor | None = None
    """What the layer before has computed of the next one, if it has (`fused_layers`)."""
    live: ClassVar[torch.Tensor | None] = None
    """How many rows are tokens; None: all."""
    _located: dict[tuple[int, int], slice | torch.Tensor] = field(default_factory=dict)
    """Where the cells of a span are, by its first row and the first position wanted: the same in most layers."""

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take a layer's `[1, heads, tokens, width]`."""
        self.layer = layer
        self.memory.keys[layer].index_copy_(0, self.cells, keys[0].transpose(0, 1))
        self.memory.values[layer].index_copy_(0, self.cells, values[0].transpose(0, 1))

    def read(self, span: Span, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's keys and values from position `first` on, as `[tokens, heads, width]`.

        Views where a sequence's blocks lie together, copies where they do not.
        """
        keys, values = self.memory.keys[self.layer], self.memory.values[self.layer]
        located = self._located.get((span.begin, first))
        if located is None:
            located = self._located[span.begin, first] = self._locate(span, first)
        if isinstance(located, slice):
            return keys[located], values[located]
        return keys.index_select(0, located), values.index_select(0, located)

    def _locate(self, span: Span, first: int) -> slice | torch.Tensor:
        begin = span.table.run(first, span.last)
        if begin is not None:
            return slice(begin, begin + span.last - first)
        return torch.from_numpy(span.table.cells(first, span.last)).to(self.cells.device)


class StepCache(Cache):
    """What a model is given as its cache: it says which layer comes, and hands on what attention is given."""

    def __init__(self, step: Any) -> None:
        super().__init__(layers=[])
        self.step = step

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Not written yet: some models keep something smaller in their caches, of which they make keys and values.
        self.step.layer = layer_idx
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        # There is no one length: a model that asks for it computes with something else than tokens' positions.
        raise EngineError(
            "This model asks how long its cache is, which a batch of several sequences cannot answer."
        )
