from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from emberkeep.kv.disk.chunk_files import ChunkFiles
from emberkeep.kv.disk.chunkfile import Damaged, Description, write
from emberkeep.kv.tree import ROOT, Made, chunk_key, store_name
from emberkeep.types.lineage import EXACT
from helpers.kv_building import FINGERPRINT, chunk_files, exported, load, new_store, prompt, put

OTHER = bytes(32)


def description(seed: int = 0, *, fingerprint: bytes = FINGERPRINT) -> Description:
    tokens = prompt(10, seed=seed)
    key = chunk_key(fingerprint, EXACT, ROOT, 0, tokens)
    return Description(fingerprint, "", key, ROOT, 0, 0, tokens, (), Made.UNKNOWN)


def payload(of: Description) -> memoryview:
    return exported(of.tokens, 0, len(of.tokens))


def entry(seed: int = 0) -> tuple[Description, memoryview]:
    return description(seed), payload(description(seed))


FOREIGN = description(fingerprint=OTHER)


@pytest.fixture
def tier(tmp_path: Path):
    tier = ChunkFiles(tmp_path, FINGERPRINT)
    tier.open_rows()
    yield tier
    tier.close()


def keys_of(tier: ChunkFiles) -> set[bytes]:
    return {row.key for row in tier.open_rows()[0]}


def test_a_written_chunk_is_read_back_and_listed(tier):
    sizes = tier.write([entry(0), entry(1)]).sizes
    assert tier.read(description(1)) == payload(description(1))
    assert keys_of(tier) == set(sizes) == {description(0).key, description(1).key}


def test_whatever_leads_to_a_new_chunk_is_forced_to_disk(tmp_path, monkeypatch):
    forced: set[tuple[int, int]] = set()
    sync = os.fsync

    def remember(handle: int) -> None:
        forced.add(identity(os.fstat(handle)))
        sync(handle)

    monkeypatch.setattr("os.fsync", remember)
    tier = ChunkFiles(tmp_path / "kv", FINGERPRINT)
    tier.open_rows()
    tier.write([entry(0)])
    [chunk] = tmp_path.rglob("*.kv")
    leading = [chunk, *chunk.parents[: len(chunk.relative_to(tmp_path).parts)]]
    assert [path for path in leading if identity(path.stat()) not in forced] == []
    tier.close()


def identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def test_nothing_but_the_owner_can_enter_the_store(tier, tmp_path):
    tier.write([entry()])
    folders = [tier.folder, *(path for path in tier.folder.rglob("*") if path.is_dir())]
    assert {path.stat().st_mode & 0o077 for path in folders} == {0}


def test_two_tiers_on_one_folder_see_each_others_chunks_and_may_write_the_same(tier, tmp_path):
    other = ChunkFiles(tmp_path, FINGERPRINT)
    other.open_rows()
    tier.write([entry(0)])
    assert [row.key for row in other.index.new_rows()] == [description(0).key]
    assert other.index.new_rows() == []
    other.write([entry(0)])
    assert other.read(description(0)) == tier.read(description(0)) == payload(description(0))
    assert keys_of(tier) == {description(0).key}
    other.write([entry(1)])  # its workplace is there after another opening
    assert tier.read(description(1)) == payload(description(1))
    other.close()


def test_many_tiers_open_one_new_folder_at_once(tmp_path):
    failures = []

    def open_and_close(number: int) -> None:
        try:
            tier = ChunkFiles(tmp_path, FINGERPRINT)
            tier.open_rows()
            tier.write([entry(number)])
            tier.close()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=open_and_close, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(chunk_files(tmp_path)) == 8


def test_a_row_without_a_file_is_dropped(tier):
    tier.write([entry()])
    tier._path(description().key).unlink()
    assert keys_of(tier) == set()
    with pytest.raises(FileNotFoundError):
        tier.read(description())


def test_swapped_files_are_noticed_when_they_are_read(tier):
    tier.write([entry(1), entry(2)])
    one, other = tier._path(description(1).key), tier._path(description(2).key)
    parked = one.with_suffix(".parked")
    one.rename(parked)
    other.rename(one)
    parked.rename(other)
    for seed in (1, 2):
        with pytest.raises(Damaged, match="another chunk"):
            tier.read(description(seed))


@pytest.mark.parametrize(
    "content",
    [entry(1), (FOREIGN, payload(FOREIGN)), None],
    ids=["of another chunk", "of another fingerprint", "half a file"],
)
def test_a_file_without_a_row_is_adopted_unless_it_is_not_what_its_name_says(tier, content):
    for own, written in (
        (description(5), entry(5)),
        (FOREIGN if content and content[0] is FOREIGN else description(), content),
    ):
        path = tier._path(own.key)
        path.parent.mkdir(exist_ok=True)
        if written:
            write(path, *written)
        else:
            path.write_bytes(b"half a chu")
    rows, damaged = tier.open_rows()
    assert ([row.key for row in rows], damaged) == ([description(5).key], 1)
    assert len(list((tier.folder / "quarantine").iterdir())) == 1


def test_things_that_do_not_belong_there_are_left_alone(tier):
    (tier.folder / "chunks" / ".DS_Store").write_bytes(b"?")
    path = tier._path(description().key)
    path.parent.mkdir()
    (path.parent / "notes.txt").write_text("mine")
    path.symlink_to(path.parent / "notes.txt")
    assert tier.open_rows() == ([], 0)
    assert (path.parent / "notes.txt").read_text() == "mine"


def test_a_dead_owners_workplace_is_swept(tier):
    dead = tier.folder / "tmp" / "dead"
    dead.mkdir()
    (dead / "owner").touch()
    (dead / description().key.hex()).write_bytes(b"half a chunk")
    tier.open_rows()
    assert not dead.exists()


def test_there_is_one_evictor_at_a_time(tier, tmp_path):
    other = ChunkFiles(tmp_path, FINGERPRINT)
    with tier.evicting() as alone:
        assert alone
        with other.evicting() as too:
            assert not too
    with other.evicting() as alone:
        assert alone
    other.close()


def test_an_unused_store_of_another_model_makes_room(tier, tmp_path):
    store = new_store(tmp_path, fingerprint=OTHER)
    put(store, prompt(200))
    store.close()
    size = sum(path.stat().st_size for path in chunk_files(tmp_path))
    assert tier.shrink_other_stores(size) == size
    assert tier.shrink_other_stores(size - 1) == 0
    assert not (tmp_path / store_name(OTHER)).exists()


def test_an_open_store_of_another_model_stays(tier, tmp_path):
    store = new_store(tmp_path, fingerprint=OTHER)
    put(store, prompt(200))
    store.flush()
    assert tier.shrink_other_stores(0) > 0
    assert load(store, prompt(200)) == 200
    store.close()


def test_folders_that_are_no_stores_are_never_removed(tier, tmp_path):
    mine, target = tmp_path / "my pictures", tmp_path / "elsewhere"
    (mine / "chunks" / "ab").mkdir(parents=True)
    (mine / "chunks" / "ab" / "x.kv").write_bytes(bytes(1000))
    target.mkdir()
    (tmp_path / ("a" * 32)).symlink_to(target)
    assert tier.shrink_other_stores(0) == 0
    assert (mine / "chunks" / "ab" / "x.kv").exists()
    assert list(target.iterdir()) == []


def test_a_failed_write_leaves_nothing_half_done(tier, monkeypatch):
    from emberkeep.kv.disk import chunkfile

    real, calls = chunkfile.write, []

    def second_fails(path, *rest):
        calls.append(path)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return real(path, *rest)

    monkeypatch.setattr(chunkfile, "write", second_fails)
    written = tier.write([entry(1), entry(2)])
    assert written.sizes == {} and "space" in str(written.error)
    assert [path.name for path in tier._tmp.iterdir()] == ["owner"]
    assert keys_of(tier) == set()
    tier.write([entry(1), entry(2)])
    assert len(keys_of(tier)) == 2


def test_what_another_process_forgets_while_it_is_written_is_no_error(tier):
    def is_wanted(key: bytes) -> bool:
        if key == description(0).key:
            (tier._tmp / key.hex()).unlink()
        return True

    written = tier.write([entry(0), entry(1)], is_wanted)
    assert (set(written.sizes), written.error) == ({description(1).key}, None)
    assert keys_of(tier) == {description(1).key}


def test_a_root_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "kv").write_text("a file where the folder should be")
    with pytest.raises(OSError, match="kv"):
        ChunkFiles(tmp_path / "kv", FINGERPRINT)
