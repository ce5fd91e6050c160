"""HTTP to public addresses only.

A name is resolved once, every address of it is checked, and the connection goes to an address that was checked: a
name that means something else a moment later gains nothing. Each redirect is a request of its own and comes
through here too. Whom the request is for (Host, TLS) stays the name.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence

import httpx

from emberkeep.errors import ToolFailed
from emberkeep.tools.addresses import Exceptions, is_public

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""The addresses of a name. Raises OSError or UnicodeError."""

_TRIED = 4
_CLOSED_AFTER_USE = httpx.Limits(max_connections=1, max_keepalive_connections=0)


async def resolve(host: str, port: int) -> Sequence[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class CheckedTransport(httpx.AsyncBaseTransport):
    def __init__(self, exceptions: Exceptions, resolve: Resolve, context: ssl.SSLContext) -> None:
        self._exceptions = exceptions
        self._resolve = resolve
        # A connection that stayed open could be used for another name with the same address.
        self._inner = httpx.AsyncHTTPTransport(verify=context, limits=_CLOSED_AFTER_USE)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Raises ToolFailed for what must not be reached, else httpx's errors."""
        *others, last = (await self._checked(request.url))[:_TRIED]
        for address in others:
            try:
                return await self._inner.handle_async_request(_directed(request, address))
            except (httpx.ConnectError, httpx.ConnectTimeout):
                continue
        return await self._inner.handle_async_request(_directed(request, last))

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def _checked(self, url: httpx.URL) -> Sequence[str]:
        host, port = url.raw_host.decode(), url.port or (443 if url.scheme == "https" else 80)
        try:
            addresses = await self._resolve(host, port)
        except (OSError, UnicodeError) as error:
            raise ToolFailed(f"The host {host!r} cannot be found: check the URL.") from error
        if not addresses:
            raise ToolFailed(f"The host {host!r} has no address: check the URL.")
        private = [address for address in addresses if not is_public(address)]
        if private and not self._exceptions.have(host, port):
            raise ToolFailed(
                f"{host!r} is not on the internet ({private[0]}) and must not be reached: "
                f"whoever runs this can allow it with http_private."
            )
        return addresses


def _directed(request: httpx.Request, address: str) -> httpx.Request:
    """The same request, sent to that address."""
    return httpx.Request(
        request.method,
        request.url.copy_with(host=address.partition("%")[0]),
        headers=request.headers,
        stream=request.stream,
        extensions={**request.extensions, "sni_hostname": request.url.raw_host.decode()},
    )
