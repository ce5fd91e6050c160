"""Which code computes an engine's steps, and how long they take.

The code is chosen when an engine is opened, because the bytes of its state depend on it. On CUDA steps are ours
(`cuda_graphs`), if the model can be computed so and gives what its authors' code gives; else they are the
model's own. What was chosen is remembered: the start after it compares nothing.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from emberkeep.engine.base import Capabilities, Logits, Rows
from emberkeep.engine.facts import Facts
from emberkeep.engine.hf.network import LearningStep, Network, Span, Step
from emberkeep.engine.hf.pool import BLOCK, BlockTable, KvMemory
from emberkeep.engine.step_table import IdleSteps, Interrupted, Stepper, StepTable
from emberkeep.errors import EngineError
from emberkeep.types.models import Vocab

if TYPE_CHECKING:
    from emberkeep.engine.hf.cuda_graphs import StepGraphs
    from emberkeep.engine.hf.fused_layers import FusedLayer
    from emberkeep.engine.hf.streaming import LayerStream

log = logging.getLogger("emberkeep.engine")
_CHOSEN, _MEASURED = "code of steps", "times of steps"
"""What is remembered."""
_OF_MODEL = "model"
"""The model's own code computes its steps."""
_COMPARED = 16
"""Tokens of which layers are computed in two ways."""
_PROMPT = 24
_FIRST_TOKENS = (3, 5)
"""With which the prompts of a comparison begin."""


Chore = Callable[[IdleSteps], None]


class SteppedEngine(Stepper, Protocol):
    @property
    def vocab(self) -> Vocab: ...

    def empty(self) -> None:
        """Forget every sequence."""


class OwnSteps:
    """What computes an engine's steps, and what is done for them while nothing waits. Belongs to its thread."""

    def __init__(
        self,
        engine: SteppedEngine,
        network: Network,
        memory: KvMemory,
        learned: LearningStep,
        stream: LayerStream | None,
    ) -> None:
        self._engine = engine
        self._network, self._memory, self._learned, self._stream = network, memory, learned, stream
        self.graphs: StepGraphs | None = None
        """None: the model's own code computes them."""
        self.refusal = ""
        """Why no step is taken any more."""
        self.table: StepTable | None = None
        """How long they take, as far as it is known."""
        self.chores: deque[Chore] = deque()
        """What is still to be done in gaps."""

    def choose(self, facts: Facts, more: Sequence[Chore]) -> None:
        """Take what is remembered of them, or find out; `more` is also to be done in gaps.

        Raises EngineError for a model that cannot run so.
        """
        self._facts = facts
        self.table = facts.read_json(_MEASURED, StepTable.from_json)
        layers = facts.read_json(_CHOSEN, str)
        if layers is None:
            self._find_out()
        elif layers != _OF_MODEL:
            self.graphs = self._open_graphs(layers)
        self.chores.extend([self._record, self._time, *more])
        if layers is not None:
            self.chores.append(self._verify)

    def _find_out(self) -> None:
        reference = self._reference()
        reference.check(self._engine)
        self.graphs = self._open_graphs()
        if self.graphs is not None:
            try:
                reference.check(self._engine)
            except EngineError as error:
                log.warning("steps are not recorded, and will be slower: %s", error)
                self._engine.empty()
                self.graphs = None
        # What failed may have done so by chance: only success is remembered.
        if self.graphs is not None or self._network.device.type != "cuda":
            self._facts.remember_json(_CHOSEN, self.graphs.layers if self.graphs else _OF_MODEL)

    def _open_graphs(self, layers: str | None = None) -> StepGraphs | None:
        """Steps of ours, where this model's can be computed so. `layers`: what was found to compute them rightly;
        None: it is to be found out. Nothing may be in the pool."""
        network, memory, stream, able = self._network, self._memory, self._stream, self._engine.capabilities
        if network.device.type != "cuda" or (stream is not None and not stream.can_record):
            return None
        try:
            # Needs Triton, which comes with torch for CUDA only.
            from emberkeep.engine.hf.cuda_graphs import StepGraphs, StepSize
            from emberkeep.engine.hf.kernels import check_assembler

            check_assembler(network.device)
            largest = StepSize(able.batch, able.outputs, able.max_sequences, -(-able.context // BLOCK))
            fused = None if stream or layers == "compiled" else self.fuse_layers(layers)
            return StepGraphs(network, memory, largest, self._learned.group, fused, stream)
        except Exception as error:
            log.warning("steps are not recorded and will be slower: %s", str(error).splitlines()[0])
            return None

    def fuse_layers(self, layers: str | None) -> list[FusedLayer] | None:
        """What computes the layers with fewer kernels, if they are of the usual make."""
        from emberkeep.engine.hf.fused_layers import fuse

        network, options = self._network, self._learned.options
        fused = fuse(network.layers, [options[layer] for layer in range(len(options))])
        if fused is None or layers == "fused":
            return fused
        rows = torch.arange(_COMPARED, device=network.device)
        step = Step(self._memory, [Span(0, _COMPARED, BlockTable([0], _COMPARED), 0)], rows)
        return fused if agree(network.layers, fused, lambda: network.run(step, rows, rows, rows[:1])) else None

    def _reference(self) -> Reference:
        engine = self._engine
        return Reference(self._network, self._memory.dtype, engine.capabilities, engine.vocab.size)

    def improve(self, is_wanted: Callable[[], bool]) -> bool:
        """See `Engine.improve`."""
        steps = IdleSteps(self._engine, is_wanted)
        try:
            while self.chores:
                self._do(self.chores[0], steps)
                self.chores.popleft()
        except Interrupted:
            return False
        return True

    def _do(self, chore: Chore, steps: IdleSteps) -> None:
        """Raises Interrupted, and nothing else: steps are as they were then, and it begins anew."""
        try:
            steps.give_way()
            chore(steps)
        except EngineError as error:
            log.warning("what would make steps quicker has failed: %s", error)
        finally:
            self._engine.empty()

    def _record(self, steps: IdleSteps) -> None:
        while self.graphs is not None and not self.graphs.is_recorded:
            steps.give_way()
            self.graphs.record_next()

    def _time(self, steps: IdleSteps) -> None:
        # At every start: one that was busy is not remembered for ever.
        if (table := measure_steps(steps)) is not None:
            self.table = table
            self._facts.remember_json(_MEASURED, table.json())

    def _verify(self, steps: IdleSteps) -> None:
        """What was remembered of the code of steps still holds: a library may have changed beneath it. Else no
        step is taken any more."""
        reference, graphs = self._reference(), self.graphs
        try:
            reference.check(steps)
            self.graphs = None
            reference.check(steps)
        except EngineError as error:
            self._facts.forget(_CHOSEN)
            self.refusal = f"What computed steps rightly before no longer does, so restart: {error}"
            log.error("%s", self.refusal)
        finally:
            self.graphs = graphs

    def close(self) -> None:
        """Let go of the model and its state."""
        self.graphs = None
        self.chores.clear()
        self._network = None  # type: ignore[assignment]
        self._memory = None  # type: ignore[assignment]
        self._learned = None  # type: ignore[assignment]
        self._stream = None


class Reference:
    """What the model's own code gives for two prompts: computed once, when it is first asked for."""

    def __init__(self, network: Network, dtype: torch.dtype, able: Capabilities, vocab_size: int) -> None:
        self._network = network
        # Half precision rounds differently in every batch shape; what is wrong is not even similar.
        self._least = 1 - 1e-5 if dtype == torch.float32 else 0.98
        count = min(_PROMPT, able.cells // 2)
        self._prompts = [np.arange(first, first + count, dtype=np.int32) % vocab_size for first in _FIRST_TOKENS]

    def check(self, engine: Stepper) -> None:
        """Two prompts, evaluated in slices beside each other by an engine that is empty, before and after.

        Raises EngineError where they give something else, and they are still there then.
        """
        count = len(self._prompts[0])
        for start, end in ((0, count // 2), (count // 2, count - 1), (count - 1, count)):
            engine.evaluate([Rows(s, start, prompt[start:end], 1) for s, prompt in enumerate(self._prompts)])
        for sequence, expected in enumerate(self._expected):
            if not np.corrcoef(engine.logits(sequence), expected)[0, 1] > self._least:
                raise EngineError("This model computes something else in a batch of several sequences.")
        for sequence in range(len(self._prompts)):
            engine.trim(sequence, 0)

    @cached_property
    def _expected(self) -> list[Logits]:
        """After the last token of each."""
        tokens = [torch.from_numpy(p.astype(np.int64)).to(self._network.device) for p in self._prompts]
        return [self._network.reference(each)[-1].float().cpu().numpy() for each in tokens]


_CLOSE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""How far results may differ that are rounded in other places, as a share of what a layer adds."""


def agree(layers: Sequence[torch.nn.Module], fused: Sequence[FusedLayer], run: Callable[[], object]) -> bool:
    """Whether every layer computes the same in both ways of what it is given when the model is `run`."""
    seen: list[tuple[torch.Tensor, dict[str, Any], torch.Tensor]] = []

    def keep(_: torch.nn.Module, given: tuple[Any, ...], named: dict[str, Any], result: Any) -> None:
        hidden = given[0] if given else named["hidden_states"]
        seen.append((hidden, {k: v for k, v in named.items() if k != "hidden_states"}, result))

    hooks = [layer.register_forward_hook(keep, with_kwargs=True) for layer in layers]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    if len(seen) != len(fused):
        return False
    for own, (hidden, named, result) in zip(fused, seen, strict=True):
        named["past_key_values"].step.normed = None  # each begins with what it was given
        if not isinstance(result, torch.Tensor) or not _is_close(hidden, result, own(hidden.clone(), **named)):
            return False
    return True


def _is_close(before: torch.Tensor, result: torch.Tensor, own: torch.Tensor) -> bool:
    added, own_added = result.double() - before.double(), own.double() - before.double()
    return bool((own_added - added).norm() <= _CLOSE.get(result.dtype, 0.0) * added.norm().clamp_min(1e-9))


_ROWS = (1, 8, 32, 2, 16, 4, 128)
"""In the order in which they are measured: between two of them guesses are better than beyond all."""
_SHALLOW, _DEEP = 64, (2048, 1024, 512)
"""The deepest that fits is measured."""
_TIMES = 3
"""Each step is taken up to so often, once more to warm up while there is time, and the quickest counts."""
_LONG_ENOUGH_S = 2.0
"""What takes longer is told by fewer steps, and by none that is deep: a gap may be short."""
_QUICK_S, _AS_QUICK = 0.5, 2.0
"""No step is taken that takes longer, or so many times as long as one of a single row: whoever comes meanwhile
waits for it."""
_WIDER, _HARDLY_LONGER = 4, 1.2
"""A depth is filled with one token, then with so many times as many at once for as long as that is quick, or takes
hardly longer than fewer did."""


def measure_steps(engine: Stepper) -> StepTable | None:
    """One sequence with more and more rows, as drafts have them. `engine` holds nothing, before and after. None
    where a context is too small for it. Raises what the engine raises."""
    able = engine.capabilities
    most = min(able.batch, able.outputs)
    room = able.context - max(_ROWS)
    depths = [each for each in (_SHALLOW, next((deep for deep in _DEEP if deep <= room), 0)) if 0 < each <= room]
    times: list[dict[int, float]] = []
    begin = perf_counter()
    for depth in depths:
        _fill(engine, depth)
        if not times:
            begin = perf_counter()
        times.append(_line(engine, depth, times[0] if times else None, most, begin))
        engine.trim(0, 0)
        if perf_counter() - begin > _LONG_ENOUGH_S / 2:
            break
    if not times:
        return None
    known = sorted(times[0])
    return StepTable(
        tuple(known), tuple(depths[: len(times)]), tuple(tuple(line[count] for count in known) for line in times)
    )


def _line(
    engine: Stepper, depth: int, before: dict[int, float] | None, most: int, begin: float
) -> dict[int, float]:
    """Milliseconds by the number of rows: of those that `before` has, or of those that do not take too long."""
    line: dict[int, float] = {}
    for count in before or [count for count in _ROWS if count <= most]:
        if before is None and line and _expected(line, count) > max(1e3 * _QUICK_S, _AS_QUICK * line[1]):
            continue
        line[count] = _milliseconds(engine, depth, count, until=begin + _LONG_ENOUGH_S)
        if before is None and perf_counter() - begin > _LONG_ENOUGH_S:
            break
    return line


def _expected(line: dict[int, float], count: int) -> float:
    """What a step takes by the two smaller ones that are nearest to it; no more than a larger one took."""
    if any(rows > count for rows in line):
        return 0.0
    *before, last = sorted(line)
    rise = (line[last] - line[before[-1]]) / (last - before[-1]) if before else 0.0
    return line[last] + rise * (count - last)


def _fill(engine: Stepper, depth: int) -> None:
    start, count, fewer_took = 0, 1, inf
    while start < depth:
        tokens = min(count, engine.capabilities.batch, depth - start)
        begin = perf_counter()
        engine.evaluate([Rows(0, start, np.zeros(tokens, np.int32), outputs=0)])
        elapsed, start = perf_counter() - begin, start + tokens
        if elapsed < _QUICK_S / 2 / _WIDER or elapsed < _HARDLY_LONGER * fewer_took:
            count, fewer_took = _WIDER * count, elapsed


def _milliseconds(engine: Stepper, depth: int, count: int, until: float) -> float:
    rows = Rows(0, depth, np.zeros(count, np.int32), outputs=count)
    seconds: list[float] = []
    while len(seconds) < 2 or (len(seconds) <= _TIMES and sum(seconds) < _LONG_ENOUGH_S / len(_ROWS)):
        begin = perf_counter()
        engine.evaluate([rows])
        seconds.append(perf_counter() - begin)
        engine.trim(0, depth)
        if perf_counter() > until:
            break
    return 1e3 * min(seconds[1:] or seconds)
