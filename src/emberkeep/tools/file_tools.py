"""Tools for files below one folder."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

from pydantic import Field

from emberkeep.errors import ToolFailed
from emberkeep.text import decode_text
from emberkeep.tools.file_root import OpenFolder, Root, translate_errors
from emberkeep.tools.function import tool
from emberkeep.types.request import Json
from emberkeep.values import dataclass

_FILE_BYTES = 16 << 20
_PAGE_CHARS = 60_000
_LISTED = 1000
_MODE = 0o644
_SEEN = 50_000
_DEPTH = 32
"""Entries that one listing looks at, and how deep."""
_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}

FilePath = Annotated[str, Field(description="Path below the working folder.")]


class FileTools:
    def __init__(self, root: Path) -> None:
        """Nothing outside of `root` is read or written, and no link is followed."""
        self._root = Root(root)

    @tool(group="files", only_reads=True)
    def read_file(
        self,
        path: FilePath,
        offset: Annotated[int, Field(ge=1, description="First line.")] = 1,
        limit: Annotated[int, Field(ge=1, le=5000, description="Number of lines.")] = 200,
    ) -> str:
        """Read a text file."""
        *folders, name = self._file_parts(path)
        with translate_errors(path), self._root.folder(folders) as folder:
            data = _read(folder, name)
        text = decode_text(data)
        if text is None:
            return f"[{path} is binary, {len(data):,} bytes: not shown.]"
        return _page(text, offset, limit)

    @tool(group="files", dangerous=True, parallel=False)
    def write_file(
        self,
        path: FilePath,
        content: str,
        append: Annotated[bool, Field(description="Add to what the file has.")] = False,
    ) -> str:
        """Write a text file, in place of what it had; missing folders are made."""
        *folders, name = self._file_parts(path)
        data = _encode(content)
        with translate_errors(path), self._root.folder(folders, make=True) as folder:
            before = _replaceable(folder, name)
            if append and before is not None:
                data = _read(folder, name) + data
            if len(data) > _FILE_BYTES:
                raise ToolFailed(f"A file may have {_FILE_BYTES:,} bytes: write less, or several files.")
            _replace(folder, name, data, before)
        return f"{'Created' if before is None else 'Wrote'} {path}: {len(data):,} bytes."

    @tool(group="files", only_reads=True)
    def list_files(
        self,
        path: FilePath = ".",
        pattern: Annotated[str, Field(max_length=200, description="Such as *.py.")] = "*",
        recursive: bool = False,
    ) -> str:
        """List a folder: names with sizes in bytes; folders end with /."""
        wanted = pattern.removeprefix("**/")
        walk = _Walk(is_deep=recursive or "**" in pattern)
        lines: list[str] = []
        with translate_errors(path), self._root.folder(self._root.parts(path)) as folder:
            for entry in walk.entries(folder):
                if fnmatchcase(entry.name, wanted) or fnmatchcase(entry.path, wanted):
                    lines.append(entry.line)
                if len(lines) > _LISTED:
                    break
        if len(lines) > _LISTED or walk.is_cut:
            lines[_LISTED:] = ["[There is more: give a narrower path or pattern.]"]
        return "\n".join(lines) or "[nothing]"

    @tool(group="files", dangerous=True, parallel=False)
    def delete_file(self, path: FilePath) -> str:
        """Delete a file or an empty folder."""
        *folders, name = self._file_parts(path)
        with translate_errors(path), self._root.folder(folders) as folder:
            kind = _kind(folder.look(name))
            if kind == "folder":
                folder.remove_folder(name)
            elif kind == "file":
                folder.remove(name)
            else:
                raise ToolFailed(f"{path!r} is a {kind}: only files and empty folders can be deleted.")
        return f"Deleted the {kind} {path}."

    @tool(group="files", only_reads=True)
    def file_exists(self, path: FilePath) -> Json:
        """Tell whether a file or folder exists, and its size."""
        *folders, name = self._root.parts(path) or (".",)
        with translate_errors(path):
            try:
                with self._root.folder(folders) as folder:
                    info = folder.look(name)
            except (FileNotFoundError, NotADirectoryError):
                return {"exists": False}
        return {"exists": True, "kind": _kind(info), "bytes": info.st_size}

    def _file_parts(self, path: str) -> tuple[str, ...]:
        """As `Root.parts`, at least one."""
        parts = self._root.parts(path)
        if not parts:
            raise ToolFailed(f"{path!r} is the working folder itself: name a file in it.")
        return parts


def _kind(info: os.stat_result) -> str:
    return _KINDS.get(stat.S_IFMT(info.st_mode), "special file")


def _read(folder: OpenFolder, name: str) -> bytes:
    with folder.open(name) as file:
        data = file.read(_FILE_BYTES + 1)
        size = max(len(data), os.fstat(file.fileno()).st_size)
    if size > _FILE_BYTES:
        raise ToolFailed(f"{name!r} has {size:,} bytes, and {_FILE_BYTES:,} can be read: use a command.")
    return data


def _page(text: str, offset: int, limit: int) -> str:
    if not text:
        return "[empty]"
    lines = text.removesuffix("\n").split("\n")
    if offset > len(lines):
        raise ToolFailed(f"The file has {len(lines)} lines: choose a smaller offset.")
    shown = _fit_lines(lines[offset - 1 : offset - 1 + limit])
    last = offset + len(shown) - 1
    if last < len(lines):
        shown.append(f"[Lines {offset} to {last} of {len(lines)}: offset={last + 1} reads on.]")
    return "\n".join(shown)


def _fit_lines(lines: list[str]) -> list[str]:
    """As many as fit, at least one, if need be a part of it."""
    first = lines[0]
    if len(first) > _PAGE_CHARS:
        return [f"{first[:_PAGE_CHARS]}[{len(first) - _PAGE_CHARS:,} more characters in this line]"]
    room, shown = _PAGE_CHARS, 0
    while shown < len(lines) and len(lines[shown]) <= room:
        room -= len(lines[shown]) + 1
        shown += 1
    return lines[:shown]


def _encode(content: str) -> bytes:
    try:
        return content.encode()
    except UnicodeEncodeError:
        raise ToolFailed("The content has half a character in it (a lone surrogate): leave it out.") from None


def _replaceable(folder: OpenFolder, name: str) -> os.stat_result | None:
    """The file that is there; None for none. Raises ToolFailed for what is no plain file."""
    try:
        info = folder.look(name)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(info.st_mode):
        raise ToolFailed(f"{name!r} is a {_kind(info)}: only files can be written.")
    return info


def _replace(folder: OpenFolder, name: str, data: bytes, before: os.stat_result | None) -> None:
    """The old or the new, whatever happens; who shares the old one over a hard link keeps it."""
    temporary = f".emberkeep-{secrets.token_hex(8)}"
    try:
        with folder.create(temporary, _MODE) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            if before is not None:
                folder.set_mode(file, stat.S_IMODE(before.st_mode) & 0o777)
        folder.rename(temporary, name)
    except BaseException:
        with suppress(OSError):
            folder.remove(temporary)
        raise


# ── what is in a folder, and beneath it ──


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    path: str
    """From where the listing began."""
    info: os.stat_result

    @property
    def line(self) -> str:
        kind, shown = _kind(self.info), _in_one_line(self.path)
        if kind == "folder":
            return f"{shown}/"
        return f"{shown}  {self.info.st_size}" if kind == "file" else f"{shown}  ({kind})"


class _Walk:
    """One listing, in the order of names, links not followed. Blocks. Folders that cannot be entered are shown and
    passed over."""

    def __init__(self, *, is_deep: bool) -> None:
        self.is_cut = False
        """More was there than a model would read."""
        self._left = _SEEN
        self._depth = _DEPTH if is_deep else 1

    def entries(self, folder: OpenFolder, prefix: str = "", level: int = 1) -> Iterator[_Entry]:
        for name, info in self._read_entries(folder):
            yield _Entry(name, f"{prefix}{name}", info)
            if stat.S_ISDIR(info.st_mode) and level < self._depth:
                yield from self._enter(folder, name, f"{prefix}{name}/", level + 1)

    def _enter(self, folder: OpenFolder, name: str, prefix: str, level: int) -> Iterator[_Entry]:
        try:
            deeper = folder.enter(name)
        except (OSError, ToolFailed):  # not ours to read, or no folder any more
            return
        try:
            yield from self.entries(deeper, prefix, level)
        finally:
            deeper.close()

    def _read_entries(self, folder: OpenFolder) -> list[tuple[str, os.stat_result]]:
        found = []
        for entry in folder.entries():
            if self._left == 0:
                self.is_cut = True
                break
            self._left -= 1
            try:
                found.append((entry.name, entry.stat(follow_symlinks=False)))
            except OSError:  # gone meanwhile
                continue
        return sorted(found, key=lambda item: item[0])


def _in_one_line(path: str) -> str:
    """On one line, whatever the name is."""
    text = os.fsencode(path).decode("utf-8", "replace")
    return text if text.isprintable() else repr(text)
