from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from emberkeep.errors import ToolFailed
from emberkeep.tools import file_tools
from emberkeep.tools.file_tools import FileTools
from emberkeep.tools.function import tools_of


@pytest.fixture(params=["handles", "paths"])
def files(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FileTools:
    """With both ways to stay beneath the root: systems without open handles compare paths."""
    monkeypatch.setattr(file_tools, "HAS_HANDLES", request.param == "handles")
    return FileTools(tmp_path)


def test_writing_and_deleting_are_dangerous_and_reading_is_not(files: FileTools) -> None:
    assert {function.name: function.is_dangerous for function in tools_of(files)} == {
        "read_file": False,
        "write_file": True,
        "list_files": False,
        "delete_file": True,
        "file_exists": False,
    }


def test_what_was_written_is_read(files: FileTools, tmp_path: Path) -> None:
    assert files.write_file("deep/down/a.txt", "grün\n") == "Created deep/down/a.txt: 6 bytes."
    assert files.read_file("deep/down/a.txt") == "grün"
    assert (tmp_path / "deep/down/a.txt").read_bytes() == "grün\n".encode()


def test_an_absolute_path_below_the_root_is_fine(files: FileTools, tmp_path: Path) -> None:
    files.write_file(str(tmp_path / "a.txt"), "x")
    assert files.read_file(str(tmp_path / "a.txt")) == "x"


def test_the_root_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real/a").write_text("x")
    (tmp_path / "way").symlink_to("real")
    assert FileTools(tmp_path / "way").read_file(str(tmp_path / "way/a")) == "x"


def test_appending_keeps_what_was_there(files: FileTools, tmp_path: Path) -> None:
    files.write_file("log", "one\n", append=True)
    assert files.write_file("log", "two\n", append=True) == "Wrote log: 8 bytes."
    assert (tmp_path / "log").read_text() == "one\ntwo\n"


def test_a_new_file_is_readable_by_all_and_an_old_one_keeps_its_mode(tmp_path: Path) -> None:
    files = FileTools(tmp_path)
    old_mask = os.umask(0o022)
    try:
        files.write_file("new", "x")
        files.write_file("script", "x")
        (tmp_path / "script").chmod(0o770)
        files.write_file("script", "y")
    finally:
        os.umask(old_mask)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o644
    assert stat.S_IMODE((tmp_path / "script").stat().st_mode) == 0o770


def test_nothing_else_is_left_in_the_folder(files: FileTools, tmp_path: Path) -> None:
    files.write_file("a", "x")
    files.write_file("a", "y")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ToolFailed, match="is a folder"):
        files.write_file("folder", "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "folder"]


def test_a_long_file_is_read_page_by_page(files: FileTools, tmp_path: Path) -> None:
    (tmp_path / "long").write_text("".join(f"line {i}\n" for i in range(1, 11)))
    assert files.read_file("long", limit=3) == "line 1\nline 2\nline 3\n[Lines 1 to 3 of 10: offset=4 reads on.]"
    assert files.read_file("long", offset=9) == "line 9\nline 10"
    with pytest.raises(ToolFailed, match="has 10 lines"):
        files.read_file("long", offset=11)


def test_many_long_lines_end_where_a_page_is_full(files: FileTools, tmp_path: Path) -> None:
    (tmp_path / "wide").write_text("\n".join(["x" * 25_000] * 4))
    assert files.read_file("wide").endswith("\n[Lines 1 to 2 of 4: offset=3 reads on.]")


def test_of_an_endless_line_the_beginning_is_shown(files: FileTools, tmp_path: Path) -> None:
    (tmp_path / "wide").write_text("x" * 100_000 + "\nnext")
    page = files.read_file("wide")
    assert "[40,000 more characters in this line]\n[Lines 1 to 1 of 2: offset=2 reads on.]" in page
    assert files.read_file("wide", offset=2) == "next"


@pytest.mark.parametrize("text", ["plain", "", "ends\n\n", "\u2028 is no end of a line"])
def test_short_text_is_shown_whole(files: FileTools, text: str) -> None:
    files.write_file("a", text)
    assert files.read_file("a") == (text.removesuffix("\n") or "[empty]")


def test_other_encodings_are_read_and_binary_is_only_said(files: FileTools, tmp_path: Path) -> None:
    (tmp_path / "wide").write_bytes("grün".encode("utf-16"))
    (tmp_path / "marked").write_bytes(b"\xef\xbb\xbfx")
    (tmp_path / "old").write_bytes("lange Zeit grün".encode("latin-1"))
    (tmp_path / "image").write_bytes(b"\x89PNG\0\0\0")
    assert files.read_file("wide") == "grün"
    assert files.read_file("marked") == "x"
    assert files.read_file("old") == "lange Zeit gr\ufffdn"
    assert files.read_file("image") == "[image is binary, 7 bytes: not shown.]"


def test_too_large_is_said_with_the_size(files: FileTools, tmp_path: Path) -> None:
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ToolFailed, match=r"1,099,511,627,776 bytes"):
        files.read_file("huge")
    with pytest.raises(ToolFailed, match="write less"):
        files.write_file("new", "x" * ((16 << 20) + 1))
    assert files.file_exists("new") == {"exists": False}


def test_a_folder_is_listed_in_order_with_sizes(files: FileTools, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b/deep.py").write_text("123")
    (tmp_path / "a.py").write_text("12")
    (tmp_path / "link").symlink_to("b")
    assert files.list_files() == "a.py  2\nb/\nlink  (link)"
    assert files.list_files(recursive=True) == "a.py  2\nb/\nb/deep.py  3\nlink  (link)"
    assert files.list_files("b") == "deep.py  3"
    assert files.list_files(pattern="**/*.py") == "a.py  2\nb/deep.py  3"
    assert files.list_files(pattern="b/*", recursive=True) == "b/deep.py  3"
    assert files.list_files(pattern="*.c") == "[nothing]"


def test_a_listing_ends(files: FileTools, tmp_path: Path) -> None:
    for i in range(1001):
        (tmp_path / f"{i:04}").touch()
    assert files.list_files().splitlines()[-2:] == ["0999  0", "[There is more: give a narrower path or pattern.]"]
    assert files.list_files(pattern="100*") == "1000  0"


def test_a_name_cannot_look_like_two(files: FileTools, tmp_path: Path) -> None:
    (tmp_path / "a\nb  5").touch()
    (tmp_path / os.fsdecode(b"\xff")).touch()
    assert files.list_files() == "'a\\nb  5'  0\n\ufffd  0"


def test_files_and_empty_folders_can_be_deleted(files: FileTools, tmp_path: Path) -> None:
    files.write_file("folder/a", "x")
    with pytest.raises(ToolFailed, match="not empty"):
        files.delete_file("folder")
    assert files.delete_file("folder/a") == "Deleted the file folder/a."
    assert files.delete_file("folder") == "Deleted the folder folder."
    with pytest.raises(ToolFailed, match="does not exist"):
        files.delete_file("folder")
    with pytest.raises(ToolFailed, match="working folder itself"):
        files.delete_file(".")
    assert tmp_path.exists()


def test_existence_is_told_with_kind_and_size(files: FileTools, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("123")
    (tmp_path / "link").symlink_to("a")
    assert files.file_exists("a") == {"exists": True, "kind": "file", "bytes": 3}
    assert files.file_exists(".")["kind"] == "folder"
    assert files.file_exists("link")["kind"] == "link"
    assert files.file_exists("b") == files.file_exists("a/b") == files.file_exists("no/b") == {"exists": False}


def test_half_a_character_is_not_written(files: FileTools) -> None:
    with pytest.raises(ToolFailed, match="surrogate"):
        files.write_file("a", "\ud800")
