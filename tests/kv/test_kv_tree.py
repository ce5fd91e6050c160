from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.kv.tree import Chunk, ChunkKey, Cursor, RadixTree, Segment, chunk_key, descend, new_root, path_to
from emberkeep.token_arrays import TokenArray, common_prefix
from emberkeep.types.lineage import EXACT, SHARED, Lineage
from helpers.chance import examples
from helpers.kv_building import ids

TOKEN = st.integers(1, 3)
"""Few different tokens, so that prefixes are shared often and diverge everywhere."""


def grow(cursor: Cursor, tokens: TokenArray) -> Chunk:
    key = chunk_key(b"", EXACT, cursor.chunk.key, cursor.used, tokens)
    chunk = Chunk(key=key, parent=cursor.chunk, take=cursor.used, tokens=tokens)
    chunk.attach()
    return chunk


def tokens_before(cursor: Cursor) -> list[int]:
    parts = [segment.chunk.tokens[: segment.end - segment.start] for segment in path_to(cursor)]
    return np.concatenate([*parts, ids()]).tolist()


@st.composite
def trees(draw):
    """A root, and every place in its tree: chunks hang anywhere, also twice at the same place."""
    root = new_root("")
    places = [Cursor(root, 0, EXACT)]
    for _ in range(draw(st.integers(0, 8))):
        parent = draw(st.sampled_from(places))
        chunk = grow(parent, ids(*draw(st.lists(TOKEN, min_size=1, max_size=5))))
        places += [Cursor(chunk, used, EXACT) for used in range(1, len(chunk.tokens) + 1)]
    return places


@examples(150)
@given(trees(), st.lists(TOKEN, max_size=14))
def test_descend_finds_the_longest_prefix_of_the_prompt(places, tokens):
    found = descend(places[0], ids(*tokens))
    reachable = [place for place in places if tokens_before(place) == tokens[: place.position]]
    assert found.position == max(place.position for place in reachable)
    assert tokens_before(found) == tokens[: found.position]


@examples(150)
@given(trees(), st.lists(TOKEN, max_size=8), st.data())
def test_descend_from_a_place_in_the_tree_stays_below_it(places, rest, data):
    begin = data.draw(st.sampled_from(places))
    tokens = [*tokens_before(begin), *rest]
    found = descend(begin, ids(*tokens))
    assert found.position >= begin.position
    assert tokens_before(found) == tokens[: found.position]


@examples(150)
@given(trees())
def test_the_path_to_a_place_has_no_gaps(places):
    for place in places:
        path = path_to(place)
        assert [segment.start for segment in path] == [0, *(s.end for s in path)][: len(path)]
        assert (path[-1].end if path else 0) == place.position


def test_a_prompt_that_differs_in_the_last_token_of_a_chunk_uses_all_before_it():
    root = new_root("")
    chunk = grow(Cursor(root, 0, EXACT), ids(1, 2, 3, 4))
    assert descend(Cursor(root, 0, EXACT), ids(1, 2, 3, 9)) == Cursor(chunk, 3, EXACT)


def test_a_branch_inside_a_chunk_uses_only_the_parents_part():
    root = new_root("")
    trunk = grow(Cursor(root, 0, EXACT), ids(1, 2, 3, 4))
    branch = grow(Cursor(trunk, 2, EXACT), ids(7, 8))
    found = descend(Cursor(root, 0, EXACT), ids(1, 2, 7, 8, 9))
    assert path_to(found) == (Segment(trunk, 0, 2), Segment(branch, 2, 4))


def test_two_chunks_that_begin_alike_are_both_looked_into():
    root = new_root("")
    grow(Cursor(root, 0, EXACT), ids(1, 2))
    longer = grow(Cursor(root, 0, EXACT), ids(1, 2, 3))
    assert descend(Cursor(root, 0, EXACT), ids(1, 2, 3)) == Cursor(longer, 3, EXACT)


def test_a_detached_chunk_is_not_found_and_leaves_its_parent_a_leaf():
    root = new_root("")
    first, second = grow(Cursor(root, 0, EXACT), ids(1)), grow(Cursor(root, 0, EXACT), ids(1, 2))
    first.detach()
    first.detach()
    assert descend(Cursor(root, 0, EXACT), ids(1)) == Cursor(second, 1, EXACT)
    second.detach()
    assert root.is_leaf


@given(st.lists(TOKEN, max_size=8), st.lists(TOKEN, max_size=8))
def test_common_prefix_counts_equal_leading_tokens(a, b):
    expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_prefix(ids(*a), ids(*b)) == expected


# ── the whole tree ──


def test_taking_out_a_chunk_takes_what_is_below_it_and_the_root_of_an_owner_who_has_nothing_left():
    tree = RadixTree()
    above = Chunk(key=ChunkKey(b"a"), parent=tree.root("ann"), take=0, tokens=ids(1, 2), lineage=Lineage("ann"))
    below = Chunk(key=ChunkKey(b"b"), parent=above, take=1, tokens=ids(3), lineage=Lineage("ann"))
    tree.add(above)
    tree.add(below)
    assert tree.deepest(tree.origin(Lineage("ann")), ids(1, 3)).chunk is below
    assert tree.take_out(above) == [above, below]
    assert list(tree) == [] and tree.root("ann") is not above.parent


def test_a_chunk_that_was_stored_anew_is_another_one():
    tree = RadixTree()
    before = Chunk(key=ChunkKey(b"a"), parent=tree.root(""), take=0, tokens=ids(1))
    tree.add(before)
    tree.take_out(before)
    again = Chunk(key=ChunkKey(b"a"), parent=tree.root(""), take=0, tokens=ids(1))
    tree.add(again)
    assert again in tree and before not in tree


def test_from_the_beginning_what_is_shared_is_found_where_it_goes_further():
    tree = RadixTree()
    own = Chunk(key=ChunkKey(b"o"), parent=tree.root("ann"), take=0, tokens=ids(1, 2), lineage=Lineage("ann"))
    shared = Chunk(
        key=ChunkKey(b"s"), parent=tree.root(SHARED), take=0, tokens=ids(1, 2, 3), lineage=Lineage(SHARED)
    )
    tree.add(own)
    tree.add(shared)
    assert tree.deepest(tree.origin(Lineage("ann")), ids(1, 2, 3)).chunk is shared
    assert tree.deepest(tree.origin(Lineage("ann")), ids(1, 2, 4)).chunk is own
