"""A model from a web address: one streaming GET for each of its files, continued where it broke off.

The bytes so far are in `part`; `part.json` says which version of the remote file they belong to. A part is
only ever continued with `If-Range`, so bytes of two versions never meet in one file.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import httpx

from emberkeep.errors import DownloadFailed
from emberkeep.files import private_folder, replace_file
from emberkeep.models.spec import Reporter, UrlFile
from emberkeep.values import dataclass

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


def fetch_url(source: UrlFile, folder: Path, reporter: Reporter) -> list[Path]:
    """The complete files of a model. Blocks. Raises DownloadFailed.

    What an interrupted call has downloaded stays in `folder` for the next, which asks again for every part of a
    split model: one that has changed since then is not used with the others.
    """
    parts, files = source.parts(), []
    with httpx.Client(follow_redirects=True, timeout=TIMEOUT_S) as client:
        for number, part in enumerate(parts, 1):
            step, place = "Downloading", folder
            if len(parts) > 1:
                step, place = f"Downloading part {number} of {len(parts)}", folder / f"part-{number}"
            report = partial(reporter.progress, step)
            files.append(_fetch_one(_Download(part, private_folder(place), client, report)))
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
    """One file of a model, and the part of it that is here."""

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
