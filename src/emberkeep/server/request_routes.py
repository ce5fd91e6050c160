"""Requests as a timeline: those that run, and the latest that did, by slot."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic, time

from fastapi import APIRouter
from starlette.responses import Response

from emberkeep.api.answer import lookup_json
from emberkeep.backend.models import Models
from emberkeep.server.json_response import PAGE, PageLimit, PageOffset, page_response
from emberkeep.types import Json, RequestRecord, RequestState

_OVER = (RequestState.FINISHED, RequestState.CANCELLED, RequestState.FAILED)


def request_routes(models: Models) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/requests")
    async def requests(limit: PageLimit = PAGE, offset: PageOffset = 0) -> Response:
        return await asyncio.to_thread(_list_page, models, limit, offset)

    return router


def _list_page(models: Models, limit: int, offset: int) -> Response:
    return page_response(told_requests(models), lambda told: told, limit, offset, now=round(time(), 3))


def told_requests(models: Models) -> list[Json]:
    """Of all models that are loaded, the latest first. From any thread."""
    to_wall = _wall_clock()
    found = [(backend.card.id, record) for backend in models.loaded() for record in backend.timeline()]
    found.sort(key=lambda each: each[1].asked_at, reverse=True)
    return [request_json(model, record, to_wall) for model, record in found]


def told_running(models: Models) -> list[Json]:
    """Of these only those that are not over."""
    to_wall = _wall_clock()
    return [
        request_json(backend.card.id, record, to_wall)
        for backend in models.loaded()
        for record in backend.timeline()
        if record.state not in _OVER
    ]


def request_json(model: str, record: RequestRecord, to_wall: Callable[[float | None], float | None]) -> Json:
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


def _wall_clock() -> Callable[[float | None], float | None]:
    """Of what the monotonic clock said, when it was: in Unix seconds, to the millisecond."""
    ahead = time() - monotonic()
    return lambda at: None if at is None else round(at + ahead, 3)
