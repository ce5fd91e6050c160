"""A web server for one file, or several, with the faults of real ones; the hub; and a pull that is watched."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

from emberkeep.models.spec import Silent


@dataclass
class ServedFile:
    content: bytes
    etag: str | None = '"v1"'
    last_modified: str | None = None
    understands_ranges: bool = True
    shifts_ranges: bool = False
    """Ranges begin one byte later than asked."""
    announces: int | None = None
    """A Content-Length other than the true one, with the connection closed at the true end."""
    extra_headers: dict[str, str] = field(default_factory=dict)
    cuts: list[int] = field(default_factory=list)
    """After how many bytes of the body the next answers break off, one each."""
    statuses: list[int] = field(default_factory=list)
    """What the next answers say instead of sending the file, one each."""
    ranges: list[str | None] = field(default_factory=list)
    """The Range header of every GET so far."""
    url: str = ""


@contextmanager
def serving(file: ServedFile) -> Iterator[ServedFile]:
    """The same file at every address."""
    with serving_with(_handler(lambda _: file)) as url:
        file.url = url
        yield file


@contextmanager
def serving_folder(files: Mapping[str, ServedFile]) -> Iterator[str]:
    """By name, in the folder whose address it gives."""
    with serving_with(_handler(lambda path: files.get(path.rpartition("/")[2]))) as url:
        yield f"{url}/folder"


@contextmanager
def serving_with(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Gives the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _handler(find: Callable[[str], ServedFile | None]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            file = self._file()
            if file.statuses:
                self._send_status(file.statuses.pop(0))
            else:
                self._send_head(200, len(file.content))

        def do_GET(self) -> None:
            file = self._file()
            file.ranges.append(self.headers.get("Range"))
            if file.statuses:
                self._send_status(file.statuses.pop(0))
            else:
                self._send(self._start())

        def _file(self) -> ServedFile:
            return find(self.path.partition("?")[0]) or ServedFile(b"", statuses=[404])

        def _send_status(self, status: int) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def _start(self) -> int:
            """Where the answer begins: the range counts only for the version the client knows."""
            file = self._file()
            wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
            current = file.etag or file.last_modified
            if not file.understands_ranges or wanted is None or self.headers["If-Range"] not in (None, current):
                return 0
            return int(wanted[1]) + file.shifts_ranges

        def _send(self, start: int) -> None:
            file = self._file()
            body = file.content[start:]
            total = len(file.content)
            if start and not body:
                self._send_head(416, 0, {"Content-Range": f"bytes */{total}"})
                return
            extra = {"Content-Range": f"bytes {start}-{total - 1}/{total}"} if start else {}
            self._send_head(206 if start else 200, file.announces or len(body), extra)
            self.wfile.write(body[: file.cuts.pop(0)] if file.cuts else body)
            self.close_connection = True

        def _send_head(self, status: int, length: int, extra: dict[str, str] | None = None) -> None:
            file = self._file()
            self.send_response(status)
            self.send_header("Content-Length", str(length))
            if file.etag:
                self.send_header("ETag", file.etag)
            if file.last_modified:
                self.send_header("Last-Modified", file.last_modified)
            for name, value in {**file.extra_headers, **(extra or {})}.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    return Handler


# ── the hub, with one repository, as its client asks for it ──

COMMIT = "c" * 40
LARGE = (".safetensors", ".gguf")
"""For these the hub promises a SHA-256."""


@dataclass
class ServedRepo:
    repo: str
    files: dict[str, bytes]
    promised: dict[str, str] = field(default_factory=dict)
    """Other SHA-256 than the files have."""
    status: int = 200
    refused: set[str] = field(default_factory=set)
    """Files that are listed and cannot be had now."""
    downloads: list[str] = field(default_factory=list)
    """The files that were sent so far."""
    url: str = ""

    def sha256(self, name: str) -> str:
        return self.promised.get(name) or hashlib.sha256(self.files[name]).hexdigest()

    def about(self) -> Mapping[str, object]:
        return {"id": self.repo, "sha": COMMIT, "siblings": [self._sibling(name) for name in self.files]}

    def tree(self) -> list[Mapping[str, object]]:
        return [
            {"type": "file", "path": name, "size": len(data), "oid": "b" * 40} for name, data in self.files.items()
        ]

    def _sibling(self, name: str) -> Mapping[str, object]:
        size = len(self.files[name])
        sibling: dict[str, object] = {"rfilename": name, "size": size, "blobId": "b" * 40}
        if name.endswith(LARGE):
            sibling["lfs"] = {"size": size, "sha256": self.sha256(name), "pointerSize": 130}
        return sibling


@contextmanager
def serving_repo(repo: ServedRepo) -> Iterator[ServedRepo]:
    with serving_with(_repo_handler(repo)) as url:
        repo.url = url
        yield repo


def _repo_handler(repo: ServedRepo) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, *, with_body: bool) -> None:
            path = unquote(self.path.partition("?")[0])
            api, files = f"/api/models/{repo.repo}", f"/{repo.repo}/resolve/{COMMIT}/"
            if repo.status != 200:
                self._send(repo.status, b"", {})
            elif path == api or path.startswith(f"{api}/revision/"):
                self._send_json(repo.about())
            elif path == f"{api}/tree/{COMMIT}":
                self._send_json(repo.tree())
            elif path.startswith(files) and (name := path.removeprefix(files)) in repo.refused:
                self._send(403, b"", {})
            elif path.startswith(files) and name in repo.files:
                if with_body:
                    repo.downloads.append(name)
                etag = repo.sha256(name) if name.endswith(LARGE) else "e" * 40
                headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'}
                self._send(200, repo.files[name], headers, with_body=with_body)
            else:
                self._send(404, b"", {})

        def _send_json(self, content: object) -> None:
            self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

        def _send(self, status: int, body: bytes, headers: Mapping[str, str], *, with_body: bool = True) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


# ── a pull ──


class Watching(Silent):
    """Keeps what it is told, and stops the pull like Ctrl-C after so many bytes, or in a step."""

    def __init__(self, stop_after: int | None = None, stop_in: str | None = None) -> None:
        self.sentences: list[str] = []
        self.seen: list[tuple[str, int, int | None]] = []
        self._stop_after = stop_after
        self._stop_in = stop_in

    def say(self, sentence: str) -> None:
        self.sentences.append(sentence)

    def progress(self, step: str, done: int, total: int | None) -> None:
        self.seen.append((step, done, total))
        if step == self._stop_in or (self._stop_after is not None and done >= self._stop_after):
            raise KeyboardInterrupt
