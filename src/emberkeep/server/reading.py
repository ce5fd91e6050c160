"""Reading a body; how much of one is taken is up to `bodies`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request as HttpRequest

from emberkeep.api.request import B, parse_body, parse_object
from emberkeep.types import Json

T = TypeVar("T")

_LARGE_BYTES = 64 << 10
"""Takes about a millisecond to parse."""


async def read(http: HttpRequest, model: type[B]) -> B:
    """Raises Refused, RequestError or InvalidField."""
    raw = await http.body()
    return await made_of_body(http, lambda: parse_body(model, raw))


async def read_object(http: HttpRequest) -> dict[str, Json]:
    """A body of which more than one kind is accepted. Raises Refused or RequestError."""
    raw = await http.body()
    return await made_of_body(http, lambda: parse_object(raw))


async def made_of_body(http: HttpRequest, make: Callable[[], T]) -> T:
    """What `make` makes of a body that was read: of a large one in a thread, so that streams need not wait."""
    is_large = len(await http.body()) > _LARGE_BYTES
    return await asyncio.to_thread(make) if is_large else make()
