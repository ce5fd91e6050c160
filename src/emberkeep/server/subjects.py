"""Which routes there are, by subject. The modules of a subject are imported when the first request asks for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from importlib import import_module
from threading import Lock

from starlette.exceptions import HTTPException
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from emberkeep.server.routes.base import ApiRoute, Routes, Served
from emberkeep.types.request import Json

SUBJECTS: tuple[tuple[str, ...], ...] = (
    ("routes.openai", "/v1/chat/completions", "/chat/completions", "/v1/completions", "/completions"),
    ("routes.ollama", "/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/version"),
    ("routes.ollama_models", "/api"),
    ("routes.anthropic", "/v1/messages"),
    ("routes.responses", "/v1/responses", "/responses", "/v1/conversations", "/conversations"),
    (
        *("routes.embeddings", "/v1/embeddings", "/embeddings", "/embedding"),
        *("/v1/rerank", "/rerank", "/v1/reranking", "/reranking"),
    ),
    ("routes.llama_server", "/completion", "/infill", "/props", "/slots", "/lora-adapters"),
    ("routes.models", "/v1/models", "/models"),
    ("routes.native", "/", "/health", "/v1/health", "/v1/stats", "/tokenize", "/detokenize", "/apply-template"),
    ("routes.cache", "/v1/cache"),
    ("routes.warm", "/v1/warm"),
    ("routes.memory", "/v1/memory"),
    ("routes.experts", "/expert-stats", "/expert-tracking"),
    ("metrics", "/metrics"),
    ("routes.page", "/page"),
    ("pulse", "/v1/events"),
    ("routes.requests", "/v1/requests"),
    ("routes.tools", "/v1/tools"),
)
"""Modules, whose `routes` makes them, each with its paths: it has the routes of these and of what is below them.
The longest path counts."""

_MOST_PARTS = 1 + max(path.count("/") for _, *paths in SUBJECTS for path in paths)


def make_routes(module: str, served: Served) -> Routes:
    """Blocks for some hundredths of a second the first time."""
    routes: Routes = import_module(f"emberkeep.server.{module}").routes(served)
    return routes


class Subjects:
    """ASGI. Hands a request to the routes of its subject. Raises HTTPException where there are none."""

    def __init__(self, served: Served) -> None:
        self._all = [_Subject(partial(make_routes, module, served)) for module, *_ in SUBJECTS]
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
        async def openapi() -> Json:
            return await asyncio.to_thread(lambda: self.document)

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
