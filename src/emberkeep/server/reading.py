"""Reading a body, and no more of it than allowed."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest

from emberkeep.library.checking import B
from emberkeep.server.wire.body import parse_body, parse_object
from emberkeep.server.wire.errors import Failure, Refused
from emberkeep.types import Json

MAX_BODY_BYTES = 16 << 20
"""Several times the text of the longest contexts; a bomb of this size still parses within a second."""


async def read(http: HttpRequest, model: type[B]) -> B:
    """Raises Refused (413), RequestError or InvalidField."""
    return parse_body(model, await _bounded(http))


async def read_object(http: HttpRequest) -> dict[str, Json]:
    """A body of which more than one kind is accepted. Raises Refused (413) or RequestError."""
    return parse_object(await _bounded(http))


async def _bounded(http: HttpRequest) -> bytes:
    declared = http.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
        raise _too_large()
    body = bytearray()
    async for part in http.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise _too_large()
    return bytes(body)


def _too_large() -> Refused:
    message = f"The body is larger than {MAX_BODY_BYTES >> 20} MiB: send less."
    return Refused(Failure(413, "invalid_request_error", message, "body_too_large"))
