"""The SHA-256 of a model's files, computed once per version of each file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from emberkeep.errors import ModelBroken, ModelNotFound
from emberkeep.files import private_folder, replace_file
from emberkeep.models.parts import part_files
from emberkeep.models.profile import SHAPING, folder_files

BLOCK = 4 << 20

Progress = Callable[[int, int], None]
"""Told how many bytes are done, of how many."""


@dataclass(frozen=True, slots=True)
class _Version:
    """What tells one version of a file from the next without reading it."""

    path: str
    size: int
    mtime_ns: int
    inode: int


def weights_digest(path: Path, cache_dir: Path) -> str:
    """The SHA-256 of the file in hex, from `cache_dir` where the file has not changed since.

    Blocks for a read of the whole file when it is not cached. Any number of processes may share `cache_dir`:
    each file has an entry of its own, replaced atomically. An unwritable or damaged cache only costs time.
    Raises ModelNotFound when the file cannot be read, ModelBroken when it changes while it is read.
    """
    version = _version(path)
    cached = _recall(version, cache_dir)
    if cached is not None:
        return cached
    digest = sha256_of(path)
    if _version(path) != version:
        raise ModelBroken(f"{path} changed while it was read; try again when nothing writes to it.")
    remember(path, digest, cache_dir)
    return digest


def model_digest(path: Path, cache_dir: Path) -> str:
    """`weights_digest` of a file; else one digest over all files that shape what a model computes, in a folder or
    the parts of a split model, each of which is cached for itself.

    Blocks and raises as `weights_digest`, and as `part_files`.
    """
    files = folder_files(path, SHAPING) if path.is_dir() else part_files(path)
    digests = [weights_digest(file, cache_dir) for file in files]
    if path.is_dir():
        names = (file.relative_to(path).as_posix() for file in files)
        return folder_digest(dict(zip(names, digests, strict=True)))
    return parts_digest(digests)


def known_digest(path: Path, cache_dir: Path) -> str | None:
    """What `model_digest` of a GGUF file gives, if it was computed before. Raises as `part_files`."""
    known = [_recall(_version(file), cache_dir) for file in part_files(path)]
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
    version = _version(path)
    entry = json.dumps({**asdict(version), "sha256": digest})
    try:
        private_folder(cache_dir)
        replace_file(_entry(version, cache_dir), entry.encode())
    except OSError:
        return


def sha256_of(path: Path, progress: Progress | None = None) -> str:
    """Blocks for a read of the whole file. Raises ModelNotFound when it cannot be read."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            total = os.fstat(file.fileno()).st_size
            while block := file.read(BLOCK):
                digest.update(block)
                if progress is not None:
                    progress(file.tell(), total)
    except OSError as error:
        raise ModelNotFound(f"Cannot read {path}: {error.strerror}.") from error
    return digest.hexdigest()


def _recall(version: _Version, cache_dir: Path) -> str | None:
    try:
        entry = json.loads(_entry(version, cache_dir).read_bytes())
        digest = entry.pop("sha256")
        return str(digest) if entry == asdict(version) else None
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None


def _entry(version: _Version, cache_dir: Path) -> Path:
    return cache_dir / f"{hashlib.sha256(os.fsencode(version.path)).hexdigest()[:32]}.json"


def _version(path: Path) -> _Version:
    try:
        real = path.resolve(strict=True)
        stat = real.stat()
    except OSError as error:
        raise ModelNotFound(f"Cannot read {path}: {error.strerror}.") from error
    return _Version(str(real), stat.st_size, stat.st_mtime_ns, stat.st_ino)
