"""Decoding with a draft model, against plain decoding: one that agrees with the model, and one that never does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.baseline import Shape, random_pair
from benchmarks.gpu.rig import Rig, improved
from benchmarks.gpu.workload import GpuPlan
from benchmarks.listener import Listener
from emberkeep.bench.report import Row, Table, ratios, series
from emberkeep.chat.prompt import prompt_of_ids
from emberkeep.engine.hf.engine import HfEngine
from emberkeep.engine.hf.model_loader import HfSettings
from emberkeep.kv.store import Budgets, KvStore
from emberkeep.sched.draft_model import LoadedDraft
from emberkeep.sched.engine_thread import EngineThread
from emberkeep.sched.lifetimes import SchedulerSettings
from emberkeep.sched.sampling import Sampler
from emberkeep.sched.scheduler import Scheduler
from emberkeep.sched.sequence import Sequence
from emberkeep.sched.sequence_state import Ending
from emberkeep.token_arrays import TokenArray
from emberkeep.types.request import Request, Sampling

_PARALLEL = 8
_STORED = 4 << 30
_NEVER_TWICE = Sampling(temperature=0, frequency_penalty=1000.0)
"""Greedy random weights repeat themselves: that would be drafted without a model."""


def measure(rig: Rig, plan: GpuPlan) -> Iterator[Table]:
    rows: list[Row] = []
    for agrees in (True, False):
        with _pair(plan, agrees=agrees) as loop:
            rows += [_row(rig, loop, plan, batch, agrees=agrees) for batch in plan.batches]
    title = (
        f"decoding {plan.drafted_for} tokens after {plan.decoded_after:,}, drafts by {plan.draft_layers} of "
        f"{plan.layers} layers"
    )
    yield Table(title, tuple(rows))


def _row(rig: Rig, loop: Scheduler, plan: GpuPlan, batch: int, *, agrees: bool) -> Row:
    plain, drafted, per_step = [], [], []
    for _ in range(1 + plan.repeat):
        prompts = [rig.prompt(plan.decoded_after) for _ in range(batch)]
        plain.append(tokens_per_second(answers(loop, plan.drafted_for, prompts, speculation=False)))
        endings = answers(loop, plan.drafted_for, prompts, speculation=True)
        drafted.append(tokens_per_second(endings))
        tokens = sum(ending.timings.predicted_n for ending in endings)
        per_step.append(tokens / (tokens - sum(ending.timings.draft_n_accepted for ending in endings)))
    without, with_drafts = series(plain[1:], "tokens/s"), series(drafted[1:], "tokens/s")
    return Row(
        f"batch of {batch}, the draft model {'agrees' if agrees else 'does not agree'}",
        {
            "plain": without,
            "with drafts": with_drafts,
            "tokens per step": series(per_step[1:], ""),
            "faster": ratios(with_drafts, without),
        },
    )


def answers(loop: Scheduler, count: int, prompts: list[TokenArray], *, speculation: bool) -> list[Ending]:
    listeners = [Listener() for _ in prompts]
    request = Request(use_cache=False, speculation=None if speculation else False).decided(is_kept=False)
    for prompt, listener in zip(prompts, listeners, strict=True):
        ids = prompt_of_ids(prompt, max_new=count)
        loop.submit(Sequence(ids, request, Sampler(_NEVER_TWICE), listener))
    return [listener.ending.result() for listener in listeners]


def tokens_per_second(endings: list[Ending]) -> float:
    """The speed of all together, from each one's first token on."""
    return sum(1e3 * (ending.timings.predicted_n - 1) / ending.timings.predicted_ms for ending in endings)


@contextmanager
def _pair(plan: GpuPlan, *, agrees: bool) -> Iterator[Scheduler]:
    """Raises EngineError."""
    context = plan.decoded_after + plan.drafted_for + 64
    shape = Shape(plan.layers, plan.hidden, context)
    settings = HfSettings(context, _PARALLEL * context, 2 * _PARALLEL, max(plan.slice, 2 * _PARALLEL))
    thread = EngineThread()
    models = thread.submit(lambda: random_pair(shape, plan.draft_layers, plan.device, agrees=agrees)).result()
    engine, draft = thread.submit(
        lambda: [
            improved(HfEngine(each, settings, f"random, {len(each.network.model.layers)} layers"))
            for each in models
        ]
    ).result()
    stores = [KvStore(each.fingerprint, Budgets(_STORED)) for each in (engine, draft)]
    loop = Scheduler(
        engine,
        stores[0],
        SchedulerSettings(parallel=_PARALLEL, prefill_slice=plan.slice, draft_max=24),
        thread=thread,
        draft=LoadedDraft("small", draft, stores[1]),
    )
    try:
        yield loop
    finally:
        loop.close()
        for store in stores:
            store.close()
