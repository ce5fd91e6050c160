from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.kv.tree import ROOT, ChunkKey, chunk_key, pack_fields, token_bytes, unpack_fields
from emberkeep.types.lineage import SHARED, Lineage, Repair, owner_of
from helpers.kv_building import ids

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


@given(fields, fields)
def test_different_fields_have_different_keys(one, other):
    assert (key_of(*one) == key_of(*other)) == (one == other)


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
