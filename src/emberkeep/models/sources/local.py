"""A model that is already on this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from emberkeep.files import private_folder
from emberkeep.models.digest import Progress, told_of_all
from emberkeep.models.folder import BESIDE_WEIGHTS, WEIGHTS, folder_files
from emberkeep.models.parts import part_files
from emberkeep.models.reporting import Reporter
from emberkeep.models.spec import LocalFile, LocalFolder

BLOCK = 4 << 20


def fetch_local(source: LocalFile, folder: Path, reporter: Reporter) -> list[Path]:
    """The files of a model: hard links where the file system allows it, else copies. Blocks. Raises OSError."""
    return _all_linked(part_files(source.path), folder, reporter)


def fetch_local_folder(source: LocalFolder, folder: Path, reporter: Reporter) -> list[Path]:
    """The files of a model, as `fetch_local` does it."""
    return _all_linked(folder_files(source.path, (WEIGHTS, *BESIDE_WEIGHTS)), folder, reporter)


def _all_linked(files: Sequence[Path], folder: Path, reporter: Reporter) -> list[Path]:
    target = private_folder(folder / "linked")
    told = told_of_all(files, lambda done, total: reporter.progress("Copying", done, total))
    # A folder of the hub's own cache holds links to its files.
    return [_linked(file.resolve(), target / file.name, tell) for file, tell in zip(files, told, strict=True)]


def _linked(source: Path, target: Path, progress: Progress) -> Path:
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        _copy(source, target, progress)
    return target


def _copy(source: Path, target: Path, progress: Progress) -> None:
    with source.open("rb") as reading, target.open("wb") as writing:
        total = os.fstat(reading.fileno()).st_size
        while block := reading.read(BLOCK):
            writing.write(block)
            progress(writing.tell(), total)
