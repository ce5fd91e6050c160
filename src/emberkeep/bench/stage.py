"""What every workload gets: a model, words for prompts, and a folder of its own on the disk to be measured."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from emberkeep.bench.words import Words
from emberkeep.errors import EmberkeepError
from emberkeep.models.gguf import read_header
from emberkeep.models.profile import profile
from emberkeep.values import dataclass


@dataclass(frozen=True, slots=True)
class Folder:
    """What a workload without a model gets."""

    folder: Path
    say: Callable[[str], None]
    """Tells the user who waits what is being done now."""

    def new_data_dir(self) -> Path:
        """An empty store's home."""
        return Path(tempfile.mkdtemp(dir=self.folder))


@dataclass(frozen=True, slots=True)
class ModelPlace(Folder):
    """What a workload gets that loads its model by itself."""

    model: Path


@dataclass(frozen=True, slots=True)
class Stage(ModelPlace):
    words: Words


def require_context(model: Path, needed: Mapping[str, int]) -> None:
    """Raises EmberkeepError when a workload needs more tokens of context than the model was trained for."""
    trained = profile(read_header(model)).context_length
    for name, tokens in needed.items():
        if tokens > trained:
            raise EmberkeepError(
                f"{name} would need {tokens:,} tokens of context and this model was trained for {trained:,}: "
                "choose smaller sizes or another --model."
            )


@contextmanager
def open_stage(model: Path, parent: Path | None, say: Callable[[str], None]) -> Iterator[Stage]:
    with open_place(model, parent, say) as place:
        yield Stage(place.folder, say, place.model, Words.of_model(model))


@contextmanager
def open_place(model: Path, parent: Path | None, say: Callable[[str], None]) -> Iterator[ModelPlace]:
    with open_folder(parent, say) as place:
        # Not without its links: the parts of a split model are found by the names that these have.
        yield ModelPlace(place.folder, say, model.absolute())


@contextmanager
def open_folder(parent: Path | None, say: Callable[[str], None]) -> Iterator[Folder]:
    """Makes a folder in `parent` (default: the system's place for temporary files) and removes it at the end."""
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="emberkeep-bench-", dir=parent)).resolve()
    try:
        yield Folder(folder, say)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
