"""Tools that ask web servers, at public addresses only."""

from __future__ import annotations

import asyncio
import socket
import ssl
import zlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import cache
from http.cookiejar import CookieJar, DefaultCookiePolicy
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Annotated, Any

import httpx
from pydantic import Field

from emberkeep.errors import ConfigError, ToolFailed
from emberkeep.text import decode_text
from emberkeep.tools.function import tool
from emberkeep.types.request import Json
from emberkeep.values import dataclass

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

_TRIED = 4
"""Addresses of a name."""
_CLOSED_AFTER_USE = httpx.Limits(max_connections=1, max_keepalive_connections=0)
_BODY_BYTES = 2 << 20

_NONE: dict[str, str] = {}

Url = Annotated[str, Field(max_length=8000, description="http or https.")]
Headers = Annotated[dict[str, str], Field(description="Request headers.")]
Body = Annotated[str | dict[str, Any] | list[Any], Field(description="Text, or an object to send as JSON.")]
Seconds = Annotated[float, Field(gt=0, le=600, description="Longest time in all.")]
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""The addresses of a name. Raises OSError or UnicodeError."""
Unpack = Callable[[bytes, int], bytes]
"""What some bytes of a stream come to, at most so many."""


async def resolve(host: str, port: int) -> Sequence[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class HttpTools:
    def __init__(self, private: Sequence[str], resolve: Resolve = resolve) -> None:
        """`private`: hosts, or host:port, that may be reached though they are not public. Raises ConfigError."""
        self._exceptions = Exceptions.of(private)
        self._resolve = resolve

    @tool(group="http", dangerous=True, only_reads=True)
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
                return await _follow(client, _request(client, method, url, headers, body))
        except TimeoutError:
            raise ToolFailed(f"{url} took longer than {timeout_s:g} s: try later, or allow more time.") from None
        except httpx.TimeoutException:
            raise ToolFailed(f"{url} cannot be reached: there is no answer.") from None
        except (httpx.HTTPError, httpx.InvalidURL, ssl.SSLError, UnicodeError) as error:
            raise ToolFailed(f"{url} cannot be asked: {error or type(error).__name__}.") from error

    def _client(self) -> httpx.AsyncClient:
        """A client for one call, so that no cookies are kept. Proxies of the environment are not used."""
        return httpx.AsyncClient(
            transport=PublicTransport(self._exceptions, self._resolve, _certificates()),
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


async def _follow(client: httpx.AsyncClient, request: httpx.Request) -> Json:
    first = request.url
    for _ in range(_REDIRECTS + 1):
        _check(request.url)
        response = await client.send(request, stream=True)
        try:
            if response.next_request is None:
                return await _result(response, first)
            request = _redirect(request, response.next_request)
        finally:
            await response.aclose()
    raise ToolFailed(f"{first} leads from redirect to redirect, more than {_REDIRECTS} times: use another URL.")


def _check(url: httpx.URL) -> None:
    if url.scheme not in ("http", "https") or not url.host:
        raise ToolFailed(f"{str(url)!r} is no URL of a web server: it begins with http:// or https://.")
    if url.userinfo:
        raise ToolFailed("The URL has a user name or password in it: leave it out, or use a header.")


def _redirect(request: httpx.Request, following: httpx.Request) -> httpx.Request:
    if _origin(request.url) != _origin(following.url):
        for name in set(following.headers) - _PASSED_ON:
            del following.headers[name]
    return following


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


async def _result(response: httpx.Response, first: httpx.URL) -> Json:
    shown = {name: response.headers[name][:_HEADER_CHARS] for name in _SHOWN if name in response.headers}
    body = await _read_body(response)
    moved = {"url": str(response.url)} if response.url != first else {}
    return {"status": response.status_code, **moved, "headers": shown, "body": body}


# ── bodies: unpacked as far as they are wanted and no further ──


async def _read_body(response: httpx.Response) -> str:
    """Reads no more than will be shown: neither a bomb nor a stream without end is received in full."""
    unpack = _unpacker(response.headers.get("content-encoding", ""))
    kept = bytearray()
    async for data in response.aiter_raw():
        kept += unpack(data, _BODY_BYTES + 1 - len(kept))
        if len(kept) > _BODY_BYTES:
            break
    text = decode_text(bytes(kept[:_BODY_BYTES]), response.charset_encoding)
    if text is None:
        kind = response.headers.get("content-type", "unknown type")[:100]
        return f"[binary ({kind}), {_size(kept)}: not shown]"
    return f"{text}\n[only the first {_BODY_BYTES:,} bytes]" if len(kept) > _BODY_BYTES else text


def _size(kept: bytearray) -> str:
    return f"more than {_BODY_BYTES:,} bytes" if len(kept) > _BODY_BYTES else f"{len(kept):,} bytes"


def _unpacker(encoding: str) -> Unpack:
    match encoding.strip().lower():
        case "" | "identity":
            return lambda data, most: data[:most]
        case "gzip" | "x-gzip" | "deflate":
            return _inflate(zlib.decompressobj(zlib.MAX_WBITS | 32))
        case other:
            raise ToolFailed(f"The answer is packed as {other[:40]!r}, which was not asked for: use another URL.")


def _inflate(stream: zlib._Decompress) -> Unpack:
    def unpack(data: bytes, most: int) -> bytes:
        try:
            return stream.decompress(data, most)
        except zlib.error as error:
            raise ToolFailed("The answer is packed in a broken way: use another URL.") from error

    return unpack


# ── where requests may go ──


class PublicTransport(httpx.AsyncBaseTransport):
    """HTTP to public addresses only.

    A name is resolved once, every address of it is checked, and the connection goes to an address that was
    checked: a name that means something else a moment later gains nothing. Each redirect is a request of its own
    and comes through here too. The name stays in the Host header and in TLS.
    """

    def __init__(self, exceptions: Exceptions, resolve: Resolve, context: ssl.SSLContext) -> None:
        self._exceptions = exceptions
        self._resolve = resolve
        # A connection that stayed open could be used for another name with the same address.
        self._inner = httpx.AsyncHTTPTransport(verify=context, limits=_CLOSED_AFTER_USE)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Raises ToolFailed for what must not be reached, else httpx's errors."""
        *others, last = (await self._check_addresses(request.url))[:_TRIED]
        for address in others:
            try:
                return await self._inner.handle_async_request(_direct_to(request, address))
            except (httpx.ConnectError, httpx.ConnectTimeout):
                continue
        return await self._inner.handle_async_request(_direct_to(request, last))

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def _check_addresses(self, url: httpx.URL) -> Sequence[str]:
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
                f"the operator can allow it with http_private."
            )
        return addresses


def _direct_to(request: httpx.Request, address: str) -> httpx.Request:
    """The same request, sent to that address."""
    return httpx.Request(
        request.method,
        request.url.copy_with(host=address.partition("%")[0]),
        headers=request.headers,
        stream=request.stream,
        extensions={**request.extensions, "sni_hostname": request.url.raw_host.decode()},
    )


_RESERVED_4 = tuple(
    IPv4Network(text)
    for text in (
        "0.0.0.0/8",  # this machine
        "10.0.0.0/8",
        "100.64.0.0/10",  # behind a provider's NAT
        "127.0.0.0/8",
        "169.254.0.0/16",  # link-local, among it the metadata of cloud machines
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",
    )
)
_PUBLIC_6 = IPv6Network("2000::/3")
_RESERVED_6 = tuple(
    IPv6Network(text)
    for text in (
        "2001::/23",  # Teredo and others that lead elsewhere
        "2001:db8::/32",
        "2002::/16",  # 6to4: any IPv4 address
        "3fff::/20",
    )
)
_NAT64 = IPv6Network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """Whether it belongs to the internet. IPv4 inside of IPv6 counts as IPv4. Raises ValueError."""
    parsed = ip_address(address.partition("%")[0])
    if isinstance(parsed, IPv6Address):
        inner = _inner_ipv4(parsed)
        if inner is None:
            return parsed in _PUBLIC_6 and not any(parsed in network for network in _RESERVED_6)
        parsed = inner
    return not any(parsed in network for network in _RESERVED_4)


def _inner_ipv4(address: IPv6Address) -> IPv4Address | None:
    """Names of the internet get such addresses where a network has no IPv4."""
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped


@dataclass(frozen=True, slots=True)
class Exceptions:
    """Hosts that may be reached though their addresses are not public."""

    _hosts: frozenset[tuple[str, int | None]]

    @classmethod
    def of(cls, entries: Iterable[str]) -> Exceptions:
        """Each is a host, or host:port. Raises ConfigError."""
        return cls(frozenset(_parse_host(entry) for entry in entries))

    def have(self, host: str, port: int) -> bool:
        return not self._hosts.isdisjoint({(host.lower(), None), (host.lower(), port)})


def _parse_host(entry: str) -> tuple[str, int | None]:
    host, colon, port = entry.rpartition(":")
    is_bare = not colon or (":" in host and not host.endswith("]"))  # a name, or IPv6 without a port
    if is_bare:
        host, port = entry, ""
    host = host.removeprefix("[").removesuffix("]").lower()
    if not host or "/" in host or (not is_bare and not (port.isascii() and port.isdigit())):
        raise ConfigError(f"http_private: {entry!r} is neither a host nor host:port.")
    return host, int(port) if port else None
