"""The page: files of this package as a browser gets them, from memory, packed once."""

from __future__ import annotations

import asyncio
import gzip
from functools import cache
from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from emberkeep.server.routes.base import Routes, Served
from emberkeep.values import dataclass

INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob:",  # which only scripts of this package can make: pictures that come with a key
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""Whatever a model writes, nothing runs that is not in this package, and nothing is fetched from elsewhere."""
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # asked for again, and answered 304
    "Vary": "Accept, Accept-Encoding",
    "X-DNS-Prefetch-Control": "off",  # the name of a link's host is a message, too
}


@dataclass(frozen=True, slots=True)
class Asset:
    media_type: str
    body: bytes
    packed: bytes
    etag: str


@cache
def assets() -> dict[str, Asset]:
    """By their paths below `/page/`."""
    return dict(_walk(files("emberkeep.server") / "page", ""))


def _walk(folder: Traversable, prefix: str) -> list[tuple[str, Asset]]:
    found: list[tuple[str, Asset]] = []
    for entry in folder.iterdir():
        name = f"{prefix}{entry.name}"
        if entry.is_dir():
            found += _walk(entry, f"{name}/")
        elif (media_type := _TYPES.get(f".{entry.name.rpartition('.')[2]}")) is not None:
            body = entry.read_bytes()
            etag = f'"{sha256(body).hexdigest()[:24]}"'
            found.append((name, Asset(media_type, body, gzip.compress(body, mtime=0), etag)))
    return found


def routes(_: Served) -> Routes:
    routes = Routes()

    @routes.get("/page/{path:path}", is_hidden=True)
    async def file(http: HttpRequest) -> Response:
        return await page_response(http, http.path_params["path"])

    return routes


def wants_page(http: HttpRequest) -> bool:
    """Whether it is a browser that someone sits in front of."""
    return "text/html" in http.headers.get("accept", "")


async def page_response(http: HttpRequest, path: str = INDEX) -> Response:
    """Raises HTTPException."""
    asset = (await asyncio.to_thread(assets)).get(path)  # the first time it packs them
    if asset is None:
        raise HTTPException(404)
    headers = {**_HEADERS, "ETag": asset.etag}
    if asset.etag in http.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if "gzip" in http.headers.get("accept-encoding", ""):
        return Response(asset.packed, headers={**headers, "Content-Encoding": "gzip"}, media_type=asset.media_type)
    return Response(asset.body, headers=headers, media_type=asset.media_type)
