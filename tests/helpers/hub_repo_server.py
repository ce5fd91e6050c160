"""A local fake of the hub: one repository, as its client asks for it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from urllib.parse import unquote

from helpers.model_file_server import serving_with

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
    with serving_with(_handler(repo)) as url:
        repo.url = url
        yield repo


def _handler(repo: ServedRepo) -> type[BaseHTTPRequestHandler]:
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
