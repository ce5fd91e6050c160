"""A replica: the whole server application, in a process of its own, without a port."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import ray
from ray import serve

from emberkeep.api.errors import failure_of
from emberkeep.backend.base import keep_warm
from emberkeep.backend.models import Models
from emberkeep.cluster.requests import AnswerPart, App, Message, ReplicaAnswer, ReplicaRequest, Scope
from emberkeep.cluster.slots import config_of_replica, forget_rest, take_slot
from emberkeep.config.settings import Config
from emberkeep.errors import EmberkeepError, Overloaded, StoreFailed
from emberkeep.library.installation import declared_prefixes
from emberkeep.logs import begin_logging
from emberkeep.routing import RouteKeys
from emberkeep.server.app import create_app
from emberkeep.server.http_server import warmup
from emberkeep.server.request_log import RequestLog

log = logging.getLogger("emberkeep.cluster")

_JSON = ((b"content-type", b"application/json"),)

Opening = Callable[[Config], Models]


class ReplicaServer:
    """Ray Serve makes it, asks it and ends it, all on one event loop."""

    async def __init__(self, config: Config, version: str, opening: Opening) -> None:  # type: ignore[misc]
        """Blocks until the model is loaded. Raises EmberkeepError, OSError."""
        begin_logging(config.log_level, is_server=True)
        context = serve.get_replica_context()
        self._id = context.replica_id.unique_id
        self._config = config
        self._slot = await asyncio.to_thread(take_slot, config.data_dir, config.replicas[1])
        self._name = self._slot.name if config.cluster_address is None else f"{_machine()}/{self._slot.name}"
        self._version = version
        own = config_of_replica(config, self._slot, context.rank.rank, os.cpu_count() or 1)
        # A thread: what asks a remote service at once runs a loop of its own.
        self._models = await asyncio.to_thread(opening, own)
        keep_warm(self._models.default, declared_prefixes(own))
        app = create_app(self._models, own, is_checked=True)
        self._app = RequestLog(app, app.state.metrics.observe)
        await self._models.start()
        await warmup(app, own)
        log.info("Replica %s is ready in %s.", self._slot.name, self._slot.folder)

    async def answer(self, asked: ReplicaRequest, keys: RouteKeys) -> AsyncIterator[AnswerPart]:
        """Ends the request when it is cancelled. `keys` are for the router, which sees what is sent."""
        if keys.replica not in ("", self._name):
            yield AnswerPart(self._id, _messages(_refused(self._name, _absent(keys.replica))))
            return
        yield AnswerPart(self._id, [])  # so that the gateway knows who answers, long before there is an answer
        batches = answers(self._app, asked)
        try:
            async for messages in batches:
                yield AnswerPart(self._id, messages)
        finally:
            await batches.aclose()

    async def answer_whole(self, asked: ReplicaRequest) -> ReplicaAnswer:
        status, headers, body = 500, (), b""
        async for messages in answers(self._app, asked):
            for message in messages:
                if message["type"] == "http.response.start":
                    status, headers = message["status"], tuple(message["headers"])
                else:
                    body += message.get("body", b"")
        return ReplicaAnswer(self._name, status, headers, body)

    async def forget_rest(self, user: str, asked: frozenset[str]) -> str | None:
        """One of those asked on this machine does it, and says what stood in its way, if anything did."""
        here = [name for name in asked if name.rpartition("/")[0] == self._name.rpartition("/")[0]]
        if self._name != min(here, default=""):
            return None
        try:
            await asyncio.to_thread(forget_rest, self._config, user, frozenset(here))
        except (OSError, StoreFailed) as error:
            return str(error)
        return ""

    async def about(self) -> dict[str, Any]:
        """For `emberkeep cluster status`."""
        return {
            "replica": self._name,
            "version": self._version,
            "pid": os.getpid(),
            "node": ray.get_runtime_context().get_node_id(),
            "data": str(self._slot.folder),
            "model": self._models.default.card.id,
            "active": self._models.default.stats().get("scheduler", {}).get("active"),
        }

    def record_routing_stats(self) -> dict[str, str]:
        """Asked by Ray now and then, for the router."""
        return {"home": self._name}

    def check_health(self) -> None:
        """Raises why there can never be an answer again, whereupon Ray starts another replica."""
        if failure := self._models.failure():
            raise failure

    async def __del__(self) -> None:
        """Called by Ray once no request is left: everything is on disk then."""
        models, self._models = getattr(self, "_models", None), None  # type: ignore[assignment]
        if models is not None:
            await models.close()


def _machine() -> str:
    """Its address: names of machines need not be different."""
    return str(ray.util.get_node_ip_address())


def _absent(replica: str) -> Overloaded:
    return Overloaded(f"There is no replica {replica!r} now: `emberkeep cluster status` lists those that run.")


def _refused(replica: str, error: EmberkeepError) -> ReplicaAnswer:
    failure = failure_of(error)
    return ReplicaAnswer(replica, failure.status, _JSON, json.dumps(failure.json()).encode())


def _messages(whole: ReplicaAnswer) -> list[Message]:
    return [
        {"type": "http.response.start", "status": whole.status, "headers": list(whole.headers)},
        {"type": "http.response.body", "body": whole.body, "more_body": False},
    ]


# ── one request to the application in this process ──


_LEAVING_S = 10.0
"""For an application to notice that its client has left: longer than an engine's step."""


async def answers(app: App, asked: ReplicaRequest) -> AsyncGenerator[list[Message], None]:
    """The messages of the application's answer, as they come; those that have piled up come together.

    Whoever stops reading has left: the application is told, and has ended when this is closed.
    """
    exchange = _Exchange(asked.body)
    running = asyncio.create_task(_run(app, asked, exchange))
    try:
        while batch := await exchange.take():
            yield batch
        await running
    finally:
        exchange.leave()
        await asyncio.wait([running], timeout=_LEAVING_S)
        running.cancel()


async def _run(app: App, asked: ReplicaRequest, exchange: _Exchange) -> None:
    try:
        await app(_scope(asked), exchange.receive, exchange.send)
    finally:
        exchange.end()


def _scope(asked: ReplicaRequest) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": asked.method,
        "scheme": "http",
        "path": asked.path,
        "raw_path": asked.raw_path,
        "query_string": asked.query,
        "headers": list(asked.headers),
        "client": None,
        "server": asked.server,
    }


class _Exchange:
    """Belongs to the event loop."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._messages: list[Message] = []
        self._changed = asyncio.Event()
        self._has_left = asyncio.Event()
        self._has_ended = False

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._has_left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self._messages.append(message)
        self._changed.set()

    async def take(self) -> list[Message]:
        """Waits for something; empty at the end."""
        await self._changed.wait()
        batch, self._messages = self._messages, []
        if not self._has_ended:
            self._changed.clear()
        return batch

    def leave(self) -> None:
        self._has_left.set()

    def end(self) -> None:
        self._has_ended = True
        self._changed.set()
