"""Reading a body; how much of one is taken is up to `bodies`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request as HttpRequest

from emberkeep.library.checking import B
from emberkeep.server.wire.body import parse_body, parse_object
from emberkeep.types import Json

T = TypeVar("T")

_LARGE_BYTES = 64 << 10
"""Takes about a millisecond to parse."""


async def read(http: HttpRequest, model: type[B]) -> B:
    """Raises Refused, RequestError or InvalidField."""
    return await _off_the_loop(lambda raw: parse_body(model, raw), await http.body())


async def read_object(http: HttpRequest) -> dict[str, Json]:
    """A body of which more than one kind is accepted. Raises Refused or RequestError."""
    return await _off_the_loop(parse_object, await http.body())


async def _off_the_loop(parse: Callable[[bytes], T], raw: bytes) -> T:
    """Large bodies are parsed beside the streams, not before them."""
    return parse(raw) if len(raw) <= _LARGE_BYTES else await asyncio.to_thread(parse, raw)
