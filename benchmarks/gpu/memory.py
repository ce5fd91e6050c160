"""What was predicted of a request's memory, against what it took; and a request that is too large for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.gpu.rig import Rig, decode, fill
from benchmarks.gpu.workload import GpuPlan
from emberkeep.bench.report import Row, Table, percentile, ratios, series
from emberkeep.engine.base import Engine
from emberkeep.errors import TooLarge
from emberkeep.kv.policy import CHUNK_TOKENS
from emberkeep.sched.admission import Admission, open_admission
from emberkeep.token_arrays import TokenArray
from emberkeep.types.events import Admitted

_GB = 1e9
_SHORTEST = 32
_MOST = 1 << 40
"""Tokens: no machine has room for so many."""


@dataclass(frozen=True, slots=True)
class _Ran:
    admitted: Admitted
    used: int
    """The most bytes of the device that were allocated while it ran."""


def measure(rig: Rig, plan: GpuPlan) -> Iterator[Table]:
    engine = rig.engine
    admission = open_admission(
        lambda: engine.footprint, engine.capabilities, largest_slice=plan.slice, margin=0.0, store_room=lambda: 0
    )
    if admission is None or rig.alone(lambda _: _peak(rig)) is None:
        yield Table("memory of requests", (Row("not predicted or not counted on this device", {}),))
        return
    ran = [_run(rig, plan, admission, tokens) for tokens in _lengths(plan)]
    yield Table(f"memory of {len(ran)} requests", (_figures(ran), _refusal(rig, plan, admission)))


def _lengths(plan: GpuPlan) -> list[int]:
    """From short to long, evenly in proportion, in random order."""
    lengths = np.geomspace(_SHORTEST, plan.longest - plan.answer_tokens, plan.requests).astype(int)
    return [int(length) for length in np.random.default_rng(0).permutation(lengths)]


def _run(rig: Rig, plan: GpuPlan, admission: Admission, length: int) -> _Ran:
    admitted, prompt = admission.admit(length, plan.answer_tokens), rig.prompt(length)

    def used(engine: Engine) -> int:
        _peak(rig)
        _answer(engine, prompt, admitted.plan.prefill_slice, plan.answer_tokens)
        return _peak(rig) or 0

    return _Ran(admitted, rig.alone(used))


def _answer(engine: Engine, prompt: TokenArray, slice_: int, count: int) -> None:
    """As a request does: evaluate in slices, write an answer, export all of it chunk by chunk."""
    chosen = [fill(engine, 0, prompt, slice_)]
    for done in range(count):
        chosen = decode(engine, [len(prompt) + done], chosen)
    length = len(prompt) + count
    for start in range(0, length, CHUNK_TOKENS):
        engine.export_kv(0, (start, min(start + CHUNK_TOKENS, length))).payloads()
    engine.trim(0, 0)


def _peak(rig: Rig) -> int | None:
    """By the device's own count, else by the engine's, since this was last asked."""
    peak = rig.limits.peak_bytes()
    rig.limits.forget_peak()
    return rig.engine.peak_bytes() if peak is None else peak


def _figures(ran: list[_Ran]) -> Row:
    used = series((one.used / _GB for one in ran), "GB")
    predicted = series((one.admitted.predicted / _GB for one in ran), "GB")
    shares = ratios(used, predicted)
    return Row(
        f"{_SHORTEST} to {max(one.admitted.prompt_tokens for one in ran):,} tokens",
        {
            "predicted": predicted,
            "used": used,
            "used / predicted": shares,
            "95% of them up to": series([percentile(shares.samples, 95)], "×"),
        },
    )


def _refusal(rig: Rig, plan: GpuPlan, admission: Admission) -> Row:
    """The first prompt, of lengths that double, that is refused; and what was allocated to find that out."""
    tokens = plan.longest
    rig.alone(lambda _: _peak(rig))
    before = rig.limits.allocated_bytes() or 0
    while tokens < _MOST:
        try:
            admission.admit(tokens, plan.answer_tokens)
        except TooLarge as error:
            after = rig.limits.peak_bytes() or 0
            return Row(
                f"{tokens:,} tokens",
                {
                    "predicted": f"{error.needed / _GB:,.1f} GB, refused",
                    "used": f"{(after - before) / _GB:.2f} GB",
                },
            )
        tokens *= 2
    return Row(f"{tokens:,} tokens", {"predicted": "fits"})
