"""Steps on CUDA, of a few numbers of tokens each: recorded one after the other while nothing waits, and
replayed.

A step of few tokens is hundreds of small kernels, and launching them from Python takes ten times as long as
running them. What changes from step to step (tokens, positions, cells, tables, tiles) lies in tensors that are
filled before the replay; tokens that a step has room for and that are not there write to the block that no
sequence owns. A size that is not recorded yet has its kernels launched one by one, the same ones over the same
tensors: so state has the same bytes either way, and the engine's fingerprint need not know. While such a step
runs, layers are computed by code of ours, or have their small operations compiled into few kernels; other steps
find the model as it was.
"""

from __future__ import annotations

import logging
import sys
import threading
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import field
from typing import Any

import numpy as np
import torch

from emberkeep import garbage
from emberkeep.engine.base import Choosing, Rows
from emberkeep.engine.hf.adjusting import Adjusting
from emberkeep.engine.hf.choosing import choose_tokens
from emberkeep.engine.hf.fused_layers import FusedLayer
from emberkeep.engine.hf.kernels import FEW_TOKENS, take_tokens
from emberkeep.engine.hf.network import Network
from emberkeep.engine.hf.pool import BLOCK, BlockTable, KvMemory
from emberkeep.engine.hf.step_batch import DeviceBiases, DeviceTables, StepBatch, StepSize
from emberkeep.engine.hf.streaming import LayerStream
from emberkeep.types.request import Json
from emberkeep.values import dataclass

log = logging.getLogger("emberkeep.engine")

_TRIAL_TOKENS = 61
"""Different tokens of a prompt that a recorded step is tried with."""
_FINER = 128
"""Rows from which on a step takes about as long as it has rows: what it has room for and lacks is not free."""


class StepGraphs:
    """A step for each of a few numbers of tokens, made when it is first needed. Belongs to the engine's thread."""

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
        pass, which are copied within the steps; nothing is compiled then."""
        self._network, self._memory, self._stream = network, memory, stream
        self._largest, self._group = largest, group
        self._tables = DeviceTables(largest.sequences, largest.blocks, memory.device)
        self._biases = DeviceBiases(largest.sequences, memory.device)
        self.layers = "plain" if stream else "fused" if fused else "compiled"
        """What computes them."""
        self._swaps: list[Swap] = []
        if fused and not stream:
            self._swaps = [_replace(layer, own) for layer, own in zip(network.layers, fused, strict=True)]
        elif not stream:
            self._swaps = compile_parts(network.layers)
        self._steps: dict[StepSize, _SizedStep] = {}
        self._rows = _sizes(largest.rows)
        order = _recording_order(self._rows, largest.sequences)
        self._sizes = [self._size(rows, decodes=decodes) for rows, decodes in order]
        self._left = list(self._sizes)
        """Sizes that are to be recorded."""
        self._logits: torch.Tensor | None = None
        """The scores of the latest step, whatever its size: recorded ones need not keep one each."""
        self._chosen = torch.zeros(largest.outputs, dtype=torch.int64, device=memory.device)
        self._adjusting: Adjusting | None = None
        if self.layers == "compiled":
            # How a compiled part adds up may follow the first size that it sees: always the same one.
            self._compute(self._sized(self._size(largest.rows)).batch)

    def run(
        self, batch: Sequence[Rows], tables: Sequence[BlockTable], sources: Sequence[int] = (), further: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Logits of every row that wants them, in float32, the tokens that were chosen, and what rows tell, if any
        do: valid until the next call. Does not wait. See `StepBatch.fill`."""
        count, outputs = sum(len(rows.tokens) for rows in batch), sum(rows.outputs for rows in batch)
        rows = self._rows[bisect_left(self._rows, count)]
        decodes = rows > FEW_TOKENS and count == len(batch)
        told = self._run(self._sized(self._size(rows, decodes=decodes)), batch, tables, sources, further)
        assert self._logits is not None
        return self._logits[:outputs], self._chosen[:outputs], told

    def stats(self) -> dict[str, Json]:
        """How many sizes are replayed, and how many there are. May be asked by any thread."""
        replayed = sum(step.graph is not None for step in list(self._steps.values()))
        return {"layers": self.layers, "replayed": replayed, "sizes": len(self._sizes)}

    @property
    def is_recorded(self) -> bool:
        """As many sizes are as can be."""
        return not self._left

    def record_next(self) -> None:
        """Record one more size, unless `is_recorded`. Nothing may be in the engine. Blocks for about as long as
        three of its steps take. Never raises: a size that cannot be recorded, or that computes other bits then,
        is launched as before."""
        step = self._sized(self._left.pop(0))
        try:
            if not self._record(step):
                log.warning("a step of %d tokens is not recorded: replayed it differs", step.batch.size.rows)
                step.graph = None
        except Exception as error:
            log.warning("steps are not recorded and will be slower: %s", str(error).splitlines()[0])
            step.graph = None
            self._left.clear()
            if self._stream is not None:
                self._stream.give_up_recording()

    def record_anew(self) -> None:
        """What was recorded, because the model is watched from now on, or no longer."""
        before = [size for size, step in self._steps.items() if step.graph is not None]
        for size in before:
            self._steps[size].graph = None
        left, self._left = self._left, [size for size in self._sizes if size in before]
        while self._left:
            self.record_next()
        self._left = left

    def _size(self, rows: int, *, decodes: bool = False) -> StepSize:
        outputs, sequences = min(rows, self._largest.outputs), min(rows, self._largest.sequences)
        return StepSize(rows, outputs, sequences, self._largest.blocks, decodes)

    def _sized(self, size: StepSize) -> _SizedStep:
        step = self._steps.get(size)
        if step is None:
            batch = StepBatch(self._memory, self._tables, self._biases, size, self._group)
            step = self._steps[size] = _SizedStep(batch)
        return step

    def _run(
        self,
        step: _SizedStep,
        batch: Sequence[Rows],
        tables: Sequence[BlockTable],
        sources: Sequence[int] = (),
        further: int = 0,
    ) -> torch.Tensor | None:
        step.batch.fill(batch, tables, sources, further)
        if step.graph is None:
            self._compute(step.batch)
        else:
            if self._stream is not None:
                self._stream.rewind()
                self._stream.replayed()
            step.graph.replay()
        if not any(rows.choosing is not None and rows.choosing.is_adjusted for rows in batch):
            return None
        if self._adjusting is None:
            assert self._logits is not None
            self._adjusting = Adjusting(self._logits, self._largest.sequences, self._biases)
        return self._adjusting.choose(batch, step.batch, self._chosen, further)

    def _compute(self, batch: StepBatch) -> None:
        """Launch the kernels of a step, or record them."""
        batch.normed = None  # a step that failed may have left something
        with ExitStack() as swapped:
            for swap in self._swaps:
                swapped.enter_context(swap())
            take_tokens(batch.tokens, batch.sources, self._chosen)
            logits = self._network.run(batch, batch.tokens, batch.positions, batch.wanted)
        if self._logits is None:
            shape = (self._largest.outputs, logits.shape[-1])
            self._logits = torch.empty(shape, dtype=torch.float32, device=logits.device)
        taken, chosen = self._logits[: len(logits)], self._chosen[: len(logits)]
        taken.copy_(logits)
        choose_tokens(taken, batch.numbers, batch.biases.ids, batch.biases.values, chosen)

    def _record(self, step: _SizedStep) -> bool:
        """Whether it computes the same bits when it is replayed: of a prompt whose state goes to other cells."""
        batch, tables = self._trial(step.batch.size)
        self._run(step, batch, tables[:1])
        launched = self._bits()
        torch.cuda.synchronize()  # what it was filled from is filled again
        step.batch.fill([], [])
        step.graph = self._capture(step.batch)
        self._run(step, batch, tables[1:])
        replayed = self._bits()
        there, here = (slice(table.blocks[0] * BLOCK, table.blocks[0] * BLOCK + table.length) for table in tables)
        pool = (*self._memory.keys, *self._memory.values)
        return torch.equal(launched, replayed) and all(
            torch.equal(part[there].view(torch.uint8), part[here].view(torch.uint8)) for part in pool
        )

    def _trial(self, size: StepSize) -> tuple[list[Rows], list[BlockTable]]:
        """A prompt that fills the step as far as there is room for it twice, and the two places."""
        # The first block is for rows that are no tokens, and the last of a context may not be whole.
        half = (self._memory.keys[0].shape[0] // BLOCK - 1) // 2
        count = min(size.rows, half * BLOCK, max((size.blocks - 1) * BLOCK, 1))
        blocks = -(-count // BLOCK)
        places = [BlockTable(array("i", range(first, first + blocks)), count) for first in (1, 1 + half)]
        # So that it is compiled now what is launched behind some steps.
        choosing = Choosing(top_logprobs=0)
        return [Rows(0, 0, np.arange(count, dtype=np.int32) % _TRIAL_TOKENS, 1, choosing)], places

    def _bits(self) -> torch.Tensor:
        """A copy of the one row of logits that a trial wants."""
        assert self._logits is not None
        return self._logits[:1].view(torch.uint8).clone()

    def _capture(self, batch: StepBatch) -> torch.cuda.CUDAGraph:
        """What `_compute` does, which it has done before: everything is compiled."""
        if self._stream is not None:
            self._stream.rewind()
        graph = torch.cuda.CUDAGraph()
        pool = next((step.graph.pool() for step in self._steps.values() if step.graph is not None), None)
        # Other engines' threads may prepare memory meanwhile; what Python lets go of here may be such memory.
        recording = torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local")
        # A recording that fails would leave its own stream in use.
        with garbage.kept(), torch.cuda.stream(torch.cuda.current_stream()), recording:
            self._compute(batch)
            if self._stream is not None:
                self._stream.end_recording()
        return graph


@dataclass(slots=True)
class _SizedStep:
    batch: StepBatch
    graph: torch.cuda.CUDAGraph | None = None
    """None: it is not recorded."""


def _sizes(most: int) -> list[int]:
    """Powers of two, from `_FINER` on also what lies halfway between two of them, and the most there can be."""
    sizes = [1]
    while sizes[-1] < most:
        last = sizes[-1]
        is_power = last & (last - 1) == 0
        following = 2 * last if last < _FINER else 3 * last // 2 if is_power else 4 * last // 3
        sizes.append(min(following, most))
    return sizes


def _recording_order(sizes: Sequence[int], sequences: int) -> list[tuple[int, bool]]:
    """Numbers of rows, and whether each is of another sequence. First those of few rows, which answers have and
    which gain most. They need little memory; of the others the largest come first, so that the rest find room in
    what it has let go of."""
    few = [(rows, False) for rows in sizes if rows <= _FINER]
    most = next((rows for rows in sizes if rows >= sequences), 0)
    decoding = [(rows, True) for rows in sizes if FEW_TOKENS < rows <= most]
    return [*few, *decoding, *((rows, False) for rows in reversed(sizes[len(few) :]))]


# ── other code in place of the model's, while such a step runs ──

_ROTATE = "apply_rotary_pos_emb"
"""What transformers calls the function in each of its model files that rotates queries and keys."""


Swap = Callable[[], AbstractContextManager[None]]
"""Other code for a part of a model, for as long as it is entered."""


def _replace(module: torch.nn.Module, forward: Callable[..., Any]) -> Swap:
    @contextmanager
    def swap() -> Iterator[None]:
        module.forward = forward
        try:
            yield
        finally:
            vars(module).pop("forward", None)

    return swap


@dataclass(slots=True)
class _Rotation:
    """Stands in a model file for the function that rotates, which engines on other threads call, too: only for the
    thread that uses it is it the compiled one."""

    plain: Callable[..., Any]
    compiled: Callable[..., Any]
    _thread: threading.local = field(default_factory=threading.local)

    def __call__(self, *given: Any, **named: Any) -> Any:
        is_used = getattr(self._thread, "is_used", False)
        return (self.compiled if is_used else self.plain)(*given, **named)

    @contextmanager
    def swap(self) -> Iterator[None]:
        self._thread.is_used = True
        try:
            yield
        finally:
            self._thread.is_used = False


def compile_parts(layers: Sequence[torch.nn.Module]) -> list[Swap]:
    """Norms, feed-forward parts and rotations of these layers run compiled.

    Mixtures do not: compiled, transformers would ask the device how many tokens each expert has.
    """
    parts = [part for layer in layers for part in layer.children() if not hasattr(part, "layer_idx")]
    parts = [part for part in parts if not hasattr(part, "experts")]
    homes = {sys.modules[type(part).__module__] for layer in layers for part in layer.children()}
    rotations = [_rotation(home).swap for home in homes if hasattr(home, _ROTATE)]
    return [*(_replace(part, _compile(part.forward)) for part in parts), *rotations]


def _rotation(home: Any) -> _Rotation:
    """Put into a model file, where it stays."""
    rotate = getattr(home, _ROTATE)
    if not isinstance(rotate, _Rotation):
        rotate = _Rotation(rotate, _compile(rotate))
        setattr(home, _ROTATE, rotate)
    return rotate


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(function, dynamic=True)
    return compiled
