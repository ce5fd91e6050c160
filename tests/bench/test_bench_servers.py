"""Servers to be measured, with scripted programs in their place. Nothing here is a timing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from emberkeep.bench.servers import PeerServer, ServerUnderTest, chunk_files, drop_from_page_cache, peer_version
from emberkeep.errors import EmberkeepError
from helpers.benchmarks import ScriptedWorkspace

pytestmark = pytest.mark.slow

LATE = """
import http.server, sys

class Answers(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        Answers.asked += 1
        self.send_response(200 if Answers.asked > 2 else 503)
        self.end_headers()
    def log_message(self, *_):
        pass

http.server.HTTPServer(("127.0.0.1", int(sys.argv[2])), Answers).serve_forever()
"""


def test_a_server_has_started_when_its_health_says_so(tmp_path: Path) -> None:
    with ServerUnderTest([sys.executable, "-c", LATE], tmp_path / "log") as server:
        assert 0 < server.ready_s < server.age()
    assert server.process.poll() is not None


def test_a_program_that_cannot_be_run_is_explained(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no program")
    for start in (peer_version, lambda program: ServerUnderTest([str(program)], tmp_path / "log")):
        with pytest.raises(EmberkeepError, match=r"text cannot be run: Permission denied\."):
            start(tmp_path / "text")


def test_a_program_that_ends_at_once_is_explained_by_its_own_words(tmp_path: Path) -> None:
    program = tmp_path / "broken"
    program.write_text("#!/bin/sh\necho no such model\n")
    program.chmod(0o755)
    with pytest.raises(EmberkeepError, match="did not start: no such model"):
        PeerServer(ScriptedWorkspace(tmp_path), program, parallel=1, ctx=128)


def test_the_files_of_a_store_are_found_and_unharmed_by_dropping_them(tmp_path: Path) -> None:
    folder = tmp_path / "kv" / "fingerprint" / "chunks" / "ab"
    folder.mkdir(parents=True)
    (folder / "ab12.kv").write_bytes(b"x" * 5000)
    (tmp_path / "kv" / "fingerprint" / "index.db").write_bytes(b"y" * 100)
    files = chunk_files(tmp_path)
    drop_from_page_cache(files)
    assert [(path.name, path.read_bytes()) for path in files] == [("ab12.kv", b"x" * 5000)]
