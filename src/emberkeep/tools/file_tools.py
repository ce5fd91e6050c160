"""Tools for files below one folder: whatever a path says, nothing outside of it is opened.

    "notes/today.md"  ->  open(root)  ->  open("notes", from it)  ->  open("today.md", from that)

Each folder on the way is opened from the one above, and a link is never followed. The check is the open: no
process can put something else there in between. Systems without such opens (Windows) compare the resolved path
instead. A hard link looks like the file it is.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path, PurePath
from typing import Annotated, BinaryIO

from pydantic import Field

from emberkeep.errors import ToolFailed
from emberkeep.text import decode_text
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


HAS_HANDLES = {os.open, os.stat, os.mkdir, os.rename, os.unlink, os.rmdir} <= os.supports_dir_fd
_NAME_BYTES = 255
_PATH_BYTES = 4096
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
_FOLDER = os.O_RDONLY | _NO_LINK | getattr(os, "O_DIRECTORY", 0)

# A pipe must not make us wait, nor a terminal become ours.
_FILE = os.O_RDONLY | _NO_LINK | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK
_NOT_ON_DISK = ("/proc", "/sys")


# ── staying beneath the folder ──


class OpenFolder:
    """One folder, held open: it stays this one whatever happens to its name. Methods block and raise OSError."""

    def __init__(self, path: Path, handle: int | None) -> None:
        self._path = path
        self._handle = handle

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)

    def enter(self, name: str) -> OpenFolder:
        """The folder of that name in this one; close it too."""
        self._refuse_link(name)
        handle = os.open(name, _FOLDER, dir_fd=self._handle) if self._handle is not None else None
        return OpenFolder(self._path / name, handle)

    def make(self, name: str) -> None:
        """Does nothing where something of that name is there."""
        with suppress(FileExistsError):
            os.mkdir(self._at(name), dir_fd=self._handle)

    def look(self, name: str) -> os.stat_result:
        """At the name itself: a link is seen as a link."""
        return os.stat(self._at(name), dir_fd=self._handle, follow_symlinks=False)

    def entries(self) -> Iterator[os.DirEntry[str]]:
        with os.scandir(self._path if self._handle is None else self._handle) as found:
            yield from found

    def open(self, name: str) -> BinaryIO:
        """A plain file for reading. Raises ToolFailed for anything else; never waits for a pipe."""
        self._refuse_link(name)
        _refuse_special(self.look(name), name)  # opening a device can already do something
        file = os.fdopen(os.open(self._at(name), _FILE, dir_fd=self._handle), "rb")
        try:
            _refuse_special(os.fstat(file.fileno()), name)
        except ToolFailed:
            file.close()
            raise
        return file

    def create(self, name: str, mode: int) -> BinaryIO:
        """Raises FileExistsError also where a link to nowhere has that name."""
        return os.fdopen(os.open(self._at(name), _NEW_FILE, mode, dir_fd=self._handle), "wb")

    def set_mode(self, file: BinaryIO, mode: int) -> None:
        """Set the mode of a file that was created here; does nothing where files have no modes."""
        if self._handle is not None:
            os.fchmod(file.fileno(), mode)

    def rename(self, old: str, new: str) -> None:
        """A link of the new name is replaced, not followed."""
        os.replace(self._at(old), self._at(new), src_dir_fd=self._handle, dst_dir_fd=self._handle)

    def remove(self, name: str) -> None:
        """A file; a link itself, not what it points to."""
        os.unlink(self._at(name), dir_fd=self._handle)

    def remove_folder(self, name: str) -> None:
        os.rmdir(self._at(name), dir_fd=self._handle)

    def _at(self, name: str) -> str:
        return name if self._handle is not None else str(self._path / name)

    def _refuse_link(self, name: str) -> None:
        """With handles only for the message: what is opened is no link in any case."""
        is_link = stat.S_ISLNK(self.look(name).st_mode)
        if is_link or (self._handle is None and (self._path / name).resolve() != self._path / name):
            raise ToolFailed(f"{name!r} is a link, and links are not followed: name the file itself.")


class Root:
    def __init__(self, path: Path) -> None:
        """`path` may be reached over links: only what is beneath it may hold none."""
        self.path = path.resolve()
        self._prefixes = (self.path, path.absolute())

    def parts(self, path: str) -> tuple[str, ...]:
        """The names on the way from the root to `path`; none for the root itself. Raises ToolFailed."""
        _check_path(path)
        pure = PurePath(path)
        if ".." in pure.parts:
            raise ToolFailed(f"{path!r} goes up with `..`: write it as a path below {self.path}.")
        if not pure.anchor:
            return pure.parts
        for prefix in self._prefixes:
            if pure.is_relative_to(prefix):
                return pure.relative_to(prefix).parts
        raise ToolFailed(f"{path!r} is outside of {self.path}, which is all that can be reached.")

    @contextmanager
    def folder(self, parts: Sequence[str], *, make: bool = False) -> Iterator[OpenFolder]:
        """The folder there, open while the context lasts; `make`: with those that are missing."""
        handle = os.open(self.path, os.O_RDONLY) if HAS_HANDLES else None
        here = OpenFolder(self.path, handle)
        try:
            for name in parts:
                if make:
                    here.make(name)
                deeper = here.enter(name)
                here.close()
                here = deeper
            yield here
        finally:
            here.close()


@contextmanager
def translate_errors(path: str) -> Iterator[None]:
    """What the system says about `path` becomes ToolFailed, in a sentence that a model can use."""
    try:
        yield
    except OSError as error:
        reason = _REASONS.get(error.errno or 0, f"cannot be used ({os.strerror(error.errno or 0)})")
        raise ToolFailed(f"{path!r} {reason}.") from error


_REASONS = {
    errno.ENOENT: "does not exist: list_files shows what does",
    errno.ENOTDIR: "has a file or a link where a folder is needed",
    errno.ELOOP: "is a link, and links are not followed",
    errno.EISDIR: "is a folder: name a file",
    errno.ENOTEMPTY: "is not empty: delete what is in it first",
    errno.EACCES: "may not be used by this user: choose another path",
    errno.EPERM: "may not be used by this user: choose another path",
    errno.EROFS: "is on a disk that can only be read: choose another path",
    errno.ENOSPC: "was not written, for the disk is full: delete something first",
    errno.EDQUOT: "was not written, for the disk is full: delete something first",
    errno.ENAMETOOLONG: "has too long a name: choose a shorter one",
    errno.ENXIO: "is no plain file: only those can be read",
}


def _check_path(path: str) -> None:
    try:
        size = len(path.encode())
    except UnicodeEncodeError:
        raise ToolFailed("The path is not Unicode text: write it in other characters.") from None
    if "\0" in path:
        raise ToolFailed("The path has a NUL character in it: leave it out.")
    if size > _PATH_BYTES or any(len(name.encode()) > _NAME_BYTES for name in PurePath(path).parts):
        raise ToolFailed("The path is too long: choose a shorter one.")
    if os.name == "nt" and any(":" in name or name.endswith((".", " ")) for name in PurePath(path).parts[1:]):
        raise ToolFailed(f"{path!r} is a name that Windows gives another meaning: choose another one.")


def _refuse_special(info: os.stat_result, name: str) -> None:
    if stat.S_ISDIR(info.st_mode):
        raise ToolFailed(f"{name!r} is a folder: list_files shows what is in it.")
    if not stat.S_ISREG(info.st_mode) or info.st_dev in _kernel_devices():
        raise ToolFailed(f"{name!r} is no plain file: only those can be read.")


@cache
def _kernel_devices() -> frozenset[int]:
    """Where files are answers of the kernel, among them every program's environment."""
    mounted = [path for path in _NOT_ON_DISK if Path(path).is_mount()]
    return frozenset(Path(path).stat().st_dev for path in mounted)
