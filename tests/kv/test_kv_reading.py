from __future__ import annotations

import os

import pytest

from emberkeep.kv import reading
from emberkeep.kv.reading import Buffers, EndsEarly, read_file

MIB = 1 << 20


@pytest.fixture(params=[0, 1, 4096, MIB - 1, MIB, MIB + 1, 2 * MIB + 4095, 3 * MIB + 17])
def file(request, tmp_path):
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
def test_a_file_is_read_whole_from_the_cache_and_from_disk(file, drop):
    assert contents(file, drop=drop) == file.read_bytes()


def test_a_file_system_without_direct_reads_is_read_the_ordinary_way(file, monkeypatch):
    monkeypatch.setattr(reading, "_DIRECT", 0)
    assert contents(file, drop=True) == file.read_bytes()


def test_a_system_without_cached_reads_is_read_as_well(file, monkeypatch):
    monkeypatch.setattr(reading, "_NOWAIT", 0)
    assert contents(file) == file.read_bytes()


def test_a_file_that_shrinks_is_noticed(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(bytes(2 * MIB))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for size in (2 * MIB + 1, 100):
            os.truncate(path, min(size, 50))
            with pytest.raises(EndsEarly):
                read_file(descriptor, size, Buffers())
    finally:
        os.close(descriptor)


def test_prepared_memory_is_given_away_once(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(os.urandom(MIB))
    buffers = Buffers()
    buffers.refill(MIB, limit=2 * MIB, desks=1)
    first, second, third = (contents(path, buffers) for _ in range(3))
    first[:3] = b"abc"
    assert bytes(second) == bytes(third) == path.read_bytes()


def test_prepared_memory_that_is_too_small_is_not_used(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(os.urandom(3 * MIB))
    buffers = Buffers()
    buffers.refill(MIB, limit=4 * MIB, desks=1)
    assert contents(path, buffers) == path.read_bytes()
    buffers.refill(3 * MIB, limit=6 * MIB, desks=1)
    assert contents(path, buffers) == path.read_bytes()


def test_what_was_read_stays_when_its_desk_is_used_again(tmp_path):
    buffers = Buffers()
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.write_bytes(os.urandom(2 * MIB + 5))
    assert [contents(path, buffers, drop=True) for path in paths] == [path.read_bytes() for path in paths]


def test_a_desk_belongs_to_one_reader_at_a_time():
    buffers = Buffers()
    buffers.refill(MIB, limit=0, desks=1)
    with buffers.desk(MIB) as first, buffers.desk(MIB) as second:
        assert first is not second
    with buffers.desk(MIB) as again:
        assert again is first
    with buffers.desk(2 * MIB) as larger:
        assert len(larger) == 2 * MIB
