"""A client that goes away takes its work with it."""

from __future__ import annotations

import json
import socket

import httpx
import pytest

from emberkeep.types.events import TextDelta
from helpers.scripted_server import HANG, WAIT_S, Running, ScriptedBackend


def send_raw(port: int, path: str, **fields: object) -> socket.socket:
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode()
    connection = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("path", "fields", "begun"),
    [
        (CHAT, {}, []),
        (CHAT, {"stream": True}, []),
        (CHAT, {}, [TextDelta(0, "Hel")]),
        (CHAT, {"stream": True}, [TextDelta(0, "Hel")]),
        ("/v1/completions", {"prompt": ["a", "b"]}, []),
    ],
)
def test_leaving_stops_the_work(
    server: Running, backend: ScriptedBackend, path: str, fields: dict[str, object], begun: list[TextDelta]
) -> None:
    backend.reset(*begun, HANG)
    connection = send_raw(server.port, path, **fields)
    assert backend.hanging.wait(WAIT_S)
    connection.close()
    assert backend.stopped_early.wait(WAIT_S)


def test_leaving_in_the_middle_of_the_body_is_not_an_error(
    server: Running, backend: ScriptedBackend, http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as connection:
        connection.sendall(b'POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"')
    assert http.get("/health").status_code == 200
    assert caplog.records == []
    assert backend.requests == []


def test_the_first_token_is_not_held_back(server: Running, backend: ScriptedBackend) -> None:
    backend.reset(TextDelta(0, "Hel"), HANG)
    connection = send_raw(server.port, "/v1/chat/completions", stream=True)
    received = b""
    while b"Hel" not in received:
        received += connection.recv(1 << 16)
    assert backend.hanging.is_set()
    assert not backend.release.is_set()
    connection.close()
    assert backend.stopped_early.wait(WAIT_S)
