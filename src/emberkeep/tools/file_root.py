"""Files beneath one folder: whatever a path says, nothing outside of it is opened.

    "notes/today.md"  ->  open(root)  ->  open("notes", from it)  ->  open("today.md", from that)

Each folder on the way is opened from the one above, and a link is never followed. The check is the open: no
process can put something else there in between. Systems without such opens (Windows) compare the resolved path
instead. A hard link looks like the file it is.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path, PurePath
from typing import BinaryIO

from emberkeep.errors import ToolFailed

HAS_HANDLES = {os.open, os.stat, os.mkdir, os.rename, os.unlink, os.rmdir} <= os.supports_dir_fd

_NAME_BYTES = 255
_PATH_BYTES = 4096
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
_FOLDER = os.O_RDONLY | _NO_LINK | getattr(os, "O_DIRECTORY", 0)
# A pipe must not make us wait, nor a terminal become ours.
_FILE = os.O_RDONLY | _NO_LINK | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK
_NOT_ON_DISK = ("/proc", "/sys")


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
