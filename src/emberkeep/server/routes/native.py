"""Endpoints of no other server: its page, its health and figures, the tools that run here, a mixture's experts."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Literal

from pydantic import ConfigDict
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from emberkeep import __version__
from emberkeep.api.body import Body, one_of
from emberkeep.backend.base import experts_of
from emberkeep.backend.models import Models, loaded
from emberkeep.backend.server_tools import ToolDesk
from emberkeep.config.settings import OFF
from emberkeep.errors import NoSuchEntry, RequestError
from emberkeep.server.routes.base import OfModel, Routes, Served, json_response
from emberkeep.types.events import Decision, Loading
from emberkeep.types.models import ExpertStats, LayerExperts
from emberkeep.types.request import Json
from emberkeep.values import dataclass


def routes(served: Served) -> Routes:
    routes, models = Routes(), served.models
    is_public = served.config.api_key is not None  # clients that do not have the key can read `/health`

    @routes.get("/")
    async def pointer(http: HttpRequest) -> Json:
        if wants_page(http):
            return await page_response(http)
        return {"name": "Emberkeep", "version": __version__, "api": "/v1", "docs": "/openapi.json"}

    @routes.get("/health", "/v1/health", errors={503: "The model is loaded, the server stops, or it has failed."})
    async def health() -> Response:
        status, more = _status(served)
        figures = models.default.health()
        shown = _without_reasons(figures) if is_public else figures
        shown["backend_connected"] = models.failure() is None and _is_connected(figures)
        return json_response({"status": status, **shown, **more}, 200 if status == "ok" else 503)

    @routes.get("/v1/stats")
    async def stats(query: OfModel) -> Json:
        # The figures may have to wait for locks: not in the loop that serves the streams.
        return await asyncio.to_thread(lambda: models.find(query.model).stats())

    @routes.get("/page/{path:path}", is_hidden=True)
    async def file(http: HttpRequest) -> Response:
        return await page_response(http, http.path_params["path"])

    _add_tools(routes, served)
    _add_experts(routes, served)
    return routes


def _status(served: Served) -> tuple[str, dict[str, Json]]:
    """In a word, and how far a start is."""
    if served.models.failure() is not None:
        return "failed", {}
    if (starting := served.models.starting) is not None:
        return "loading", _progress(starting)
    return "draining" if served.drain.draining else "ok", {}


def _progress(starting: Loading) -> dict[str, Json]:
    """With the error by which llama-server's clients know that it loads."""
    error = {"code": 503, "message": "Loading model", "type": "unavailable_error"}
    return {"step": starting.step or f"Loading {starting.model}", "progress": starting.fraction, "error": error}


def _is_connected(health: dict[str, Json]) -> bool:
    """Whether the backend can answer, as far as is known: of several one, as long as it did not fail last."""
    chain = health.get("chain")
    return any(link["state"] != "failed" for link in chain) if chain else "error" not in health


def _without_reasons(health: Json) -> Json:
    """Without the reasons of failures: they name addresses, which are not for clients without the key."""
    if isinstance(health, list):
        return [_without_reasons(item) for item in health]
    if not isinstance(health, dict):
        return health
    return {key: _without_reasons(value) for key, value in health.items() if key != "error"}


# ── the page: files of this package, from memory, packed once ──

INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob:",  # which only scripts of this package can make: pictures that come with a key
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""Whatever a model writes, nothing runs that is not in this package, and nothing is fetched from elsewhere."""
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # asked for again, and answered 304
    "Vary": "Accept, Accept-Encoding",
    "X-DNS-Prefetch-Control": "off",  # the name of a link's host is a message, too
}


@dataclass(frozen=True, slots=True)
class Asset:
    media_type: str
    body: bytes
    packed: bytes
    etag: str


@cache
def assets() -> dict[str, Asset]:
    """By their paths below `/page/`."""
    return dict(_walk(files("emberkeep.server") / "page", ""))


def _walk(folder: Traversable, prefix: str) -> list[tuple[str, Asset]]:
    found: list[tuple[str, Asset]] = []
    for entry in folder.iterdir():
        name = f"{prefix}{entry.name}"
        if entry.is_dir():
            found += _walk(entry, f"{name}/")
        elif (media_type := _TYPES.get(f".{entry.name.rpartition('.')[2]}")) is not None:
            body = entry.read_bytes()
            etag = f'"{sha256(body).hexdigest()[:24]}"'
            found.append((name, Asset(media_type, body, gzip.compress(body, mtime=0), etag)))
    return found


def wants_page(http: HttpRequest) -> bool:
    """Whether it is a browser that someone sits in front of."""
    return "text/html" in http.headers.get("accept", "")


async def page_response(http: HttpRequest, path: str = INDEX) -> Response:
    """Raises HTTPException."""
    asset = (await asyncio.to_thread(assets)).get(path)  # the first time it packs them
    if asset is None:
        raise HTTPException(404)
    headers = {**_HEADERS, "ETag": asset.etag}
    if asset.etag in http.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if "gzip" in http.headers.get("accept-encoding", ""):
        return Response(asset.packed, headers={**headers, "Content-Encoding": "gzip"}, media_type=asset.media_type)
    return Response(asset.body, headers=headers, media_type=asset.media_type)


# ── tools that run here ──


class DecisionBody(Body):
    id: str
    decision: Literal["once", "no", "always", "never"]


def _add_tools(routes: Routes, served: Served) -> None:
    models = served.models

    @routes.get("/v1/tools")
    async def tools() -> Json:
        return tools_json(_tools_of(models), is_enabled=served.config.server_tools != OFF)

    @routes.post("/v1/tools/decisions", example={"id": "question", "decision": "once"})
    async def decide(body: DecisionBody) -> Json:
        decision = Decision(body.decision)
        if not any(tools.decide(body.id, decision) for tools in _tools_of(models)):
            raise NoSuchEntry("Nothing waits for this decision: the call was answered already, or given up.")
        return {"object": "tool.decision", "id": body.id, "decision": decision}


def _tools_of(models: Models) -> list[ToolDesk]:
    """The tools of every model that is loaded, since each has its own."""
    return [tools for backend in models.loaded() if (tools := backend.host_tools) is not None]


def tools_json(found: Sequence[ToolDesk], *, is_enabled: bool) -> dict[str, Json]:
    """They are the same for every model: those of the first. None are known before one is loaded."""
    tools = found[0].listed() if found else []
    servers = found[0].servers() if found else []
    return {
        "object": "list",
        "enabled": is_enabled or bool(found),
        "data": [asdict(tool) for tool in tools],
        "servers": [asdict(server) for server in servers],
    }


# ── which experts a mixture chooses ──


class TrackingBody(Body):
    model_config = ConfigDict(json_schema_extra=one_of("enabled", "reset"))

    enabled: bool | None = None
    reset: bool | None = None


def _add_experts(routes: Routes, served: Served) -> None:
    models = served.models

    @routes.get("/expert-stats", errors={400: "The model has no experts."})
    async def expert_stats(query: OfModel) -> Json:
        async with loaded(models.find(query.model)) as backend:
            return stats_json(experts_of(backend).stats())

    @routes.post("/expert-tracking")
    async def expert_tracking(query: OfModel, body: TrackingBody) -> Json:
        if body.enabled is None and body.reset is None:
            raise RequestError("Nothing is asked for: give enabled, reset or both.")
        async with loaded(models.find(query.model)) as backend:
            return stats_json(await experts_of(backend).track(body.enabled, reset=bool(body.reset)))


def stats_json(stats: ExpertStats) -> dict[str, Json]:
    """Everything by the names of other servers, too, so that what was written for them can read it."""
    return {
        "enabled": stats.enabled,
        "experts": stats.experts,
        "experts_used": stats.experts_used,
        "tracking_enabled": stats.enabled,
        "n_expert": stats.experts,
        "n_expert_used": stats.experts_used,
        "total_tokens": stats.tokens,
        "layers": [_layer_json(layer) for layer in stats.layers],
    }


def _layer_json(layer: LayerExperts) -> dict[str, Json]:
    return {
        "layer": layer.layer,
        "tokens": layer.tokens,
        "counts": layer.counts,
        "frequencies": [round(frequency, 6) for frequency in layer.frequencies],
        "activations": [
            {"expert": expert, "count": count, "frequency": round(share, 6)}
            for expert, (count, share) in enumerate(zip(layer.counts, layer.shares, strict=True))
        ],
    }
