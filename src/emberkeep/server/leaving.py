"""Work for a client that may leave before it is done."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest

from emberkeep.server.feed import ClientGone, disconnected

T = TypeVar("T")


async def while_there(http: HttpRequest, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves. Read the body before.

    Raises what `work` raises, and ClientGone.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(disconnected(http.receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
