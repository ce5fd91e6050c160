"""The SHA-256 of a model's files, computed once per version of each file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from emberkeep import file_digests
from emberkeep.errors import ModelBroken, ModelNotFound
from emberkeep.file_digests import Changed, FileVersion, Progress, recall, remembered_digest
from emberkeep.models.parts import part_files
from emberkeep.models.profile import SHAPING, folder_files


def weights_digest(path: Path, cache_dir: Path, progress: Progress | None = None) -> str:
    """The SHA-256 of the file in hex, from `cache_dir` where the file has not changed since; `progress` is told
    while it is read.

    Blocks as `remembered_digest`. Raises ModelNotFound when the file cannot be read, ModelBroken when it changes
    while it is read.
    """
    try:
        return remembered_digest(path, cache_dir, lambda file: sha256_of(file, progress))
    except OSError as error:
        raise _unreadable(path, error) from error
    except Changed as error:
        raise ModelBroken(str(error)) from error


def model_digest(path: Path, cache_dir: Path, progress: Progress | None = None) -> str:
    """`weights_digest` of a file; else one digest over all files that shape what a model computes, in a folder or
    the parts of a split model, each of which is cached for itself.

    Blocks and raises as `weights_digest`, and as `part_files`.
    """
    files = _shaping_files(path)
    told = split_progress(files, progress) if progress is not None else [None] * len(files)
    digests = [weights_digest(file, cache_dir, tell) for file, tell in zip(files, told, strict=True)]
    if path.is_dir():
        names = (file.relative_to(path).as_posix() for file in files)
        return folder_digest(dict(zip(names, digests, strict=True)))
    return parts_digest(digests)


def file_versions(path: Path) -> list[FileVersion]:
    """The versions of the files that `model_digest` reads. Raises as that does."""
    return [_version(file) for file in _shaping_files(path)]


def _shaping_files(path: Path) -> Sequence[Path]:
    return folder_files(path, SHAPING) if path.is_dir() else part_files(path)


def known_digest(path: Path, cache_dir: Path) -> str | None:
    """What `model_digest` of a GGUF file gives, if it was computed before. Raises as `part_files`."""
    known = [recall(_version(file), cache_dir) for file in part_files(path)]
    return parts_digest([digest for digest in known if digest]) if all(known) else None


def parts_digest(digests: Sequence[str]) -> str:
    """One digest for those of a GGUF model's files, by number; whatever the files are called."""
    if len(digests) == 1:
        return digests[0]
    lines = [f"{number} of {len(digests)} {digest}" for number, digest in enumerate(digests, 1)]
    return hashlib.sha256("\n".join(["split GGUF", *lines]).encode()).hexdigest()


def split_progress(files: Sequence[Path], progress: Progress) -> list[Progress]:
    """For each of the files what tells `progress` how much of all of them is done when it is told of that one."""
    sizes = [_version(file).size for file in files]
    return [_shift_progress(progress, sum(sizes[:before]), sum(sizes)) for before in range(len(files))]


def _shift_progress(progress: Progress, before: int, total: int) -> Progress:
    return lambda done, _: progress(before + done, total)


def folder_digest(digests: Mapping[str, str]) -> str:
    """One digest for those of a folder's shaping files, by name."""
    lines = [f"{name} {digest}" for name, digest in sorted(digests.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def remember(path: Path, digest: str, cache_dir: Path) -> None:
    """Store a digest that is already known. Best effort."""
    file_digests.remember(_version(path), digest, cache_dir)


def sha256_of(path: Path, progress: Progress | None = None) -> str:
    """Blocks for a read of the whole file. Raises ModelNotFound when it cannot be read."""
    try:
        return file_digests.sha256_of(path, progress)
    except OSError as error:
        raise _unreadable(path, error) from error


def _version(path: Path) -> FileVersion:
    try:
        return FileVersion.of(path)
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> ModelNotFound:
    return ModelNotFound(f"Cannot read {path}: {error.strerror}.")
