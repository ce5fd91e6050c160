"""`gpu`: an engine with random weights, against eager transformers and against the device's limits.

    rig          the engine with a scheduler and a store around it
    memory       what was predicted of a request's memory, against what it took
    ttft         the first token of a cached prompt and of cached turns, against evaluating everything
    transfer     moving state between RAM and the device, against copying pinned bytes
    decode       a decode step, against transformers and against reading the weights once
    speculation  decoding with a draft model, against plain decoding
    streaming    a model larger than its share of the device: its steps against the link (`streaming`), and with
                 drafts (`streamed_drafts`)

Of the package's dependencies it needs only those of the engine, the scheduler and the store, so that
`python -m benchmarks.gpu` also runs where little is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.gpu import decode, memory, speculation, streaming, transfer, ttft
from benchmarks.gpu.rig import Rig, open_rig
from benchmarks.gpu.workload import GpuPlan
from emberkeep.bench.report import BenchResult, Table
from emberkeep.bench.workspace import Workspace

__all__ = ["GpuPlan", "measure", "run"]

_NOTES = (
    "prefill alone: nothing is looked up and nothing stored. from RAM: nothing of it was in the engine any more.",
    "transformers: eager code, SDPA, a cache that grows by concatenation, tokens chosen on the device.",
    "tokens per step: of one answer, with what was accepted of drafts; catching up with the prompt is counted.",
    "weights read once: their bytes / the bytes per second that a copy within the device reads and writes.",
)

_PARTS: dict[str, Callable[[Rig, GpuPlan], Iterator[Table]]] = {
    "memory": memory.measure,
    "prompts": ttft.measure_prompts,
    "transfer": transfer.measure,
    "turns": ttft.measure_turns,
    "decode": decode.measure,
    "speculation": speculation.measure,
}
"""Memory first, and transformers, which has weights of its own, last: nothing else is on the device then."""

_ALONE: dict[str, Callable[[GpuPlan], Iterator[Table]]] = {
    "streaming": streaming.measure,
    "streamed_drafts": streaming.measure_drafts,
}
"""With engines of their own, and nothing else on the device."""


async def run(workspace: Workspace, plan: GpuPlan) -> BenchResult:
    *_, last = measure(plan, workspace.say)
    return last


def measure(plan: GpuPlan, say: Callable[[str], None]) -> Iterator[BenchResult]:
    """Everything that is known, again after every table. Blocks. Raises EngineError."""
    tables: list[Table] = []
    with_rig = [name for name in plan.parts if name in _PARTS]
    for name in plan.parts:
        if name in _ALONE and plan.engine == "hf":
            say(name)
            for table in _ALONE[name](plan):
                tables.append(table)
                yield BenchResult("gpu", tuple(tables), _NOTES)
    if not with_rig:
        return
    with open_rig(plan) as rig:
        for name in with_rig:
            if name == "speculation" and plan.engine != "hf":
                continue  # a pair of models that agree is made of a model of transformers
            say(name)
            for table in _PARTS[name](rig, plan):
                tables.append(table)
                yield BenchResult("gpu", tuple(tables), (rig.about, *_NOTES))
