"""A model larger than its share of the device: decoding by what stays there, against the link, and with drafts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.baseline import Shape, random_int4_model
from benchmarks.gpu.rig import decode, fill, improved
from benchmarks.gpu.speculation import answers, tokens_per_second
from benchmarks.gpu.workload import GpuPlan
from emberkeep.bench.report import Row, Table, ratios, series
from emberkeep.engine.base import Engine, Logits
from emberkeep.engine.hf.device import DeviceLimits
from emberkeep.engine.hf.engine import HfEngine
from emberkeep.engine.hf.model_loader import HfSettings
from emberkeep.engine.hf.residency import Placing
from emberkeep.kv.store import Budgets, KvStore
from emberkeep.sched.draft_model import LoadedDraft
from emberkeep.sched.engine_thread import EngineThread
from emberkeep.sched.lifetimes import SchedulerSettings
from emberkeep.sched.scheduler import Scheduler
from emberkeep.token_arrays import TokenArray
from emberkeep.types.models import Residency

_GB = 1e9
_CONTEXT, _PROMPT, _SEQUENCES, _SLICE = 2048, 256, 4, 512
_UNTIMED = 2
_LINK = 1 << 28
_STORED = 1 << 30


def measure(plan: GpuPlan) -> Iterator[Table]:
    """Blocks. Raises EngineError."""
    budget = Placing(gpu_memory=plan.streamed_memory)
    placings = {
        "everything stays, without a bound": Placing(),
        "auto: as many layers stay as fit": budget,
        "ffn: attention stays": replace(budget, residency=Residency.FFN),
        "stream: nothing stays": replace(budget, residency=Residency.STREAM),
    }
    shape = f"{plan.streamed_layers} layers of {plan.streamed_hidden:,} in four bits"
    title = f"{shape}, in {plan.streamed_memory / _GB:.1f} GB: a decode step"
    yield Table(title, tuple(_row(plan, label, placing) for label, placing in placings.items()))


def measure_drafts(plan: GpuPlan) -> Iterator[Table]:
    """Blocks. Raises EngineError."""
    shape = f"{plan.streamed_layers} layers of {plan.streamed_hidden:,} in four bits"
    title = f"{shape}: {plan.streamed_tokens} tokens with drafts by {plan.draft_layers} layers"
    with _pair(plan) as (loop, draft):
        # The first one is not counted: what is worth drafting is learnt in it.
        answers(loop, plan.streamed_tokens, [_prompt(9)], speculation=True)
        plain = [_answer(loop, plan, seed, speculation=False)[0] for seed in range(plan.streamed_repeat)]
        yield Table(title, tuple(_drafted(loop, draft, plan, plain, right) for right in plan.draft_right))


def _row(plan: GpuPlan, label: str, placing: Placing) -> Row:
    limits = DeviceLimits(plan.device)
    link = limits.load_speed(_LINK)
    limits.forget_peak()
    engine, about = _open(plan, placing)
    try:
        before = _copied(engine)
        seconds = _step_seconds(engine, plan)
        copied = (_copied(engine) - before) / (len(seconds) + _UNTIMED + 1)  # and the prompt's
        peak = limits.peak_bytes()
    finally:
        engine.close()
        gc.collect()
    step = median(seconds)
    figures: dict[str, Any] = {
        "step": series([1e3 * each for each in seconds], "ms"),
        "tokens/s": f"{1 / step:.2f}",
        "pass": f"{copied / _GB:.2f} GB",
        "of the link": f"{copied / step / link:.0%} of {link / _GB:.1f} GB/s" if copied else "-",
        "peak": "not counted" if peak is None else f"{peak / _GB:.2f} GB",
    }
    return Row(f"{label} ({about})", figures)


def _open(plan: GpuPlan, placing: Placing) -> tuple[HfEngine, str]:
    model = random_int4_model(_shape(plan, plan.streamed_layers), plan.device, placing, plan.draft_layers)
    stream = model.stream
    kept = plan.streamed_layers - (len(stream.plan.streamed) if stream else 0)
    return improved(HfEngine(model, _settings(placing), "random")), f"{kept} of {plan.streamed_layers} layers stay"


def _shape(plan: GpuPlan, layers: int) -> Shape:
    return Shape(layers, plan.streamed_hidden, _CONTEXT, is_tied=False)


def _settings(placing: Placing) -> HfSettings:
    return HfSettings(_CONTEXT, None, _SEQUENCES, _SLICE, gpu_memory=placing.gpu_memory)


def _step_seconds(engine: Engine, plan: GpuPlan) -> list[float]:
    chosen, seconds = [fill(engine, 0, _prompt(0), _SLICE)], []
    for done in range(_UNTIMED + plan.streamed_steps):
        begin = perf_counter()
        chosen = decode(engine, [_PROMPT + done], chosen)
        seconds.append(perf_counter() - begin)
    engine.trim(0, 0)
    return seconds[_UNTIMED:]


def _copied(engine: HfEngine) -> int:
    streaming: Any = engine.stats().get("streaming")
    return int(streaming["copied_bytes"]) if streaming else 0


def _prompt(seed: int) -> TokenArray:
    return np.random.default_rng(seed).integers(0, 150_000, _PROMPT, np.int32)


# ── with drafts ──


class SometimesRight:
    """An engine whose logits are, but for a share of them, those of other tokens."""

    def __init__(self, engine: Engine) -> None:
        self.right = 1.0
        self._engine = engine
        self._random = np.random.default_rng(1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def logits(self, index: int, row: int = 0) -> Logits:
        given = self._engine.logits(index, row)
        return given if self._random.random() < self.right else np.roll(given, 1)


def _drafted(loop: Scheduler, draft: SometimesRight, plan: GpuPlan, plain: list[float], right: float) -> Row:
    draft.right = right
    _answer(loop, plan, 0, speculation=True)  # what is worth drafting now
    speeds, shares, per_step = zip(
        *(_answer(loop, plan, seed, speculation=True) for seed in range(plan.streamed_repeat)), strict=True
    )
    without, with_drafts = series(plain, "tokens/s"), series(speeds, "tokens/s")
    return Row(
        f"of what the draft model says, {1 - right:.0%} is replaced",
        {
            "plain": without,
            "with drafts": with_drafts,
            "of drafted tokens accepted": series(shares, ""),
            "tokens per step": series(per_step, ""),
            "faster": ratios(with_drafts, without),
        },
    )


def _answer(loop: Scheduler, plan: GpuPlan, seed: int, *, speculation: bool) -> tuple[float, float, float]:
    """Tokens per second, the share of drafted tokens that was accepted, tokens per step."""
    (ending,) = endings = answers(loop, plan.streamed_tokens, [_prompt(10 + seed)], speculation=speculation)
    tokens, accepted = ending.timings.predicted_n, ending.timings.draft_n_accepted
    return tokens_per_second(endings), accepted / max(ending.timings.draft_n, 1), tokens / (tokens - accepted)


@contextmanager
def _pair(plan: GpuPlan) -> Iterator[tuple[Scheduler, SometimesRight]]:
    """The draft model is on the device before the other, which has what is left. Raises EngineError."""
    thread, placing = EngineThread(), Placing(gpu_memory=plan.streamed_memory)

    def open_both() -> tuple[HfEngine, HfEngine]:
        small = random_int4_model(_shape(plan, plan.draft_layers), plan.device, Placing())
        draft = improved(HfEngine(small, replace(_settings(placing), cells=2 * _CONTEXT), "random draft"))
        return _open(plan, placing)[0], draft

    engine, small = thread.submit(open_both).result()
    draft = SometimesRight(small)
    stores = [KvStore(each.fingerprint, Budgets(_STORED)) for each in (engine, small)]
    loop = Scheduler(
        engine,
        stores[0],
        SchedulerSettings(parallel=2, prefill_slice=_SLICE, draft_max=24),
        thread=thread,
        draft=LoadedDraft("small", draft, stores[1]),
    )
    try:
        yield loop, draft
    finally:
        loop.close()
        for store in stores:
            store.close()
