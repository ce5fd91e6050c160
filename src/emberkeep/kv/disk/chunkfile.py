"""The file of one chunk. What it says about itself is enough to rebuild the index, to refuse it, and to find all
files of a user.

    0   magic "EMBERKV2"
    8   u32 length of the description, u32 padding before the payload
    16  u64 length of the payload
    24  xxh3-128 of the payload
    40  blake2b-128 of the bytes before it and the description
    56  description: length-prefixed fields (fingerprint, namespace, key, parent, take+start, tokens, sampled,
        made)
        padding, payload to the end of the file

xxh3 guards the payload against bit rot at memory speed. What makes a payload the *right* one is the
description, which a reader compares in full with the chunk it is looking for.

Whole files come into RAM at the speed of the disk. What the kernel has cached is copied from there. The rest is
read past its cache, into a few bounce buffers that are used over and over: where the disk is a virtual one, memory
that it has not written to before halves its speed, and a copy out of the bounce buffer costs less than that.
Memory that was never touched makes the copy slow in turn, so some of it is kept ready.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import re
import stat
import struct
import threading
from collections import deque
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import xxhash

from emberkeep.files import delete, list_folder
from emberkeep.kv.tree import (
    MADE,
    Chunk,
    ChunkKey,
    Made,
    Span,
    chunk_key,
    pack_fields,
    pack_spans,
    token_bytes,
    unpack_fields,
    unpack_spans,
)
from emberkeep.token_arrays import TokenArray
from emberkeep.types.lineage import Lineage
from emberkeep.values import dataclass

CHUNKS, QUARANTINE, TMP = "chunks", "quarantine", "tmp"
"""Folders of a store."""
OWNER = "owner"
is_chunk_name = re.compile(r"[0-9a-f]{64}\.kv").fullmatch

MAGIC = b"EMBERKV2"
_FIXED = struct.Struct("<8sIIQ16s16s")
_ALIGN = 64
_MAX_DESCRIPTION = 1 << 20
_MAX_FILE = 1 << 30
"""More than a chunk of any model has; what claims to be larger is not read into memory."""


class Damaged(Exception):
    """The file is not what it should be. Its message says how."""


@dataclass(frozen=True, slots=True)
class Description:
    """Everything about a chunk but its bytes."""

    fingerprint: bytes
    namespace: str
    key: ChunkKey
    parent: ChunkKey
    take: int
    start: int
    tokens: TokenArray
    sampled: tuple[Span, ...]
    made: Made

    def pack(self) -> bytes:
        return self.pack_identity() + pack_fields([pack_spans(self.sampled), bytes([self.made])])

    def pack_identity(self) -> bytes:
        """What makes a payload the right one. Two processes may differ about where its tokens came from."""
        place = struct.pack("<II", self.take, self.start)
        whose = (self.fingerprint, self.namespace.encode())
        return pack_fields([*whose, self.key, self.parent, place, token_bytes(self.tokens)])

    @classmethod
    def unpack(cls, data: bytes) -> Description:
        """Raises Damaged. The key is recomputed: a description cannot claim another chunk's place."""
        try:
            fingerprint, namespace, key, parent, place, tokens, sampled, (made,) = unpack_fields(data)
            take, start = struct.unpack("<II", place)
            ids, spans = np.frombuffer(tokens, "<i4"), unpack_spans(sampled)
            keys = (namespace.decode(), ChunkKey(key), ChunkKey(parent))
            description = cls(fingerprint, *keys, take, start, ids, spans, MADE[made % len(MADE)])
        except (ValueError, struct.error) as error:
            raise Damaged(f"unreadable description: {error}") from None
        lineage = Lineage.parse(description.namespace)
        if chunk_key(fingerprint, lineage, description.parent, take, ids) != key:
            raise Damaged("its key does not belong to its tokens")
        return description


def describe(chunk: Chunk, fingerprint: bytes) -> Description:
    assert chunk.parent is not None
    place = (str(chunk.lineage), chunk.key, chunk.parent.key, chunk.take, chunk.start)
    return Description(fingerprint, *place, chunk.tokens, chunk.sampled, chunk.made)


def most_bytes(chunk: Chunk) -> int:
    """No less than the size of the file of a chunk that is only in RAM yet."""
    words = len(chunk.tokens) + 2 * len(chunk.sampled)
    return chunk.bytes + 4 * words + len(str(chunk.lineage).encode()) + _FIXED.size + _ALIGN + 256


def write(path: Path, description: Description, payload: memoryview) -> int:
    """Write a new file and force it to disk; returns its size. Raises OSError."""
    head, payload = parts(description, payload)
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        _write_all(descriptor, memoryview(head))
        _write_all(descriptor, payload)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return len(head) + len(payload)


def read(path: Path, expected: Description, buffers: Buffers) -> memoryview:
    """The payload, verified. Blocks on disk. Raises FileNotFoundError, OSError, or Damaged.

    The whole file is read into one buffer, and the payload is a view into it.
    """
    with _opened(path) as (descriptor, size):
        if not _FIXED.size < size <= _MAX_FILE:
            raise Damaged("the file is too short or too long")
        buffer = read_file(descriptor, size, buffers)
    return verified(buffer, expected)[1]


def parts(description: Description, payload: memoryview) -> tuple[bytes, memoryview]:
    """A whole file, one after the other."""
    packed = description.pack()
    padding = -(_FIXED.size + len(packed)) % _ALIGN
    checksum = xxhash.xxh3_128_digest(payload)
    begin = _FIXED.pack(MAGIC, len(packed), padding, len(payload), checksum, b"")[:40]
    return begin + _digest(begin, packed) + packed + bytes(padding), payload


def verified(buffer: memoryview, expected: Description) -> tuple[bytes, memoryview]:
    """The packed description and the payload of a whole file. Raises Damaged."""
    if not _FIXED.size < len(buffer) <= _MAX_FILE:
        raise Damaged("the file is too short or too long")
    fixed = bytes(buffer[: _FIXED.size])
    length, padding, checksum = _check_fixed(fixed, len(buffer))
    end = _FIXED.size + length
    packed, payload = bytes(buffer[_FIXED.size : end]), buffer[end + padding :]
    _check_digest(fixed, packed)
    if any(buffer[end : end + padding]):
        raise Damaged("the padding is not empty")
    if not packed.startswith(expected.pack_identity()):
        raise Damaged("the file describes another chunk")
    if xxhash.xxh3_128_digest(payload) != checksum:
        raise Damaged("the payload's checksum is wrong")
    return packed, payload


def read_description(path: Path) -> tuple[Description, int]:
    """What a file says about itself, and its size; the payload is not read. Raises as `read` does."""
    with _opened(path) as (descriptor, size):
        return Description.unpack(_read_packed(descriptor, size)), size


def namespace_of(path: Path) -> str | None:
    """Whose a file is by its own words, whatever else is wrong with it; None where it does not say.

    The payload is not read, and need not be there. Blocks on disk. Raises FileNotFoundError, OSError.
    """
    try:
        with _opened(path) as (descriptor, _):
            return unpack_fields(_read_packed(descriptor, None))[1].decode()
    except (Damaged, ValueError, LookupError):
        return None


@contextmanager
def _opened(path: Path) -> Iterator[tuple[int, int]]:
    """A descriptor, and the file's size. Raises Damaged and FileNotFoundError where that will not pass, and any
    other OSError where it may."""
    try:
        # Without O_NONBLOCK, opening a named pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise FileNotFoundError(*error.args) from error  # a foreign link, or a file where a folder was
        if error.errno == errno.ENXIO:
            raise Damaged("it is not a file") from error
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise Damaged("it is not a file")
        yield descriptor, status.st_size
    finally:
        os.close(descriptor)


def _read_packed(descriptor: int, size: int | None) -> bytes:
    """The description of a file, which has that size, as it was written. Raises OSError, Damaged."""
    fixed = os.pread(descriptor, _FIXED.size, 0)
    if len(fixed) < _FIXED.size:
        raise Damaged("the file is too short")
    if size is not None:
        _check_fixed(fixed, size)
    packed = os.pread(descriptor, min(_FIXED.unpack(fixed)[1], _MAX_DESCRIPTION), _FIXED.size)
    _check_digest(fixed, packed)
    return packed


def _check_fixed(fixed: bytes, size: int) -> tuple[int, int, bytes]:
    """(description length, padding, the payload's checksum), consistent with each other and the file's size."""
    magic, length, padding, payload_length, checksum, _ = _FIXED.unpack(fixed)
    if magic != MAGIC:
        raise Damaged("it is not a chunk file")
    if length > _MAX_DESCRIPTION or padding >= _ALIGN or size > _MAX_FILE:
        raise Damaged("its lengths are out of range")
    if _FIXED.size + length + padding + payload_length != size:
        raise Damaged("its size is not what its lengths say")
    return length, padding, checksum


def _check_digest(fixed: bytes, packed: bytes) -> None:
    if fixed[40:] != _digest(fixed[:40], packed):
        raise Damaged("the description's checksum is wrong")


def _digest(begin: bytes, packed: bytes) -> bytes:
    return hashlib.blake2b(begin + packed, digest_size=16).digest()


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


# ── what belongs to a user ──


def sweep_files(folder: Path, whose: Container[str]) -> int:
    """Delete their files in the store in `folder`; returns the bytes that went.

    chunks      whatever says that it is theirs, and what is named like a chunk and does not say whose it is: no
                lookup could use that
    quarantine  the same, whatever its name
    tmp         what says that it is theirs; the rest is being written, or was when its process died

    Raises OSError when some could not be looked at or deleted: the others are gone all the same.
    """
    swept, failed = 0, None
    known: dict[str | None, bool] = {}
    for path, goes_unless_it_says in _candidates(folder):
        try:
            namespace = namespace_of(path)
            if namespace not in known:
                known[namespace] = namespace is not None and namespace in whose
            if known[namespace] or (namespace is None and goes_unless_it_says):
                size = os.lstat(path).st_size
                delete(path)
                swept += size
        except FileNotFoundError:
            pass
        except OSError as error:
            failed = error
    if failed is not None:
        raise failed
    return swept


def _candidates(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Yields files, and whether one that does not say whose it is goes as well. Raises OSError."""
    for inner in list_folder(folder / CHUNKS):
        for entry in list_folder(Path(inner.path)) if inner.is_dir(follow_symlinks=False) else ():
            if entry.is_file(follow_symlinks=False):
                yield Path(entry.path), is_chunk_name(entry.name) is not None
    for entry in list_folder(folder / QUARANTINE):
        yield Path(entry.path), True
    for inner in list_folder(folder / TMP):
        for entry in list_folder(Path(inner.path)) if inner.is_dir(follow_symlinks=False) else ():
            if entry.is_file(follow_symlinks=False) and entry.name != OWNER:
                yield Path(entry.path), False


# ── reading ──

_PAGE = 4096
_WORTH_IT = 1 << 20
"""Smaller files are read into ordinary memory in the ordinary way."""
_READY_BYTES = 128 << 20
_DIRECT = getattr(os, "O_DIRECT", 0)
_NOWAIT = getattr(os, "RWF_NOWAIT", 0)
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)


class Buffers:
    """Page-aligned memory, touched in advance. Safe to use from any thread.

    `allocate` gives memory that is better than any other for so many bytes, in whole pages, or None.
    """

    def __init__(self) -> None:
        self.allocate: Callable[[int], memoryview | None] = lambda size: None
        self._ready: deque[memoryview] = deque()
        self._bounce: deque[memoryview] = deque()
        self._lock = threading.Lock()

    def take(self, size: int) -> memoryview:
        """At least `size` bytes; the caller's alone."""
        return self._pop(self._ready, size) or _fresh(size)

    @contextmanager
    def bounce_buffer(self, size: int) -> Iterator[memoryview]:
        """At least `size` bytes, a multiple of the page size, whose contents are not needed afterwards."""
        bounce = self._pop(self._bounce, size) or _fresh(size)
        try:
            yield bounce
        finally:
            with self._lock:
                self._bounce.append(bounce)

    def refill(self, size: int, limit: int, bounce_buffers: int) -> None:
        """Make memory for files of `size` ready, up to `limit` bytes, and `bounce_buffers` to read them through.

        Blocks: call it when nothing is urgent.
        """
        if size >= _WORTH_IT:
            self._fill(self._bounce, size, bounce_buffers)
            self._fill(self._ready, size, min(_READY_BYTES, limit) // size)

    def _pop(self, shelf: deque[memoryview], size: int) -> memoryview | None:
        with self._lock:
            return shelf.pop() if shelf and len(shelf[-1]) >= size else None

    def _fill(self, shelf: deque[memoryview], size: int, count: int) -> None:
        while True:
            with self._lock:
                if shelf and len(shelf[-1]) < size:
                    shelf.clear()
                if len(shelf) >= count:
                    return
            touched = _fresh(size, _POPULATE)
            with self._lock:
                shelf.append(touched)


def read_file(descriptor: int, size: int, buffers: Buffers) -> memoryview:
    """The first `size` bytes of the file. Blocks on disk. Raises OSError, or Damaged where it ends early."""
    if size < _WORTH_IT:
        small = memoryview(np.empty(size, np.uint8))
        _read_all(descriptor, small)
        return small
    given = buffers.allocate(size)
    if given is not None:
        if _is_cached(descriptor, given, size) or not _read_directly(descriptor, given, size):
            _read_all(descriptor, given[:size])
        return given[:size]
    buffer = buffers.take(size)[:size]
    with buffers.bounce_buffer(size) as bounce:
        if _is_cached(descriptor, bounce, size) or not _read_directly(descriptor, bounce, size):
            _read_all(descriptor, buffer)
        else:
            # Slice assignment would hold the interpreter's lock.
            np.copyto(np.frombuffer(buffer, np.uint8), np.frombuffer(bounce[:size], np.uint8))
    return buffer


def _fresh(size: int, flags: int = 0) -> memoryview:
    flags |= mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return memoryview(mmap.mmap(-1, -(-size // _PAGE) * _PAGE, flags=flags))


def _is_cached(descriptor: int, buffer: memoryview, size: int) -> bool:
    """Whether the kernel has the file's last page, and so most likely all of it.

    The last one, because a question about any other makes the kernel read ahead from there.
    """
    try:
        last = (size - 1) // _PAGE * _PAGE
        return _NOWAIT != 0 and os.preadv(descriptor, [buffer[:_PAGE]], last, _NOWAIT) > 0
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL):
            return False
        raise


def _read_directly(descriptor: int, buffer: memoryview, size: int) -> bool:
    """Read past the page cache; False where the file system does not do that."""
    if not _DIRECT:
        return False
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    offset = 0
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | _DIRECT)
        while offset < size:
            offset += _read_some(descriptor, buffer, offset)
            if offset < size and offset % _PAGE:
                return False  # only the end of a file may be unaligned
        return True
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)


def _read_all(descriptor: int, buffer: memoryview) -> None:
    offset = 0
    while offset < len(buffer):
        offset += _read_some(descriptor, buffer, offset)


def _read_some(descriptor: int, buffer: memoryview, offset: int) -> int:
    count = os.preadv(descriptor, [buffer[offset:]], offset)
    if count == 0:
        raise Damaged("the file ends early")
    return count
