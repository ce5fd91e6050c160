"""Models from the Hugging Face hub, through its own client: resume and tokens are its business."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path, PurePosixPath
from threading import Event, Thread
from typing import TYPE_CHECKING

from emberkeep.errors import DownloadFailed, ModelError
from emberkeep.models.parts import is_model_name, name_parts, part_name, some, whole_name
from emberkeep.models.profile import BESIDE_WEIGHTS, CONFIG, WEIGHTS
from emberkeep.models.spec import Fetched, HubFile, HubQuantisation, HubRepo, Reporter

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

HubSource = HubFile | HubQuantisation | HubRepo

_LOOK_EVERY_S = 0.25

# The client is imported inside functions because that takes half a second, which no other command should pay.


def fetch_hub(source: HubFile | HubQuantisation, folder: Path, reporter: Reporter) -> list[Fetched]:
    """The files of a GGUF model, each with the SHA-256 that the hub promises for it, if it does.

    Blocks. What an interrupted call has downloaded stays in `folder` for the next. Raises ModelError.
    """
    if isinstance(source, HubFile) and part_name(source.file) is None:
        return [_fetch_file(source, folder, reporter)]
    with _explain_errors(source):
        seen = _model_info(source)
        files, promised = _fetch_files(source, seen, _parts(source, _names(seen)), folder, reporter)
    return [(file, promised.get(name)) for name, file in files.items()]


def fetch_hub_repo(
    source: HubRepo, folder: Path, reporter: Reporter
) -> tuple[Mapping[str, Path], Mapping[str, str]]:
    """By name the files of a model, and the SHA-256 that the hub promises for those that it does for.

    Blocks. What an interrupted call has downloaded stays in `folder` for the next. Raises ModelError.
    """
    with _explain_errors(source):
        seen = _model_info(source)
        files, promised = _fetch_files(source, seen, _repo_files(source, _names(seen)), folder, reporter)
    return files, promised


def _fetch_file(source: HubFile, folder: Path, reporter: Reporter) -> Fetched:
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    endpoint = os.environ.get("HF_ENDPOINT")
    with _explain_errors(source):
        url = hf_hub_url(source.repo, source.file, revision=source.revision, endpoint=endpoint)
        seen = get_hf_file_metadata(url, endpoint=endpoint)
        with _telling_progress(folder / "hub", seen.size, reporter):
            path = hf_hub_download(
                source.repo,
                source.file,
                revision=seen.commit_hash or source.revision,
                local_dir=folder / "hub",
                endpoint=endpoint,
            )
    return Path(path), seen.etag if re.fullmatch("[0-9a-f]{64}", seen.etag or "") else None


def _model_info(source: HubSource) -> ModelInfo:
    from huggingface_hub import HfApi

    api = HfApi(os.environ.get("HF_ENDPOINT"))
    return api.model_info(source.repo, revision=source.revision, files_metadata=True)


def _names(seen: ModelInfo) -> list[str]:
    """The paths of a repository's files; without those that would lead out of the folder they are put into."""
    paths = (PurePosixPath(file.rfilename) for file in seen.siblings or ())
    return [str(path) for path in paths if not path.is_absolute() and ".." not in path.parts]


def _fetch_files(
    source: HubSource, seen: ModelInfo, names: Sequence[str], folder: Path, reporter: Reporter
) -> tuple[Mapping[str, Path], Mapping[str, str]]:
    """By name, the files of one commit, and the SHA-256 that the hub promises for those that it does for."""
    from huggingface_hub import snapshot_download

    total = sum(file.size or 0 for file in seen.siblings or () if file.rfilename in names)
    with _telling_progress(folder / "hub", total or None, reporter):
        path = snapshot_download(
            source.repo,
            revision=seen.sha,
            local_dir=folder / "hub",
            allow_patterns=[escape(name) for name in names],
            endpoint=os.environ.get("HF_ENDPOINT"),
        )
    promised = {file.rfilename: file.lfs.sha256 for file in seen.siblings or () if file.lfs}
    return {name: Path(path) / name for name in names}, promised


@contextmanager
def _telling_progress(folder: Path, total: int | None, reporter: Reporter) -> Iterator[None]:
    """While the client writes to `folder`, tell how much is there: in place of its own bars."""
    ended = Event()

    def tell() -> None:
        with suppress(ModelError):  # given up: the pull ends when the client comes back
            while not ended.wait(_LOOK_EVERY_S):
                done = _bytes_in(folder)
                reporter.progress("Downloading", min(done, total) if total else done, total)

    telling = Thread(target=tell, name="emberkeep-download", daemon=True)
    telling.start()
    try:
        with _without_bars():
            yield
    finally:
        ended.set()
        telling.join()
    if total:
        reporter.progress("Downloading", total, total)


@contextmanager
def _without_bars() -> Iterator[None]:
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    had_none = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not had_none:
            enable_progress_bars()


def _bytes_in(folder: Path) -> int:
    found = 0
    for file in folder.rglob("*"):
        with suppress(OSError):  # it is renamed when it is complete
            found += file.stat().st_size if file.is_file() else 0
    return found


def _parts(source: HubFile | HubQuantisation, names: Sequence[str]) -> list[str]:
    """The files of the model that is meant."""
    first = source.file if isinstance(source, HubFile) else _only_model(source, names)
    part = part_name(first)
    files = [str(other) for other in part.all()] if part else [first]
    missing = [number for number, file in enumerate(files, 1) if file not in names]
    if missing:
        raise DownloadFailed(
            f"hf:{source.repo} lacks {name_parts(missing, len(files))} of {whole_name(first)}: "
            "check the name and the revision, or choose another quantisation."
        )
    return files


def _only_model(source: HubQuantisation, names: Sequence[str]) -> str:
    """The name of the first file of the model with this quantisation."""
    models = sorted({whole_name(name) for name in names if is_model_name(name)})
    # Q4_K is no Q4_K_M, and Q4_XS no IQ4_XS.
    wanted = re.compile(rf"(?<![a-z0-9]){re.escape(source.quantisation)}(?![a-z0-9_])", re.IGNORECASE)
    found = [model for model in models if wanted.search(model.removesuffix(".gguf"))]
    if len(found) == 1:
        return found[0]
    if found:
        raise ModelError(
            f"{source.label} could be any of {some(found)}: name the file (hf:{source.repo}/file.gguf)."
        )
    there = f"has {some(models)}" if models else "has no GGUF files"
    raise ModelError(f"There is no {source.quantisation} in hf:{source.repo}, which {there}: choose another.")


def _repo_files(source: HubRepo, names: Sequence[str]) -> list[str]:
    """What is needed to run the model. Some repositories hold the same weights twice, under other names."""
    weights = [name for name in names if fnmatchcase(name, WEIGHTS) and "/" not in name]
    weights = [name for name in weights if name.startswith("model")] or weights
    if not weights or CONFIG not in names:
        raise ModelError(
            f"{source.label} holds no model as {CONFIG} and safetensors: choose another, "
            f"or name one file ({source.label}/file.gguf) or a quantisation ({source.label}:Q4_K_M)."
        )
    # A star stands for slashes, too: as many of them have to be there as the pattern has.
    beside = [
        name
        for name in names
        if any(fnmatchcase(name, each) and name.count("/") == each.count("/") for each in BESIDE_WEIGHTS)
    ]
    return sorted({*weights, *beside})


@contextmanager
def _explain_errors(source: HubSource) -> Iterator[None]:
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, OfflineModeIsEnabled

    try:
        yield
    except ModelError:
        raise
    except OfflineModeIsEnabled as error:
        raise DownloadFailed(f"{source.label} cannot be pulled while HF_HUB_OFFLINE is set: unset it.") from error
    except GatedRepoError as error:
        raise DownloadFailed(
            f"{source.repo} is gated; accept its terms on its page, run `hf auth login` and pull again."
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "an error"
        raise DownloadFailed(
            f"The hub answered {status} for {source.label}; check owner, repository, file and revision."
        ) from error
    except Exception as error:
        # The client's HTTP library, and with it what it raises, changes between its versions.
        raise DownloadFailed(
            f"{source.label} could not be downloaded ({_first_line(error)}); pull again to resume."
        ) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
