"""How good the predictions of memory are: what was predicted against what was used."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np

from emberkeep.sched.admission import Admitted
from emberkeep.sched.job import Job
from emberkeep.types import Json, Plan

_REMEMBERED = 1024
_REMEMBERED_PER_COHORT = 256
_COHORTS = 64
"""Those that had something to tell lately."""

Cohort = tuple[int, Plan]
"""Requests of about the same length (the power of two below it) with the same plan."""


class Calibration:
    """May be used from any thread. Its memory is bounded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: deque[float] = deque(maxlen=_REMEMBERED)
        self._cohorts: OrderedDict[Cohort, deque[float]] = OrderedDict()
        self._count = 0

    def note(self, admitted: Admitted, actual: int) -> None:
        """A request was admitted with that prediction, and this is what was used."""
        ratio = actual / max(admitted.predicted, 1)
        cohort = 1 << max(admitted.prompt_tokens.bit_length() - 1, 0), admitted.plan
        with self._lock:
            self._count += 1
            self._all.append(ratio)
            self._cohorts.setdefault(cohort, deque(maxlen=_REMEMBERED_PER_COHORT)).append(ratio)
            self._cohorts.move_to_end(cohort)
            if len(self._cohorts) > _COHORTS:
                self._cohorts.popitem(last=False)

    def stats(self) -> dict[str, Json]:
        """With ratios above 1 more was used than predicted; `suggested_margin` would have covered 99 of 100."""
        with self._lock:
            every, count = list(self._all), self._count
            cohorts = {cohort: list(ratios) for cohort, ratios in sorted(self._cohorts.items(), key=_in_order)}
        return {
            "suggested_margin": max(_quantile(every, 0.99) - 1, 0.0) if every else None,
            "actual_to_predicted": {**_summary(every), "count": count},
            "cohorts": [_cohort_json(cohort, ratios) for cohort, ratios in cohorts.items()],
        }


class Measured(Protocol):
    def peak_bytes(self) -> int | None:
        """As `Engine` has it."""


class PeakWatch:
    """Asks for the peak around every job that runs alone: only then is it that job's. On the engine's thread."""

    def __init__(self, engine: Measured, calibration: Calibration, others: Callable[[], int]) -> None:
        """`others`: bytes that the engine's measure counts as well, and that are not the engine's."""
        self._engine = engine
        self._calibration = calibration
        self._others = others
        self._watched: Job | None = None

    def started(self, job: Job, *, alone: bool) -> None:
        self._watched = job if alone and job.admitted else None
        if self._watched:
            self._engine.peak_bytes()

    def ended(self, job: Job) -> None:
        if job is not self._watched or job.admitted is None:
            return
        self._watched = None
        actual = self._engine.peak_bytes()
        if actual is not None:
            self._calibration.note(job.admitted, actual - self._others())


def _in_order(item: tuple[Cohort, Iterable[float]]) -> tuple[int, int, int]:
    (tokens, plan), _ = item
    return tokens, plan.prefill_slice, plan.kv_bits


def _cohort_json(cohort: Cohort, ratios: list[float]) -> dict[str, Json]:
    tokens, plan = cohort
    return {
        "prompt_tokens": [tokens, 2 * tokens - 1],
        "prefill_slice": plan.prefill_slice,
        "kv_bits": plan.kv_bits,
        **_summary(ratios),
    }


def _summary(ratios: list[float]) -> dict[str, Json]:
    return {
        "count": len(ratios),
        "median": _quantile(ratios, 0.5) if ratios else None,
        "p95": _quantile(ratios, 0.95) if ratios else None,
    }


def _quantile(ratios: list[float], share: float) -> float:
    return round(float(np.quantile(ratios, share, method="higher")), 4)
