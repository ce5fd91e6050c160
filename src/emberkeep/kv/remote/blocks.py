"""Blocks: tokens cut so that every host gives the same part the same name.

    position   0        128       256    300
    host A     [block 0][block 1 ][tail ]          a turn ended at 300
    host B     [chunk 0 ][0][1][chunk 2   ]        cut where its conversations parted

A block begins at a multiple of its length, whatever happened on a host. Its key is that of a chunk whose parents
are blocks too, all of the same lineage: it depends on the tokens from the beginning and on nothing else. Chunks
that lie otherwise stay where they are.
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from emberkeep.kv.disk.chunkfile import Damaged, Description
from emberkeep.kv.tree import ROOT, Chunk, ChunkKey, Cursor, Made, Span, chunk_key, tokens_to
from emberkeep.token_arrays import TokenArray
from emberkeep.types.lineage import Lineage
from emberkeep.values import dataclass

BLOCK_TOKENS = 128
_REMEMBERED = 65_536
_NO_TOKENS = np.empty(0, np.int32)


def block_start(position: int) -> int:
    """Where the block that holds `position` begins."""
    return position // BLOCK_TOKENS * BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Place:
    """The end of a block, or the beginning of everything."""

    fingerprint: bytes
    lineage: Lineage
    key: ChunkKey = ROOT
    position: int = 0

    @property
    def take(self) -> int:
        return BLOCK_TOKENS if self.position else 0

    def child(self, tokens: TokenArray, sampled: tuple[Span, ...] = (), made: Made = Made.UNKNOWN) -> Description:
        """The block, or the tail, of `tokens` that begins here."""
        key = chunk_key(self.fingerprint, self.lineage, self.key, self.take, tokens)
        name = str(self.lineage)
        return Description(self.fingerprint, name, key, self.key, self.take, self.position, tokens, sampled, made)

    def snapshot(self, tokens: TokenArray, made: Made = Made.UNKNOWN) -> Description:
        """The state after `tokens` from here, fewer than a block."""
        parent, take = self.key, self.take
        if len(tokens):
            parent, take = self.child(tokens).key, len(tokens)
        key = chunk_key(self.fingerprint, self.lineage, parent, take, _NO_TOKENS)
        start = self.position + len(tokens)
        return Description(self.fingerprint, str(self.lineage), key, parent, take, start, _NO_TOKENS, (), made)

    def after(self, block: Description) -> Place:
        return Place(self.fingerprint, self.lineage, block.key, self.position + len(block.tokens))


def blocks_of(fingerprint: bytes, lineage: Lineage, tokens: TokenArray) -> list[Description]:
    place, blocks = Place(fingerprint, lineage), []
    for begin in range(0, block_start(len(tokens)), BLOCK_TOKENS):
        blocks.append(place.child(tokens[begin : begin + BLOCK_TOKENS]))
        place = place.after(blocks[-1])
    return blocks


def place_after(fingerprint: bytes, lineage: Lineage, blocks: Sequence[Description]) -> Place:
    """Where the last of `blocks` ends; without any, the beginning."""
    if not blocks:
        return Place(fingerprint, lineage)
    return Place(fingerprint, lineage, blocks[-1].key, len(blocks) * BLOCK_TOKENS)


@dataclass(frozen=True, slots=True)
class Placed:
    """A chunk of the tree, as every host would describe it."""

    before: Place
    """The last block's end before it."""
    tokens: TokenArray
    """What is from there to its end."""
    described: Description


class BlockPlaces:
    """Where chunks of the tree lie, as blocks. Belongs to one thread."""

    def __init__(self, fingerprint: bytes) -> None:
        self._fingerprint = fingerprint
        self._ends: OrderedDict[tuple[Lineage, ChunkKey], Place] = OrderedDict()

    def of(self, chunk: Chunk) -> Placed | None:
        """A block, a tail or a snapshot; None where it lies otherwise, or is of one conversation alone."""
        assert chunk.parent is not None
        lineage = chunk.lineage
        is_cut_otherwise = not chunk.is_snapshot and chunk.start % BLOCK_TOKENS != 0
        if lineage.repair is not None or lineage.splice or is_cut_otherwise:
            return None
        begins = Cursor(chunk.parent, chunk.take, lineage)
        before = self._place(begins, block_start(chunk.start))
        if chunk.is_snapshot:
            rest = tokens_to(begins)[before.position :]
            return Placed(before, rest, before.snapshot(rest, chunk.made))
        described = before.child(chunk.tokens, chunk.sampled, chunk.made)
        if len(chunk.tokens) == BLOCK_TOKENS:
            self._remember((lineage, chunk.key), before.after(described))
        return Placed(before, chunk.tokens, described)

    def _place(self, cursor: Cursor, position: int) -> Place:
        """The block's end at `position`, at or before `cursor`."""
        parent = cursor.chunk
        known = self._ends.get((cursor.lineage, parent.key)) if parent.end == position == cursor.position else None
        if known is None:
            blocks = blocks_of(self._fingerprint, cursor.lineage, tokens_to(cursor)[:position])
            known = place_after(self._fingerprint, cursor.lineage, blocks)
        return known

    def _remember(self, end: tuple[Lineage, ChunkKey], place: Place) -> None:
        self._ends[end] = place
        self._ends.move_to_end(end)
        while len(self._ends) > _REMEMBERED:
            self._ends.popitem(last=False)


# ── how they look in the server ──


class Seal:
    """How names and values look in the server: as they are, so that anyone who can read it can read them."""

    is_closed = False

    def digest(self, data: bytes, size: int) -> bytes:
        return hashlib.blake2b(data, digest_size=size).digest()

    def close(self, name: bytes, parts: Sequence[bytes | memoryview]) -> bytes:
        """One value, which can be opened under that name alone."""
        return b"".join(parts)

    def open(self, name: bytes, value: bytes) -> bytes:
        """Raises Damaged."""
        return value


class KeySeal(Seal):
    """AES-256-GCM. A value belongs to its name: one that was swapped does not open."""

    is_closed = True

    def __init__(self, secret: str) -> None:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        derived = HKDF(SHA256(), length=64, salt=None, info=b"emberkeep remote tier 1").derive(secret.encode())
        self._names, self._cipher, self._wrong = derived[32:], AESGCM(derived[:32]), InvalidTag

    def digest(self, data: bytes, size: int) -> bytes:
        return hashlib.blake2b(data, digest_size=size, key=self._names).digest()

    def close(self, name: bytes, parts: Sequence[bytes | memoryview]) -> bytes:
        nonce = os.urandom(12)
        return nonce + self._cipher.encrypt(nonce, b"".join(parts), name)

    def open(self, name: bytes, value: bytes) -> bytes:
        try:
            return self._cipher.decrypt(value[:12], memoryview(value)[12:], name)
        except (self._wrong, ValueError):
            raise Damaged("it was not sealed with this key, or under another name") from None
