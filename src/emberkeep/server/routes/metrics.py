"""`/metrics`, in the text format that every Prometheus scraper reads."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, generate_latest
from starlette.responses import Response

_TEXT = {"content": {"text/plain": {"schema": {"type": "string"}}}}


def metrics_routes(registry: CollectorRegistry) -> APIRouter:
    router = APIRouter()

    @router.get("/metrics", response_class=Response, responses={200: _TEXT})
    async def metrics() -> Response:
        # The backend's figures may have to wait for a lock: not in the loop that serves the streams.
        text = await asyncio.to_thread(generate_latest, registry)
        return Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return router
