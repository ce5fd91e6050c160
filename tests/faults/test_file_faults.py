"""Files that are damaged, lost or replaced, between two lives of a server and under a running one."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from emberkeep.kv.policy import CHUNK_TOKENS
from helpers.stored_chats import ask, cold, files_of, is_all_reused, start, store_folder

Fault = Callable[[list[Path]], object]
"""Does something to the third file of a conversation."""


def flip(offset: int) -> Fault:
    def damage(files: list[Path]) -> None:
        data = bytearray(files[2].read_bytes())
        data[offset] ^= 1
        files[2].write_bytes(data)

    return damage


def resize(change: Callable[[int], int]) -> Fault:
    return lambda files: os.truncate(files[2], change(files[2].stat().st_size))


def swap(files: list[Path]) -> None:
    other = files[3].read_bytes()
    files[3].write_bytes(files[2].read_bytes())
    files[2].write_bytes(other)


def put_a_folder_there(files: list[Path]) -> None:
    files[2].unlink()
    files[2].mkdir()


def put_a_pipe_there(files: list[Path]) -> None:
    files[2].unlink()
    os.mkfifo(files[2])


def put_a_link_there(files: list[Path]) -> None:
    moved = files[2].rename(files[2].with_name("elsewhere"))
    files[2].symlink_to(moved)


FAULTS: dict[str, Fault] = {
    "magic": flip(0),
    "lengths": flip(8),
    "payload-checksum": flip(30),
    "head-digest": flip(45),
    "description": flip(100),
    "first-payload-byte": flip(-1536),
    "last-byte": flip(-1),
    "empty": resize(lambda size: 0),
    "cut-in-the-head": resize(lambda size: 40),
    "cut-in-the-payload": resize(lambda size: size - 700),
    "grown": resize(lambda size: size + 1),
    "grown-beyond-reason": resize(lambda size: 1 << 42),
    "swapped": swap,
    "deleted": lambda files: files[2].unlink(),
    "a-folder": put_a_folder_there,
    "a-pipe": put_a_pipe_there,
    "a-link": put_a_link_there,
}


def spoil_all(data_dir: Path) -> None:
    """Each fault hits the conversation of the user who is named after it."""
    files = {user: files_of(data_dir, user) for user in FAULTS}
    for user, fault in FAULTS.items():
        fault(files[user])


@pytest.mark.slow
def test_a_bad_file_costs_its_own_tokens_and_those_after_it(tmp_path: Path) -> None:
    with start(tmp_path) as server:
        for user in FAULTS:
            ask(server, user)
        server.stop()
    spoil_all(tmp_path)
    with start(tmp_path) as server:
        reused = {user: ask(server, user).cached_tokens for user in FAULTS}
        assert reused == dict.fromkeys(FAULTS, 2 * CHUNK_TOKENS)
        assert cold(server)["damaged_chunks"] >= len(FAULTS) - 2  # the deleted one and the link are missing
        server.stop()
    with start(tmp_path) as server:
        assert all(is_all_reused(ask(server, user)) for user in FAULTS)
        assert cold(server)["damaged_chunks"] == 0


@pytest.mark.slow
def test_a_file_that_goes_bad_under_a_running_server_costs_no_more(tmp_path: Path) -> None:
    with start(tmp_path, "--ram-budget", "24000", "--sequences", "2") as server:
        for user in [*FAULTS, "last-but-one", "last"]:
            ask(server, user)
            server.wait_until_stored()
        spoil_all(tmp_path)
        reused = {user: ask(server, user).cached_tokens for user in FAULTS}
        assert reused == dict.fromkeys(FAULTS, 2 * CHUNK_TOKENS)
        assert cold(server)["damaged_chunks"] >= len(FAULTS) - 2
        assert cold(server)["vanished_chunks"] >= 2
        server.wait_until_stored()
        assert cold(server)["refused_chunks"] == 0
        server.stop()
    with start(tmp_path) as server:
        assert all(is_all_reused(ask(server, user)) for user in FAULTS)


# ── the index, and the folders around the files ──────────────────────────────────────────────────
@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with one conversation, written by a server that is gone."""
    folder = tmp_path_factory.mktemp("stored") / "data"
    with start(folder) as server:
        ask(server, "ann")
        server.stop()
    return folder


@pytest.fixture
def data_dir(stored: Path, tmp_path: Path) -> Path:
    return shutil.copytree(stored, tmp_path / "data")


def scribble(path: Path) -> None:
    """Every seventh byte behind the header of the database's first page."""
    data = bytearray(path.read_bytes())
    for offset in range(100, len(data), 7):
        data[offset] ^= 0x55
    path.write_bytes(data)


INDEX_FAULTS: dict[str, Callable[[Path], object]] = {
    "deleted": Path.unlink,
    "garbage": lambda path: path.write_bytes(b"not a database" * 1000),
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "scribbled": scribble,
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", INDEX_FAULTS.values(), ids=INDEX_FAULTS.keys())
def test_a_broken_index_is_rebuilt_from_the_files(data_dir: Path, fault: Callable[[Path], object]) -> None:
    fault(store_folder(data_dir) / "index.db")
    with start(data_dir) as server:
        assert is_all_reused(ask(server, "ann"))
        assert cold(server)["damaged_chunks"] == 0
        server.stop()


@pytest.mark.slow
def test_an_index_that_breaks_under_a_running_server_spoils_no_answer(data_dir: Path) -> None:
    with start(data_dir) as server:
        ask(server, "ann")
        (store_folder(data_dir) / "index.db").write_bytes(b"not a database" * 1000)
        assert not is_all_reused(ask(server, "ben"))
        assert is_all_reused(ask(server, "ann"))
        server.terminate()
        assert server.exit_code() == 0
    with start(data_dir) as server:
        assert is_all_reused(ask(server, "ann"))
        assert is_all_reused(ask(server, "ben"))


@pytest.mark.slow
def test_leftovers_of_dead_processes_and_strangers_files_are_no_trouble(data_dir: Path) -> None:
    folder = store_folder(data_dir)
    dead = folder / "tmp" / "dead"
    dead.mkdir()
    (dead / "owner").touch()
    (dead / "half-written").write_bytes(b"EMBERKV2")
    (folder / "tmp" / "a file").touch()
    (folder / "chunks" / "a file").touch()
    (folder / "chunks" / "zz").mkdir()
    (folder / "chunks" / "zz" / "a name.kv").touch()
    (data_dir / "kv" / "a file").touch()
    with start(data_dir) as server:
        assert is_all_reused(ask(server, "ann"))
        assert not dead.exists()
        server.stop()


@pytest.mark.slow
@pytest.mark.parametrize("name", [".", "chunks", "quarantine", "tmp", "index.db"])
def test_a_store_that_cannot_be_used_leaves_a_server_that_answers(data_dir: Path, name: str) -> None:
    place = store_folder(data_dir) / name
    if place.is_dir():
        shutil.rmtree(place)
        place.touch()
    else:
        place.unlink()
        place.mkdir()
    with start(data_dir) as server:
        ask(server, "ann")
        assert is_all_reused(ask(server, "ann"))
        server.stop()


@pytest.mark.slow
def test_a_store_that_disappears_under_a_running_server_leaves_one_that_answers(data_dir: Path) -> None:
    with start(data_dir, "--ram-budget", "24000", "--sequences", "2") as server:
        ask(server, "ann")
        chunks = store_folder(data_dir) / "chunks"
        shutil.rmtree(chunks)
        chunks.touch()
        for user in ("ben", "cid", "dan"):
            ask(server, user)
        ask(server, "ann")
        assert cold(server)["refused_chunks"] > 0
        assert cold(server)["last_error"]
        server.stop()


@pytest.mark.slow
def test_another_model_under_the_same_name_reuses_nothing_and_takes_nothing_away(data_dir: Path) -> None:
    with start(data_dir, "--weights", "other") as server:
        assert ask(server, "ann", weights="other").cached_tokens == 0
        server.stop()
    for weights in ("fake", "other"):
        with start(data_dir, "--weights", weights) as server:
            assert is_all_reused(ask(server, "ann", weights=weights))
            server.stop()


USERS = [f"user-{i}" for i in range(6)]


def mount(*arguments: str) -> bool:
    return subprocess.run(["mount", *arguments], capture_output=True).returncode == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    try:
        is_there = mount("-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk))
    except FileNotFoundError:
        is_there = False
    if not is_there:
        pytest.skip("mounting a small disk needs root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def fill(disk: Path) -> Path:
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return filler


@pytest.mark.slow
def test_a_full_disk_stops_the_storing_but_not_the_serving(small_disk: Path) -> None:
    with start(small_disk / "data") as server:
        ask(server, "early")
        server.wait_until_stored()
        filler = fill(small_disk)
        for user in USERS:
            ask(server, user)
        assert all(is_all_reused(ask(server, user)) for user in ["early", *USERS])
        assert cold(server)["refused_chunks"] > 0
        assert "space" in cold(server)["last_error"] or "full" in cold(server)["last_error"]
        filler.unlink()
        server.stop()
    with start(small_disk / "data") as server:
        assert all(is_all_reused(ask(server, user)) for user in ["early", *USERS])


@pytest.mark.slow
def test_a_server_starts_on_a_full_disk_and_answers(small_disk: Path) -> None:
    with start(small_disk / "data") as server:
        ask(server, "early")
        server.stop()
    filler = fill(small_disk)
    with start(small_disk / "data") as server:
        ask(server, "early")
        ask(server, "late")
        server.terminate()
        assert server.exit_code() == 0
    filler.unlink()
    with start(small_disk / "data") as server:
        assert is_all_reused(ask(server, "early"))
        server.stop()


@pytest.mark.slow
def test_a_server_starts_on_a_read_only_disk_and_answers(small_disk: Path) -> None:
    with start(small_disk / "data") as server:
        ask(server, "early")
        server.stop()
    assert mount("-o", "remount,ro", str(small_disk))
    with start(small_disk / "data") as server:
        ask(server, "early")
        assert is_all_reused(ask(server, "early"))
        server.stop()
