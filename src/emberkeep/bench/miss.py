"""`miss`: what looking up and storing cost a prompt of which nothing is known.

The product (everything but HTTP) and a bare engine evaluate the same tokens in the same slices, in turns, in
one process. Both begin with an empty engine each time.
"""

from __future__ import annotations

import asyncio
from contextlib import closing
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from emberkeep.backend.base import Backend, ModelCard
from emberkeep.bench.bare import Tokens, open_engine, prefill_seconds
from emberkeep.bench.client import is_settled
from emberkeep.bench.figures import overhead, series
from emberkeep.bench.report import Result, Row, Table
from emberkeep.bench.stage import Stage
from emberkeep.config import Config
from emberkeep.runtime import assemble
from emberkeep.types import Request, Sampling

_POLL_S = 0.002
_ROOM = 64
_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
"""Prompts are token ids here: the model's own template is not needed."""


@dataclass(frozen=True, slots=True)
class MissPlan:
    tokens: int = 2048
    repeat: int = 7

    def quick(self) -> MissPlan:
        return replace(self, tokens=512, repeat=2)


@dataclass(frozen=True, slots=True)
class _Round:
    product: float
    """Seconds to the first token."""
    durable: float
    """Seconds until everything was on disk as well."""
    bare: float


async def run(stage: Stage, plan: MissPlan) -> Result:
    config = Config(model=str(stage.model), data_dir=stage.new_data_dir(), parallel=1)
    context, slice_ = plan.tokens + _ROOM, config.prefill_slice
    with closing(open_engine(stage.model, context=context, sequences=1, batch=slice_)) as bare:
        engine = open_engine(stage.model, context=context, sequences=1, batch=slice_)
        backend = assemble(config, engine, _TEMPLATE, ModelCard("benchmark", 0, context))
        try:
            rounds = []
            for number in range(plan.repeat):
                stage.say(f"round {number + 1} of {plan.repeat}")
                prompt = _prompt(plan.tokens, number, bare.vocab.size)
                # Who goes first alternates, so that a machine that heats up favours neither.
                before = prefill_seconds(bare, prompt, slice_) if number % 2 else None
                product, durable = await _through_product(backend, prompt)
                rounds.append(_Round(product, durable, before or prefill_seconds(bare, prompt, slice_)))
        finally:
            await backend.close()
    return _result(plan, rounds)


def _prompt(tokens: int, seed: int, vocab_size: int) -> Tokens:
    """Random tokens: nothing of one prompt is a prefix of another."""
    return np.random.default_rng(seed).integers(0, vocab_size, tokens, np.int32)


async def _through_product(backend: Backend, prompt: Tokens) -> tuple[float, float]:
    request = Request(prompt=tuple(int(token) for token in prompt), max_tokens=1, sampling=Sampling(temperature=0))
    begin = perf_counter()
    async for _ in backend.generate(request):
        pass
    answered = perf_counter()
    while not is_settled(backend.stats()):
        await asyncio.sleep(_POLL_S)
    return answered - begin, perf_counter() - begin


def _result(plan: MissPlan, rounds: list[_Round]) -> Result:
    bare, product, durable = (
        series((1e3 * getattr(one, name) for one in rounds), "ms") for name in ("bare", "product", "durable")
    )
    rows = (
        Row("bare engine", {"time": bare}),
        Row("to the first token", {"time": product, "overhead": overhead(product, bare)}),
        Row("until all is on disk", {"time": durable, "overhead": overhead(durable, bare)}),
    )
    return Result("miss", (Table(f"prompts of {plan.tokens:,} tokens, nothing reusable", rows),))
