"""A disk that is full, a file that cannot be written or read: one clear sentence, nothing half, and on it goes."""

from __future__ import annotations

import random
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from emberkeep.errors import MemoryFailed
from emberkeep.memory.memory import Memory
from emberkeep.types.memory import Note, NoteKind
from emberkeep.types.request import Message
from helpers.chance import seed, times
from helpers.remembering import PLENTY, turn


def filled(path: Path, turns: int = 200) -> Memory:
    memory = Memory(path, limit_bytes=PLENTY)
    memory.archive("", [turn(f"thing number {i} " + "word " * 100) for i in range(turns)])
    return memory


def assert_whole(memory: Memory, turns: int) -> None:
    assert memory.stats("")["turns"] == turns
    assert sum(row["kind"] == "turn" for row in memory.export()) == turns
    with memory._database.transaction() as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        db.execute("INSERT INTO words (words) VALUES ('integrity-check')")


@contextmanager
def no_file_longer_than(size: int) -> Iterator[None]:
    """Writes beyond it fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_failed_write_is_explained_leaves_nothing_half_and_works_again_later(tmp_path: Path) -> None:
    memory = filled(tmp_path / "memory.sqlite")
    log = tmp_path / "memory.sqlite-wal"
    for spare in (0, 1000, 5000, 30_000):
        with no_file_longer_than(log.stat().st_size + spare), pytest.raises(MemoryFailed) as failed:
            memory.archive("", [turn(f"late {spare} {i} " + "word " * 2000) for i in range(50)])
        assert "cannot be" in str(failed.value) and "\n" not in str(failed.value)
        assert memory.search("", "thing number 7") and memory.search("", "late") == []
    assert_whole(memory, 200)
    assert memory.archive("", [turn("late but in time")]) == 1
    assert_whole(memory, 201)
    memory.close()


def test_a_disk_without_room_is_called_full(tmp_path: Path) -> None:
    memory = filled(tmp_path / "memory.sqlite")
    with memory._database.transaction() as db:
        db.pragma("max_page_count", db.pragma("page_count"))
    actions = [
        lambda: memory.archive("", [turn(f"late {i} " + "word " * 2000) for i in range(50)]),
        lambda: memory.archive("", [], [Note(b"k", NoteKind.INSERTED, "long " * 100_000)]),
        lambda: memory.set_fact("", "story", "long " * 100_000),
        lambda: memory.store_answer("", "why", "long " * 100_000),
        lambda: memory.save_messages("", "c", [Message("user", "long " * 100_000)], model="m"),
    ]
    for action in actions:
        with pytest.raises(MemoryFailed, match="its disk is full: make room and try again"):
            action()
    assert_whole(memory, 200)
    assert memory.facts("") == [] and memory.conversations("") == []
    with memory._database.transaction() as db:
        db.pragma("max_page_count", 1 << 30)
    for action in actions:
        action()
    assert_whole(memory, 250)
    memory.close()


def test_a_file_that_may_not_be_written_is_still_searched(tmp_path: Path) -> None:
    memory = filled(tmp_path / "memory.sqlite")
    with memory._database.transaction() as db:
        db.pragma("query_only", True)
    with pytest.raises(MemoryFailed, match="allow writing there, or choose another data_dir"):
        memory.archive("", [turn("late")])
    assert memory.search("", "thing number 7")
    memory._database._writer.pragma("query_only", False)
    assert memory.archive("", [turn("late")]) == 1
    memory.close()


def test_a_place_where_no_folder_can_be_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for path in (tmp_path / "file" / "memory.sqlite", tmp_path):
        with pytest.raises(MemoryFailed, match="cannot be used") as failed:
            Memory(path, limit_bytes=PLENTY)
        assert str(path) in str(failed.value)


def test_a_program_that_holds_the_file_for_too_long_is_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emberkeep.memory.database._BUSY_S", 0.02)
    memory, other = filled(tmp_path / "memory.sqlite"), Memory(tmp_path / "memory.sqlite", limit_bytes=PLENTY)
    with other._database.transaction(), pytest.raises(MemoryFailed, match="held by another program"):
        memory.archive("", [turn("late")])
    assert memory.search("", "thing number 7")
    assert memory.archive("", [turn("late")]) == 1
    memory.close()
    other.close()


def test_a_file_that_is_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "memory.sqlite"
    path.write_bytes(b"this is not a database " * 1000)
    with pytest.raises(MemoryFailed, match="is damaged: move the file away"):
        Memory(path, limit_bytes=PLENTY)
    assert path.read_bytes() == b"this is not a database " * 1000


def use_everything(memory: Memory) -> None:
    memory.search("", "thing number 7")
    memory.archive("", [turn("one more")], [Note(b"k", NoteKind.EVICTED, 1)])
    memory.notes("", [b"k"])
    memory.set_fact("", "a", "b")
    memory.facts("")
    memory.save_messages("", "c", [Message("user", "hi")], model="m")
    memory.conversations("")
    memory.stats("")
    list(memory.export())
    memory.forget("", "talk")


def test_a_damaged_file_is_called_damaged_and_nothing_else_happens(tmp_path: Path) -> None:
    path = tmp_path / "memory.sqlite"
    filled(path).close()
    good, chance = path.read_bytes(), random.Random(seed(3))
    failures = 0
    for _ in range(times(30)):
        bad, at = bytearray(good), chance.randrange(100, len(good) - 4096)
        bad[at : at + 2000] = chance.randbytes(2000)
        path.write_bytes(bad)
        try:
            memory = Memory(path, limit_bytes=PLENTY)
            try:
                use_everything(memory)
            finally:
                memory.close()
        except MemoryFailed as failed:
            failures += 1
            assert str(path) in str(failed)
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
    assert failures > times(10)


@pytest.mark.parametrize("size", [0, 1, 100, 4096, 20_000])
def test_a_truncated_file_is_empty_or_called_damaged(tmp_path: Path, size: int) -> None:
    path = tmp_path / "memory.sqlite"
    filled(path).close()
    path.write_bytes(path.read_bytes()[:size])
    try:
        memory = Memory(path, limit_bytes=PLENTY)
    except MemoryFailed:
        return
    try:
        use_everything(memory)
        assert size < 100  # SQLite takes that for a file that was just created
    except MemoryFailed:
        assert size > 0
    finally:
        memory.close()
