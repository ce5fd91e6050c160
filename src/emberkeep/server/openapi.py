"""The OpenAPI document. Bodies are read by us, so their schemas are added here; so are errors.

FastAPI would parse a large body on the loop that serves the streams, and make its own 400 of every refusal.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from emberkeep.api.errors import AnthropicErrors, OllamaErrors, OpenAiErrors, error_shape
from emberkeep.api.request import Body
from emberkeep.types import Json

_WHERE = "#/components/schemas/{model}"
_bodies: dict[str, type[Body]] = {}
"""Those that routes take, by name."""

HELLO = {"role": "user", "content": "Why is the sky blue?"}
"""A message for examples."""

STREAMS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
"""Responses of a route whose answers may also come as a stream."""
LINES: dict[int | str, dict[str, Any]] = {200: {"content": {"application/x-ndjson": {}}}}
"""The same for a stream of lines, as Ollama has it."""

_ERRORS = {
    400: "A field has a bad value, or the prompt is longer than the context.",
    401: "The API key is missing or wrong.",
    403: "The Host or Origin is not allowed.",
    404: "What is named is not here.",
    405: "The path takes other methods.",
    408: "The body did not arrive in time.",
    413: "The body or the prompt is too large.",
    414: "The path and query are too long.",
    415: "The body is compressed.",
    429: "This user has too many requests running; Retry-After says when to try again.",
    431: "The headers are too large or too many.",
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
    OpenAiErrors: (
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


def takes(*models: type[Body], **example: Json) -> dict[str, Any]:
    """The body of a route, which may be of several kinds, and fields that make one which is accepted."""
    _bodies.update({model.__name__: model for model in models})
    kinds = [{"$ref": _WHERE.format(model=model.__name__)} for model in models]
    content: dict[str, Json] = {"schema": kinds[0] if len(kinds) == 1 else {"anyOf": kinds}}
    if example:
        content["example"] = example
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


class DescribedApp(FastAPI):
    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            _complete(super().openapi())
        return super().openapi()


def _complete(document: dict[str, Json]) -> None:
    _, shared = models_json_schema([(body, "validation") for body in _bodies.values()], ref_template=_WHERE)
    schemas = dict(_ERROR_SCHEMAS.values())
    document["components"] = {
        "schemas": shared["$defs"] | schemas,
        "responses": {f"{name}{status}": _error_response(name, status) for name in schemas for status in _ERRORS},
    }
    for path, methods in document["paths"].items():
        name, _ = _ERROR_SCHEMAS[type(error_shape(path))]
        for method, operation in methods.items():
            operation["responses"].pop("422", None)  # the framework's own; ours is 400
            for status in _possible_errors(method, operation):
                operation["responses"].setdefault(str(status), {"$ref": f"#/components/responses/{name}{status}"})


def _error_response(name: str, status: int) -> dict[str, Json]:
    schema = {"$ref": _WHERE.format(model=name)}
    return {"description": _ERRORS[status], "content": {"application/json": {"schema": schema}}}


def _possible_errors(method: str, operation: dict[str, Json]) -> tuple[int, ...]:
    """A route without parameters that changes nothing has no errors of its own."""
    return _EVERYWHERE if method == "get" and "parameters" not in operation else tuple(_ERRORS)
