"""The OpenAPI document, made of what routes tell of themselves, when somebody asks for it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from inspect import cleandoc

from pydantic.json_schema import models_json_schema

from emberkeep import __version__
from emberkeep.api.errors import AnthropicErrors, ErrorShape, OllamaErrors, error_shape
from emberkeep.server.routes.base import JSON, ApiRoute
from emberkeep.types.request import Json

_WHERE = "#/components/schemas/{model}"

_ERRORS = {
    400: "A field has a bad value, or the prompt is longer than the context.",
    401: "The API key is missing or wrong.",
    403: "The Host or Origin is not allowed.",
    404: "What is named is not here.",
    405: "The path takes other methods.",
    408: "The body did not arrive in time.",
    413: "The body or the prompt is too large.",
    415: "The body is compressed.",
    429: "This user has too many requests running; Retry-After says when to try again.",
    431: "The path or the headers are too large.",
    500: "Something broke; the server's log says what.",
    502: "The model runs elsewhere, and did not answer.",
    503: "The queue is full, too many connections are open, the server is stopping, or a model elsewhere is down; "
    "Retry-After may say when to try again.",
    504: "The request took longer than it may.",
}
_EVERYWHERE = (401, 403, 405, 500)

_TEXT = {"type": "string"}
_MAYBE_TEXT = {"type": ["string", "null"]}


def _object(**fields: Json) -> dict[str, Json]:
    return {"type": "object", "required": list(fields), "properties": fields}


_ERROR_SCHEMAS: dict[type, tuple[str, Json]] = {
    ErrorShape: (
        "Error",
        _object(error=_object(message=_TEXT, type=_TEXT, param=_MAYBE_TEXT, code=_MAYBE_TEXT)),
    ),
    AnthropicErrors: (
        "AnthropicError",
        _object(type=_TEXT, error=_object(type=_TEXT, message=_TEXT), request_id=_TEXT),
    ),
    OllamaErrors: ("OllamaError", _object(error=_TEXT)),
}
"""By their shape: what their schema is called, and the schema."""


def document(routes: Iterable[ApiRoute]) -> dict[str, Json]:
    """Blocks for a good part of a second."""
    described = [route for route in routes if route.include_in_schema]
    paths: dict[str, dict[str, Json]] = {}
    for route in described:
        paths.setdefault(route.path_format, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Emberkeep", "version": __version__},
        "paths": paths,
        "components": {"schemas": _schemas(described), "responses": dict(_error_responses())},
    }


def _schemas(routes: Iterable[ApiRoute]) -> dict[str, Json]:
    bodies = {body.__name__: body for route in routes for body in route.bodies}
    _, shared = models_json_schema([(body, "validation") for body in bodies.values()], ref_template=_WHERE)
    return {**shared.get("$defs", {}), **dict(_ERROR_SCHEMAS.values())}


def _error_responses() -> Iterator[tuple[str, Json]]:
    for name, _ in _ERROR_SCHEMAS.values():
        content = {"application/json": {"schema": {"$ref": _WHERE.format(model=name)}}}
        for status, description in _ERRORS.items():
            yield f"{name}{status}", {"description": description, "content": content}


def _operation(route: ApiRoute) -> dict[str, Json]:
    name = re.sub(r"\W", "_", f"{route.name}{route.path_format}_{route.method.lower()}")
    operation: dict[str, Json] = {"summary": _title(route.name), "operationId": name}
    if route.endpoint.__doc__:
        operation["description"] = cleandoc(route.endpoint.__doc__)
    if parameters := _parameters(route):
        operation["parameters"] = parameters
    if route.bodies or "schema" in route.about:
        operation["requestBody"] = {"required": True, "content": {"application/json": _content(route)}}
    operation["responses"] = _responses(route, has_parameters=bool(parameters))
    return operation


def _parameters(route: ApiRoute) -> list[Json]:
    """Those in the path first. What no model reads is any text."""
    schema = route.parameters.model_json_schema()
    fields, required = schema.get("properties", {}), schema.get("required", ())
    in_path = {name: fields.pop(name, _TEXT | {"title": _title(name)}) for name in route.param_convertors}
    return [
        *({"name": name, "in": "path", "required": True, "schema": kind} for name, kind in in_path.items()),
        *(
            {"name": name, "in": "query", "required": name in required, "schema": _without_null(kind)}
            for name, kind in fields.items()
        ),
    ]


def _title(name: str) -> str:
    return name.replace("_", " ").title()


def _without_null(schema: dict[str, Json]) -> dict[str, Json]:
    """Without a default that a query cannot have."""
    return {key: value for key, value in schema.items() if (key, value) != ("default", None)}


def _content(route: ApiRoute) -> dict[str, Json]:
    kinds: list[Json] = [{"$ref": _WHERE.format(model=body.__name__)} for body in route.bodies] or [
        route.about["schema"]
    ]
    content: dict[str, Json] = {"schema": kinds[0] if len(kinds) == 1 else {"anyOf": kinds}}
    return {**content, "example": route.about["example"]} if "example" in route.about else content


def _responses(route: ApiRoute, *, has_parameters: bool) -> dict[str, Json]:
    good = {"200": {"description": "Successful Response", "content": dict(route.about.get("content", JSON))}}
    own = {str(status): {"description": words} for status, words in route.about.get("errors", {}).items()}
    # A route without parameters that changes nothing has no errors of its own.
    possible = _EVERYWHERE if route.method == "GET" and not has_parameters else tuple(_ERRORS)
    name, _ = _ERROR_SCHEMAS[type(error_shape(route.path))]
    shared = {str(status): {"$ref": f"#/components/responses/{name}{status}"} for status in possible}
    return {**good, **shared, **own}
