"""From the error tree to OpenAI's error object and its HTTP status."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

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
from emberkeep.types import Json


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
        inner = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": {**inner, **self.figures}}

    def frame(self) -> bytes:
        """The last event of a stream that failed."""
        return b"data: " + json.dumps(self.json()).encode() + b"\n\n"


class Refused(EmberkeepError):
    """Something about the HTTP request itself: who asks, from where, how much."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def failure_of(error: BaseException) -> Failure:
    """Errors that are not ours keep their details to themselves."""
    message = str(error)
    match error:
        case Refused():
            return error.failure
        case ContextExceeded():
            return Failure(400, "invalid_request_error", message, "context_length_exceeded", error.param)
        case TooLarge():
            return _too_large(error)
        case NoSuchEntry():
            return Failure(404, "invalid_request_error", message, "entry_not_found", error.param)
        case RequestError():
            return Failure(400, "invalid_request_error", message, None, error.param)
        case ModelNotFound():
            return Failure(404, "invalid_request_error", message, "model_not_found", "model")
        case Overloaded():
            return Failure(503, "overloaded", message, "overloaded", headers=_come_back(error.retry_after))
        case RateLimited():
            return Failure(
                429, "rate_limit_error", message, "rate_limit_exceeded", headers=_come_back(error.retry_after)
            )
        case RemoteDown():
            headers = _come_back(error.retry_after) if error.retry_after is not None else {}
            return Failure(503, "upstream_error", message, "backend_unavailable", headers=headers)
        case RemoteLoop():
            return Failure(508, "upstream_error", message, "backend_loop")
        case RemoteError():
            return Failure(502, "upstream_error", message, "backend_failed")
        case DeadlineExceeded():
            return Failure(504, "deadline", message, "deadline_exceeded")
        case MemoryOff():
            return Failure(404, "invalid_request_error", message, "memory_off")
        case MemoryFailed():
            return Failure(500, "server_error", message, "memory_failed")
        case EmberkeepError():
            return Failure(500, "server_error", message)
        case _:
            return Failure(500, "server_error", "The server failed on this request: its log says why.")


def _too_large(error: TooLarge) -> Failure:
    figures = {
        "prompt_tokens": error.prompt_tokens,
        "predicted_peak_mb": round(error.needed / 1e6, 3),
        "free_mb": round(error.available / 1e6, 3),
        "suggested_max_tokens": error.suggested_max_tokens,
    }
    return Failure(413, "invalid_request_error", str(error), "prompt_too_large", error.param, figures=figures)


def _come_back(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, math.ceil(seconds)))}
