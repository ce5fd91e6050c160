from __future__ import annotations

import numpy as np

from emberkeep.kv.disk.chunkfile import Description
from emberkeep.kv.remote.blocks import BLOCK_TOKENS, BlockPlaces, Place, blocks_of
from emberkeep.types.lineage import EXACT, Lineage, Repair
from helpers.kv_building import FINGERPRINT, LONG, new_store, put


def test_a_block_is_named_by_all_tokens_up_to_its_end() -> None:
    blocks = blocks_of(FINGERPRINT, EXACT, LONG)
    other = LONG.copy()
    other[200] += 1
    others = blocks_of(FINGERPRINT, EXACT, other)
    assert [a.key == b.key for a, b in zip(blocks, others, strict=True)] == [True, *[False] * 6]
    assert [block.start for block in blocks] == list(range(0, 896, BLOCK_TOKENS))


def test_another_user_model_or_way_to_be_approximate_has_other_names() -> None:
    names = [
        blocks_of(fingerprint, lineage, LONG)[0].key
        for fingerprint in (FINGERPRINT, b"other")
        for lineage in (EXACT, Lineage("alice"), Lineage("alice", 8))
    ]
    assert len(set(names)) == len(names)


def test_what_a_block_says_of_itself_is_a_chunk_files_description() -> None:
    for block in (*blocks_of(FINGERPRINT, EXACT, LONG), Place(FINGERPRINT, EXACT).snapshot(LONG[:30])):
        told = Description.unpack(block.pack())
        assert told.pack() == block.pack()


def test_chunks_of_any_tree_have_the_names_of_their_tokens() -> None:
    plain = {block.key for block in blocks_of(FINGERPRINT, EXACT, LONG)}
    for parts in ([], [300], [300, 356, 777], [1]):
        store = new_store(None)
        for end in parts:
            put(store, LONG[:end], fork=True)
        put(store, LONG)
        chunks = store.transact(lambda ledger: list(ledger.tree))
        places = BlockPlaces(FINGERPRINT)
        placed = [(chunk, places.of(chunk)) for chunk in chunks]
        for chunk, found in placed:
            assert (found is not None) == (chunk.start % BLOCK_TOKENS == 0)
            if found is not None:
                assert np.array_equal(found.tokens, LONG[chunk.start : chunk.end])
                assert len(chunk.tokens) < BLOCK_TOKENS or found.described.key in plain
        store.close()


def test_state_of_one_conversation_alone_has_no_name_for_others() -> None:
    store = new_store(None)
    put(store, LONG[:256], namespace=Lineage("alice", repair=Repair.SELECTIVE))
    put(store, LONG[:256], namespace=Lineage("alice", splice="one"))
    places = BlockPlaces(FINGERPRINT)
    assert store.transact(lambda ledger: [places.of(chunk) for chunk in ledger.tree]) == [None] * 4
