"""The engine with a scheduler and a store around it, and one request after the other through them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import numpy as np

from benchmarks.baseline import Shape, random_model
from benchmarks.gpu.workload import GpuPlan
from benchmarks.listener import Listener
from emberkeep.chat.prompt import prompt_of_ids
from emberkeep.engine.base import Engine, Outcome, Rows
from emberkeep.engine.hf.device import DeviceLimits
from emberkeep.engine.hf.engine import HfEngine
from emberkeep.engine.hf.model_loader import HfSettings
from emberkeep.errors import EngineError
from emberkeep.kv.store import Budgets, KvStore
from emberkeep.sched.engine_thread import EngineThread
from emberkeep.sched.lifetimes import SchedulerSettings
from emberkeep.sched.sampling import Sampler
from emberkeep.sched.scheduler import Scheduler
from emberkeep.sched.sequence import Sequence as Sequence_
from emberkeep.token_arrays import TokenArray
from emberkeep.types.events import LookupRecord
from emberkeep.types.request import Execution, Request, Sampling

T = TypeVar("T")

_SEQUENCES = 16
_CONTEXTS = 4
"""The pool has cells for so many of the longest sequences."""
_STORED = 32 << 30


@dataclass(frozen=True, slots=True)
class Answer:
    ttft_ms: float
    tokens: tuple[int, ...]
    lookup: LookupRecord


class Rig:
    """Every method blocks. What is asked leaves its state in the engine and in RAM, as it does in a server."""

    def __init__(self, shape: Shape, engine: Engine, loop: Scheduler, limits: DeviceLimits, weights: int) -> None:
        self.shape = shape
        self.engine = engine
        self.limits = limits
        self.weights_bytes = weights
        self._loop = loop
        self._random = np.random.default_rng(0)

    @property
    def about(self) -> str:
        """The model and what computes it, for people."""
        shape, attention = self.shape, self.engine.attention
        computed = f"attention: {attention.tier}" if attention else "by llama.cpp"
        return f"{shape.layers} layers of {shape.hidden:,}, {self.weights_bytes / 1e9:.2f} GB, {computed}."

    def prompt(self, tokens: int) -> TokenArray:
        """Different from every other one."""
        return self._random.integers(0, self.shape.vocab, tokens, np.int32)

    def ask(self, tokens: TokenArray, max_new: int = 1, *, afresh: bool = False) -> Answer:
        """`afresh`: without stored state, and without storing any. Raises EngineError."""
        prompt = prompt_of_ids(tokens, max_new=max_new)  # in a server the tokenizer has made it
        sampler = Sampler(Sampling(temperature=0))
        request = Request(use_cache=not afresh, execution=Execution(is_kept=not afresh))
        listener = Listener()
        self._loop.submit(Sequence_(prompt, request, sampler, listener))
        ending = listener.ending.result()
        while self._loop.call(self._loop.stats).result()["active"]:
            pass  # what is stored after the answer belongs to this request
        return Answer(1e3 * (listener.first - listener.submitted), tuple(listener.tokens), ending.lookup)

    def leave_engine(self) -> None:
        """Let nothing rest in the engine: the store has it."""
        self._loop.forget({""}).result()

    def alone(self, action: Callable[[Engine], T]) -> T:
        """Something on the engine's thread, while the engine holds nothing."""
        return self._loop.when_idle(lambda: action(self.engine)).result()


@contextmanager
def open_rig(plan: GpuPlan) -> Iterator[Rig]:
    """Raises EngineError."""
    shape = Shape(plan.layers, plan.hidden, plan.longest)
    thread = EngineThread()
    opened = thread.submit(
        lambda: _open_llamacpp(plan, shape) if plan.engine == "llamacpp" else _open_hf(plan, shape)
    )
    engine, weights_bytes = opened.result()
    store = KvStore(engine.fingerprint, Budgets(_STORED))
    loop = Scheduler(engine, store, SchedulerSettings(parallel=8, prefill_slice=plan.slice), thread=thread)
    try:
        yield Rig(shape, engine, loop, DeviceLimits(plan.device), weights_bytes)
    finally:
        loop.close()
        store.close()


def _open_hf(plan: GpuPlan, shape: Shape) -> tuple[Engine, int]:
    settings = HfSettings(plan.longest, _CONTEXTS * plan.longest, _SEQUENCES, max(plan.slice, _SEQUENCES))
    model = random_model(shape, plan.device)
    return improved(HfEngine(model, settings, "random")), model.weights_bytes


def improved(engine: HfEngine) -> HfEngine:
    """As it is once it has had time of its own: its steps are recorded. Blocks."""
    engine.improve(lambda: False)
    return engine


def _open_llamacpp(plan: GpuPlan, shape: Shape) -> tuple[Engine, int]:
    """Everything on the GPU, if there is one."""
    from benchmarks.gpu.random_gguf import write_random_gguf
    from emberkeep.engine.llamacpp.context import LlamaSettings
    from emberkeep.engine.llamacpp.engine import LlamaEngine
    from emberkeep.engine.llamacpp.gpus import Placement
    from emberkeep.engine.llamacpp.model import LlamaModel

    settings = LlamaSettings(plan.longest, _CONTEXTS * plan.longest, _SEQUENCES, max(plan.slice, _SEQUENCES))
    with TemporaryDirectory() as folder:
        path = write_random_gguf(Path(folder) / "random.gguf", shape)
        placement = Placement(shape.layers, 0 if plan.device == "cpu" else shape.layers + 1)
        return LlamaEngine(LlamaModel(path, placement=placement), settings, "random"), path.stat().st_size


# ── without a scheduler, on the engine's thread ──


def fill(engine: Engine, sequence: int, tokens: TokenArray, largest: int) -> int:
    """Evaluate a prompt in slices of at most `largest` tokens; the token that follows it."""
    for start in range(0, len(tokens), largest):
        end = min(start + largest, len(tokens))
        step(engine, [Rows(sequence, start, tokens[start:end], outputs=end == len(tokens))])
    return engine.likeliest(0)


def decode(engine: Engine, positions: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """Sequences 0, 1, ... go on by one token each; the tokens that follow."""
    placed = enumerate(zip(positions, chosen, strict=True))
    step(engine, [Rows(s, at, np.array([token], np.int32), outputs=1) for s, (at, token) in placed])
    return [engine.likeliest(index) for index in range(len(chosen))]


def step(engine: Engine, batch: Sequence[Rows]) -> None:
    if engine.evaluate(batch) is not Outcome.DONE:
        raise EngineError("The benchmark's prompts do not fit its context: choose smaller sizes.")
