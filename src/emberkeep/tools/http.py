"""Tools that ask web servers."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping, Sequence
from functools import cache
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Annotated, Any

import httpx
from pydantic import Field

from emberkeep.errors import ToolFailed
from emberkeep.tools.addresses import Exceptions
from emberkeep.tools.base import tool
from emberkeep.tools.connecting import CheckedTransport, Resolve, resolve
from emberkeep.tools.unpacking import body_of
from emberkeep.types import Json

_REDIRECTS = 5
_CONNECT_S = 10.0
_SENT_BYTES = 16 << 20
_HEADER_CHARS = 1000
_SHOWN = ("content-type", "content-length", "last-modified", "etag", "location", "link", "retry-after", "allow")
_OURS = frozenset(
    {"host", "connection", "content-length", "transfer-encoding", "accept-encoding", "upgrade", "te", "expect"}
)
# To another site nothing goes that was meant for the first one.
_PASSED_ON = _OURS | {"accept", "accept-language", "user-agent", "content-type"}

_NONE: dict[str, str] = {}

Url = Annotated[str, Field(max_length=8000, description="http or https.")]
Headers = Annotated[dict[str, str], Field(description="Request headers.")]
Body = Annotated[str | dict[str, Any] | list[Any], Field(description="Text, or an object to send as JSON.")]
Seconds = Annotated[float, Field(gt=0, le=600, description="Longest time in all.")]


class HttpTools:
    def __init__(self, private: Sequence[str], resolve: Resolve = resolve) -> None:
        """`private`: hosts, or host:port, that may be reached though they are not public. Raises ConfigError."""
        self._exceptions = Exceptions.of(private)
        self._resolve = resolve

    @tool(group="http", dangerous=True)
    async def http_get(self, url: Url, headers: Headers = _NONE, timeout_s: Seconds = 30) -> Json:
        """Get a web page or a resource."""
        return await self._ask("GET", url, headers, "", timeout_s)

    @tool(group="http", dangerous=True, parallel=False)
    async def http_post(
        self, url: Url, body: Body = "", headers: Headers = _NONE, timeout_s: Seconds = 30
    ) -> Json:
        """Send data to a web server with POST."""
        return await self._ask("POST", url, headers, body, timeout_s)

    @tool(group="http", dangerous=True, parallel=False)
    async def http_put(self, url: Url, body: Body = "", headers: Headers = _NONE, timeout_s: Seconds = 30) -> Json:
        """Put a resource on a web server."""
        return await self._ask("PUT", url, headers, body, timeout_s)

    @tool(group="http", dangerous=True, parallel=False)
    async def http_delete(self, url: Url, headers: Headers = _NONE, timeout_s: Seconds = 30) -> Json:
        """Delete a resource on a web server."""
        return await self._ask("DELETE", url, headers, "", timeout_s)

    async def _ask(self, method: str, url: str, headers: Mapping[str, str], body: Json, timeout_s: float) -> Json:
        try:
            async with asyncio.timeout(timeout_s), self._client() as client:
                return await _followed(client, _request(client, method, url, headers, body))
        except TimeoutError:
            raise ToolFailed(f"{url} took longer than {timeout_s:g} s: try later, or allow more time.") from None
        except httpx.TimeoutException:
            raise ToolFailed(f"{url} cannot be reached: there is no answer.") from None
        except (httpx.HTTPError, httpx.InvalidURL, ssl.SSLError, UnicodeError) as error:
            raise ToolFailed(f"{url} cannot be asked: {error or type(error).__name__}.") from error

    def _client(self) -> httpx.AsyncClient:
        """For one call: what a site leaves behind, nobody finds again. The environment's proxies are not asked."""
        return httpx.AsyncClient(
            transport=CheckedTransport(self._exceptions, self._resolve, _certificates()),
            headers={"User-Agent": "emberkeep", "Accept-Encoding": "gzip"},
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
            trust_env=False,
        )


@cache
def _certificates() -> ssl.SSLContext:
    """Made once: reading all of them takes a while."""
    return httpx.create_ssl_context()


def _request(
    client: httpx.AsyncClient, method: str, url: str, headers: Mapping[str, str], body: Json
) -> httpx.Request:
    refused = [name for name in headers if name.lower() in _OURS or name.lower().startswith("proxy-")]
    if refused:
        raise ToolFailed(f"The header {refused[0]} cannot be chosen: leave it out.")
    if isinstance(body, str):
        request = client.build_request(method, url, headers=headers, content=body.encode() or None)
    else:
        request = client.build_request(method, url, headers=headers, json=body)
    if int(request.headers.get("Content-Length", 0)) > _SENT_BYTES:
        raise ToolFailed(f"A body may have {_SENT_BYTES:,} bytes: send less.")
    return request


async def _followed(client: httpx.AsyncClient, request: httpx.Request) -> Json:
    first = request.url
    for _ in range(_REDIRECTS + 1):
        _check(request.url)
        response = await client.send(request, stream=True)
        try:
            if response.next_request is None:
                return await _told(response, first)
            request = _redirected(request, response.next_request)
        finally:
            await response.aclose()
    raise ToolFailed(f"{first} leads from redirect to redirect, more than {_REDIRECTS} times: use another URL.")


def _check(url: httpx.URL) -> None:
    if url.scheme not in ("http", "https") or not url.host:
        raise ToolFailed(f"{str(url)!r} is no URL of a web server: it begins with http:// or https://.")
    if url.userinfo:
        raise ToolFailed("The URL has a user name or password in it: leave it out, or use a header.")


def _redirected(request: httpx.Request, following: httpx.Request) -> httpx.Request:
    if _origin(request.url) != _origin(following.url):
        for name in set(following.headers) - _PASSED_ON:
            del following.headers[name]
    return following


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


async def _told(response: httpx.Response, first: httpx.URL) -> Json:
    shown = {name: response.headers[name][:_HEADER_CHARS] for name in _SHOWN if name in response.headers}
    body = await body_of(response)
    moved = {"url": str(response.url)} if response.url != first else {}
    return {"status": response.status_code, **moved, "headers": shown, "body": body}
