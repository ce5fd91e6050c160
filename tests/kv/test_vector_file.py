"""The file of vectors: what is added is found, the oldest go, and damage costs nothing but time."""

from __future__ import annotations

from pathlib import Path

import apsw
import pytest

from emberkeep.kv.disk.vector_file import VectorFile

SIZE = 4096


def key(number: int) -> bytes:
    return number.to_bytes(20, "big")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "private" / "vectors.db"


def test_what_was_added_is_found_by_another_process_too(path: Path) -> None:
    first, second = VectorFile(path, 1 << 20), VectorFile(path, 1 << 20)
    first.add({key(1): b"one", key(2): b"two"})
    assert second.find([key(2), key(3)]) == {key(2): b"two"}
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_thousands_of_keys_are_looked_up_at_once_and_all_can_be_removed(path: Path) -> None:
    file = VectorFile(path, 1 << 24)
    file.add({key(number): b"x" for number in range(2000)})
    file.add({key(1): b"other"})
    found = file.find(map(key, range(3000)))
    assert len(found) == 2000 and found[key(1)] == b"x"
    file.clear()
    assert file.find([key(1)]) == {}


def test_the_longest_unused_go_where_there_is_no_room(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    day = 100_000
    clock = iter(range(day, 1000 * day, day))
    monkeypatch.setattr("emberkeep.kv.disk.vector_file.time.time", lambda: next(clock))
    file = VectorFile(path, 64 * SIZE)
    for number in range(100):
        file.add({key(number): bytes(SIZE // 2)})
        file.find([key(0)])
    kept = file.find(map(key, range(100)))
    assert key(0) in kept
    assert key(1) not in kept
    assert key(99) in kept
    assert path.stat().st_size <= 80 * SIZE


@pytest.mark.parametrize("damage", [b"this is no database" * 300, b""])
def test_a_file_that_is_damaged_is_begun_anew(path: Path, damage: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(damage)
    file = VectorFile(path, 1 << 20)
    file.add({key(1): b"one"})
    assert file.find([key(1)]) == {key(1): b"one"}


def test_so_is_one_of_another_version(path: Path) -> None:
    VectorFile(path, 1 << 20).add({key(1): b"one"})
    db = apsw.Connection(str(path))
    db.pragma("user_version", 99)
    db.close()
    file = VectorFile(path, 1 << 20)
    assert file.find([key(1)]) == {}
    file.add({key(2): b"two"})
    assert file.find([key(2)]) == {key(2): b"two"}


def test_without_a_usable_place_nothing_is_kept_and_nothing_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    file = VectorFile(tmp_path / "file" / "vectors.db", 1 << 20)
    file.add({key(1): b"one"})
    assert file.find([key(1)]) == {}
    file.close()
