"""From the bytes of a body to a checked model. Everything wrong with a body is found here."""

from __future__ import annotations

import json
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from emberkeep.errors import InvalidField, RequestError
from emberkeep.types import Json

MAX_DEPTH = 64
_LONGEST_NAME = 64


class Body(BaseModel):
    """Unknown fields are ignored, as OpenAI does; known ones must have exactly their JSON type."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


B = TypeVar("B", bound=Body)


def parse_body(model: type[B], raw: bytes) -> B:
    """Raises RequestError, or InvalidField with the path of the first bad field."""
    value = _parse_json(raw)
    if not isinstance(value, dict):
        raise RequestError("The body must be a JSON object.")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _first_complaint(error) from None


def _parse_json(raw: bytes) -> Json:
    try:
        text = raw.decode("utf-8")
        value = json.loads(text, parse_constant=_refuse_constant)
        if "\\ud" in text or "\\uD" in text:
            # Half of a surrogate pair is valid JSON, and cannot be encoded (or tokenised) by anyone.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise RequestError(f"The body is not valid JSON: {error.msg} at {where}.") from None
    except UnicodeError:
        raise RequestError("The body is not valid UTF-8: send JSON encoded as UTF-8.") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise RequestError(f"The body is not valid JSON: {error}.") from None
    _check_depth(value)
    return value


def _refuse_constant(name: str) -> Json:
    raise ValueError(f"{name} is not a number in JSON")


def _check_depth(value: Json) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for parent in level for child in _containers(parent)]
        if not level:
            return
    raise _too_deep()


def _containers(value: Json) -> list[Json]:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [child for child in children if isinstance(child, (dict, list))]


def _too_deep() -> RequestError:
    return RequestError(f"The body is nested too deeply: use at most {MAX_DEPTH} levels.")


def _first_complaint(error: ValidationError) -> InvalidField:
    first = error.errors(include_url=False, include_input=False)[0]
    cause = first.get("ctx", {}).get("error")
    message = str(cause) if isinstance(cause, ValueError) else first["msg"]
    return InvalidField(_path(first["loc"]), message if message.endswith(".") else message + ".")


def _path(location: tuple[int | str, ...]) -> str:
    """`("messages", 0, "role")` as `messages[0].role`."""
    parts = [part for part in location if part != "[key]"]
    shown = [f"[{part}]" if isinstance(part, int) else f".{part[:_LONGEST_NAME]}" for part in parts]
    return "".join(shown).removeprefix(".")
