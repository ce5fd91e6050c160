"""Keys of chunks: a hash chain in which every field is length-prefixed, so that no two inputs collide.

A key commits to the format version, the fingerprint (weights, KV layout, engine), the lineage, the parent's key,
how many of the parent's tokens come before the chunk, and the chunk's tokens.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from functools import lru_cache
from typing import NewType

import numpy as np

from emberkeep.token_arrays import TokenArray
from emberkeep.types.lineage import Lineage

ChunkKey = NewType("ChunkKey", bytes)


_U32 = struct.Struct("<I")


FORMAT_VERSION = 2


ROOT = ChunkKey(b"")
"""Parent key of chunks that begin at position 0."""


Span = tuple[int, int]


def pack_fields(fields: Iterable[bytes]) -> bytes:
    """Each field behind its length: a concatenation that can be taken apart in one way only."""
    return b"".join([_U32.pack(len(field)) + field for field in fields])


def unpack_fields(data: bytes) -> list[bytes]:
    """Inverse of `pack_fields`. Raises ValueError."""
    fields = []
    offset = 0
    while offset < len(data):
        if offset + 4 > len(data):
            raise ValueError("a field's length is cut off")
        (length,) = struct.unpack_from("<I", data, offset)
        offset += 4
        if offset + length > len(data):
            raise ValueError("a field is cut off")
        fields.append(data[offset : offset + length])
        offset += length
    return fields


def chunk_key(fingerprint: bytes, lineage: Lineage, parent: ChunkKey, take: int, tokens: TokenArray) -> ChunkKey:
    # What the keys of one lineage have in common is hashed once.
    digest = _common_part(fingerprint, lineage).copy()
    digest.update(pack_fields((parent, _U32.pack(take), token_bytes(tokens))))
    return ChunkKey(digest.digest())


@lru_cache(maxsize=256)
def _common_part(fingerprint: bytes, lineage: Lineage) -> hashlib.blake2b:
    fields = [_U32.pack(FORMAT_VERSION), fingerprint, str(lineage).encode()]
    return hashlib.blake2b(pack_fields(fields), digest_size=32)


def forget_lineages() -> None:
    """Drop what is remembered of lineages for speed: their owners are users."""
    _common_part.cache_clear()
    Lineage.parse.cache_clear()


def store_name(fingerprint: bytes) -> str:
    """The name of the folder for everything with this fingerprint, in this format."""
    fields = [_U32.pack(FORMAT_VERSION), fingerprint]
    return hashlib.blake2b(pack_fields(fields), digest_size=16).hexdigest()


def token_bytes(tokens: TokenArray) -> bytes:
    return tokens.astype("<i4", copy=False).tobytes()


def pack_spans(spans: tuple[Span, ...]) -> bytes:
    return np.array(spans, "<u4").tobytes()


def unpack_spans(data: bytes) -> tuple[Span, ...]:
    """Raises ValueError."""
    # Most chunks have none, and opening a store reads a hundred thousand.
    return tuple((int(a), int(b)) for a, b in np.frombuffer(data, "<u4").reshape(-1, 2)) if data else ()
