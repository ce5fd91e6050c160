"""A decode step, against eager transformers and against reading the weights once."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from time import perf_counter

from benchmarks.baseline import PlainModel
from benchmarks.gpu.rig import Rig, decode, fill
from benchmarks.gpu.workload import GpuPlan
from emberkeep.bench.report import Row, Series, Table, ratios, series
from emberkeep.engine.base import Engine
from emberkeep.token_arrays import TokenArray

_UNTIMED = 4
"""The first steps of a shape are captured or tuned."""


def measure(rig: Rig, plan: GpuPlan) -> Iterator[Table]:
    plain = rig.alone(lambda _: PlainModel.random(rig.shape, plan.device))
    rows = [_row(rig, plan, plain, batch) for batch in plan.batches]
    yield Table(f"a decode step after {plan.decoded_after:,} tokens", tuple(rows))


def _row(rig: Rig, plan: GpuPlan, plain: PlainModel, batch: int) -> Row:
    prompts = [rig.prompt(plan.decoded_after) for _ in range(batch)]
    steps, theirs, ours, once = _UNTIMED + plan.steps, [], [], []
    for _ in range(plan.repeat):
        theirs.append(_middle(rig.alone(lambda _: plain.step_seconds(prompts, steps))))
        ours.append(_middle(rig.alone(lambda engine: _step_seconds(engine, plan, prompts, steps))))
        once.append(1e3 * rig.weights_bytes / rig.alone(lambda _: rig.limits.read_speed(rig.weights_bytes)))
    return _figures(batch, *(series(samples, "ms") for samples in (theirs, ours, once)))


def _figures(batch: int, theirs: Series, ours: Series, once: Series) -> Row:
    return Row(
        f"batch of {batch}",
        {
            "ours": ours,
            "transformers": theirs,
            "faster": ratios(theirs, ours),
            "weights read once": once,
            "ours / read once": ratios(ours, once),
        },
    )


def _middle(seconds: list[float]) -> float:
    return 1e3 * median(seconds[_UNTIMED:])


def _step_seconds(engine: Engine, plan: GpuPlan, prompts: list[TokenArray], steps: int) -> list[float]:
    """Those of our engine, by the same clock as transformers: from the chosen tokens to the next ones."""
    chosen = [fill(engine, sequence, prompt, plan.slice) for sequence, prompt in enumerate(prompts)]
    seconds = []
    for done in range(steps):
        begin = perf_counter()
        chosen = decode(engine, [len(prompt) + done for prompt in prompts], chosen)
        seconds.append(perf_counter() - begin)
    for sequence in range(len(prompts)):
        engine.trim(sequence, 0)
    return seconds
