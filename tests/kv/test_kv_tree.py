from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.kv.tree import (
    ROOT,
    Chunk,
    ChunkKey,
    Cursor,
    RadixTree,
    chunk_key,
    descend,
    new_root,
    pack_fields,
    path_to,
    token_bytes,
    unpack_fields,
)
from emberkeep.token_arrays import TokenArray, common_prefix
from emberkeep.types.lineage import EXACT, SHARED, Lineage, Repair, owner_of
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


PRINT = bytes(range(32))

PARENT = ChunkKey(bytes(32))

fields = st.tuples(
    st.binary(min_size=0, max_size=40),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    st.sampled_from([b"", bytes(32), b"\xff" * 32]),
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=6),
)


def key_of(fingerprint: bytes, namespace: str, parent: bytes, take: int, tokens: list[int]) -> ChunkKey:
    return chunk_key(fingerprint, Lineage.parse(namespace), ChunkKey(parent), take, np.array(tokens, np.int32))


@pytest.mark.parametrize(
    ("namespace", "parent", "take", "tokens", "expected"),
    [
        ("", ROOT, 0, [1, 2, 3], "6e849f5fd1309484301cb28c60f65bd5cbb0934b7a379ea957d0bdc25f9abc6d"),
        ("alice", ROOT, 0, [1, 2, 3], "4990b99a63a810a4c7965c236679deb9bedf38f19f48d965025320812068f5bf"),
        ("", PARENT, 128, [1, 2, 3], "0f3526ca33ee931fdf70193959c3639a1cd4a4433917bbc9bb48bddac8dc6dd1"),
        ("", ROOT, 0, [], "7f5e8a89a7d1b6d5ac6ca9475336acfce36b7d382d156a16560660facfa0fd57"),
        ("", ROOT, 0, [-1, 2**31 - 1], "232b1b453655908d57e9aa0e6b68348c231c3faac759e136b92e383929979344"),
    ],
)
def test_keys_of_this_format_version_never_change(namespace, parent, take, tokens, expected):
    assert key_of(PRINT, namespace, parent, take, tokens).hex() == expected


@given(fields, st.data())
def test_changing_any_single_field_changes_the_key(one, data):
    index = data.draw(st.integers(0, len(one) - 1))
    other = data.draw(fields)
    changed = (*one[:index], other[index], *one[index + 1 :])
    assert (key_of(*one) == key_of(*changed)) == (one == changed)


@given(st.lists(st.binary(max_size=20), max_size=6))
def test_packed_fields_come_apart_as_they_were(values):
    assert unpack_fields(pack_fields(values)) == values


@given(st.lists(st.binary(max_size=20), min_size=1, max_size=6), st.data())
def test_cut_off_fields_are_refused(values, data):
    packed = pack_fields(values)
    borders = {len(pack_fields(values[:count])) for count in range(len(values) + 1)}
    cut = data.draw(st.integers(0, len(packed) - 1))
    if cut in borders:
        assert unpack_fields(packed[:cut]) == values[: sorted(borders).index(cut)]
    else:
        with pytest.raises(ValueError, match="cut off"):
            unpack_fields(packed[:cut])


def test_bytes_moving_between_neighbouring_fields_change_the_key():
    assert key_of(b"ab", "c", b"", 0, [1]) != key_of(b"a", "bc", b"", 0, [1])


def test_token_bytes_are_little_endian_words_whatever_the_array_was():
    wide = np.array([1, -2], np.int64)
    assert token_bytes(ids(1, -2)) == token_bytes(wide) == struct.pack("<2i", 1, -2)


OWNERS = ["", "*", '["alice", ""]', '["~8~", "+"]']

LINEAGES = [
    Lineage(owner, bits, repair, splice)
    for owner in OWNERS
    for bits in (16, 8, 4)
    for repair in (None, *Repair)
    for splice in ("", "5f1c")
]


def test_a_lineage_is_read_back_from_its_name():
    assert [Lineage.parse(str(lineage)) for lineage in LINEAGES] == LINEAGES
    assert len({str(lineage) for lineage in LINEAGES}) == len(LINEAGES)
    assert [owner_of(str(lineage)) for lineage in LINEAGES] == [lineage.owner for lineage in LINEAGES]


@pytest.mark.parametrize("name", ["~~", "~16~", "~8+4~", "~none+8~", "~weird~", "~8", "~+~", "~cut-a+cut-b~x"])
def test_a_name_that_is_none_of_ours_belongs_to_an_owner_that_no_user_is(name):
    foreign = Lineage.parse(name)
    assert str(foreign) == name
    assert not any(lineage.sees(foreign) for lineage in LINEAGES)


def test_a_lineage_sees_what_is_no_more_approximate_than_itself():
    def marks(lineage: Lineage) -> set[object]:
        return {lineage.bits, lineage.repair, lineage.splice} - {16, None, ""}

    for one in LINEAGES:
        for other in LINEAGES:
            is_mine = other.owner in (one.owner, SHARED)
            assert one.sees(other) == (is_mine and marks(other) <= marks(one))
