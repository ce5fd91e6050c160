from __future__ import annotations

from emberkeep.kv.disk.tier import shrink_disk
from emberkeep.kv.ledger import Ledger
from emberkeep.kv.tree import Chunk, ChunkKey
from helpers.kv_building import ids

LATER = 1000.0
"""Until when chunks are wanted here; it is always 0 o'clock."""


def grown(ledger: Ledger, name: str, length: int, *, hits: int = 0) -> list[Chunk]:
    """A conversation of `length` chunks on disk, a byte each."""
    chunks = [ledger.tree.root("")]
    for number in range(length):
        key = ChunkKey(f"{name}{number}".encode())
        chunk = Chunk(key=key, parent=chunks[-1], take=len(chunks[-1].tokens), tokens=ids(ord(name), 1), bytes=1)
        chunk.expires = LATER
        ledger.add(chunk, memoryview(b"x"))
        ledger.enter_file(chunk, 1)
        for _ in range(hits):
            ledger.use(chunk)
        chunks.append(chunk)
    return chunks[1:]


def test_a_conversation_that_is_not_continued_goes_whole_before_the_end_of_one_that_is():
    ledger = Ledger()
    proven, alone = grown(ledger, "p", 3, hits=2), grown(ledger, "a", 5)
    assert shrink_disk(ledger, 3, 0) == alone[::-1]
    assert set(ledger.tree) == set(proven)


def test_what_has_expired_goes_before_what_is_worth_least():
    ledger = Ledger()
    (proven,), (fresh,) = grown(ledger, "p", 1, hits=5), grown(ledger, "f", 1)
    proven.expires = -1.0
    assert shrink_disk(ledger, 1, 0) == [proven]
    assert fresh in ledger.tree


def test_a_chunk_that_is_stored_again_keeps_its_history_and_sets_the_rhythm():
    ledger = Ledger()
    grown(ledger, "a", 1, hits=2)
    before = ledger.rhythm.lookups
    ledger.tick += 500
    shrink_disk(ledger, 0, 0)
    (back,) = grown(ledger, "a", 1)
    assert (back.hits, back.came_back) == (2, True)
    assert ledger.rhythm.lookups > before
