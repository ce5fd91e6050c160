"""One look at every request, when it has ended and its bill is known: nothing happens per token."""

from __future__ import annotations

from time import monotonic

from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.types import ASGIApp, Receive, Scope, Send

from emberkeep.api.errors import Failure
from emberkeep.server.account import Account, Outcome, account_of
from emberkeep.server.metrics.figures import PREFIX
from emberkeep.types import Completed, MissReason

_WAITS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
_STEPS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_WHOLES = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)


class RequestMetrics:
    """Belongs to the event loop's thread; the registry may be read from any."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, help: str, label: str) -> Counter:
            return Counter(PREFIX + name, help, [label], registry=registry)

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(PREFIX + name, help, buckets=buckets, registry=registry)

        self._requests = counter("requests_total", "HTTP requests by how they ended.", "outcome")
        self._refused = counter("requests_refused_total", "Requests that got an error as answer.", "reason")
        self._misses = counter("prefix_cache_misses_total", "Prompts not wholly reused, and why.", "reason")
        self._first_token = histogram("time_to_first_token_seconds", "From arrival to the first token.", _WAITS)
        self._per_token = histogram("time_per_output_token_seconds", "Between tokens of an answer.", _STEPS)
        self._queue = histogram("request_queue_time_seconds", "From arrival to a place in the engine.", _WAITS)
        self._whole = histogram("e2e_request_latency_seconds", "From arrival to the end of the answer.", _WHOLES)
        # A counter that is there from the beginning has no first increase for a rate to miss.
        for outcome in Outcome:
            self._requests.labels(outcome)
        for reason in MissReason:
            if reason is not MissReason.NONE:
                self._misses.labels(reason)

    def observe(self, account: Account, seconds: float) -> None:
        """Of a request that has ended and took that long."""
        outcome = account.outcome
        if outcome is Outcome.REFUSED and account.failure:
            self.refused(account.failure)
        elif outcome:
            self._requests.labels(outcome).inc()
        if outcome is Outcome.FINISHED:
            self._whole.observe(seconds)
        for bill in account.bills:
            self._observe_bill(bill)

    def refused(self, failure: Failure) -> None:
        """Before it became a request."""
        self._requests.labels(Outcome.REFUSED).inc()
        self._refused.labels(failure.code or failure.type).inc()

    def _observe_bill(self, bill: Completed) -> None:
        timings, reason = bill.timings, bill.lookup.reason
        self._first_token.observe(timings.ttft_ms / 1e3)
        self._queue.observe(timings.queue_ms / 1e3)
        if timings.predicted_per_second:
            self._per_token.observe(1 / timings.predicted_per_second)
        if reason is not MissReason.NONE:
            self._misses.labels(reason).inc()


class Metered:
    """ASGI. Streams pass through untouched."""

    def __init__(self, app: ASGIApp, metrics: RequestMetrics) -> None:
        self.app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        account, begin = account_of(scope), monotonic()
        try:
            await self.app(scope, receive, send)
        finally:
            self._metrics.observe(account, monotonic() - begin)
