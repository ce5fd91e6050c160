"""Rows in 8 and 4 bits: never further away than half a step, never larger than promised, never trusted."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from emberkeep.engine.packing import Group, Packed, Streams, is_packed, pack
from emberkeep.errors import EngineError
from helpers.chance import examples

pytestmark = pytest.mark.slow

BITS = [8, 4]
KINDS = st.booleans()


def packed_and_back(group: Group, bits: int, rest: bytes = b"") -> np.ndarray:
    packed = Packed(pack([group], bits, rest), [group.streams])
    assert (packed.tokens, bytes(packed.rest)) == (group.rows.shape[1], rest)
    target = np.empty(group.rows.shape, group.rows.dtype)
    packed.unpack([target])
    return target


def group_of(rows: np.ndarray, is_key: bool) -> Group:
    count, _, channels = rows.shape
    return Group(Streams(is_key, channels, count), rows)


def half_a_step(group: Group, bits: int) -> np.ndarray:
    """What the format allows, and what rounding the numbers themselves adds."""
    rows = group.rows.astype(np.float64)
    if not group.streams.is_key:
        rows = rows.reshape(*rows.shape[:2], -1, group.streams.width)
    axis = 1 if group.streams.is_key else -1
    spread = rows.max(axis=axis, keepdims=True) - rows.min(axis=axis, keepdims=True)
    magnitude = np.abs(rows).max(axis=axis, keepdims=True)
    # low and step may be off by two neighbours of f16, and step is at least the smallest number of it
    step = (spread + magnitude * 2**-9) / (2**bits - 1) * (1 + 2**-9) + 2**-22
    grain = np.finfo(group.rows.dtype).eps * magnitude
    return np.broadcast_to(step / 2 + grain, rows.shape).reshape(group.rows.shape)


def rows_of(dtype: type, limit: float) -> st.SearchStrategy[np.ndarray]:
    shapes = st.tuples(st.integers(1, 3), st.integers(1, 9), st.sampled_from([2, 8, 62, 64, 66, 96, 134]))
    width = np.finfo(dtype).bits
    numbers = st.floats(-limit, limit, allow_nan=False, width=width)
    return shapes.flatmap(lambda shape: hnp.arrays(dtype, shape, elements=numbers, fill=numbers))


@given(
    rows=rows_of(np.float16, 65504.0) | rows_of(np.float32, 2.0**100) | rows_of(np.float32, 8.0),
    is_key=KINDS,
    bits=st.sampled_from(BITS),
)
@examples(150)
def test_no_value_is_further_away_than_half_a_step(rows, is_key, bits):
    group = group_of(rows, is_key)
    back = packed_and_back(group, bits)
    assert np.isfinite(back).all()
    error = np.abs(back.astype(np.float64) - rows.astype(np.float64))
    assert (error <= half_a_step(group, bits)).all()


@given(value=st.floats(-65504, 65504, width=16), is_key=KINDS, bits=st.sampled_from(BITS))
@examples(100)
def test_what_is_constant_is_exact(value, is_key, bits):
    rows = np.full((2, 5, 64), value, np.float16)
    assert np.array_equal(packed_and_back(group_of(rows, is_key), bits), rows)


@given(
    rows=hnp.arrays(np.float16, (2, 4, 8), elements=st.floats(width=16)), is_key=KINDS, bits=st.sampled_from(BITS)
)
@examples(100)
def test_what_is_no_number_is_not_packed(rows, is_key, bits):
    if np.isfinite(rows).all():
        assert np.isfinite(packed_and_back(group_of(rows, is_key), bits)).all()
    else:
        with pytest.raises(EngineError):
            pack([group_of(rows, is_key)], bits)


def test_one_large_channel_of_the_keys_does_not_spoil_the_others():
    rows = np.random.default_rng(1).standard_normal((1, 128, 64)).astype(np.float16)
    rows[..., 7] *= 1000
    error = np.abs(packed_and_back(group_of(rows, True), 8) - rows)
    assert error[..., :7].max() < 0.03 < error[..., 7].max()


def test_one_large_token_of_the_values_does_not_spoil_the_others():
    rows = np.random.default_rng(1).standard_normal((1, 128, 64)).astype(np.float16)
    rows[:, 0] *= 1000
    error = np.abs(packed_and_back(group_of(rows, False), 8) - rows)
    assert error[:, 1:].max() < 0.03 < error[:, 0].max()


@pytest.mark.parametrize(("bits", "share"), [(8, 0.53), (4, 0.28)])
@pytest.mark.parametrize("channels", [64, 192, 1024])
def test_a_chunk_takes_its_share_of_the_bytes_with_everything_counted(bits, share, channels):
    rows = np.random.default_rng(2).standard_normal((4, 128, channels)).astype(np.float16)
    groups = [group_of(rows, True), group_of(rows, False)]
    assert len(pack(groups, bits)) <= share * 2 * rows.nbytes


def test_groups_of_several_shapes_travel_together_and_may_be_strided():
    random = np.random.default_rng(3)
    buffer = random.standard_normal((3, 10, 100)).astype(np.float16)
    groups = [group_of(buffer[:, :7, :64], True), group_of(random.standard_normal((2, 7, 24), np.float32), False)]
    packed = Packed(pack(groups, 8, b"beside"), [group.streams for group in groups])
    into = np.zeros((3, 9, 80), np.float16)
    targets = [into[:, :7, :64], np.empty((2, 7, 24), np.float32)]
    packed.unpack(targets)
    for group, target in zip(groups, targets, strict=True):
        assert np.abs(target - group.rows).max() < 0.03
    assert not into[:, 7:].any() and not into[..., 64:].any()


def test_the_format_is_the_one_written_down():
    rows = np.array([[[-1.0, 0.0, 14.0, 2.0]]], np.float16)
    data = bytes(pack([group_of(rows, False)], 4, b"engine"))
    assert is_packed(memoryview(data))
    assert struct.unpack_from("<4sHHII", data) == (b"EKpk", 1, 4, 1, 1)
    assert struct.unpack_from("<BBHIII", data, 16) == (0, 0, 4, 4, 1, 0)
    low, step = np.frombuffer(data, "<f2", 1, 32)[0], np.frombuffer(data, "<f2", 1, 48)[0]
    assert (low, step) == (-1.0, 1.0)
    assert data[64:66] == bytes([0 | 15 << 4, 1 | 3 << 4])
    assert data[80:] == b"engine"


def a_payload(bits: int = 8) -> tuple[bytes, list[Streams]]:
    random = np.random.default_rng(4)
    groups = [group_of(random.standard_normal((2, 6, 16)).astype(np.float16), is_key) for is_key in (True, False)]
    return bytes(pack(groups, bits, b"rest")), [group.streams for group in groups]


@pytest.mark.parametrize("bits", BITS)
def test_a_payload_of_other_streams_is_refused(bits):
    data, streams = a_payload(bits)
    others = [
        streams[:1],
        [*streams, streams[0]],
        streams[::-1],
        [streams[0], Streams(False, 16, 3)],
        [streams[0], Streams(False, 32, 2)],
        [],
    ]
    for other in others:
        with pytest.raises(EngineError):
            Packed(memoryview(data), other)


@pytest.mark.parametrize("bits", BITS)
def test_a_cut_payload_is_refused(bits):
    data, streams = a_payload(bits)
    for length in range(len(data) - len(b"rest")):
        with pytest.raises(EngineError):
            Packed(memoryview(data[:length]), streams)


@pytest.mark.filterwarnings("error")
def test_flipped_bytes_are_refused_or_data():
    data, streams = a_payload()
    for offset in range(len(data)):
        for flip in (0x01, 0x80, 0xFF):
            changed = bytearray(data)
            changed[offset] ^= flip
            try:
                packed = Packed(memoryview(bytes(changed)), streams)
            except EngineError:
                continue
            packed.unpack([np.empty((2, packed.tokens, 16), np.float16) for _ in streams])
            assert packed.tokens <= 6


def test_huge_counts_in_a_head_reserve_nothing():
    data, streams = a_payload()
    head = struct.pack("<4sHHII", b"EKpk", 1, 8, 2**32 - 1, 2)
    with pytest.raises(EngineError):
        Packed(memoryview(head + data[16:]), streams)
