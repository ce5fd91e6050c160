"""Which code computes an engine's steps, and how long they take.

The code is chosen when an engine is opened, because the bytes of its state depend on it. On CUDA steps are ours
(`cuda_graphs`), on a CPU layers are (`cpu_layers`), if the model can be computed so and gives what its authors'
code gives; else they are the model's own. What was chosen is remembered: the start after it compares nothing.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from emberkeep.engine.base import Capabilities, Logits, Rows
from emberkeep.engine.facts import Facts
from emberkeep.engine.hf.attention import Span
from emberkeep.engine.hf.cpu_layers import CpuLayer, cpu_layers
from emberkeep.engine.hf.network import LearningStep, Network, Step
from emberkeep.engine.hf.pool import BLOCK, BlockTable, KvMemory
from emberkeep.engine.step_table import IdleSteps, Interrupted, Stepper, StepTable, measure_steps
from emberkeep.errors import EngineError
from emberkeep.types.models import AttentionTier, Vocab

if TYPE_CHECKING:
    from emberkeep.engine.hf.cuda_graphs import StepGraphs
    from emberkeep.engine.hf.flights import Flights
    from emberkeep.engine.hf.fused_layers import FusedLayer
    from emberkeep.engine.hf.streaming import LayerStream

log = logging.getLogger("emberkeep.engine")
_CHOSEN, _MEASURED = "code of steps", "times of steps"
"""What is remembered."""
_OF_MODEL, _ON_CPU = "model", "on a CPU"
"""The model's own code computes its steps, or `cpu_layers` does."""
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

    def reserve(self, tables: Sequence[BlockTable], counts: Sequence[int]) -> bool:
        """Room for so many more tokens of each; False: there is none."""


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
        self.flights: Flights | None = None
        """They launch steps of ours."""
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
        elif layers == _ON_CPU:
            self._network.own_layers = self.open_cpu_layers()
        elif layers != _OF_MODEL:
            self.graphs = self._open_graphs(layers)
        self.chores.extend([self._record, self._time, *more])
        if layers is not None:
            self.chores.append(self._verify)

    @property
    def layers(self) -> str | None:
        """Which code of ours computes them; None: the model's own does."""
        if self.graphs is not None:
            return self.graphs.layers
        return _ON_CPU if self._network.own_layers else None

    def _find_out(self) -> None:
        reference = self._reference()
        reference.check(self._engine)
        self.graphs, self._network.own_layers = self._open_graphs(), self._agreeing_cpu_layers()
        if self.layers is not None:
            try:
                reference.check(self._engine)
            except EngineError as error:
                log.warning("steps are not computed by code of ours, and will be slower: %s", error)
                self._engine.empty()
                self.graphs, self._network.own_layers = None, None
        # What failed may have done so by chance: only success is remembered.
        if self.layers is not None or self._network.device.type != "cuda":
            self._facts.remember_json(_CHOSEN, self.layers or _OF_MODEL)

    def _open_graphs(self, layers: str | None = None) -> StepGraphs | None:
        """Steps of ours, where this model's can be computed so. `layers`: what was found to compute them rightly;
        None: it is to be found out. Nothing may be in the pool."""
        network, memory, stream, able = self._network, self._memory, self._stream, self._engine.capabilities
        if network.device.type != "cuda" or (stream is not None and not stream.can_record):
            return None
        try:
            # Needs Triton, which comes with torch for CUDA only.
            from emberkeep.engine.hf.cuda_graphs import StepGraphs
            from emberkeep.engine.hf.kernels import check_assembler
            from emberkeep.engine.hf.step_batch import StepSize

            check_assembler(network.device)
            largest = StepSize(able.batch, able.outputs, able.max_sequences, -(-able.context // BLOCK))
            from emberkeep.engine.hf.flights import Flights

            self.flights = Flights(able.outputs, self._engine.reserve)
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
        return fused if self._agrees(fused) else None

    def open_cpu_layers(self) -> list[CpuLayer] | None:
        """What computes the layers on a CPU, if they are of the usual make and stay there."""
        options = self._learned.options
        if self._network.device.type != "cpu" or self._stream is not None:
            return None
        return cpu_layers(self._network.layers, [options[layer] for layer in range(len(options))])

    def _agreeing_cpu_layers(self) -> list[CpuLayer] | None:
        own = self.open_cpu_layers()
        return own if own and self._agrees(own) else None

    def _agrees(self, own: Sequence[Layer]) -> bool:
        """Nothing may be in the pool."""
        network, rows = self._network, torch.arange(_COMPARED, device=self._network.device)
        step = Step(self._memory, [Span(0, _COMPARED, BlockTable([0], _COMPARED), 0)], rows)
        return agree(network.layers, own, lambda: network.run(step, rows, rows, rows))

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
        reference, graphs, own = self._reference(), self.graphs, self._network.own_layers
        try:
            reference.check(steps)
            self.graphs, self._network.own_layers = None, None
            reference.check(steps)
        except EngineError as error:
            self._facts.forget(_CHOSEN)
            self.refusal = f"What computed steps rightly before no longer does, so restart: {error}"
            log.error("%s", self.refusal)
        finally:
            self.graphs, self._network.own_layers = graphs, own

    def close(self) -> None:
        """Let go of the engine, the model and its state."""
        self.graphs = self.flights = None
        self.chores.clear()
        self._engine = None  # type: ignore[assignment]
        self._network = None  # type: ignore[assignment]
        self._memory = None  # type: ignore[assignment]
        self._learned = None  # type: ignore[assignment]
        self._stream = None


def run_by_model(
    network: Network,
    memory: KvMemory,
    tier: AttentionTier,
    batch: Sequence[Rows],
    tables: Sequence[BlockTable],
) -> torch.Tensor:
    """By the model's own code: logits of every row that wants them."""

    def on_device(array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(network.device, non_blocking=True)

    ends = np.cumsum([len(rows.tokens) for rows in batch]).tolist()
    begins = [0, *ends[:-1]]
    spans = [
        Span(begin, end, table, rows.start)
        for begin, end, table, rows in zip(begins, ends, tables, batch, strict=True)
    ]
    cells = np.concatenate([t.cells(r.start, t.length) for t, r in zip(tables, batch, strict=True)])
    positions = np.concatenate([np.arange(r.start, r.start + len(r.tokens)) for r in batch])
    tokens = np.concatenate([r.tokens for r in batch]).astype(np.int64)
    wanted = [np.arange(end - rows.outputs, end) for end, rows in zip(ends, batch, strict=True)]
    step = Step(memory, spans, on_device(cells), tier)
    last = on_device(np.concatenate(wanted).astype(np.int64))
    return network.run(step, on_device(tokens), on_device(positions), last)


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


Layer = Callable[..., torch.Tensor]


def agree(layers: Sequence[torch.nn.Module], fused: Sequence[Layer], run: Callable[[], object]) -> bool:
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
