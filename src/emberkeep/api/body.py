"""How the body of a request is read: JSON, with limits, into a model whose fields are checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from emberkeep.api.errors import HALF_A_CHARACTER, refusal
from emberkeep.errors import RequestError
from emberkeep.types.request import Json, exceeds_depth

MAX_DEPTH = 64
MAX_VALUES = 600_000
"""Values and keys of a body: 100,000 messages. While they are parsed, a third of a second, all threads wait."""


class Body(BaseModel):
    """Unknown fields are ignored, as OpenAI does; known ones must have exactly their JSON type.

    A body's validator is built when it is first used, which is safe from any thread.
    """

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, defer_build=True)


B = TypeVar("B", bound=Body)


def parse_body(model: type[B], raw: bytes) -> B:
    """Raises RequestError, or InvalidField with the path of the first bad field."""
    return validate(model, parse_object(raw))


def validate(model: type[B], value: Mapping[str, Json]) -> B:
    """Raises InvalidField with the path of the first bad field."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise refusal(first["loc"], first["type"], first.get("ctx", {})) from None


def parse_object(raw: bytes) -> dict[str, Json]:
    """Raises RequestError."""
    value = parse_json(raw)
    if not isinstance(value, dict):
        raise RequestError("The body must be a JSON object.")
    return value


def parse_list(raw: bytes) -> list[Json]:
    """Raises RequestError."""
    value = parse_json(raw)
    if not isinstance(value, list):
        raise RequestError("The body must be a JSON list.")
    return value


def parse_json(raw: bytes) -> Json:
    """Raises RequestError."""
    if _values(raw) > MAX_VALUES and _values(_without_strings(raw)) > MAX_VALUES:
        raise RequestError(f"The body has more than {MAX_VALUES:,} values: send less.")
    try:
        text = raw.decode("utf-8")
        value = json.loads(text, parse_constant=_refuse_constant)
        if "\\ud" in text or "\\uD" in text:
            # Half of a surrogate pair is valid JSON, and cannot be encoded or tokenised.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise RequestError(f"The body is not valid JSON: {error.msg} at {where}.") from None
    except UnicodeDecodeError:
        raise RequestError("The body is not valid UTF-8: send JSON encoded as UTF-8.") from None
    except UnicodeEncodeError:
        raise RequestError(f"The body cannot be used: {HALF_A_CHARACTER}") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise RequestError(f"The body is not valid JSON: {error}.") from None
    if exceeds_depth(value, MAX_DEPTH):
        raise _too_deep()
    return value


def _values(raw: bytes) -> int:
    """At least the number of values and keys: each but the first follows one of these characters."""
    return raw.count(b",") + raw.count(b"[") + raw.count(b"{") + raw.count(b":")


def _without_strings(raw: bytes) -> bytes:
    """Without the strings, whose commas do not count. Stops after as many strings as values are allowed."""
    unescaped = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    return b"".join(unescaped.split(b'"', 2 * MAX_VALUES)[::2])


def _refuse_constant(name: str) -> Json:
    raise ValueError(f"{name} is not a number in JSON")


def _too_deep() -> RequestError:
    return RequestError(f"The body is nested too deeply: use at most {MAX_DEPTH} levels.")
