"""A server that has an address: streamable HTTP, with answers of a bearable length."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import httpx2
from mcp.client._transport import TransportStreams
from mcp.client.streamable_http import streamable_http_client

from emberkeep.config import McpServer
from emberkeep.mcp.program import MESSAGE_BYTES

_CONNECT_S = 30.0


@asynccontextmanager
async def address(
    server: McpServer, headers: Mapping[str, str], on_status: Callable[[int], None]
) -> AsyncGenerator[TransportStreams, None]:
    """Leaving it ends the session. `on_status` gets the status of every answer."""
    assert server.url is not None

    async def look(response: httpx2.Response) -> None:
        on_status(response.status_code)
        _bound(response)

    client = httpx2.AsyncClient(
        headers={**headers, "Accept-Encoding": "identity"},
        # Waiting is bounded per call; a stream for notices may be silent for hours.
        timeout=httpx2.Timeout(_CONNECT_S, read=None),
        event_hooks={"response": [look]},
    )
    async with (
        client,
        streamable_http_client(server.url, http_client=client, max_sse_event_size=MESSAGE_BYTES) as streams,
    ):
        yield streams


def _bound(response: httpx2.Response) -> None:
    assert isinstance(response.stream, httpx2.AsyncByteStream)
    if response.headers.get("content-encoding", "identity") != "identity":
        # A few bytes could become gigabytes.
        response.stream = _Bounded(response.stream, 0, "it is compressed, which nobody asked for")
    elif not response.headers.get("content-type", "").startswith("text/event-stream"):
        response.stream = _Bounded(response.stream, MESSAGE_BYTES, f"it is longer than {MESSAGE_BYTES >> 20} MiB")


class _Bounded(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream, limit: int, complaint: str) -> None:
        self._stream = stream
        self._limit = limit
        self._complaint = complaint

    async def __aiter__(self) -> AsyncIterator[bytes]:
        left = self._limit
        async for chunk in self._stream:
            left -= len(chunk)
            if left < 0:
                # The SDK fails the call with it, and goes on.
                raise httpx2.StreamError(self._complaint)
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()
