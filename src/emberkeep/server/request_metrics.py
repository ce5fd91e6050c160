"""Figures of requests. They are counted here, and told by `metrics` when somebody reads them."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import field

from emberkeep.api.errors import Failure
from emberkeep.server.request_log import RequestOutcome, RequestRecord
from emberkeep.types.events import Completed, MissReason
from emberkeep.values import dataclass

_WAITS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
_STEPS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_WHOLES = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0)


@dataclass(slots=True)
class Tally:
    """How often something happened, by a label."""

    name: str
    help: str
    label: str
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, value: str) -> None:
        self.counts[value] = self.counts.get(value, 0) + 1


@dataclass(slots=True)
class Distribution:
    """Values by how large they are."""

    name: str
    help: str
    bounds: tuple[float, ...]
    """Each is the largest value of its part; one part more has what is larger."""
    total: float = 0.0
    counts: list[int] = field(init=False)
    """By part."""

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class RequestMetrics:
    """One look at every request, when it has ended and its usage is known: nothing happens per token.

    Belongs to the event loop's thread; the figures may be read from any.
    """

    def __init__(self) -> None:
        # A counter that is there from the beginning has no first increase for a rate to miss.
        outcomes = {str(outcome): 0 for outcome in RequestOutcome}
        misses = {str(reason): 0 for reason in MissReason if reason is not MissReason.NONE}
        self._requests = Tally("requests_total", "HTTP requests by how they ended.", "outcome", outcomes)
        self._refused = Tally("requests_refused_total", "Requests that got an error as answer.", "reason")
        self._misses = Tally("prefix_cache_misses_total", "Prompts not wholly reused, and why.", "reason", misses)
        self._first_token = Distribution("time_to_first_token_seconds", "From arrival to the first token.", _WAITS)
        self._per_token = Distribution("time_per_output_token_seconds", "Between tokens of an answer.", _STEPS)
        self._queue = Distribution("request_queue_time_seconds", "From arrival to a slot in the engine.", _WAITS)
        self._whole = Distribution(
            "e2e_request_latency_seconds", "From arrival to the end of the answer.", _WHOLES
        )

    @property
    def tallies(self) -> tuple[Tally, ...]:
        return self._requests, self._refused, self._misses

    @property
    def distributions(self) -> tuple[Distribution, ...]:
        return self._first_token, self._per_token, self._queue, self._whole

    def observe(self, record: RequestRecord, seconds: float) -> None:
        """Count a request that has ended after that many seconds."""
        outcome = record.outcome
        if outcome is RequestOutcome.REFUSED and record.failure:
            self.refused(record.failure)
        elif outcome:
            self._requests.add(outcome)
        if outcome is RequestOutcome.FINISHED:
            self._whole.add(seconds)
        for completed in record.completed:
            self._observe_completed(completed)

    def refused(self, failure: Failure) -> None:
        """Count what was refused before it became a request."""
        self._requests.add(RequestOutcome.REFUSED)
        self._refused.add(failure.code or failure.type)

    def _observe_completed(self, completed: Completed) -> None:
        timings, reason = completed.timings, completed.lookup.reason
        self._first_token.add(timings.ttft_ms / 1e3)
        self._queue.add(timings.queue_ms / 1e3)
        if timings.predicted_per_second:
            self._per_token.add(1 / timings.predicted_per_second)
        if reason is not MissReason.NONE:
            self._misses.add(reason)
