"""Which routes there are, by subject. The modules of a subject are imported when the first request asks for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from threading import Lock

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from emberkeep.backend.models import Models
from emberkeep.config.settings import Config
from emberkeep.models.library import ModelLibrary
from emberkeep.server.json_response import json_response
from emberkeep.server.middleware import Drain
from emberkeep.server.request_metrics import RequestMetrics
from emberkeep.server.routes import ApiRoute, Routes
from emberkeep.server.side_work import SideWork
from emberkeep.types.request import Json
from emberkeep.values import dataclass


@dataclass(frozen=True, slots=True)
class Served:
    """What routes work with."""

    models: Models
    config: Config
    library: ModelLibrary
    side: SideWork
    drain: Drain
    metrics: RequestMetrics


class Subjects:
    """ASGI. Hands a request to the routes of its subject. Raises HTTPException where there are none."""

    def __init__(self, served: Served) -> None:
        self._all = [_Subject(partial(make, served)) for make, *_ in SUBJECTS]
        named = zip(self._all, SUBJECTS, strict=True)
        self._by_path = {path: subject for subject, (_, *paths) in named for path in paths}
        self._by_path["/openapi.json"] = _Subject(self._document_routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        subject = self._find(scope["path"])
        if subject is None:
            raise HTTPException(404)
        # Importing takes too long for the loop that serves the streams.
        scope["router"] = subject.router or await asyncio.to_thread(subject.load)
        await scope["router"](scope, receive, send)

    def routes(self) -> Iterator[ApiRoute]:
        """All of them, in the order of the table. Blocks while modules are imported."""
        for subject in self._all:
            for route in subject.load().routes:
                assert isinstance(route, ApiRoute)
                yield route

    @cached_property
    def document(self) -> dict[str, Json]:
        """OpenAPI's. Blocks for a good part of a second the first time."""
        from emberkeep.server.openapi import document

        return document(self.routes())

    def _document_routes(self) -> Routes:
        routes = Routes()

        @routes.get("/openapi.json", is_hidden=True)
        async def openapi(_: HttpRequest) -> Response:
            return await asyncio.to_thread(lambda: json_response(self.document))

        return routes

    def _find(self, path: str) -> _Subject | None:
        """The subject that has this path or one that it begins with."""
        parts = path.split("/", _MOST_PARTS)
        names = ("/".join(parts[:count]) for count in range(_MOST_PARTS, 1, -1))
        return next((self._by_path[name] for name in names if name in self._by_path), None)


class _Subject:
    def __init__(self, make: Callable[[], Routes]) -> None:
        self.router: Router | None = None
        """None until it is loaded."""
        self._make = make
        self._loading = Lock()

    def load(self) -> Router:
        """Blocks for some hundredths of a second the first time. From any thread."""
        with self._loading:
            if self.router is None:
                self.router = Router(self._make().listed, redirect_slashes=False)
            return self.router


# ── the subjects ──


def _openai(served: Served) -> Routes:
    from emberkeep.server.openai import openai_routes

    return openai_routes(served.models)


def _ollama(served: Served) -> Routes:
    from emberkeep.server.ollama_routes import ollama_routes

    return ollama_routes(served.models)


def _ollama_models(served: Served) -> Routes:
    from emberkeep.server.ollama_models import ollama_model_routes

    return ollama_model_routes(served.models, served.library, served.side)


def _anthropic(served: Served) -> Routes:
    from emberkeep.server.anthropic_routes import anthropic_routes

    return anthropic_routes(served.models, served.side)


def _responses(served: Served) -> Routes:
    from emberkeep.server.responses_routes import responses_routes

    return responses_routes(served.models, served.side)


def _embeddings(served: Served) -> Routes:
    from emberkeep.server.embedding_routes import embedding_routes

    return embedding_routes(served.models)


def _llama(served: Served) -> Routes:
    from emberkeep.server.llama_routes import llama_routes

    return llama_routes(served.models, served.side)


def _models(served: Served) -> Routes:
    from emberkeep.server.model_routes import model_routes

    return model_routes(served.models, served.library, served.side)


def _native(served: Served) -> Routes:
    from emberkeep.server.native_routes import native_routes

    return native_routes(served.models, served.drain, served.side, is_public=served.config.api_key is not None)


def _cache(served: Served) -> Routes:
    from emberkeep.server.cache_routes import cache_routes

    return cache_routes(served.models, served.side)


def _warm(served: Served) -> Routes:
    from emberkeep.server.warm_routes import warm_routes

    return warm_routes(served.models)


def _memory(served: Served) -> Routes:
    from emberkeep.server.memory_routes import memory_routes

    return memory_routes(served.models.default, served.side)


def _experts(served: Served) -> Routes:
    from emberkeep.server.expert_routes import expert_routes

    return expert_routes(served.models)


def _metrics(served: Served) -> Routes:
    from emberkeep.server.metrics import metrics_routes

    return metrics_routes(served.models, served.metrics)


def _page(served: Served) -> Routes:
    from emberkeep.server.page_routes import page_routes

    return page_routes()


def _pulse(served: Served) -> Routes:
    from emberkeep.server.pulse import pulse_routes

    return pulse_routes(served.models, served.drain)


def _requests(served: Served) -> Routes:
    from emberkeep.server.request_routes import request_routes

    return request_routes(served.models)


def _tools(served: Served) -> Routes:
    from emberkeep.server.tool_routes import tool_routes

    return tool_routes(served.models, is_enabled=served.config.server_tools)


_MOST_PARTS = 4
"""Of the paths in the table, with the empty one before the first slash."""

SUBJECTS: tuple[tuple[Callable[[Served], Routes], *tuple[str, ...]], ...] = (
    (_openai, "/v1/chat/completions", "/chat/completions", "/v1/completions", "/completions"),
    (_ollama, "/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/version"),
    (_ollama_models, "/api"),
    (_anthropic, "/v1/messages"),
    (_responses, "/v1/responses", "/responses", "/v1/conversations", "/conversations"),
    (
        *(_embeddings, "/v1/embeddings", "/embeddings", "/embedding"),
        *("/v1/rerank", "/rerank", "/v1/reranking", "/reranking"),
    ),
    (_llama, "/completion", "/infill", "/props", "/slots", "/lora-adapters"),
    (_models, "/v1/models", "/models"),
    (_native, "/", "/health", "/v1/health", "/v1/stats", "/tokenize", "/detokenize", "/apply-template"),
    (_cache, "/v1/cache"),
    (_warm, "/v1/warm"),
    (_memory, "/v1/memory"),
    (_experts, "/expert-stats", "/expert-tracking"),
    (_metrics, "/metrics"),
    (_page, "/page"),
    (_pulse, "/v1/events"),
    (_requests, "/v1/requests"),
    (_tools, "/v1/tools"),
)
"""Each with its paths: it has the routes of these and of what is below them. The longest one counts."""
