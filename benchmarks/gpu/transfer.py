"""Moving state between RAM and the device, chunk by chunk as the store has it, against copying pinned bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter

import numpy as np

from benchmarks.gpu.rig import Rig, fill, step
from benchmarks.gpu.workload import GpuPlan
from emberkeep.bench.report import Row, Table, ratios, series
from emberkeep.engine.base import Engine, Payload, Rows
from emberkeep.kv.policy import CHUNK_TOKENS

_GB = 1e9


def measure(rig: Rig, plan: GpuPlan) -> Iterator[Table]:
    for size in plan.tokens:
        yield _transfers(rig, plan, size)


def _transfers(rig: Rig, plan: GpuPlan, size: int) -> Table:
    prompt, borders = rig.prompt(size), [*range(0, size, CHUNK_TOKENS), size]

    def transfers(engine: Engine) -> list[tuple[float, float, float]]:
        fill(engine, 0, prompt, plan.slice)
        rounds = [_round_trip(rig, engine, borders) for _ in range(1 + plan.repeat)]
        engine.trim(0, 0)
        return rounds[1:]

    rounds = rig.alone(transfers)
    limit, loaded, stored = (series(speeds, "GB/s") for speeds in zip(*rounds, strict=True))
    total = size * rig.engine.capabilities.kv_bytes_per_token
    title = f"state of {size:,} tokens ({total / _GB:.2f} GB) between RAM and the device"
    return Table(
        title,
        (
            Row("pinned copy to the device", {"speed": limit}),
            Row("loaded", {"speed": loaded, "of the copy": ratios(loaded, limit)}),
            Row("stored", {"speed": stored, "of the copy": ratios(stored, limit)}),
        ),
    )


def _round_trip(rig: Rig, engine: Engine, borders: list[int]) -> tuple[float, float, float]:
    """GB/s of a plain copy of the same size, of loading sequence 0's state into another, and of exporting it."""
    payloads: list[Payload] = []
    export = _seconds(rig, lambda: payloads.extend(engine.export_kv(0, borders).payloads()))
    load = _seconds(rig, lambda: _load(engine, borders, payloads))
    # Engines may hold payloads until the next step: as in a request, one follows.
    step(engine, [Rows(1, borders[-1], np.zeros(1, np.int32), outputs=1)])
    engine.trim(1, 0)
    total = sum(len(payload) for payload in payloads)
    return rig.limits.load_speed(total) / _GB, total / load / _GB, total / export / _GB


def _load(engine: Engine, borders: list[int], payloads: list[Payload]) -> None:
    engine.import_kv(1, borders[0], borders[-1], payloads, borders[0])


def _seconds(rig: Rig, action: Callable[[], None]) -> float:
    rig.limits.settle()
    begin = perf_counter()
    action()
    rig.limits.settle()
    return perf_counter() - begin
