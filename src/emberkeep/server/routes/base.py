"""Routes: which function answers a path and a method, what is read of the request for it, and what the OpenAPI
document says of it.

A function gets what it names: `http` (the request), `query` (what path and query say) and `body`, both checked by
the models that stand as their types. It returns a response, or JSON.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps
from typing import Annotated, Any, Concatenate, ParamSpec, TypedDict, TypeVar, Unpack, get_type_hints

from pydantic import ConfigDict, Field
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from emberkeep.api.answer import Answer, Frames
from emberkeep.api.body import INT32_MAX, Body, validate
from emberkeep.backend.base import Backend
from emberkeep.backend.models import Models, loaded
from emberkeep.config.settings import Config
from emberkeep.errors import Overloaded, RemoteLoop
from emberkeep.models.library import ModelLibrary
from emberkeep.server.middleware import Drain
from emberkeep.server.request_log import RequestMetrics
from emberkeep.server.stream import Answers, gather, read_body, stream
from emberkeep.types.models import DEPTH_HEADER, HOPS_HEADER
from emberkeep.types.request import Json, Request
from emberkeep.values import dataclass

Handler = Callable[..., Awaitable[Json]]
H = TypeVar("H", bound=Handler)
T = TypeVar("T")

HELLO = {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}
"""A chat for examples."""

JSON: Mapping[str, Json] = {"application/json": {"schema": {}}}
STREAMS: Mapping[str, Json] = {**JSON, "text/event-stream": {}}
"""Content of answers that may also come as a stream."""
LINES: Mapping[str, Json] = {**JSON, "application/x-ndjson": {}}
"""The same for a stream of lines, as Ollama has it."""

PAGE = 1000
"""Items that are listed at a time."""


@dataclass(frozen=True, slots=True)
class Served:
    """What routes work with."""

    models: Models
    config: Config
    library: ModelLibrary
    side: SideWork
    drain: Drain
    metrics: RequestMetrics


# ── what a request says ──


class Parameters(Body):
    """What a path and a query say: texts, such as "5" for a number."""

    model_config = ConfigDict(strict=False)


class OfModel(Parameters):
    """For routes without a body: whose state or figures; those of the default model unless it is said."""

    model: Annotated[str, Field(max_length=256)] | None = None


class PageParameters(Parameters):
    limit: Annotated[int, Field(ge=1, le=PAGE)] = PAGE
    offset: Annotated[int, Field(ge=0, le=INT32_MAX)] = 0


def register_path_part(name: str, regex: str) -> None:
    """`{parameter:name}` in a path stands for what `regex` matches."""
    register_url_convertor(name, type(name, (StringConvertor,), {"regex": regex})())


_MOST_HOPS = 8
_DIGITS = 4
"""Most digits of a number in a header."""


def passed_on(http: HttpRequest, request: Request) -> Request:
    """`request`, with how often it was passed on. Raises RemoteLoop if too many servers have done so: a circle."""
    hops = _number_in(http, HOPS_HEADER)
    if hops > _MOST_HOPS:
        raise RemoteLoop(f"This request was passed on by {hops} servers: check whose backend asks whom.")
    return request.decided(depth=_number_in(http, DEPTH_HEADER), hops=hops)


def _number_in(http: HttpRequest, header: str) -> int:
    """0 for what is no number."""
    value = http.headers.get(header, "")
    return int(value[:_DIGITS]) if value.isascii() and value.isdecimal() else 0


# ── what is answered ──


async def respond(
    http: HttpRequest,
    backend: Answers,
    requests: Sequence[Request],
    frames: Callable[[], Frames] | None,
    whole: Callable[[Answer], Json],
) -> Json:
    """The answer as a stream of `frames`, or what `whole` makes of it where they are None.

    Both are called once the backend answers. Raises what it raises before the first event, and ClientGone.
    """
    if frames is not None:
        return await stream(http, backend, requests, frames)
    return whole(await gather(http, backend, requests))


def json_response(value: Json, status: int = 200) -> Response:
    return Response(json.dumps(value).encode(), status, media_type="application/json")


def list_response(name: str, items: Iterable[Json], **more: Json) -> Response:
    """An object with a list under `name`, which may be long: each item is written by itself, so that other threads
    go on in between."""
    written = ", ".join(map(json.dumps, items))
    rest = "".join(f", {json.dumps(key)}: {json.dumps(value)}" for key, value in more.items())
    return Response(f"{{{json.dumps(name)}: [{written}]{rest}}}", media_type="application/json")


def page_response(
    items: Sequence[T], to_json: Callable[[T], Json], page: PageParameters, **more: Json
) -> Response:
    shown = items[page.offset : page.offset + page.limit]
    has_more = page.offset + len(shown) < len(items)
    return list_response("data", map(to_json, shown), object="list", has_more=has_more, **more)


# ── routes ──


class About(TypedDict, total=False):
    """What the OpenAPI document says of a route besides its path, its method and what its function is given."""

    bodies: tuple[type[Body], ...]
    """Kinds of a body that the function reads by itself."""
    schema: Mapping[str, Json]
    """The schema of a body that no model reads."""
    example: Json
    """A body that is accepted."""
    content: Mapping[str, Json]
    """What it answers with; JSON if it is left out."""
    errors: Mapping[int, str]
    """Those that mean something else here than everywhere."""
    is_hidden: bool
    """The document does not have it."""


class ApiRoute(Route):
    def __init__(self, method: str, path: str, handler: Handler, about: About) -> None:
        given: dict[str, Any] = get_type_hints(handler)
        endpoint = _endpoint(handler, given)
        super().__init__(path, endpoint, methods=[method], include_in_schema=not about.get("is_hidden"))
        self.methods = {method}  # HEAD is GET when it comes here: see PathMiddleware
        self.method = method
        self.about = about
        self.parameters: type[Body] = given.get("query", Body)
        self.bodies: tuple[type[Body], ...] = (given["body"],) if "body" in given else about.get("bodies", ())


def _endpoint(handler: Handler, given: Mapping[str, Any]) -> Callable[[HttpRequest], Awaitable[Response]]:
    @wraps(handler)
    async def endpoint(http: HttpRequest) -> Response:
        arguments: dict[str, Any] = {"http": http} if "http" in given else {}
        if "query" in given:
            arguments["query"] = validate(given["query"], {**http.query_params, **http.path_params})
        if "body" in given:
            arguments["body"] = await read_body(http, given["body"])
        answer = await handler(**arguments)
        return answer if isinstance(answer, Response) else json_response(answer)

    return endpoint


class Routes:
    """The routes of a subject, in the order in which they are tried. The document has the first path of each
    function."""

    def __init__(self, *prefixes: str) -> None:
        """Each path stands behind each of the prefixes."""
        self.listed: list[ApiRoute] = []
        self._prefixes = prefixes or ("",)

    def get(self, *paths: str, **about: Unpack[About]) -> Callable[[H], H]:
        return self._adding("GET", paths, about)

    def post(self, *paths: str, **about: Unpack[About]) -> Callable[[H], H]:
        return self._adding("POST", paths, about)

    def put(self, *paths: str, **about: Unpack[About]) -> Callable[[H], H]:
        return self._adding("PUT", paths, about)

    def delete(self, *paths: str, **about: Unpack[About]) -> Callable[[H], H]:
        return self._adding("DELETE", paths, about)

    def _adding(self, method: str, paths: tuple[str, ...], about: About) -> Callable[[H], H]:
        def add(handler: H) -> H:
            first: About = about
            for path in (f"{prefix}{path}" for prefix in self._prefixes for path in paths):
                self.listed.append(ApiRoute(method, path, handler, first))
                first = {"is_hidden": True}
            return handler

        return add


# ── work beside the answers: it may take a while, and must hold up neither them nor the loop ──

P = ParamSpec("P")

THREADS = 4
WAITING = 64
RETRY_AFTER_S = 1.0


class SideWork:
    """Has its own threads, because answers use those of the loop and must not wait for this work."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="emberkeep-side")
        self._here = 0

    async def run(self, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        """Raises what `work` raises, and Overloaded. If the client leaves, the work goes on to its end."""
        if self._here >= THREADS + WAITING:
            raise Overloaded("Too many requests of this kind wait: try again in a moment.", RETRY_AFTER_S)
        self._here += 1
        working = asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *args, **named))
        working.add_done_callback(self._ended)
        return await asyncio.shield(working)  # its place is free again when the thread has ended

    async def run_on(
        self, work: Callable[Concatenate[Backend, P], T], backend: Backend, *args: P.args, **named: P.kwargs
    ) -> T:
        """As `run`, with the model loaded: threads that waited for that would hold up all others. Raises what
        loading it raises, too."""
        return await asyncio.shield(self._run_loaded(work, backend, *args, **named))

    async def _run_loaded(
        self, work: Callable[Concatenate[Backend, P], T], backend: Backend, *args: P.args, **named: P.kwargs
    ) -> T:
        """The model stays until the thread has ended, whether or not the client waits for it."""
        async with loaded(backend) as real:
            return await self.run(work, real, *args, **named)

    def _ended(self, working: asyncio.Future[T]) -> None:
        self._here -= 1
