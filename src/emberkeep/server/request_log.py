"""What every request leaves behind: a record, filled in along its way, a line in the log, and its figures."""

from __future__ import annotations

import json
import logging
import os
import re
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import field
from enum import StrEnum
from time import monotonic
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from emberkeep.api.errors import Failure, error_shape
from emberkeep.logs import request_id
from emberkeep.types.events import Completed, MissReason, merge_usage
from emberkeep.values import dataclass

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/v1/health"})
CLIENT_LEFT = 499
"""A status for the log: nobody reads the answer."""

_RECORD = "emberkeep.record"
_TAKEN_ON = frozenset({"server_error", "upstream_error", "deadline"})
"""Types of failures that do not count as refusals."""


class RequestOutcome(StrEnum):
    FINISHED = "finished"
    FAILED = "failed"  # an error of ours, or of a service that was asked, or time ran out
    CANCELLED = "cancelled"  # the client left before the end
    REFUSED = "refused"  # by what was asked, by who asked, or for want of room


@dataclass(slots=True)
class RequestRecord:
    """What one HTTP request asked for, what came of it, and what it cost: kept with its scope, filled in along its
    way."""

    id: str = field(default_factory=lambda: f"req_{os.urandom(12).hex()}")
    """What the client called it, or a name of ours."""
    prompts: int = 0
    completed: list[Completed] = field(default_factory=list)
    """One for every prompt that was answered."""
    status: int | None = None
    """What was sent; None: nothing yet."""
    failure: Failure | None = None
    """What the client got in place of an answer."""
    broken_off: bool = False
    """An answer that had begun ended with an error."""

    @property
    def outcome(self) -> RequestOutcome | None:
        """Asked when the request has ended; None when it wanted no answer of the model and went well."""
        if self.broken_off or (self.failure and self.failure.type in _TAKEN_ON):
            return RequestOutcome.FAILED
        if self.failure:
            return RequestOutcome.REFUSED
        if len(self.completed) < self.prompts:
            return RequestOutcome.CANCELLED
        return RequestOutcome.FINISHED if self.prompts else None


def record_of(scope: Scope) -> RequestRecord:
    record: RequestRecord = scope.setdefault(_RECORD, RequestRecord())
    return record


class FailureResponse(Response):
    """The answer to a request that failed, which enters itself into the request's record."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(status_code=failure.status)
        self._failure = failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """In the shape that the clients of this path expect."""
        record = record_of(scope)
        record.failure = self._failure
        body = json.dumps(error_shape(scope["path"]).body(self._failure, record.id)).encode()
        await Response(body, self.status_code, self._failure.headers, "application/json")(scope, receive, send)


# ── a name, a line in the log, and the metrics ──

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_QUIET_PATHS = OPEN_PATHS | {"/metrics"}
"""Asked by machines every few seconds: logged at the level debug."""
_BEFORE_NAMES = ("/v1/memory/facts/", "/v1/memory/conversations/")
"""Paths after which a user's text follows, which is not logged."""


class RequestLog:
    """ASGI. Every answer names its request, as the client called it or as we do. When it has ended, `observe` gets
    its record and how long it took, and the log a line."""

    def __init__(
        self, app: ASGIApp, observe: Callable[[RequestRecord, float], None] = lambda record, seconds: None
    ) -> None:
        self._app = app
        self._observe = observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record, begin = record_of(scope), monotonic()
        given = Headers(scope=scope).get("x-request-id", "")
        if _REQUEST_ID.fullmatch(given):
            record.id = given
        request_id.set(record.id)

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status, name = message["status"], record.id.encode()
                # `request-id`: Anthropic's clients look there.
                message["headers"] = [*message["headers"], (b"x-request-id", name), (b"request-id", name)]
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        finally:
            self._observe(record, monotonic() - begin)
            level = logging.DEBUG if scope["path"] in _QUIET_PATHS else logging.INFO
            if log.isEnabledFor(level):
                log.log(level, "%s", _line(scope, record))


def _line(scope: Scope, record: RequestRecord) -> str:
    # Quoted again, so that no path can look like a line of its own; without the query, which may hold secrets.
    line = f"{scope['method']} {quote(_without_name(scope['path']))[:200]} {record.status}"
    if record.completed and len(record.completed) == record.prompts:
        return f"{line}: {_figures(merge_usage(record.completed))}"
    if record.status == CLIENT_LEFT or record.outcome is RequestOutcome.CANCELLED:
        return f"{line}: the client left"
    return f"{line}: broken off" if record.broken_off else line


def _without_name(path: str) -> str:
    return next((f"{before}..." for before in _BEFORE_NAMES if path.startswith(before)), path)


def _figures(completed: Completed) -> str:
    usage, timings = completed.usage, completed.timings
    return (
        f"{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} reused, "
        f"first token after {timings.ttft_ms:.0f} ms, "
        f"{usage.completion_tokens} tokens at {timings.predicted_per_second:.1f}/s"
    )


# ── figures of requests, which are counted here and told by `metrics` when somebody reads them ──

_WAITS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
_STEPS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_WHOLES = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0)


@dataclass(slots=True)
class LabelCounts:
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
        self._requests = LabelCounts("requests_total", "HTTP requests by how they ended.", "outcome", outcomes)
        self._refused = LabelCounts("requests_refused_total", "Requests that got an error as answer.", "reason")
        self._misses = LabelCounts(
            "prefix_cache_misses_total", "Prompts not wholly reused, and why.", "reason", misses
        )
        self._first_token = Distribution("time_to_first_token_seconds", "From arrival to the first token.", _WAITS)
        self._per_token = Distribution("time_per_output_token_seconds", "Between tokens of an answer.", _STEPS)
        self._queue = Distribution("request_queue_time_seconds", "From arrival to a slot in the engine.", _WAITS)
        self._whole = Distribution(
            "e2e_request_latency_seconds", "From arrival to the end of the answer.", _WHOLES
        )
        self.tallies = self._requests, self._refused, self._misses
        self.distributions = self._first_token, self._per_token, self._queue, self._whole

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
