"""Whatever a path says, and whatever happens to folders meanwhile: nothing outside of the root."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.errors import ToolFailed
from emberkeep.tools import file_tools
from emberkeep.tools.file_tools import FileTools

SECRET = "SECRET"


class World:
    """A root, and beside it what must stay as it is."""

    def __init__(self, folder: Path) -> None:
        self.root, self.outside = folder / "root", folder / "outside"
        self.root.mkdir()
        self.outside.mkdir()
        (self.outside / "secret.txt").write_text(SECRET)
        (self.outside / "empty").mkdir()
        (self.root / "inside.txt").write_text("inside")
        (self.root / "folder").mkdir()
        (self.root / "out").symlink_to(self.outside)
        (self.root / "rel").symlink_to("../outside")
        (self.root / "file").symlink_to(self.outside / "secret.txt")
        (self.root / "chain").symlink_to("out")
        (self.root / "nowhere").symlink_to(self.outside / "new.txt")
        (self.root / "loop").symlink_to("loop")
        (self.root / "self").symlink_to(".")
        self.files = FileTools(self.root)

    def seen_outside(self) -> dict[str, object]:
        return {
            str(path): (path.lstat().st_mode, path.lstat().st_ino, path.read_bytes() if path.is_file() else None)
            for path in sorted(self.outside.rglob("*"))
        }

    def attempts(self, path: str) -> list[Callable[[], Any]]:
        files = self.files
        return [
            lambda: files.read_file(path),
            lambda: files.list_files(path, recursive=True),
            lambda: files.file_exists(path),
            lambda: files.write_file(path, "HARM"),
            lambda: files.write_file(path, "HARM", append=True),
            lambda: files.delete_file(path),
        ]


@pytest.fixture(params=["handles", "paths"])
def world(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(file_tools, "HAS_HANDLES", request.param == "handles")
    return World(tmp_path)


TRAVERSALS = [
    "../outside/secret.txt",
    "folder/../../outside/secret.txt",
    "./.././outside/secret.txt",
    "folder/../inside.txt",
    "..",
    "../",
    "../root/inside.txt",
    "folder/..",
    "/etc/passwd",
    "//etc/passwd",
    "/",
    "/proc/self/environ",
    "/proc/self/root/etc/passwd",
    "/proc/self/cwd/inside.txt",
    "/dev/zero",
    "/dev/stdin",
    "/dev/fd/0",
    "out/secret.txt",
    "rel/secret.txt",
    "chain/secret.txt",
    "out/empty",
    "out/new/file.txt",
    "self/inside.txt",
    "self/out/secret.txt",
    "loop/x",
    "inside.txt\0.png",
    "\0",
    "\ud800",
    "a" * 256,
    "é" * 200,
    "a/" * 3000 + "b",
]
LINKS = ["file", "nowhere", "loop"]


@pytest.mark.parametrize("path", TRAVERSALS, ids=ascii)
def test_no_path_leads_outside(world: World, path: str) -> None:
    before = world.seen_outside()
    for attempt in world.attempts(path):
        with pytest.raises(ToolFailed):
            attempt()
    assert world.seen_outside() == before


@pytest.mark.parametrize("path", LINKS)
def test_a_link_is_neither_read_nor_written_nor_deleted(world: World, path: str) -> None:
    before = world.seen_outside()
    for attempt in world.attempts(path):
        with suppress(ToolFailed):
            assert attempt() == {"exists": True, "kind": "link", "bytes": (world.root / path).lstat().st_size}
    assert world.seen_outside() == before
    assert (world.root / path).is_symlink()


def test_absolute_paths_outside_and_other_spellings_of_the_root_are_refused(world: World) -> None:
    near = f"{world.root}-other"
    for path in [str(world.outside / "secret.txt"), near, f"{world.root}/../outside/secret.txt", "~/x", "~root"]:
        for attempt in world.attempts(path)[:3]:
            with suppress(ToolFailed):
                assert attempt() == {"exists": False}  # a file whose name begins with ~
    world.files.write_file("~/x", "a name like any other")
    assert (world.root / "~" / "x").exists()


def test_encoded_dots_are_names_like_any_other(world: World) -> None:
    before = world.seen_outside()
    for path in [
        "%2e%2e/outside/secret.txt",
        "..%2foutside",
        "....//outside/secret.txt",
        "..\\outside\\secret.txt",
    ]:
        assert world.files.file_exists(path) == {"exists": False}
        world.files.write_file(path, "kept inside")
    assert world.seen_outside() == before


@given(
    st.lists(
        st.sampled_from(
            ["..", ".", "out", "rel", "file", "folder", "self", "", "~", "secret.txt", "outside", "\0"]
        )
        | st.text(max_size=5),
        max_size=6,
    ).map("/".join)
)
def test_no_path_whatever_leads_outside(tmp_path_factory: pytest.TempPathFactory, path: str) -> None:
    world = World(tmp_path_factory.mktemp("any"))
    before = world.seen_outside()
    for attempt in world.attempts(path):
        with suppress(ToolFailed):
            assert SECRET not in str(attempt())
    assert world.seen_outside() == before


def test_pipes_sockets_and_devices_are_refused_without_waiting(world: World) -> None:
    os.mkfifo(world.root / "pipe")
    listening = socket.socket(socket.AF_UNIX)
    here = Path.cwd()
    os.chdir(world.root)  # the address of a socket must be short
    try:
        listening.bind("socket")
    finally:
        os.chdir(here)
        listening.close()
    for path in ["pipe", "socket"]:
        for attempt in world.attempts(path):
            with suppress(ToolFailed):
                assert attempt() == {"exists": True, "kind": "special file", "bytes": 0}
        assert (world.root / path).exists()


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_even_below_the_root_of_the_system_neither_devices_nor_the_kernel_are_read() -> None:
    files = FileTools(Path("/"))
    for path in [
        "/proc/self/environ",
        "proc/1/cmdline",
        "/dev/zero",
        "/dev/tty",
        "/dev/null",
        "/proc/self/root/etc/passwd",
    ]:
        with pytest.raises(ToolFailed):
            files.read_file(path)


def test_a_hard_link_is_not_written_through(world: World) -> None:
    os.link(world.outside / "secret.txt", world.root / "hard")
    world.files.write_file("hard", "HARM")
    world.files.write_file("hard", "HARM", append=True)
    assert (world.outside / "secret.txt").read_text() == SECRET


@pytest.fixture
def swapping(tmp_path: Path) -> Iterator[World]:
    """A root in which `place` is a folder one moment, and a link to the outside the next."""
    world = World(tmp_path)
    (world.root / "real").mkdir()
    (world.root / "real/secret.txt").write_text("inside")
    place, real, stop = world.root / "place", world.root / "real", threading.Event()

    def swap() -> None:
        for turn in count():
            if stop.is_set():
                return
            with suppress(OSError):  # the one that writes may make a folder of that name
                place.rename(world.root / f"made-{turn}")
            with suppress(OSError):
                real.rename(place)
                place.rename(real)
            with suppress(OSError):
                place.symlink_to(world.outside)
                place.unlink()

    thread = threading.Thread(target=swap)
    thread.start()
    yield world
    stop.set()
    thread.join()


def tried(attempt: Callable[[], object]) -> str:
    try:
        return str(attempt())
    except (ToolFailed, OSError):
        return ""


@pytest.mark.serial  # on one core it takes a minute until the two are at it at the same time
def test_a_folder_that_becomes_a_link_while_it_is_read_shows_nothing(swapping: World) -> None:
    naive, seen = set(), set()
    for i in count():
        naive.add(tried((swapping.root / "place/secret.txt").read_text))
        seen.add(tried(lambda: swapping.files.read_file("place/secret.txt")))
        seen.add(tried(lambda: swapping.files.list_files("place")).partition("  ")[0])
        # Until an ordinary program would have been betrayed, and ours has had its chance.
        if i > 400 and SECRET in naive and "inside" in seen:
            break
    assert SECRET not in seen and "empty/\nsecret.txt" not in seen


@pytest.mark.serial
def test_a_folder_that_becomes_a_link_while_it_is_written_changes_nothing(swapping: World) -> None:
    before = swapping.seen_outside()
    written = 0
    for i in count():
        written += bool(tried(lambda: swapping.files.write_file("place/new.txt", "HARM")))
        tried(lambda: swapping.files.delete_file("place/secret.txt"))
        if i > 150 and written:
            break
    assert swapping.seen_outside() == before


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    try:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no mount here")
    if done.returncode != 0:
        pytest.skip("mounting a small disk needs root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_one_sentence_and_the_old_file_stays(tiny_disk: Path) -> None:
    files = FileTools(tiny_disk)
    files.write_file("a", "old")
    with pytest.raises(ToolFailed, match="'a' was not written, for the disk is full: delete something first"):
        files.write_file("a", "x" * 100_000)
    assert files.list_files() == "a  3"
    assert files.read_file("a") == "old"
