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

from benchmarks.gpu.rig import decode, fill
from benchmarks.gpu.speculation import answers, tokens_per_second
from benchmarks.gpu.workload import Workload
from emberkeep.bench.figures import ratios, series
from emberkeep.bench.report import Row, Table
from emberkeep.engine.base import Engine, Logits
from emberkeep.engine.hf import HfEngine, HfSettings, Placing
from emberkeep.engine.hf.baseline import Shape, random_int4_model
from emberkeep.engine.hf.device import DeviceLimits
from emberkeep.kv.store import Budgets, KvStore
from emberkeep.sched.draft_model import LoadedDraft
from emberkeep.sched.engine_thread import EngineThread
from emberkeep.sched.scheduler import Scheduler, SchedulerSettings
from emberkeep.token_arrays import TokenArray
from emberkeep.types import Residency

_GB = 1e9
_CONTEXT, _PROMPT, _SEQUENCES, _SLICE = 2048, 256, 4, 512
_UNTIMED = 2
_LINK = 1 << 28
_STORED = 1 << 30


def measure(plan: Workload) -> Iterator[Table]:
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
    yield Table(
        f"{shape}: {plan.streamed_tokens} tokens with drafts by {plan.draft_layers} layers", (_drafted(plan),)
    )


def _row(plan: Workload, label: str, placing: Placing) -> Row:
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


def _open(plan: Workload, placing: Placing) -> tuple[HfEngine, str]:
    model = random_int4_model(_shape(plan, plan.streamed_layers), plan.device, placing, plan.draft_layers)
    stream = model.stream
    kept = plan.streamed_layers - (len(stream.plan.streamed) if stream else 0)
    return HfEngine(model, _settings(placing), "random"), f"{kept} of {plan.streamed_layers} layers stay"


def _shape(plan: Workload, layers: int) -> Shape:
    return Shape(layers, plan.streamed_hidden, _CONTEXT, is_tied=False)


def _settings(placing: Placing) -> HfSettings:
    return HfSettings(_CONTEXT, None, _SEQUENCES, _SLICE, gpu_memory=placing.gpu_memory)


def _step_seconds(engine: Engine, plan: Workload) -> list[float]:
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

    def __init__(self, engine: Engine, right: float) -> None:
        self._engine, self._right = engine, right
        self._random = np.random.default_rng(1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def logits(self, index: int, row: int = 0) -> Logits:
        given = self._engine.logits(index, row)
        return given if self._random.random() < self._right else np.roll(given, 1)


def _drafted(plan: Workload) -> Row:
    plain: list[float] = []
    drafted: list[float] = []
    per_step, shares = [], []
    with _pair(plan) as loop:
        # The first one is not counted: what is worth drafting is learnt in it.
        answers(loop, plan.streamed_tokens, [_prompt(9)], speculation=True)
        for seed in range(plan.streamed_repeat):
            prompts = [_prompt(10 + seed)]
            for speculation, found in ((False, plain), (True, drafted)):
                endings = answers(loop, plan.streamed_tokens, prompts, speculation=speculation)
                found.append(tokens_per_second(endings))
            tokens, accepted, tried = (
                sum(getattr(ending, name) for ending in endings)
                for name in ("sampled_tokens", "accepted_tokens", "drafted_tokens")
            )
            per_step.append(tokens / (tokens - accepted))
            shares.append(accepted / max(tried, 1))
    without, with_drafts = series(plain, "tokens/s"), series(drafted, "tokens/s")
    return Row(
        f"the draft is right {plan.draft_right:.0%} of the time",
        {
            "plain": without,
            "with drafts": with_drafts,
            "of drafted tokens accepted": series(shares, ""),
            "tokens per step": series(per_step, ""),
            "faster": ratios(with_drafts, without),
        },
    )


@contextmanager
def _pair(plan: Workload) -> Iterator[Scheduler]:
    """The draft model is on the device before the other, which has what is left. Raises EngineError."""
    thread, placing = EngineThread(), Placing(gpu_memory=plan.streamed_memory)

    def open_both() -> tuple[HfEngine, HfEngine]:
        small = random_int4_model(_shape(plan, plan.draft_layers), plan.device, Placing())
        draft = HfEngine(small, replace(_settings(placing), cells=2 * _CONTEXT), "random draft")
        return _open(plan, placing)[0], draft

    engine, draft = thread.submit(open_both).result()
    stores = [KvStore(each.fingerprint, Budgets(_STORED)) for each in (engine, draft)]
    loop = Scheduler(
        engine,
        stores[0],
        SchedulerSettings(parallel=2, prefill_slice=_SLICE, draft_max=24),
        thread=thread,
        draft=LoadedDraft("small", SometimesRight(draft, plan.draft_right), stores[1]),
    )
    try:
        yield loop
    finally:
        loop.close()
        for store in stores:
            store.close()
