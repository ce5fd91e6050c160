from __future__ import annotations

from pathlib import Path

import apsw
import numpy as np
import pytest

from emberkeep.kv.disk.index import Index, Unreadable
from helpers.kv_building import chunk_files, chunks_of, load, new_store, prompt, put

TOKENS = prompt(300)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store with three chunks."""
    store = new_store(tmp_path)
    put(store, TOKENS, sampled=((3, 9),))
    store.close()
    return tmp_path


def database(folder: Path) -> Path:
    (path,) = folder.glob("*/index.db")
    return path


def rows(folder: Path) -> int:
    return len(Index(database(folder)).rows_after(0))


def everything_is_found(folder: Path) -> bool:
    store = new_store(folder)
    found = load(store, TOKENS)
    sampled = {span for chunk in chunks_of(store) for span in chunk.sampled}
    store.close()
    return found == len(TOKENS) and sampled == {(3, 9)}


def test_rows_say_what_was_added(folder):
    first, second, third = Index(database(folder)).rows_after(0)
    assert [row.start for row in (first, second, third)] == [0, 128, 256]
    assert np.array_equal(third.tokens, TOKENS[256:])
    assert second.parent == first.key
    sizes = {path.stem: path.stat().st_size for path in chunk_files(folder)}
    assert first.bytes == sizes[first.key.hex()]


def break_pages(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:4096] + b"\xee" * (path.stat().st_size - 4096))


def change_schema(path: Path) -> None:
    with apsw.Connection(str(path)) as db:
        db.execute("DROP TABLE chunk")
        db.execute("CREATE TABLE chunk (something TEXT)")
        db.pragma("user_version", 99)


DAMAGES = {
    "deleted": Path.unlink,
    "not a database": lambda path: path.write_bytes(b"this is not SQLite" * 100),
    "empty": lambda path: path.write_bytes(b""),
    "broken pages": break_pages,
    "of another version": change_schema,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_database_that_is_lost_is_rebuilt_from_the_files(folder, damage):
    damage(database(folder))
    assert everything_is_found(folder)
    assert rows(folder) == 3


@pytest.mark.parametrize(
    "lie",
    [
        "UPDATE chunk SET tokens = zeroblob(512) WHERE start = 128",
        "UPDATE chunk SET tokens = zeroblob(7) WHERE start = 128",
        "UPDATE chunk SET tokens = zeroblob(0) WHERE start = 128",
        "UPDATE chunk SET namespace = 'another user' WHERE start = 0",
        "UPDATE chunk SET namespace = x'00ff' WHERE start = 0",
        "UPDATE chunk SET take = take + 1 WHERE start = 128",
        "UPDATE chunk SET take = 'many' WHERE start = 128",
        "UPDATE chunk SET parent = zeroblob(32) WHERE start = 256",
        "UPDATE chunk SET sampled = zeroblob(5) WHERE start = 0",
    ],
)
def test_an_index_that_lies_is_not_believed(folder, lie):
    with apsw.Connection(str(database(folder))) as db:
        db.execute(lie)
    with pytest.raises(Unreadable):
        Index(database(folder)).rows_after(0)
    assert everything_is_found(folder)


def test_a_locked_database_is_an_error_and_is_not_thrown_away(folder, monkeypatch):
    monkeypatch.setattr("emberkeep.kv.disk.index._BUSY_MS", 1)
    holder = apsw.Connection(str(database(folder)))
    holder.pragma("journal_mode", "delete")
    holder.execute("BEGIN EXCLUSIVE")
    with pytest.raises(OSError, match="locked") as caught:
        Index(database(folder))
    assert not isinstance(caught.value, Unreadable)
    holder.execute("COMMIT")
    holder.close()
    assert rows(folder) == 3
