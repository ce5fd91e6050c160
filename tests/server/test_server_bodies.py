"""Bodies that are no proper JSON, or too much of it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from emberkeep.server.middleware import Limits
from helpers.scripted_server import ScriptedBackend

MAX_BODY_BYTES = Limits().body_bytes
CHAT = "/v1/chat/completions"


def nested(depth: int) -> bytes:
    return b'{"messages": [{"role": "user", "content": "x"}], "x": ' + b"[" * depth + b"]" * depth + b"}"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b'{"messages": NaN}',
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"n": ' + b"9" * 5000 + b"}",
        "{}".encode("utf-16"),
        nested(64),
        nested(100_000),
        b'{"a":' * 100_000,
    ],
    ids=lambda body: repr(body[:24]),
)
def test_it_is_refused_in_openais_shape(backend: ScriptedBackend, http: httpx.Client, body: bytes) -> None:
    response = http.post(CHAT, content=body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert len(response.text) < 500
    assert backend.requests == []


def test_half_a_surrogate_pair_is_called_that(backend: ScriptedBackend, http: httpx.Client) -> None:
    body = b'{"messages": [{"role": "user", "content": "\\ud800"}]}'
    message = http.post(CHAT, content=body).json()["error"]["message"]
    assert "half of a surrogate pair" in message
    assert "UTF-8" not in message


def test_what_is_nested_as_deep_as_allowed_is_taken(backend: ScriptedBackend, http: httpx.Client) -> None:
    assert http.post(CHAT, content=nested(63)).status_code == 200


def test_a_surrogate_pair_is_a_character(backend: ScriptedBackend, http: httpx.Client) -> None:
    body = b'{"messages": [{"role": "user", "content": "\\ud83d\\ude42"}]}'
    assert http.post(CHAT, content=body).status_code == 200
    assert backend.last.messages[0].content == "🙂"


def test_a_body_that_declares_too_much_is_refused(backend: ScriptedBackend, http: httpx.Client) -> None:
    response = http.post(CHAT, content=b" " * (MAX_BODY_BYTES + 1))
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"


def test_a_body_that_grows_too_large_is_refused(backend: ScriptedBackend, http: httpx.Client) -> None:
    def parts() -> Iterator[bytes]:
        for _ in range((MAX_BODY_BYTES >> 20) + 1):
            yield b" " * (1 << 20)

    assert http.post(CHAT, content=parts()).status_code == 413
    assert http.get("/health").status_code == 200
