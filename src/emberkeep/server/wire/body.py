"""From the bytes of a body to a checked model."""

from __future__ import annotations

import json

from emberkeep.errors import RequestError
from emberkeep.library.checking import HALF_A_CHARACTER, B, checked
from emberkeep.types import Json, exceeds_depth

MAX_DEPTH = 64
MAX_VALUES = 600_000
"""And keys: a hundred thousand messages. No other thread goes on while they are parsed, a third of a second."""


def parse_body(model: type[B], raw: bytes) -> B:
    """Raises RequestError, or InvalidField with the path of the first bad field."""
    return checked(model, parse_object(raw))


def parse_object(raw: bytes) -> dict[str, Json]:
    """Raises RequestError."""
    value = _parse_json(raw)
    if not isinstance(value, dict):
        raise RequestError("The body must be a JSON object.")
    return value


def _parse_json(raw: bytes) -> Json:
    if _values(raw) > MAX_VALUES and _values(_without_strings(raw)) > MAX_VALUES:
        raise RequestError(f"The body has more than {MAX_VALUES:,} values: send less.")
    try:
        text = raw.decode("utf-8")
        value = json.loads(text, parse_constant=_refuse_constant)
        if "\\ud" in text or "\\uD" in text:
            # Half of a surrogate pair is valid JSON, and cannot be encoded (or tokenised) by anyone.
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
    """No fewer than the values and keys that are there: each but the first follows one of these."""
    return raw.count(b",") + raw.count(b"[") + raw.count(b"{") + raw.count(b":")


def _without_strings(raw: bytes) -> bytes:
    """Texts may have as many commas as they like. More strings than values are allowed are not looked at."""
    unescaped = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    return b"".join(unescaped.split(b'"', 2 * MAX_VALUES)[::2])


def _refuse_constant(name: str) -> Json:
    raise ValueError(f"{name} is not a number in JSON")


def _too_deep() -> RequestError:
    return RequestError(f"The body is nested too deeply: use at most {MAX_DEPTH} levels.")
