"""Errors as clients see them: fields refused in our words, and OpenAI's error object with its HTTP status."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import field

from emberkeep.errors import (
    ContextExceeded,
    DeadlineExceeded,
    EmberkeepError,
    MemoryFailed,
    MemoryOff,
    ModelNotFound,
    NoSuchEntry,
    Overloaded,
    RateLimited,
    RemoteDown,
    RemoteError,
    RemoteLoop,
    RequestError,
    TooLarge,
)
from emberkeep.types.request import Json
from emberkeep.values import dataclass


@dataclass(frozen=True, slots=True)
class Failure:
    """What the client is told."""

    status: int
    type: str
    message: str
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    figures: Mapping[str, Json] = field(default_factory=dict)
    """What a program can make use of, beside OpenAI's fields."""

    def json(self) -> dict[str, Json]:
        """In OpenAI's shape."""
        inner = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": {**inner, **self.figures}}


class ErrorShape:
    """How the clients of an API expect errors. OpenAI's shape."""

    def body(self, failure: Failure, request_id: str) -> dict[str, Json]:
        return failure.json()

    def frame(self, failure: Failure, request_id: str) -> bytes:
        """The last event of a stream that failed."""
        return sse(self.body(failure, request_id))


class AnthropicErrors(ErrorShape):
    def body(self, failure: Failure, request_id: str) -> dict[str, Json]:
        kind = _ANTHROPIC_TYPES.get(failure.status, "api_error" if failure.status >= 500 else _ANY_REQUEST)
        # Agents look for these words, and make their conversation shorter.
        is_long = failure.code == "context_length_exceeded"
        message = f"prompt is too long: {failure.message}" if is_long else failure.message
        inner = {"type": kind, "message": message, **failure.figures}
        return {"type": "error", "error": inner, "request_id": request_id}

    def frame(self, failure: Failure, request_id: str) -> bytes:
        return sse(self.body(failure, request_id), "error")


class OllamaErrors(ErrorShape):
    def body(self, failure: Failure, request_id: str) -> dict[str, Json]:
        return {"error": failure.message}

    def frame(self, failure: Failure, request_id: str) -> bytes:
        return json.dumps(self.body(failure, request_id)).encode() + b"\n"


_ANY_REQUEST = "invalid_request_error"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

OPENAI_ERRORS = ErrorShape()
ANTHROPIC_ERRORS = AnthropicErrors()
OLLAMA_ERRORS = OllamaErrors()
_SHAPES: tuple[tuple[str, ErrorShape], ...] = (("/v1/messages", ANTHROPIC_ERRORS), ("/api/", OLLAMA_ERRORS))
"""Shapes of the paths that begin so; all others have OpenAI's."""


def error_shape(path: str) -> ErrorShape:
    return next((shape for beginning, shape in _SHAPES if path.startswith(beginning)), OPENAI_ERRORS)


def sse(value: Json, event: str = "") -> bytes:
    """One server-sent event. In ASCII: some clients take U+2028 inside a text for the end of a line."""
    name = f"event: {event}\n".encode() if event else b""
    return name + b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


class Refused(EmberkeepError):
    """Something about the HTTP request itself: who asks, from where, how much."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


_KINDS: tuple[tuple[type[EmberkeepError], int, str, str | None], ...] = (
    (ContextExceeded, 400, "invalid_request_error", "context_length_exceeded"),
    (TooLarge, 413, "invalid_request_error", "prompt_too_large"),
    (NoSuchEntry, 404, "invalid_request_error", "entry_not_found"),
    (RequestError, 400, "invalid_request_error", None),
    (ModelNotFound, 404, "invalid_request_error", "model_not_found"),
    (Overloaded, 503, "overloaded", "overloaded"),
    (RateLimited, 429, "rate_limit_error", "rate_limit_exceeded"),
    (RemoteDown, 503, "upstream_error", "backend_unavailable"),
    (RemoteLoop, 508, "upstream_error", "backend_loop"),
    (RemoteError, 502, "upstream_error", "backend_failed"),
    (DeadlineExceeded, 504, "deadline", "deadline_exceeded"),
    (MemoryOff, 404, "invalid_request_error", "memory_off"),
    (MemoryFailed, 500, "server_error", "memory_failed"),
    (EmberkeepError, 500, "server_error", None),
)
"""Status, type and code of each kind. The first one that fits counts."""


def failure_of(error: BaseException) -> Failure:
    """What the client is told about `error`. Details of errors that are not ours are not shown."""
    if isinstance(error, Refused):
        return error.failure
    for kind, status, type_name, code in _KINDS:
        if isinstance(error, kind):
            return Failure(
                status,
                type_name,
                str(error),
                code,
                "model" if kind is ModelNotFound else getattr(error, "param", None),
                headers=_come_back(getattr(error, "retry_after", None)),
                figures=_figures(error) if isinstance(error, TooLarge) else {},
            )
    return Failure(500, "server_error", "The server failed on this request: its log says why.")


def _figures(error: TooLarge) -> dict[str, Json]:
    return {
        "prompt_tokens": error.prompt_tokens,
        "predicted_peak_mb": round(error.needed / 1e6, 3),
        "free_mb": round(error.available / 1e6, 3),
        "suggested_max_tokens": error.suggested_max_tokens,
    }


def _come_back(seconds: float | None) -> dict[str, str]:
    return {} if seconds is None else {"Retry-After": str(max(1, math.ceil(seconds)))}
