from __future__ import annotations

from emberkeep.kv.holdings import RamTier, Tally
from emberkeep.kv.tree import Chunk, ChunkKey, new_root
from helpers.kv_building import ids

PAYLOAD = memoryview(bytes(10))


def chain(*names: str, on_disk: bool) -> list[Chunk]:
    """Chunks one below the other."""
    chunks = [new_root("")]
    for name in names:
        above = chunks[-1]
        chunk = Chunk(key=ChunkKey(name.encode()), parent=above, take=len(above.tokens), tokens=ids(1, 2))
        chunk.on_disk = on_disk
        chunk.attach()
        chunks.append(chunk)
    return chunks[1:]


def filled(budget: int, *chunks: Chunk) -> RamTier:
    ram = RamTier(budget)
    for chunk in chunks:
        ram.put(chunk, PAYLOAD)
    return ram


def test_what_is_put_is_counted_until_it_is_freed_once_or_twice():
    (chunk,) = chain("a", on_disk=True)
    ram = filled(100, chunk)
    assert ram.tally == Tally(chunks=1, tokens=2, bytes=10)
    ram.free(chunk)
    ram.free(chunk)
    assert ram.tally == Tally() and chunk.payload is None


def test_what_is_also_on_disk_goes_before_what_is_worth_less_and_exists_nowhere_else():
    (stored,), (only_here,) = chain("s", on_disk=True), chain("o", on_disk=False)
    ram = filled(15, only_here, stored)
    dropped: list[Chunk] = []
    assert ram.shrink(lambda chunk: float(chunk is stored), dropped.append) == 1
    assert dropped == [] and stored.payload is None and only_here.payload is not None


def test_of_what_exists_nowhere_else_only_leaves_are_dropped():
    above, below = chain("a", "b", on_disk=False)
    ram = filled(15, above, below)

    def drop(chunk: Chunk) -> None:
        chunk.detach()
        ram.free(chunk)

    assert ram.shrink(lambda chunk: 0.0, drop) == 1
    assert below.payload is None and above.payload is not None


def test_a_parent_that_becomes_a_leaf_is_weighed_with_the_rest():
    """Otherwise the end of every conversation would go before the second chunk of any."""
    (old_above, old_below), (new_above, new_below) = (chain(name, name * 2, on_disk=False) for name in "on")
    ram = filled(25, old_above, old_below, new_above, new_below)

    def drop(chunk: Chunk) -> None:
        chunk.detach()
        ram.free(chunk)

    assert ram.shrink(lambda chunk: float(chunk in (new_above, new_below)), drop) == 2
    assert old_above.payload is None and old_below.payload is None
    assert new_above.payload is not None and new_below.payload is not None


def test_what_a_lookup_uses_or_a_person_pinned_stays():
    used, pinned = *chain("u", on_disk=True), *chain("p", on_disk=False)
    used.pins, pinned.is_pinned = 1, True
    ram = filled(0, used, pinned)
    assert ram.shrink(lambda chunk: 0.0, ram.free) == 0
    assert ram.tally.chunks == 2


def test_a_branch_is_freed_up_to_the_first_chunk_that_was_used_since():
    first, second, third = chain("1", "2", "3", on_disk=True)
    first.last_used = 9
    ram = filled(100, first, second, third)
    assert ram.free_branch(third, tick=5) == 2
    assert first.payload is not None


def test_what_has_expired_is_freed_if_it_is_on_disk():
    (stored,), (only_here,) = chain("s", on_disk=True), chain("o", on_disk=False)
    ram = filled(100, stored, only_here)
    assert ram.free_expired(now=1.0) == 1
    assert only_here.payload is not None
