"""Taking a port, draining, stopping."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import httpx
import pytest

from emberkeep.config.settings import Config
from emberkeep.errors import EmberkeepError
from emberkeep.server.lifecycle import bind
from emberkeep.server.middleware import Limits
from emberkeep.types.events import TextDelta
from helpers.scripted_server import HANG, WAIT_S, ScriptedBackend, running, says

pytestmark = pytest.mark.slow

BODY = {"messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"


def test_a_taken_port_is_one_sentence_with_the_way_out() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EmberkeepError) as caught:
            bind("127.0.0.1", port)
    assert str(caught.value) == f"Port {port} on 127.0.0.1 is in use: stop the other server or choose --port."


def test_an_address_of_another_machine_is_one_sentence() -> None:
    with pytest.raises(EmberkeepError, match="choose another --host"):
        bind("192.0.2.1", 0)


def test_a_draining_server_refuses_new_work_and_finishes_the_old() -> None:
    backend = ScriptedBackend([TextDelta(0, "Hel"), HANG, *says("lo")])
    with (
        running(backend, Config(), Limits(drain_s=60)) as server,
        httpx.Client(base_url=server.url, timeout=WAIT_S) as http,
        ThreadPoolExecutor() as pool,
    ):
        old = pool.submit(httpx.post, server.url + CHAT, json=BODY, timeout=WAIT_S)
        assert backend.hanging.wait(WAIT_S)
        server.stop()
        while (health := http.get("/health")).status_code == 200:
            pass
        assert (health.status_code, health.json()["status"]) == (503, "draining")
        for refused in (http.post(CHAT, json=BODY), http.delete("/v1/cache?user_id=ann")):
            assert refused.status_code == 503
            assert refused.json()["error"]["type"] == "overloaded"
            assert int(refused.headers["retry-after"]) > 0
        backend.release.set()
        assert old.result().json()["choices"][0]["message"]["content"] == "Hello"
        server.thread.join(WAIT_S)
        assert not server.thread.is_alive()


def test_what_outlives_the_drain_is_cut_off_with_a_reason(caplog: pytest.LogCaptureFixture) -> None:
    backend = ScriptedBackend([TextDelta(0, "Hel"), HANG])
    with running(backend, Config(), Limits(drain_s=0)) as server, ThreadPoolExecutor() as pool:
        whole = pool.submit(httpx.post, server.url + CHAT, json=BODY, timeout=WAIT_S)
        assert backend.hanging.wait(WAIT_S)
        with httpx.stream("POST", server.url + CHAT, json={**BODY, "stream": True}, timeout=WAIT_S) as streamed:
            server.stop()
            text = "".join(streamed.iter_text())
        assert text.startswith("data: ")
        assert '"type":"overloaded"' in text
        assert whole.result().status_code == 503
        assert whole.result().json()["error"]["type"] == "overloaded"
        assert backend.stopped_early.wait(WAIT_S)
        server.thread.join(WAIT_S)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == ["Cutting off 2 request(s) that did not finish within 0 s."]


def test_a_client_that_does_not_read_cannot_keep_a_server_from_stopping(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend = ScriptedBackend([*(TextDelta(0, "x" * 1_000_000) for _ in range(100)), HANG])
    with (
        running(backend, Config(), Limits(drain_s=0)) as server,
        socket.create_connection(("127.0.0.1", server.port)) as deaf,
    ):
        body = json.dumps({**BODY, "stream": True}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        deaf.sendall(head.encode() + body)
        assert deaf.recv(1) == b"H"
        server.stop()
        server.thread.join(WAIT_S)
        assert not server.thread.is_alive()
    assert "ERROR" not in caplog.text


SCRIPT = """
import sys
from helpers.scripted_server import HANG, ScriptedBackend, says
from emberkeep.config.settings import Config
from emberkeep.backend.models import Models
from emberkeep.server.app import create_app
from emberkeep.server.http_server import Server
from emberkeep.server.lifecycle import run_until_stopped
from emberkeep.server.lifecycle import bind
from emberkeep.server.middleware import Limits
from emberkeep.types.events import TextDelta

config = Config(log_level="info")
backend = ScriptedBackend([TextDelta(0, "Hel"), HANG] if sys.argv[1] == "hang" else says("Hello"))
with bind("127.0.0.1", 0) as listener:
    print("port", listener.getsockname()[1], flush=True)
    models = Models(backend)
    run_until_stopped(Server(create_app(models, config), config), models, listener)
print("closed", backend.closed.is_set(), flush=True)
"""


def start(mode: str) -> tuple[subprocess.Popen[str], str]:
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here.parent), str(here.parents[1] / "src")])
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, mode],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    port = re.findall(r"\d+", _out(process).readline())[0]
    return process, f"http://127.0.0.1:{port}"


def _out(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdout is not None
    return process.stdout


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_an_idle_server_in_good_order(sig: signal.Signals) -> None:
    process, url = start("talk")
    with process:
        assert httpx.post(url + CHAT, json=BODY, timeout=WAIT_S).status_code == 200
        process.send_signal(sig)
        assert process.wait(WAIT_S) == 0
        assert _out(process).read() == "closed True\n"


def test_a_second_signal_does_not_wait_for_the_drain() -> None:
    process, url = start("hang")
    with process, httpx.stream("POST", url + CHAT, json={**BODY, "stream": True}, timeout=WAIT_S) as response:
        lines = response.iter_lines()
        assert "Hel" in next(lines)
        process.send_signal(signal.SIGTERM)
        while httpx.get(url + "/health", timeout=WAIT_S).status_code == 200:
            pass
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
        assert any("overloaded" in line for line in lines)
        assert _out(process).read() == "closed True\n"
