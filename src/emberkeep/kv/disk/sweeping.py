"""Deletes what belongs to a user, by what the files themselves say."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator
from pathlib import Path

from emberkeep.kv.disk.chunkfile import namespace_of
from emberkeep.kv.disk.folders import (
    CHUNKS,
    OWNER,
    QUARANTINE,
    TMP,
    delete,
    is_chunk_name,
    list_folder,
)


def sweep_files(folder: Path, whose: Container[str]) -> int:
    """Delete their files in the store in `folder`; returns the bytes that went.

    chunks      whatever says that it is theirs, and what is named like a chunk and does not say whose it is: no
                lookup could use that
    quarantine  the same, whatever its name
    tmp         what says that it is theirs; the rest is being written, or was when its process died

    Raises OSError when some could not be looked at or deleted: the others are gone all the same.
    """
    swept, failed = 0, None
    known: dict[str | None, bool] = {}
    for path, goes_unless_it_says in _candidates(folder):
        try:
            namespace = namespace_of(path)
            if namespace not in known:
                known[namespace] = namespace is not None and namespace in whose
            if known[namespace] or (namespace is None and goes_unless_it_says):
                size = os.lstat(path).st_size
                delete(path)
                swept += size
        except FileNotFoundError:
            pass
        except OSError as error:
            failed = error
    if failed is not None:
        raise failed
    return swept


def _candidates(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Files, and whether one that does not say whose it is goes as well. Raises OSError."""
    for inner in list_folder(folder / CHUNKS):
        for entry in list_folder(Path(inner.path)) if inner.is_dir(follow_symlinks=False) else ():
            if entry.is_file(follow_symlinks=False):
                yield Path(entry.path), is_chunk_name(entry.name) is not None
    for entry in list_folder(folder / QUARANTINE):
        yield Path(entry.path), True
    for inner in list_folder(folder / TMP):
        for entry in list_folder(Path(inner.path)) if inner.is_dir(follow_symlinks=False) else ():
            if entry.is_file(follow_symlinks=False) and entry.name != OWNER:
                yield Path(entry.path), False
