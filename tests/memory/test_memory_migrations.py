from __future__ import annotations

import threading
from pathlib import Path

import apsw
import pytest

from emberkeep.errors import MemoryFailed
from emberkeep.memory.database import MIGRATIONS, m001_initial, migrate
from emberkeep.memory.memory import Memory
from helpers.remembering import PLENTY, owners, turn


def schema(db: apsw.Connection) -> list[tuple[str, ...]]:
    return db.execute("SELECT type, name, sql FROM sqlite_schema ORDER BY name").fetchall()  # type: ignore[return-value]


@pytest.fixture
def db(tmp_path: Path) -> apsw.Connection:
    return apsw.Connection(str(tmp_path / "plain.sqlite"))


def next_example(db: apsw.Connection) -> None:
    db.execute("ALTER TABLE facts ADD COLUMN source TEXT NOT NULL DEFAULT ''")


def test_a_file_of_an_earlier_version_keeps_what_is_in_it(path: Path) -> None:
    memory = Memory(path, limit_bytes=PLENTY)
    memory.set_fact("", "town", "Graz")
    memory.archive("", [turn("hello")])
    memory.close()
    db = apsw.Connection(str(path))
    assert db.pragma("user_version") == len(MIGRATIONS)
    migrate(db, [*MIGRATIONS, next_example])
    assert db.pragma("user_version") == len(MIGRATIONS) + 1
    assert db.execute("SELECT name, value, source FROM facts").fetchall() == [("town", "Graz", "")]
    db.close()


def test_a_file_of_the_first_version_is_remembered_and_forgotten_like_any_other(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    db = apsw.Connection(str(path))
    migrate(db, [m001_initial])
    db.execute("INSERT INTO owners (name) VALUES ('ann')")
    db.close()
    memory = Memory(path, limit_bytes=PLENTY)
    assert owners(memory) == ["ann"] and memory.last_forgetting() == 0
    memory.forget("ann")
    assert owners(memory) == [] and memory.forgotten_since(0, "ann", "")
    memory.close()


def test_a_migration_that_fails_half_way_leaves_the_file_as_it_was(db: apsw.Connection) -> None:
    def next_broken(db: apsw.Connection) -> None:
        next_example(db)
        db.execute("INSERT INTO owners (name) VALUES ('half')")
        raise RuntimeError("power cut")

    migrate(db)
    before = schema(db)
    with pytest.raises(RuntimeError, match="power cut"):
        migrate(db, [*MIGRATIONS, next_broken])
    assert schema(db) == before
    assert db.pragma("user_version") == len(MIGRATIONS)
    assert db.execute("SELECT * FROM owners").fetchall() == []
    migrate(db, [*MIGRATIONS, next_example])
    assert db.pragma("user_version") == len(MIGRATIONS) + 1


def test_a_file_of_a_newer_version_is_refused_and_left_alone(path: Path) -> None:
    Memory(path, limit_bytes=PLENTY).close()
    db = apsw.Connection(str(path))
    db.pragma("user_version", len(MIGRATIONS) + 1)
    db.close()
    before = path.read_bytes()
    with pytest.raises(MemoryFailed, match="newer Emberkeep") as refused:
        Memory(path, limit_bytes=PLENTY)
    assert str(refused.value).endswith("update Emberkeep, or move the file away.")
    assert path.read_bytes() == before


def test_many_who_open_a_new_file_at_once_migrate_it_once(path: Path) -> None:
    failures: list[BaseException] = []
    ready = threading.Barrier(6)

    def open_and_write(i: int) -> None:
        try:
            ready.wait()
            memory = Memory(path, limit_bytes=PLENTY)
            memory.archive("", [turn(f"turn {i}")])
            memory.close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=open_and_write, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    memory = Memory(path, limit_bytes=PLENTY)
    assert memory.stats("")["turns"] == 6
    memory.close()
