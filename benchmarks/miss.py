"""`miss`: what looking up and storing cost a prompt of which nothing is known.

The product (everything but HTTP) and a bare engine evaluate the same tokens in the same slices, in turns, on
one thread. Both begin with an empty engine each time. What slicing itself costs is a row of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from time import perf_counter, process_time

import numpy as np

from benchmarks.bare import parts_of_engine, prefill
from emberkeep.backend.base import ModelCard
from emberkeep.backend.local import LocalBackend
from emberkeep.bench.report import BenchResult, Row, Series, Table, ratios, series
from emberkeep.bench.servers import is_settled
from emberkeep.bench.workspace import Workspace
from emberkeep.config.settings import PREFILL_SLICE, Config
from emberkeep.engine.base import Engine, Outcome, Rows
from emberkeep.engine.llamacpp.context import LlamaSettings
from emberkeep.engine.llamacpp.engine import LlamaEngine
from emberkeep.engine.llamacpp.threads import one_core_each
from emberkeep.runtime.local_model import assemble
from emberkeep.sched.engine_thread import EngineThread
from emberkeep.token_arrays import TokenArray
from emberkeep.types.request import Request, Sampling

_POLL_S = 0.002
_ROOM = 64
_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
"""Prompts are token ids here: the model's own template is not needed."""


@dataclass(frozen=True, slots=True)
class MissPlan:
    tokens: int = 2048
    repeat: int = 7

    @property
    def context(self) -> int:
        return self.tokens + _ROOM

    def quick(self) -> MissPlan:
        return replace(self, tokens=512, repeat=2)


@dataclass(frozen=True, slots=True)
class _Cost:
    """Seconds, by the clock and of all cores of this process."""

    wall: float
    cpu: float

    @classmethod
    def since(cls, begin: _Cost) -> _Cost:
        return cls(perf_counter() - begin.wall, process_time() - begin.cpu)


@dataclass(frozen=True, slots=True)
class _Round:
    bare: _Cost
    answered: _Cost
    """To the first token."""
    durable: _Cost
    """Until everything was on disk as well."""
    unhurried: _Cost
    """The bare engine with the largest slices: no other request could have got a step in between."""


class _Recorder(LlamaEngine):
    """Remembers how many tokens each step evaluated."""

    def __init__(self, model: Path, settings: LlamaSettings) -> None:
        self.steps: list[int] = []
        super().__init__(*parts_of_engine(model, settings))

    def evaluate(self, batch: Sequence[Rows]) -> Outcome:
        self.steps.append(sum(len(rows.tokens) for rows in batch))
        return super().evaluate(batch)


async def run(workspace: Workspace, plan: MissPlan) -> BenchResult:
    workspace.require_context(plan.context)
    config = Config(model=str(workspace.model), data_dir=workspace.new_data_dir(), parallel=1)
    settings = LlamaSettings(context=plan.context, cells=plan.context, sequences=1, batch=PREFILL_SLICE)
    thread = EngineThread()
    engine, bare = thread.submit(lambda: _open_both(workspace.model, settings)).result()
    backend = assemble(config, engine, _TEMPLATE, ModelCard("benchmark", 0, settings.context), thread)
    try:
        rounds = []
        for number in range(plan.repeat):
            workspace.say(f"round {number + 1} of {plan.repeat}")
            prompt = _prompt(plan.tokens, number, bare.vocab.size)
            rounds.append(await _round(backend, engine, bare, prompt))
    finally:
        await asyncio.wrap_future(backend.scheduler.call(bare.close))
        await backend.close()
    return _result(plan, rounds)


def _open_both(model: Path, settings: LlamaSettings) -> tuple[_Recorder, LlamaEngine]:
    with one_core_each():
        return _Recorder(model, settings), LlamaEngine(*parts_of_engine(model, settings))


async def _round(backend: LocalBackend, engine: _Recorder, bare: Engine, prompt: TokenArray) -> _Round:
    async def alone(slices: Sequence[int]) -> _Cost:
        return await asyncio.wrap_future(backend.scheduler.call(lambda: _bare(bare, prompt, slices)))

    engine.steps.clear()
    answered, durable = await _through_product(backend, prompt)
    return _Round(
        bare=await alone(leading(engine.steps, len(prompt))),
        answered=answered,
        durable=durable,
        unhurried=await alone(largest_slices(len(prompt), bare.capabilities.batch)),
    )


def leading(steps: Sequence[int], tokens: int) -> list[int]:
    """The steps that evaluated the prompt; what follows evaluated the answer."""
    return [steps[i] for i, end in enumerate(accumulate(steps)) if end <= tokens]


def largest_slices(tokens: int, batch: int) -> list[int]:
    """All but the last token in as few steps as possible, then that one, as the scheduler does."""
    full, rest = divmod(tokens - 1, batch)
    return [*[batch] * full, *([rest] if rest else ()), 1]


def _bare(engine: Engine, prompt: TokenArray, slices: Sequence[int]) -> _Cost:
    begin = _now()
    prefill(engine, prompt, slices)
    return _Cost.since(begin)


def _prompt(tokens: int, seed: int, vocab_size: int) -> TokenArray:
    """Random tokens: nothing of one prompt is a prefix of another."""
    return np.random.default_rng(seed).integers(0, vocab_size, tokens, np.int32)


async def _through_product(backend: LocalBackend, prompt: TokenArray) -> tuple[_Cost, _Cost]:
    request = Request(prompt=tuple(int(token) for token in prompt), max_tokens=1, sampling=Sampling(temperature=0))
    begin = _now()
    async for _ in backend.generate(request):
        pass
    answered = _Cost.since(begin)
    while not is_settled(backend.stats()):
        await asyncio.sleep(_POLL_S)
    return answered, _Cost.since(begin)


def _now() -> _Cost:
    return _Cost(perf_counter(), process_time())


def _result(plan: MissPlan, rounds: list[_Round]) -> BenchResult:
    rows = (
        Row("bare engine", {"time": _series(rounds, "bare", "wall"), "CPU": _series(rounds, "bare", "cpu")}),
        _row("to the first token", rounds, "answered"),
        _row("until all is on disk", rounds, "durable"),
        _row("bare engine, largest slices", rounds, "unhurried"),
    )
    return BenchResult(
        "miss",
        (Table(f"prompts of {plan.tokens:,} tokens, nothing reusable", rows),),
        ("The bare engine evaluates the slices that the scheduler chose in the same round.",),
    )


def _row(label: str, rounds: list[_Round], name: str) -> Row:
    wall, cpu = _series(rounds, name, "wall"), _series(rounds, name, "cpu")
    return Row(
        label,
        {
            "time": wall,
            "CPU": cpu,
            "overhead": overhead(wall, _series(rounds, "bare", "wall")),
            "CPU overhead": overhead(cpu, _series(rounds, "bare", "cpu")),
        },
    )


def overhead(product: Series, bare: Series) -> Series:
    """What the product adds to the bare work, in percent, pair by pair."""
    return series((100 * (ratio - 1) for ratio in ratios(product, bare).samples), "%")


def _series(rounds: list[_Round], name: str, clock: str) -> Series:
    return series((1e3 * getattr(getattr(one, name), clock) for one in rounds), "ms")
