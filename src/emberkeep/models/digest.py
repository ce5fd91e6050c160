"""The SHA-256 of a model's files, computed once per version of each file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from emberkeep import files
from emberkeep.errors import ModelBroken, ModelNotFound
from emberkeep.files import Changed, FileVersion, Progress, recall, remembered_digest
from emberkeep.models.parts import part_files
from emberkeep.models.profile import SHAPING_FILES, folder_files


def weights_digest(path: Path, cache_dir: Path, progress: Progress | None = None) -> str:
    """The SHA-256 of the file in hex, from `cache_dir` where the file has not changed since; `progress` is told
    while it is read.

    Blocks as `remembered_digest`. Raises ModelNotFound when the file cannot be read, ModelBroken when it changes
    while it is read.
    """
    with _explained(path):
        return remembered_digest(path, cache_dir, lambda file: sha256_of(file, progress))


def model_digest(path: Path, cache_dir: Path, progress: Progress | None = None) -> str:
    """`weights_digest` of a file; else one digest over all files that shape what a model computes, in a folder or
    the parts of a split model, each of which is cached for itself.

    Blocks and raises as `weights_digest`, and as `part_files`.
    """
    shaping = shaping_files(path)
    reports = split_progress(shaping, progress) if progress is not None else [None] * len(shaping)
    digests = [weights_digest(file, cache_dir, report) for file, report in zip(shaping, reports, strict=True)]
    return joined_digest(path, digests)


def file_versions(path: Path) -> list[FileVersion]:
    """The versions of the files that `model_digest` reads. Raises as that does."""
    return [_version(file) for file in shaping_files(path)]


def shaping_files(path: Path) -> Sequence[Path]:
    """The files that shape what the model at `path` computes. Raises as `part_files`."""
    return folder_files(path, SHAPING_FILES) if path.is_dir() else part_files(path)


def known_digest(path: Path, cache_dir: Path) -> str | None:
    """What `model_digest` of a GGUF file gives, if it was computed before. Raises as `part_files`."""
    known = [recall(_version(file), cache_dir) for file in part_files(path)]
    return joined_digest(path, [digest for digest in known if digest]) if all(known) else None


def joined_digest(path: Path, digests: Sequence[str]) -> str:
    """One digest for those of the model's shaping files: in a folder by name, of parts by number, whatever these
    are called."""
    if path.is_dir():
        names = [file.relative_to(path).as_posix() for file in shaping_files(path)]
        lines = [f"{name} {digest}" for name, digest in sorted(zip(names, digests, strict=True))]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()
    if len(digests) == 1:
        return digests[0]
    lines = [f"{number} of {len(digests)} {digest}" for number, digest in enumerate(digests, 1)]
    return hashlib.sha256("\n".join(["split GGUF", *lines]).encode()).hexdigest()


def split_progress(parts: Sequence[Path], progress: Progress) -> list[Progress]:
    """For each file a report that tells `progress` how much of all of them is done."""
    sizes = [_version(file).size for file in parts]

    def report_after(before: int) -> Progress:
        return lambda done, _: progress(sum(sizes[:before]) + done, sum(sizes))

    return [report_after(number) for number in range(len(parts))]


def remember(path: Path, digest: str, cache_dir: Path) -> None:
    """Store a digest that is already known. Best effort."""
    files.remember(_version(path), digest, cache_dir)


def sha256_of(path: Path, progress: Progress | None = None) -> str:
    """Blocks for a read of the whole file. Raises ModelNotFound when it cannot be read."""
    with _explained(path):
        return files.sha256_of(path, progress)


def _version(path: Path) -> FileVersion:
    with _explained(path):
        return FileVersion.of(path)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Raises ModelNotFound, ModelBroken."""
    try:
        yield
    except OSError as error:
        raise ModelNotFound(f"Cannot read {path}: {error.strerror}.") from error
    except Changed as error:
        raise ModelBroken(str(error)) from error
