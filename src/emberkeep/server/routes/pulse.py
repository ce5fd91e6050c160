"""What the server does right now, a few times a second, for whoever watches, and its requests as a timeline."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, suppress
from functools import partial
from time import monotonic, time
from typing import Any

from starlette.responses import Response, StreamingResponse

from emberkeep.api.answer import lookup_json
from emberkeep.backend.base import Backend
from emberkeep.backend.models import Models
from emberkeep.errors import Overloaded
from emberkeep.server.routes.base import OfModel, PageParameters, Routes, Served, page_response
from emberkeep.types.models import ModelState, RequestState, TimelineRecord
from emberkeep.types.request import Json

log = logging.getLogger(__name__)

_EVERY_S = 0.5
_SILENCE_S = 10.0
"""After which a comment says that nothing has changed."""
_MOST_WATCHERS = 64


class Pulse:
    """One reading of the figures for all who watch, and none while nobody does. Belongs to the event loop.
    `read` may block, and runs in a thread."""

    def __init__(self, read: Callable[[], Mapping[str, Json]], every_s: float = _EVERY_S) -> None:
        self._read = read
        self._every_s = every_s
        self._watchers: set[asyncio.Queue[bytes]] = set()
        self._beating: asyncio.Task[None] | None = None
        self._latest = b""

    async def watch(self, is_over: Callable[[], bool]) -> AsyncGenerator[bytes]:
        """Frames of server-sent events: what is known at once, then whatever changes, until it `is_over`. Who
        reads slowly misses some. Raises Overloaded."""
        if len(self._watchers) >= _MOST_WATCHERS:
            raise Overloaded(f"{_MOST_WATCHERS} watch this server already: close one of these pages.", 5.0)
        frames: asyncio.Queue[bytes] = asyncio.Queue(1)
        self._watchers.add(frames)
        if self._beating is None or self._beating.done():
            self._latest = b""
            self._beating = asyncio.create_task(self._beat())
        elif self._latest:
            frames.put_nowait(self._latest)
        try:
            silent_s = 0.0
            while not is_over():
                try:
                    async with asyncio.timeout(2 * self._every_s):
                        frame = await frames.get()
                except TimeoutError:
                    silent_s += 2 * self._every_s
                    if silent_s < _SILENCE_S:
                        continue
                    frame = b": nothing has changed\n\n"
                silent_s = 0.0
                yield frame
        finally:
            self._watchers.discard(frames)

    async def _beat(self) -> None:
        while self._watchers:
            try:
                figures = await asyncio.to_thread(self._read)
                frame = f"data: {json.dumps(figures, separators=(',', ':'))}\n\n".encode()
            except Exception:
                log.exception("what the server does could not be told")
                frame = self._latest
            if frame != self._latest:
                self._latest = frame
                for frames in self._watchers:
                    with suppress(asyncio.QueueEmpty):
                        frames.get_nowait()  # only the latest counts
                    frames.put_nowait(frame)
            await asyncio.sleep(self._every_s)


def routes(served: Served) -> Routes:
    routes, models = Routes(), served.models
    _add_timeline(routes, served)
    pulses: dict[str, Pulse] = {}

    def read(backend: Backend) -> dict[str, Json]:
        return {**pulse_json(backend.stats()), "running": told_running(models)}

    @routes.get("/v1/events", is_hidden=True)  # it has no end, which a document cannot say
    async def events(query: OfModel) -> Response:
        backend = models.find(query.model)
        pulse = pulses.setdefault(backend.card.id, Pulse(partial(read, backend)))
        frames = pulse.watch(lambda: served.drain.draining)
        first = await anext(frames, b"")  # so that a refusal has its status
        return StreamingResponse(_after(first, frames), media_type="text/event-stream", headers=_HEADERS)

    return routes


_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


async def _after(first: bytes, frames: AsyncGenerator[bytes]) -> AsyncIterator[bytes]:
    async with aclosing(frames):
        yield first
        async for frame in frames:
            yield frame


_TOKENS = {
    "prompt": "prompt_tokens",
    "evaluated": "evaluated_tokens",
    **{tier: f"reused_{tier}_tokens" for tier in ("hot", "warm", "cold", "remote")},
    "moved": "moved_tokens",
    "sampled": "sampled_tokens",
}
_TIER = ("tokens", "bytes", "budget")
_DISK = ("read_bytes", "written_bytes", "pending_chunks")


def pulse_json(stats: Mapping[str, Any]) -> dict[str, Json]:
    """Those figures that move while requests are served. A backend without a store has fewer."""
    scheduler, store = stats.get("scheduler") or {}, stats.get("store") or {}
    warm, cold = store.get("warm") or {}, store.get("cold") or {}
    return {
        "model": stats.get("model"),
        "loaded": stats.get("state", ModelState.LOADED) == ModelState.LOADED,
        "active": scheduler.get("active", 0),
        "waiting": scheduler.get("waiting", 0),
        "tiers": {
            "hot": {"tokens": scheduler.get("resident_tokens", 0)},
            "warm": {name: warm.get(name, 0) for name in _TIER},
            "cold": {name: cold.get(name, 0) for name in _TIER},
        },
        "tokens": {name: scheduler.get(key, 0) for name, key in _TOKENS.items()},
        "disk": {name: cold.get(name, 0) for name in _DISK},
        "remote": _remote_json(store.get("remote")),
        "saved_s": round(scheduler.get("saved_s", 0.0), 1),
        "evicted": {tier: sum(by.values()) for tier, by in (store.get("evictions") or {}).items()},
    }


def _remote_json(remote: Mapping[str, Any] | None) -> dict[str, Json] | None:
    """None where no hosts share their state."""
    names = ("breaker_open", "hits", "lookups", "read_bytes", "written_bytes", "pending_chunks")
    return None if remote is None else {name: remote[name] for name in names}


# ── requests as a timeline: those that run, and the latest that did, by slot ──

_OfModel = tuple[str, TimelineRecord]
"""The model's name, and the record."""
_OVER = (RequestState.FINISHED, RequestState.CANCELLED, RequestState.FAILED)


def _add_timeline(routes: Routes, served: Served) -> None:
    @routes.get("/v1/requests")
    async def requests(query: PageParameters) -> Response:
        return await asyncio.to_thread(_list_page, served.models, query)


def _list_page(models: Models, page: PageParameters) -> Response:
    found, to_json = sorted(_records(models), key=lambda each: -each[1].asked_at), _writer()
    return page_response(found, to_json, page, now=round(time(), 3))


def told_running(models: Models) -> list[Json]:
    """Those that are not over. From any thread."""
    to_json = _writer()
    return [to_json(each) for each in _records(models) if each[1].state not in _OVER]


def _records(models: Models) -> Iterator[_OfModel]:
    """The records of all models that are loaded."""
    return ((backend.card.id, record) for backend in models.loaded() for record in backend.timeline())


def _writer() -> Callable[[_OfModel], Json]:
    """With one reading of the clocks for all."""
    ahead = time() - monotonic()

    def to_wall(at: float | None) -> float | None:
        """A time of the monotonic clock in Unix seconds, to the millisecond."""
        return None if at is None else round(at + ahead, 3)

    return lambda each: request_json(*each, to_wall)


def request_json(model: str, record: TimelineRecord, to_wall: Callable[[float | None], float | None]) -> Json:
    return {
        "id": record.number,
        "model": model,
        "user": record.user or None,
        "conversation_id": record.conversation_id,
        "kind": "prefix" if record.is_prefix else "answer",
        "state": record.state,
        "slot": record.slot if record.slot >= 0 else None,
        "asked_at": to_wall(record.asked_at),
        "started_at": to_wall(record.started_at),
        "loaded_at": to_wall(record.loaded_at),
        "first_token_at": to_wall(record.first_token_at),
        "ended_at": to_wall(record.ended_at),
        "prompt_tokens": record.lookup.prompt_tokens,
        "computed_tokens": record.computed_tokens,
        "completion_tokens": record.sampled_tokens,
        **lookup_json(record.lookup),
        "divergence": record.lookup.divergence.token_index if record.lookup.divergence else None,
    }
