"""A disk that is full or read-only: serving goes on, and storing resumes when it can."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.stored_chats import ask, cold, is_all_reused, start

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
