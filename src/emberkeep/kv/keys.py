"""Chunk identity: a hash chain in which every field is length-prefixed, so that no two inputs collide.

A key commits to the format version, the fingerprint (weights, KV layout, engine), the lineage, the
parent's key, how many of the parent's tokens come before this chunk, and this chunk's tokens.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from functools import lru_cache
from typing import NewType

import numpy as np
import numpy.typing as npt

from emberkeep.types import Lineage

ChunkKey = NewType("ChunkKey", bytes)
TokenArray = npt.NDArray[np.int32]

_U32 = struct.Struct("<I")

FORMAT_VERSION = 2
ROOT = ChunkKey(b"")
"""Parent key of chunks that begin at position 0."""


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


def store_name(fingerprint: bytes) -> str:
    """The name of the folder for everything with this fingerprint, in this format."""
    fields = [_U32.pack(FORMAT_VERSION), fingerprint]
    return hashlib.blake2b(pack_fields(fields), digest_size=16).hexdigest()


def token_bytes(tokens: TokenArray) -> bytes:
    return tokens.astype("<i4", copy=False).tobytes()
