"""Routes: which function answers a path and a method, how its parameters are read, and what the OpenAPI document
says of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import field
from typing import Annotated, TypedDict, TypeVar, Unpack

from pydantic import ConfigDict, Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from emberkeep.api.body import B, Body, validate
from emberkeep.api.field_kinds import INT32_MAX
from emberkeep.types.request import Json
from emberkeep.values import dataclass

Handler = Callable[[HttpRequest], Awaitable[Response]]
H = TypeVar("H", bound=Handler)

HELLO = {"role": "user", "content": "Why is the sky blue?"}
"""A message for examples."""

JSON: Mapping[str, Json] = {"application/json": {"schema": {}}}
STREAMS: Mapping[str, Json] = {**JSON, "text/event-stream": {}}
"""Content of answers that may also come as a stream."""
LINES: Mapping[str, Json] = {**JSON, "application/x-ndjson": {}}
"""The same for a stream of lines, as Ollama has it."""


PAGE = 1000
"""Items that are listed at a time."""

# ── parameters ──


class Parameters(Body):
    """What a path and a query say: texts, such as "5" for a number."""

    model_config = ConfigDict(strict=False)


class OfModel(Parameters):
    """For routes without a body: whose state or figures; those of the default model unless it is said."""

    model: Annotated[str, Field(max_length=256)] | None = None


class PageParameters(Parameters):
    limit: Annotated[int, Field(ge=1, le=PAGE)] = PAGE
    offset: Annotated[int, Field(ge=0, le=INT32_MAX)] = 0


def read_parameters(http: HttpRequest, model: type[B]) -> B:
    """Raises InvalidField."""
    return validate(model, {**http.query_params, **http.path_params})


def of_model(http: HttpRequest) -> str | None:
    """Raises InvalidField."""
    return read_parameters(http, OfModel).model


# ── what is told of a route ──


@dataclass(frozen=True, slots=True)
class TakenBody:
    """The body of a route."""

    models: tuple[type[Body], ...] = ()
    """Its kinds."""
    schema: Mapping[str, Json] = field(default_factory=dict)
    """Of a body that no model reads."""
    example: Json = None
    """One that is accepted."""


def takes(*models: type[Body], **example: Json) -> TakenBody:
    """A body that may be of several kinds, and fields that make one which is accepted."""
    return TakenBody(models, example=example or None)


class About(TypedDict, total=False):
    """What the OpenAPI document says of a route besides its path and its method."""

    parameters: type[Body]
    """What is read of the path and the query; what is in the path only may be left out."""
    body: TakenBody
    content: Mapping[str, Json]
    """Of its answer; JSON unless it is said."""
    errors: Mapping[int, str]
    """Those that mean something else here than everywhere."""
    is_hidden: bool
    """The document does not have it."""


class ApiRoute(Route):
    def __init__(self, method: str, path: str, handler: Handler, about: About) -> None:
        super().__init__(path, handler, methods=[method], include_in_schema=not about.get("is_hidden"))
        self.methods = {method}  # HEAD is GET when it comes here: see PathMiddleware
        self.method = method
        self.about = about


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
            told = about
            for path in (f"{prefix}{path}" for prefix in self._prefixes for path in paths):
                self.listed.append(ApiRoute(method, path, handler, told))
                told = {"is_hidden": True}
            return handler

        return add
