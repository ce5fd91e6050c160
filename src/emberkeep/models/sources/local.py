"""A model that is already on this machine."""

from __future__ import annotations

import os
from pathlib import Path

from emberkeep.models.reporting import Reporter
from emberkeep.models.spec import LocalFile

BLOCK = 4 << 20


def fetch_local(source: LocalFile, folder: Path, reporter: Reporter) -> Path:
    """A hard link where the file system allows it, else a copy. Blocks. Raises OSError."""
    target = folder / "linked.gguf"
    target.unlink(missing_ok=True)
    try:
        os.link(source.path, target)
    except OSError:
        _copy(source.path, target, reporter)
    return target


def _copy(source: Path, target: Path, reporter: Reporter) -> None:
    with source.open("rb") as reading, target.open("wb") as writing:
        total = os.fstat(reading.fileno()).st_size
        while block := reading.read(BLOCK):
            writing.write(block)
            reporter.progress("Copying", writing.tell(), total)
