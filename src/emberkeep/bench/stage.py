"""What every workload gets: a model, words for prompts, and a folder of its own on the disk to be measured."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from emberkeep.bench.texts import Words


@dataclass(frozen=True, slots=True)
class Stage:
    model: Path
    words: Words
    folder: Path
    say: Callable[[str], None]
    """Tells whoever waits what is being done now."""

    def new_data_dir(self) -> Path:
        """An empty store's home."""
        return Path(tempfile.mkdtemp(dir=self.folder))


@contextmanager
def open_stage(model: Path, parent: Path | None, say: Callable[[str], None]) -> Iterator[Stage]:
    """Makes a folder in `parent` (default: the system's place for temporary files) and removes it at the end."""
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="emberkeep-bench-", dir=parent)).resolve()
    try:
        yield Stage(model.resolve(), Words.of_model(model), folder, say)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
