"""The body of an HTTP response as text: unpacked as far as it is wanted and no further."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import httpx

from emberkeep.errors import ToolFailed
from emberkeep.tools.texts import decoded

_BODY_BYTES = 2 << 20

Unpack = Callable[[bytes, int], bytes]
"""What some bytes of a stream come to, at most so many."""


async def body_of(response: httpx.Response) -> str:
    """Reads no more than will be shown: neither a bomb nor a stream without end is received in full."""
    unpack = _unpacker(response.headers.get("content-encoding", ""))
    kept = bytearray()
    async for data in response.aiter_raw():
        kept += unpack(data, _BODY_BYTES + 1 - len(kept))
        if len(kept) > _BODY_BYTES:
            break
    text = decoded(bytes(kept[:_BODY_BYTES]), response.charset_encoding)
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
