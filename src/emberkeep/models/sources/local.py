"""A model that is already on this machine."""

from __future__ import annotations

import os
from pathlib import Path

from emberkeep.files import private_folder
from emberkeep.models.folder import BESIDE_WEIGHTS, WEIGHTS, folder_files
from emberkeep.models.reporting import Reporter
from emberkeep.models.spec import LocalFile, LocalFolder

BLOCK = 4 << 20


def fetch_local(source: LocalFile, folder: Path, reporter: Reporter) -> Path:
    """A hard link where the file system allows it, else a copy. Blocks. Raises OSError."""
    return _linked(source.path, folder / "linked.gguf", reporter)


def fetch_local_folder(source: LocalFolder, folder: Path, reporter: Reporter) -> list[Path]:
    """The files of a model, as `fetch_local` does it."""
    files = folder_files(source.path, (WEIGHTS, *BESIDE_WEIGHTS))
    target = private_folder(folder / "linked")
    # A folder of the hub's own cache holds links to its files.
    return [_linked(file.resolve(), target / file.name, reporter) for file in files]


def _linked(source: Path, target: Path, reporter: Reporter) -> Path:
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        _copy(source, target, reporter)
    return target


def _copy(source: Path, target: Path, reporter: Reporter) -> None:
    with source.open("rb") as reading, target.open("wb") as writing:
        total = os.fstat(reading.fileno()).st_size
        while block := reading.read(BLOCK):
            writing.write(block)
            reporter.progress("Copying", writing.tell(), total)
