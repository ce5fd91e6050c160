"""Requests as a timeline: those that run, and the latest that did, by slot."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from time import monotonic, time

from starlette.responses import Response

from emberkeep.api.answer import lookup_json
from emberkeep.backend.models import Models
from emberkeep.server.routes.base import PageParameters, Routes, Served, page_response
from emberkeep.types.models import RequestState, TimelineRecord
from emberkeep.types.request import Json

_OfModel = tuple[str, TimelineRecord]
"""The model's name, and the record."""
_OVER = (RequestState.FINISHED, RequestState.CANCELLED, RequestState.FAILED)


def routes(served: Served) -> Routes:
    routes = Routes()

    @routes.get("/v1/requests")
    async def requests(query: PageParameters) -> Response:
        return await asyncio.to_thread(_list_page, served.models, query)

    return routes


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
