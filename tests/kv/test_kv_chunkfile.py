from __future__ import annotations

import mmap
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from emberkeep.kv.disk import chunkfile
from emberkeep.kv.disk.chunkfile import Buffers, Damaged, Description, read_file
from emberkeep.kv.tree import ROOT, ChunkKey, Made, chunk_key, pack_fields, pack_spans
from emberkeep.token_arrays import TokenArray
from emberkeep.types.lineage import Lineage
from helpers.kv_building import FINGERPRINT, exported, ids, prompt

TOKENS = prompt(20)
PAYLOAD = exported(TOKENS, 0, 20)
BUFFERS = Buffers()


def description(
    tokens: TokenArray = TOKENS,
    *,
    namespace: str = "a user",
    parent: ChunkKey = ROOT,
    fingerprint: bytes = FINGERPRINT,
) -> Description:
    key = chunk_key(fingerprint, Lineage.parse(namespace), parent, 0, tokens)
    return Description(
        fingerprint, namespace, key, parent, 0, 0, tokens, ((2, 5), (9, 20)), Made.GIVEN | Made.WIDE
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "chunk.kv"
    chunkfile.write(path, description(), PAYLOAD)
    return path


def flip(file: Path, offset: int, bit: int = 0) -> None:
    with file.open("r+b") as opened:
        opened.seek(offset)
        byte = opened.read(1)[0]
        opened.seek(offset)
        opened.write(bytes([byte ^ (1 << bit)]))


def test_what_was_written_is_read_back_also_by_who_does_not_know_what_was_sampled(file):
    for expected in (description(), replace(description(), sampled=())):
        assert chunkfile.read(file, expected, BUFFERS) == PAYLOAD
    assert file.stat().st_mode & 0o777 == 0o600
    assert (file.stat().st_size - len(PAYLOAD)) % 64 == 0


def test_a_file_tells_everything_about_itself(file):
    found, size = chunkfile.read_description(file)
    assert np.array_equal(found.tokens, TOKENS)
    assert replace(found, tokens=TOKENS).pack() == description().pack()
    assert size == file.stat().st_size


def test_a_flipped_bit_never_gives_a_payload_nor_a_description(file):
    head = 56 + len(description().pack())
    for offset in range(file.stat().st_size):
        flip(file, offset, bit=offset % 8)
        with pytest.raises(Damaged):
            chunkfile.read(file, description(), BUFFERS)
        if not 16 <= offset < 24 and offset < head:
            with pytest.raises(Damaged):
                chunkfile.read_description(file)
        flip(file, offset, bit=offset % 8)
    assert chunkfile.read(file, description(), BUFFERS) == PAYLOAD


def test_a_file_of_any_other_length_is_damaged(file):
    size = file.stat().st_size
    for length in (1 << 42, (1 << 30) + 1, size + 1, *range(size - 1, -1, -1)):
        os.truncate(file, length)
        with pytest.raises(Damaged):
            chunkfile.read(file, description(), BUFFERS)
        with pytest.raises(Damaged):
            chunkfile.read_description(file)


@pytest.mark.parametrize(
    "other",
    [
        description(prompt(20, seed=1)),
        description(namespace="another user"),
        description(parent=ChunkKey(bytes(32))),
        description(fingerprint=bytes(32)),
        replace(description(), start=128),
        description(TOKENS[:19]),
    ],
    ids=["tokens", "namespace", "parent", "fingerprint", "start", "a prefix of its tokens"],
)
def test_a_sound_file_of_another_chunk_is_refused(file, other):
    with pytest.raises(Damaged, match="another chunk"):
        chunkfile.read(file, other, BUFFERS)


def test_a_description_cannot_claim_another_chunks_key(tmp_path):
    liar = replace(description(), key=chunk_key(FINGERPRINT, Lineage("a user"), ROOT, 0, ids(1)))
    chunkfile.write(tmp_path / "liar.kv", liar, PAYLOAD)
    with pytest.raises(Damaged, match="key"):
        chunkfile.read_description(tmp_path / "liar.kv")


def test_a_symlink_is_not_followed(file, tmp_path):
    link = tmp_path / "link.kv"
    link.symlink_to(file)
    with pytest.raises(OSError, match="symbolic links"):
        chunkfile.read(link, description(), BUFFERS)
    with pytest.raises(OSError, match="symbolic links"):
        chunkfile.read_description(link)
    with pytest.raises(FileExistsError):
        chunkfile.write(link, description(), PAYLOAD)


def test_what_comes_in_pieces_ends_up_whole(tmp_path, monkeypatch):
    write, preadv = os.write, os.preadv
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:7]))
    monkeypatch.setattr(os, "preadv", lambda file, buffers, offset: preadv(file, [buffers[0][:7]], offset))
    chunkfile.write(tmp_path / "slow.kv", description(), PAYLOAD)
    assert chunkfile.read(tmp_path / "slow.kv", description(), BUFFERS) == PAYLOAD


def test_a_file_that_shrinks_while_it_is_read_is_damaged(file, monkeypatch):
    preadv = os.preadv

    def shrinking(descriptor, buffers, offset):
        os.truncate(file, 100)
        return preadv(descriptor, [buffers[0][:80]], offset)

    monkeypatch.setattr(os, "preadv", shrinking)
    with pytest.raises(Damaged, match="early"):
        chunkfile.read(file, description(), BUFFERS)


@pytest.mark.parametrize(("made", "read"), [(b"\0", Made.UNKNOWN), (b"\xf5", Made.GIVEN | Made.NARROW)])
def test_how_a_chunk_came_about_is_read_as_far_as_it_is_known(made: bytes, read: Made) -> None:
    described = description()
    packed = described.pack_identity() + pack_fields([pack_spans(described.sampled), made])
    assert Description.unpack(packed).made is read


@pytest.mark.parametrize("made", [b"", b"\1\1"])
def test_a_description_with_more_or_less_than_one_byte_of_flags_is_damaged(made: bytes) -> None:
    described = description()
    packed = described.pack_identity() + pack_fields([pack_spans(described.sampled), made])
    with pytest.raises(Damaged, match="unreadable description"):
        Description.unpack(packed)


# ── reading whole files ──

MIB = 1 << 20


@pytest.fixture(params=[0, 1, 4096, MIB - 1, MIB, MIB + 1, 2 * MIB + 4095, 3 * MIB + 17])
def any_file(request, tmp_path):
    path = tmp_path / "data"
    path.write_bytes(os.urandom(request.param))
    return path


def contents(path, buffers=None, *, drop=False):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if drop:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        return read_file(descriptor, path.stat().st_size, buffers or Buffers())
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("drop", [False, True])
def test_a_file_is_read_whole_from_the_cache_and_from_disk(any_file, drop):
    assert contents(any_file, drop=drop) == any_file.read_bytes()


@pytest.mark.parametrize("flag", ["_DIRECT", "_NOWAIT"])
def test_a_system_without_direct_or_cached_reads_is_read_the_ordinary_way(any_file, monkeypatch, flag):
    monkeypatch.setattr(chunkfile, flag, 0)
    assert contents(any_file, drop=flag == "_DIRECT") == any_file.read_bytes()


def test_a_file_that_shrinks_is_noticed(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(bytes(2 * MIB))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for size in (2 * MIB + 1, 100):
            os.truncate(path, min(size, 50))
            with pytest.raises(Damaged, match="early"):
                read_file(descriptor, size, Buffers())
    finally:
        os.close(descriptor)


def test_prepared_memory_is_given_away_once(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(os.urandom(MIB))
    buffers = Buffers()
    buffers.refill(MIB, limit=2 * MIB, bounce_buffers=1)
    first, second, third = (contents(path, buffers) for _ in range(3))
    first[:3] = b"abc"
    assert bytes(second) == bytes(third) == path.read_bytes()


@pytest.mark.parametrize("drop", [False, True])
def test_a_file_goes_into_memory_that_is_better_for_it(any_file, drop):
    size, given = any_file.stat().st_size, []

    def allocate(wanted: int) -> memoryview | None:
        given.append(memoryview(mmap.mmap(-1, (wanted // 4096 + 2) * 4096)))
        return given[-1]

    buffers = Buffers()
    buffers.allocate = allocate
    assert contents(any_file, buffers, drop=drop) == any_file.read_bytes()
    assert len(given) == (size >= MIB)
    assert all(memory[:size] == any_file.read_bytes() for memory in given)


def test_what_was_read_stays_when_its_bounce_buffer_is_used_again(tmp_path):
    buffers = Buffers()
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.write_bytes(os.urandom(2 * MIB + 5))
    assert [contents(path, buffers, drop=True) for path in paths] == [path.read_bytes() for path in paths]


def test_a_bounce_buffer_belongs_to_one_reader_at_a_time():
    buffers = Buffers()
    buffers.refill(MIB, limit=0, bounce_buffers=1)
    with buffers.bounce_buffer(MIB) as first, buffers.bounce_buffer(MIB) as second:
        assert first is not second
    with buffers.bounce_buffer(MIB) as again:
        assert again is first
    with buffers.bounce_buffer(2 * MIB) as larger:
        assert len(larger) == 2 * MIB
