"""`bench start` watches a process from its first moment: when it listens, is ready, and has its first token."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from emberkeep.bench import start
from emberkeep.bench.sides import OURS, PEER
from emberkeep.errors import EmberkeepError

SERVER = """
import http.server, sys

class Answers(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        Answers.asked += 1
        self.send_response(200 if Answers.asked > 2 else 503)
        self.end_headers()
    def do_POST(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answers).serve_forever()
"""


def measure(script: str) -> start.Started:
    port = start._free_port()
    with Path(os.devnull).open("wb") as log:
        return start._measure([sys.executable, "-c", script, str(port)], os.environ, port, log.fileno())


def test_a_server_is_watched_until_its_first_token() -> None:
    started = measure(SERVER)
    assert 0 < started.listens < started.ready < started.first_token


def test_a_server_that_does_not_start_is_said() -> None:
    with pytest.raises(EmberkeepError, match="did not start"):
        measure("raise SystemExit(1)")


def test_ours_is_compared_with_the_other_in_both_ways() -> None:
    ours, peer = start.Started(1, 3, 4, 2, 100), start.Started(1, 1, 2, 1, 100)
    found = {f"{OURS}, first time": [ours], f"{OURS}, remembered": [ours], PEER: [peer]}
    row = start._row("until the first token", "first_token", found)
    assert row.values[f"{OURS}, remembered / {PEER}"].median == 2
