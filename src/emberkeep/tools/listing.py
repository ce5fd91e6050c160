"""What is in a folder, and beneath it: in the order of names, links not followed, never without end."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from emberkeep.errors import ToolFailed
from emberkeep.tools.beneath import Folder

_SEEN = 50_000
_DEPTH = 32

_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}


def kind_of(info: os.stat_result) -> str:
    return _KINDS.get(stat.S_IFMT(info.st_mode), "special file")


@dataclass(frozen=True, slots=True)
class Entry:
    name: str
    path: str
    """From where the listing began."""
    info: os.stat_result

    @property
    def line(self) -> str:
        kind, shown = kind_of(self.info), _readable(self.path)
        if kind == "folder":
            return f"{shown}/"
        return f"{shown}  {self.info.st_size}" if kind == "file" else f"{shown}  ({kind})"


class Walk:
    """One listing. Blocks. Folders that cannot be entered are shown and passed over."""

    def __init__(self, *, is_deep: bool) -> None:
        self.is_cut = False
        """More was there than anybody would read."""
        self._left = _SEEN
        self._depth = _DEPTH if is_deep else 1

    def entries(self, folder: Folder, prefix: str = "", level: int = 1) -> Iterator[Entry]:
        for name, info in self._sorted(folder):
            yield Entry(name, f"{prefix}{name}", info)
            if stat.S_ISDIR(info.st_mode) and level < self._depth:
                yield from self._entered(folder, name, f"{prefix}{name}/", level + 1)

    def _entered(self, folder: Folder, name: str, prefix: str, level: int) -> Iterator[Entry]:
        try:
            deeper = folder.enter(name)
        except (OSError, ToolFailed):  # not ours to read, or no folder any more
            return
        try:
            yield from self.entries(deeper, prefix, level)
        finally:
            deeper.close()

    def _sorted(self, folder: Folder) -> list[tuple[str, os.stat_result]]:
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


def _readable(path: str) -> str:
    """On one line, whatever the name is."""
    text = os.fsencode(path).decode("utf-8", "replace")
    return text if text.isprintable() else repr(text)
