"""Models that were put into the models folder by hand: a GGUF file, all parts of a split one, or a folder.

They stay as they lie. What lies there may be half copied, or no model at all: that is told, and never an error of
somebody who asks for another model.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from emberkeep.errors import ModelError
from emberkeep.models.parts import is_model_name, model_in, part_files, part_name, whole_name
from emberkeep.models.profile import CONFIG, WEIGHTS, folder_files, is_model_folder, profile_of
from emberkeep.values import dataclass

_Version = tuple[tuple[Path, int, int], ...]


@dataclass(frozen=True, slots=True)
class Dropped:
    path: Path
    """A GGUF file, the first part of a split one, or a folder with config.json, safetensors and a tokenizer."""
    size: int
    """In bytes."""
    quantisation: str
    changed: int
    """Unix seconds."""


def entries(root: Path, record: str) -> Mapping[str, Path]:
    """What lies in `root` beside the folders that hold a `record`, by its name without a part's number; of a split
    model any part. Reads none of it."""
    found: dict[str, Path] = {}
    for entry in sorted(root.iterdir()) if root.is_dir() else ():
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            if not (entry / record).exists():
                found[entry.name] = entry
        elif is_model_name(entry.name) and (
            entry.is_file() or not entry.exists()
        ):  # no pipe: it would be waited for
            part = part_name(entry.name)
            found.setdefault(f"{part.stem}.gguf" if part else entry.name, entry)
    return found


def look_at(entry: Path) -> Dropped:
    """Raises ModelError for what is no complete model. Blocks for one pass over its headers, the first time."""
    if entry.is_dir() and not is_model_folder(entry):
        weights = model_in(entry)
        if weights is None:
            raise ModelError(
                f"{entry} holds no model: a GGUF file is needed there, or {CONFIG} and {WEIGHTS}; "
                "or move it elsewhere."
            )
    else:
        weights = entry
    files = folder_files(weights, (CONFIG, WEIGHTS)) if weights.is_dir() else part_files(weights)
    try:
        version = tuple((file, file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    except OSError as error:
        raise ModelError(f"Cannot read {entry}: {error.strerror}.") from error
    return _read(weights if weights.is_dir() else files[0], version)


@lru_cache(maxsize=256)
def _read(path: Path, version: _Version) -> Dropped:
    """`version`: of its files, so that others are read again."""
    size = sum(size for _, size, _ in version)
    changed = max(changed for _, _, changed in version) // 10**9
    return Dropped(path, size, profile_of(path).quantisation, changed)


def remove(entry: Path) -> None:
    """Delete it, with all parts that there are of it."""
    if entry.is_dir() and not entry.is_symlink():
        # Renamed first: a half-deleted folder must never be found under its name.
        trash = entry.rename(entry.with_name(f".trash-{uuid.uuid4().hex}"))
        shutil.rmtree(trash, ignore_errors=True)
        return
    name = whole_name(entry.name)
    for file in sorted(entry.parent.glob("*.gguf"), reverse=True):
        if whole_name(file.name) == name:
            file.unlink(missing_ok=True)
    entry.unlink(missing_ok=True)
