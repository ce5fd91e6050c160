"""What goes when room is short, or when nobody has wanted it for its TTL.

Everything here is called with the store's lock held.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Container, Iterable
from heapq import heapify, heappop, heappush

from emberkeep.kv.entries import Entry
from emberkeep.kv.keys import ChunkKey
from emberkeep.kv.ledger import Ledger
from emberkeep.kv.policy import LOW_WATER
from emberkeep.kv.tree import Chunk
from emberkeep.types.events import MissReason

log = logging.getLogger("emberkeep.kv")


def evict(ledger: Ledger, room: int, most_files: int, newcomer: Chunk | None) -> int:
    """Drop chunks on disk until all files that are known fit into `room` bytes, down to the low-water mark;
    likewise for their number. Nothing while they fit; returns how many were dropped."""
    now = ledger.clock.now()
    allowed = room - ledger.to_remove_bytes - ledger.orphans.bytes
    target = allowed * LOW_WATER if ledger.disk.bytes > allowed else allowed
    most = int(most_files * LOW_WATER) if ledger.disk.chunks >= most_files else most_files
    victims = shrink_disk(ledger, target, now, newcomer, most_chunks=most)
    expired = sum(chunk.expires <= now for chunk in victims)
    ledger.counters.expired_evictions += expired
    ledger.counters.cold_evictions += len(victims) - expired
    if victims and log.isEnabledFor(logging.DEBUG):
        size = sum(chunk.bytes for chunk in victims)
        log.debug("cold: %d chunks are evicted, %d of them expired, %d bytes", len(victims), expired, size)
    return len(victims)


def shrink_disk(
    ledger: Ledger, target: float, now: float, newcomer: Chunk | None = None, *, most_chunks: int = sys.maxsize
) -> list[Chunk]:
    """Drop leaves that no lookup uses and that are not pinned, expired ones first, then by worth, down to
    `target` bytes and `most_chunks`.

    With a `newcomer`, only what is worth less than it goes. A parent that becomes a leaf is weighed with the
    rest. Returns what was dropped.
    """
    victims: list[Chunk] = []
    if ledger.disk.bytes <= target and ledger.disk.chunks <= most_chunks:
        return victims

    def ranked(chunk: Chunk) -> tuple[bool, float, ChunkKey, Chunk]:
        return chunk.expires > now, ledger.worth(chunk), chunk.key, chunk

    limit = (True, ledger.worth(newcomer)) if newcomer else (True, float("inf"))
    heap = [ranked(chunk) for chunk in ledger.tree if chunk.on_disk and chunk.may_go]
    heapify(heap)
    while heap and heap[0][:2] < limit and (ledger.disk.bytes > target or ledger.disk.chunks > most_chunks):
        is_wanted, _, _, chunk = heappop(heap)
        victims.append(chunk)
        ledger.drop(chunk, MissReason.EVICTED if is_wanted else MissReason.EXPIRED)
        parent = chunk.parent
        if parent and not parent.is_root and parent.on_disk and parent.may_go:
            heappush(heap, ranked(parent))
    return victims


def drop_expired(ledger: Ledger, chunks: Iterable[Chunk], but: Container[ChunkKey] = ()) -> list[Chunk]:
    """Drop those of `chunks` that are not wanted any more, and what they grow from, leaves first. Returns what
    was dropped."""
    now = ledger.clock.now()
    victims: list[Chunk] = []
    for end in chunks:
        chunk: Chunk | None = end
        while chunk and not chunk.is_root and chunk in ledger.tree and chunk.expires <= now and chunk.may_go:
            if chunk.key in but:
                break
            victims += ledger.drop(chunk, MissReason.EXPIRED)
            chunk = chunk.parent
    return victims


def has_expired(ledger: Ledger, entry: Entry) -> bool:
    """No request has wanted it for its TTL, and it is not pinned."""
    return not entry.is_pinned and entry.used_at + ledger.keeping.ttl[entry.ttl] <= ledger.clock.now()
