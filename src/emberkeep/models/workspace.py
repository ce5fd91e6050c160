"""Where a pull works until its model is complete."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from emberkeep.errors import DownloadFailed, ModelBroken, ModelError, ModelNotFound
from emberkeep.models.folder import profile_of
from emberkeep.models.library import InstalledModel, ModelLibrary
from emberkeep.models.spec import Source


def already_here(id: str, source: Source, library: ModelLibrary) -> InstalledModel | None:
    """The usable model called `id`, if there is one. Raises ModelError where it came from another source."""
    try:
        model = library.get(id)
        profile_of(model.path)
    except (ModelNotFound, ModelBroken):
        return None
    if model.record.source != source.label:
        raise ModelError(
            f"A model called {id} is here already, from {model.record.source}; "
            f"give this one another --name, or `emberkeep models remove {id}` first."
        )
    return model


@contextmanager
def workspace(library: ModelLibrary, source: Source) -> Iterator[Path]:
    """This pull's own folder; gone afterwards, unless there is something in it to resume from.

    Raises DownloadFailed when another process uses it, or the disk does not play along.
    """
    try:
        folder = library.workspace(source.label)
        with (folder / "lock").open("w") as lock:
            _claim(lock.fileno(), source)
            try:
                yield folder
            except ModelBroken:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise DownloadFailed(
            f"The model could not be stored in {library.root} ({error.strerror or error}): "
            "make room, or choose another --data-dir."
        ) from error


def _claim(lock: int, source: Source) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise DownloadFailed(f"Another process is pulling {source.label}; wait until it is done.") from error
