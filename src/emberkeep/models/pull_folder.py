"""Getting a model that is a folder: fetch its files, check them, install them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from emberkeep.errors import ModelBroken
from emberkeep.files import private_folder, sync
from emberkeep.models.digest import folder_digest, remember, sha256_of
from emberkeep.models.folder import SHAPING, folder_files, profile_of
from emberkeep.models.library import InstalledModel, ModelLibrary, Record
from emberkeep.models.reporting import Reporter
from emberkeep.models.sources.hub import fetch_hub_repo
from emberkeep.models.sources.local import fetch_local_folder
from emberkeep.models.spec import FolderSource, HubRepo
from emberkeep.models.workspace import already_here, workspace


def pull_folder(id: str, source: FolderSource, library: ModelLibrary, reporter: Reporter) -> InstalledModel:
    """As `pull`. Blocks. Raises ModelError; then nothing was installed."""
    here = already_here(id, source, library)
    if here is not None:
        reporter.say(f"{id} is already here.")
        return here
    with workspace(library, source) as work:
        files, promised = _download(source, work, reporter)
        digests = {file.name: _checked(file, source, promised.get(file.name), reporter) for file in files}
        return _install(id, _gathered(files, work), source, digests, library)


def _download(source: FolderSource, work: Path, reporter: Reporter) -> tuple[list[Path], Mapping[str, str]]:
    """The files, and by name the SHA-256 they must have where that is known."""
    reporter.say(f"Fetching {source.label}")
    if isinstance(source, HubRepo):
        return fetch_hub_repo(source, work)
    return fetch_local_folder(source, work, reporter), {}


def _checked(file: Path, source: FolderSource, promised: str | None, reporter: Reporter) -> str:
    digest = sha256_of(file, lambda done, total: reporter.progress(f"Checking {file.name}", done, total))
    if promised is not None and digest != promised:
        raise ModelBroken(f"{source.label}/{file.name} does not have the SHA-256 it should have; pull it again.")
    sync(file)
    return digest


def _gathered(files: Sequence[Path], work: Path) -> Path:
    """One folder with nothing but these files."""
    gathered = work / "gathered"
    shutil.rmtree(gathered, ignore_errors=True)
    private_folder(gathered)
    for file in files:
        file.rename(gathered / file.name)
    sync(gathered)
    return gathered


def _install(
    id: str, folder: Path, source: FolderSource, digests: Mapping[str, str], library: ModelLibrary
) -> InstalledModel:
    shaping = {file.name: digests[file.name] for file in folder_files(folder, SHAPING)}
    record = Record(
        source=source.label,
        sha256=folder_digest(shaping),
        size=sum(file.stat().st_size for file in folder.iterdir()),
        quantisation=profile_of(folder).quantisation,
        pulled_at=int(time.time()),
    )
    model = library.install(id, folder, record)
    for name, digest in shaping.items():
        remember(model.path / name, digest, library.digests)
    return model
