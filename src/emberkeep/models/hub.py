"""Models from the web: from the Hugging Face hub, through its own client, and from other addresses."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from fnmatch import fnmatchcase
from functools import partial
from glob import escape
from pathlib import Path, PurePosixPath
from threading import Event, Thread
from typing import TYPE_CHECKING

import httpx

from emberkeep.errors import DownloadFailed, ModelError
from emberkeep.files import private_folder, replace_file
from emberkeep.models.parts import is_weights_name, name_parts, part_name, some, whole_name
from emberkeep.models.profile import BESIDE_WEIGHTS, CONFIG, WEIGHTS
from emberkeep.models.spec import Fetched, HubFile, HubQuantisation, HubRepo, Reporter, UrlFile
from emberkeep.values import dataclass

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

HubSource = HubFile | HubQuantisation | HubRepo

_LOOK_EVERY_S = 0.25

# The client is imported inside functions because that takes half a second, which no other command should pay.


def fetch_hub(source: HubSource, folder: Path, reporter: Reporter) -> list[Fetched]:
    """The files of a model, each with the SHA-256 that the hub promises for it, if it does.

    Blocks. What an interrupted call has downloaded stays in `folder` for the next. Raises ModelError.
    """
    if isinstance(source, HubFile) and part_name(source.file) is None:
        return [_fetch_file(source, folder, reporter)]
    with _explain_errors(source):
        seen = _model_info(source)
        names = _names(seen)
        wanted = _repo_files(source, names) if isinstance(source, HubRepo) else _parts(source, names)
        return _fetch_files(source, seen, wanted, folder, reporter)


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
    promised = seen.etag if re.fullmatch("[0-9a-f]{64}", seen.etag or "") else None
    return source.file, Path(path), promised


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
) -> list[Fetched]:
    """Files of one commit."""
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
    return [(name, Path(path) / name, promised.get(name)) for name in names]


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
    models = sorted({whole_name(name) for name in names if is_weights_name(name)})
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


# ── from an address: one streaming GET for each file, continued where it broke off ──


ATTEMPTS = 5
"""Connections in a row that may break without getting further than any before."""
PAUSE_S = 1.0
TIMEOUT_S = 30.0

Progress = Callable[[int, int | None], None]
"""Is told how many bytes are here, of how many if the server says so."""


@dataclass(frozen=True, slots=True)
class _Remote:
    """One version of the remote file."""

    validator: str | None
    """A strong ETag or a date; None when the server gives neither, and a part cannot be continued."""
    total: int | None


def fetch_url(source: UrlFile, folder: Path, reporter: Reporter) -> list[Fetched]:
    """The complete files of a model. Blocks. Raises DownloadFailed.

    What an interrupted call has downloaded stays in `folder` for the next, which asks again for every part of a
    split model: one that has changed since then is not used with the others.
    """
    parts, files = source.parts(), list[Fetched]()
    with httpx.Client(follow_redirects=True, timeout=TIMEOUT_S) as client:
        for number, part in enumerate(parts, 1):
            step, place = "Downloading", folder
            if len(parts) > 1:
                step, place = f"Downloading part {number} of {len(parts)}", folder / f"part-{number}"
            report = partial(reporter.progress, step)
            file = _fetch_one(_Download(part, private_folder(place), client, report))
            files.append((file.name, file, None))
    return files


def _fetch_one(download: _Download) -> Path:
    label = download.source.label
    try:
        return _persist(download)
    except (httpx.TransportError, _ServerTrouble) as error:
        reason = str(error) or type(error).__name__
        raise DownloadFailed(f"{label} could not be downloaded ({reason}); pull again to resume.") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise DownloadFailed(f"{label} cannot be fetched ({error}); check the address.") from error


def _persist(download: _Download) -> Path:
    """Try until the file is complete or connections stop bringing anything new."""
    furthest, failures = download.received, 0
    while True:
        try:
            return download.attempt()
        except (httpx.TransportError, _ServerTrouble):
            failures = 0 if download.received > furthest else failures + 1
            furthest = max(furthest, download.received)
            if failures == ATTEMPTS:
                raise
        time.sleep(PAUSE_S * failures)


class _ServerTrouble(Exception):
    """The server cannot answer now and may be able to later."""


class _Download:
    """One file of a model, and the `part` of it that is here. `part.json` says which version it belongs to: it is
    only ever continued with `If-Range`, so bytes of two versions never meet."""

    def __init__(self, source: UrlFile, folder: Path, client: httpx.Client, report: Progress) -> None:
        self.source = source
        self._client = client
        self._part = folder / "part"
        self._sidecar = folder / "part.json"
        self._report = report

    @property
    def received(self) -> int:
        return self._part.stat().st_size if self._part.exists() else 0

    def attempt(self) -> Path:
        """One connection. Returns the complete file, or raises with everything received kept."""
        remote = self._known()
        headers = {"Accept-Encoding": "identity"}
        if self.received and remote.validator:
            headers |= {"Range": f"bytes={self.received}-", "If-Range": remote.validator}
        with self._client.stream("GET", self.source.url, headers=headers) as response:
            if response.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
                return self._nothing_left(response)
            self._require_success(response)
            remote = self._begin(response, remote)
            self._receive(response, remote)
        return self._finish(remote)

    def _require_success(self, response: httpx.Response) -> None:
        status = f"{response.status_code} {response.reason_phrase}".strip()
        if response.status_code >= 500 or response.status_code == httpx.codes.TOO_MANY_REQUESTS:
            raise _ServerTrouble(f"the server answered {status}")
        if not response.is_success:
            raise DownloadFailed(f"{self.source.label} answered {status}; check the address.")

    def _begin(self, response: httpx.Response, known: _Remote) -> _Remote:
        """Keep the part when the server continues it, else start over with what it sends."""
        if response.status_code == httpx.codes.PARTIAL_CONTENT:
            start, total = _content_range(response)
            if start == self.received:
                return _Remote(known.validator, total)
            self._forget()
            raise _ServerTrouble("the server sent another range than it was asked for")
        remote = _Remote(_validator(response), _content_length(response))
        self._forget()
        replace_file(self._sidecar, json.dumps(asdict(remote)).encode())
        return remote

    def _receive(self, response: httpx.Response, remote: _Remote) -> None:
        with self._part.open("ab") as part:
            for block in response.iter_raw():
                part.write(block)
                self._report(part.tell(), remote.total)

    def _nothing_left(self, response: httpx.Response) -> Path:
        """The part is as long as the file, or belongs to a file that no longer exists."""
        _, total = _content_range(response)
        if total is not None and total == self.received:
            return self._finish(_Remote(None, total))
        self._forget()
        raise _ServerTrouble("the file has changed on the server")

    def _finish(self, remote: _Remote) -> Path:
        received = self.received
        if remote.total is not None and received != remote.total:
            self._forget()
            raise DownloadFailed(
                f"{self.source.label} sent {received} bytes and had announced {remote.total}; pull it again."
            )
        return self._part

    def _known(self) -> _Remote:
        try:
            return _Remote(**json.loads(self._sidecar.read_bytes()))
        except (OSError, ValueError, TypeError):
            return _Remote(None, None)

    def _forget(self) -> None:
        self._part.unlink(missing_ok=True)
        self._sidecar.unlink(missing_ok=True)


def _validator(response: httpx.Response) -> str | None:
    etag: str = response.headers.get("ETag", "")
    date: str | None = response.headers.get("Last-Modified")
    # RFC 9110: a weak ETag must not be used for ranges.
    return etag if etag and not etag.startswith("W/") else date


def _content_length(response: httpx.Response) -> int | None:
    length = response.headers.get("Content-Length", "")
    return int(length) if length.isdecimal() else None


def _content_range(response: httpx.Response) -> tuple[int | None, int | None]:
    """Where the sent bytes begin and how long the whole file is, as far as the server says."""
    match = re.fullmatch(r"bytes (?:(\d+)-\d+|\*)/(?:(\d+)|\*)", response.headers.get("Content-Range", ""))
    start, total = match.groups() if match else (None, None)
    return (int(start) if start else None), (int(total) if total else None)
