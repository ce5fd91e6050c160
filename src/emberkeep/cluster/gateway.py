"""The gateway: it listens, checks, counts, and passes each request to the replica that the router chooses.

An answer goes to its client as it comes. What was lost with a replica before any of its answer was on its way is
asked again elsewhere; after that the answer ends with an error, so that no part of one is taken for the whole.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field
from typing import Any, Protocol

from emberkeep.api.errors import error_shape, failure_of
from emberkeep.backend.limits import Permits
from emberkeep.cluster.requests import (
    AnswerPart,
    Merge,
    Message,
    Receive,
    ReplicaAnswer,
    ReplicaRequest,
    Route,
    Scope,
    Send,
    conversation_key,
    forgotten_user,
    merge_for,
    merged,
    names_replica,
    route_of,
)
from emberkeep.errors import Overloaded
from emberkeep.routing import RouteKeys
from emberkeep.server.request_log import record_of
from emberkeep.values import dataclass

RETRY_AFTER_S = 1.0
_LARGE_BYTES = 64 << 10
"""A body of so many bytes takes about a millisecond to parse."""
_MOST_TRIES = 5
_NO_LIMIT = 1 << 30
_STREAMS = (b"text/event-stream", b"application/x-ndjson")
_NOT_PASSED_ON = frozenset({b"origin", b"connection", b"transfer-encoding", b"content-length", b"x-request-id"})
"""The gateway has looked at them, or writes them anew: a body is whole when it is passed on."""
_OWN_HEADERS = frozenset({b"x-request-id", b"request-id"})
"""The gateway writes them itself."""
_RESPONSE_ID = re.compile(rb'"id": ?"(resp_[A-Za-z0-9]+)"')


class ReplicaLost(Exception):
    """The replica that was asked has ended."""


class _AnotherHead(Exception):
    """An answer that was begun once more is of another kind than what the client has been told."""


class ReplicaStream(Protocol):
    """One answer that comes in parts. Raises ReplicaLost."""

    def __aiter__(self) -> AsyncIterator[AnswerPart]: ...

    def cancel(self) -> None:
        """The replica stops working on it. Idempotent."""


class Replicas(Protocol):
    def ask(self, asked: ReplicaRequest, keys: RouteKeys) -> ReplicaStream:
        """The one that the router chooses."""

    async def ask_all(self, asked: ReplicaRequest) -> Sequence[ReplicaAnswer]:
        """All that there are. Raises Overloaded."""

    async def forget_rest(self, user: str, asked: frozenset[str]) -> None:
        """Leave nothing of a user in folders of other replicas than were `asked`. Raises StoreFailed."""

    def learn(self, keys: RouteKeys, replica: str) -> None:
        """It knows what has these keys."""


@dataclass(slots=True, eq=False)
class _Exchange:
    """One request that is being answered."""

    asked: ReplicaRequest
    route: Route
    request_id: str
    send: Send
    replica: str = ""
    status: int = 0
    has_head: bool = False
    has_body: bool = False
    is_stream: bool = False
    broken_off: asyncio.Event = field(default_factory=asyncio.Event)


class Gateway:
    """ASGI. Belongs to the event loop."""

    def __init__(
        self, replicas: Replicas, per_user: int | None, drain_s: float, own_metrics: Callable[[], bytes]
    ) -> None:
        """`own_metrics`: figures of what never reached a replica, as Prometheus reads them."""
        self._replicas = replicas
        self._permits = Permits(_NO_LIMIT, per_user)
        self._drain_s = drain_s
        self._own_metrics = own_metrics
        self._running: set[_Exchange] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises EmberkeepError where nothing was sent yet."""
        body = await _read(receive)
        if body is None:
            return
        asked = _asked(scope, body)
        if (merge := merge_for(asked.method, asked.path)) and not names_replica(asked):
            await _send_whole(await self._ask_all(asked, merge), send)
            return
        route = await asyncio.to_thread(route_of, asked) if len(body) > _LARGE_BYTES else route_of(asked)
        with self._permit(route):
            exchange = _Exchange(asked, route, record_of(scope).id, send)
            self._running.add(exchange)
            try:
                await self._answer(exchange, receive)
            finally:
                self._running.discard(exchange)

    def set_present(self, present: frozenset[str]) -> None:
        """These replicas take requests. Others finish what they have, in the time of the drain."""
        loop = asyncio.get_running_loop()
        for gone in {exchange.replica for exchange in self._running if exchange.replica} - present:
            loop.call_later(self._drain_s, self._break_off_all, gone)

    def _break_off_all(self, replica: str) -> None:
        for exchange in self._running:
            if exchange.replica == replica:
                exchange.broken_off.set()

    async def _ask_all(self, asked: ReplicaRequest, merge: Merge) -> ReplicaAnswer:
        """Raises Overloaded."""
        answers = list(await self._replicas.ask_all(asked))
        if (user := forgotten_user(asked)) is not None:
            await self._replicas.forget_rest(user, frozenset(answer.replica for answer in answers))
        if merge is Merge.METRICS:
            answers.append(ReplicaAnswer("gateway", 200, (), self._own_metrics()))
        return await asyncio.to_thread(merged, merge, answers)

    @contextmanager
    def _permit(self, route: Route) -> Iterator[None]:
        """Raises RateLimited."""
        if not route.is_answer:
            yield
            return
        permit = self._permits.acquire(route.user)
        try:
            yield
        finally:
            self._permits.give_back(permit)

    async def _answer(self, exchange: _Exchange, receive: Receive) -> None:
        """Until it is answered, its client has left, or its time is over."""
        leaving = asyncio.create_task(_disconnect(receive))
        try:
            while await self._must_go_elsewhere(exchange, leaving):
                exchange.broken_off.clear()
        finally:
            await _stop(leaving)

    async def _must_go_elsewhere(self, exchange: _Exchange, leaving: asyncio.Task[None]) -> bool:
        """Whether the time of its replica was over before there was an answer."""
        passing = asyncio.create_task(self._pass_on(exchange))
        breaking = asyncio.create_task(exchange.broken_off.wait())
        try:
            await asyncio.wait({passing, leaving, breaking}, return_when=asyncio.FIRST_COMPLETED)
            if breaking.done() and not passing.done() and not leaving.done():
                await _stop(passing)
                if not exchange.has_head and _is_repeatable(exchange):
                    return True
                await _break_off(exchange, _stopped())
        finally:
            await _stop(passing)
            await _stop(breaking)
        if not passing.cancelled():
            passing.result()
        return False

    async def _pass_on(self, exchange: _Exchange) -> None:
        """Raises Overloaded where nothing was sent yet."""
        for _ in range(_MOST_TRIES):
            exchange.replica = ""
            answering = self._replicas.ask(exchange.asked, exchange.route.keys)
            try:
                async for part in answering:
                    await self._send_part(exchange, part)
                return
            except _AnotherHead:
                answering.cancel()
                break
            except asyncio.CancelledError:
                answering.cancel()
                raise
            except ReplicaLost:
                if exchange.has_body:
                    await _break_off(exchange, _lost())
                    return
                if not _is_repeatable(exchange):
                    break
        if exchange.has_head:
            await _break_off(exchange, _lost())
            return
        raise _lost()

    async def _send_part(self, exchange: _Exchange, part: AnswerPart) -> None:
        exchange.replica = part.replica
        for message in part.messages:
            if message["type"] == "http.response.start":
                await _send_head(exchange, message)
                continue
            if message.get("body") and not exchange.has_body:
                self._learn(exchange, message["body"])
            exchange.has_body = exchange.has_body or bool(message.get("body"))
            await exchange.send(message)

    def _learn(self, exchange: _Exchange, body: bytes) -> None:
        """A response is continued, read and cancelled by an id that the replica has given it."""
        if exchange.asked.path.rstrip("/").endswith("/responses") and (found := _RESPONSE_ID.search(body)):
            key = conversation_key(exchange.route.owner, found[1].decode())
            self._replicas.learn(RouteKeys(key), exchange.replica)


async def _send_head(exchange: _Exchange, message: Message) -> None:
    """Once: an answer that was begun elsewhere has had its head, if nothing more. Raises _AnotherHead."""
    if exchange.has_head and message["status"] != exchange.status:
        raise _AnotherHead
    if exchange.has_head:
        return
    exchange.status = message["status"]
    headers = [(name, value) for name, value in message["headers"] if name.lower() not in _OWN_HEADERS]
    kinds = [value for name, value in headers if name.lower() == b"content-type"]
    exchange.is_stream = any(kind.startswith(_STREAMS) for kind in kinds)
    exchange.has_head = True
    await exchange.send({**message, "headers": headers})


async def _break_off(exchange: _Exchange, error: Overloaded) -> None:
    """An end that is not taken for the answer's own."""
    if not exchange.has_head:
        raise error
    if not exchange.is_stream:
        raise ConnectionAbortedError(str(error))  # the web server closes the connection in the middle of the body
    frame = error_shape(exchange.asked.path).frame(failure_of(error), exchange.request_id)
    await exchange.send({"type": "http.response.body", "body": frame, "more_body": False})


def _is_repeatable(exchange: _Exchange) -> bool:
    """Whether it may be done twice: a replica that was lost may have done it."""
    return exchange.route.is_answer or exchange.asked.method != "POST"


def _lost() -> Overloaded:
    return Overloaded("The replica that was answering has ended: ask again.", RETRY_AFTER_S)


def _stopped() -> Overloaded:
    return Overloaded("The server stopped before this answer was complete: ask again.", RETRY_AFTER_S)


def _asked(scope: Scope, body: bytes) -> ReplicaRequest:
    headers = tuple((name, value) for name, value in scope["headers"] if name not in _NOT_PASSED_ON)
    return ReplicaRequest(
        scope["method"],
        scope["path"],
        scope["query_string"],
        (*headers, (b"content-length", b"%d" % len(body)), (b"x-request-id", record_of(scope).id.encode())),
        body,
        scope.get("raw_path") or b"",
        tuple(scope["server"]) if scope.get("server") else None,
    )


async def _read(receive: Receive) -> bytes | None:
    """The whole body; None where the client left before. Raises Refused."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def _disconnect(receive: Receive) -> None:
    """Returns when the client has left; its body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _stop(task: asyncio.Task[Any]) -> None:
    """Waits until it has ended. Its failure is the business of who reads its result."""
    task.cancel()
    await asyncio.wait([task])


async def _send_whole(whole: ReplicaAnswer, send: Send) -> None:
    headers = [(name, value) for name, value in whole.headers if name.lower() not in _OWN_HEADERS]
    sized = [(name, value) for name, value in headers if name.lower() != b"content-length"]
    sized.append((b"content-length", b"%d" % len(whole.body)))
    await send({"type": "http.response.start", "status": whole.status, "headers": sized})
    await send({"type": "http.response.body", "body": whole.body, "more_body": False})


# ── where the router and the gateway meet, who live on two threads of one process ──

Present = Callable[[frozenset[str]], None]


class Learning(Protocol):
    """A router."""

    def learn_soon(self, keys: RouteKeys, replica: str) -> None:
        """From any thread."""


class Board:
    """This process has one. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._router: Learning | None = None
        self._watcher: Present = lambda present: None
        self._present: frozenset[str] = frozenset()
        self.slots = 1
        """Requests that a replica works on at a time; set before there is a router."""

    def attach(self, router: Learning) -> None:
        with self._lock:
            self._router = router

    def watch(self, watcher: Present) -> None:
        """It gets the replicas that take requests, now and whenever they change, on the router's thread."""
        with self._lock:
            self._watcher = watcher
        watcher(self._present)

    def show(self, present: frozenset[str]) -> None:
        with self._lock:
            self._present = present
            watcher = self._watcher
        watcher(present)

    def learn(self, keys: RouteKeys, replica: str) -> None:
        """What has these keys was answered there."""
        with self._lock:
            router = self._router
        if router is not None:
            router.learn_soon(keys, replica)


board = Board()
