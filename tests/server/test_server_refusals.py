"""What is wrong in a request is refused by the name of its field, before a model is asked for anything; and
bodies that are no proper JSON, or too much of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import httpx
import pytest

from emberkeep.server.middleware import Limits
from emberkeep.types.request import Json
from helpers.cache_server import SYSTEM, tool
from helpers.scripted_server import ScriptedBackend

HELLO = {"messages": [{"role": "user", "content": "hi"}]}

INFILL = {"input_prefix": "a", "input_suffix": "b"}

PROMPTS = ([], [[]], [-1], [True], ["a", None], 5, {})

BAD: dict[str, tuple[Json, Mapping[str, tuple[Json, ...]]]] = {
    "/v1/chat/completions": (
        HELLO,
        {
            "reasoning_format": ("loud",),
            "evict": ("no",),
            "recall": ("always",),
            "approximate": (True, 3, ["cacheblend"]),
        },
    ),
    "/v1/completions": (
        {"prompt": "a"},
        {
            "prompt": (*PROMPTS, [1, "a"], ["a", 1], ["a"] * 33),
            "suffix": (5,),
            "best_of": (17,),
            "logprobs": (21, True),
        },
    ),
    "/completion": ({}, {"prompt": (*PROMPTS, None, [1, None], {"prompt_string": 5}, [["a"], 1])}),
    "/infill": (INFILL, {"input_prefix": (None,), "input_suffix": (None,), "prompt": (5,)}),
    "/tokenize": ({}, {"content": (None, 5)}),
    "/detokenize": ({}, {"tokens": (None, "a")}),
    "/apply-template": ({}, {"messages": (None, [])}),
    "/expert-tracking": ({}, {"enabled": ("yes",), "reset": (1,)}),
    "/v1/tools/decisions": ({"id": "guess", "decision": "once"}, {"id": (None, 7), "decision": (None, "maybe")}),
    "/v1/warm": (
        {"text": "a"},
        {"text": ("", 5), "ttl": ("forever",), "user_id": ("not an id",)},
    ),
    "/v1/cache/pin": ({}, {"id": (None, 5)}),
    "/v1/cache/unpin": ({}, {"id": (None, 5)}),
    "/v1/cache/verify": ({}, {"ids": ([],), "sample": (0,), "tokens": (0, 257), "seconds": (601,)}),
}
"""By path: a body that is accepted, or needs only the field, and values that the field cannot have."""


def bad_fields() -> Iterator[tuple[str, Json, str]]:
    for path, (good, fields) in BAD.items():
        for field, values in fields.items():
            for value in values:
                yield path, {**good, field: value}, field


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        *bad_fields(),
        ("/v1/chat/completions", {**HELLO, "prediction": {"type": "text", "content": "x"}}, "prediction.type"),
        ("/v1/chat/completions", {**HELLO, "approximate": "blend"}, "approximate.repair"),
        ("/v1/chat/completions", {**HELLO, "approximate": {"repair": "off?"}}, "approximate.repair"),
        ("/v1/chat/completions", {**HELLO, "approximate": {"ratio": 1.5}}, "approximate.ratio"),
        ("/v1/chat/completions", {**HELLO, "approximate": {"boundary": -1}}, "approximate.boundary"),
        ("/v1/chat/completions", {**HELLO, "approximate": {"sinks": 1e9}}, "approximate.sinks"),
        ("/v1/chat/completions", {**HELLO, "approximate": {"overlap": "8"}}, "approximate.overlap"),
        ("/v1/chat/completions", {**HELLO, "approximate": {"side": "left"}}, "approximate.side"),
        ("/infill", {**INFILL, "input_extra": [{"filename": "f"}]}, "input_extra[0].text"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/expert-tracking", {"enabled": None, "reset": None}, None),
        ("/v1/warm", {"messages": [], "tools": []}, "messages"),
        ("/v1/warm", {"text": None}, "messages"),
        ("/v1/warm", {"text": "a", "messages": [SYSTEM]}, "text"),
        ("/v1/warm", {"text": "a", "tools": [tool("t")]}, "text"),
        ("/v1/warm", {"messages": [{"role": "system"}]}, "messages[0].content"),
        ("/v1/warm", {"messages": [{"role": "pirate", "content": "a"}]}, "messages[0].role"),
        ("/v1/warm", {"tools": [{"function": {"name": "not a name"}}]}, "tools[0].function.name"),
        ("/v1/warm", {"text": "a", "user_id": "x", "llama_user_id": "y"}, "llama_user_id"),
        ("/v1/cache/explain", {}, "messages"),
        ("/v1/cache/explain", {"prompt": ["a", "b"]}, "prompt"),
        ("/v1/cache/explain", {"prompt": "a", **HELLO}, "prompt"),
        ("/v1/cache/explain", {"prompt": "a", "temperature": 9}, "temperature"),
        ("/v1/cache/verify", {"ids": [5]}, "ids[0]"),
        ("/v1/cache/verify", {"ids": ["0123456789ab"], "sample": 1}, "sample"),
    ],
)
def test_a_bad_field_is_refused_by_name(
    backend: ScriptedBackend, http: httpx.Client, path: str, body: Json, param: str | None
) -> None:
    response = http.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert backend.requests == []


@pytest.mark.parametrize(
    ("method", "url", "param", "words"),
    [
        ("DELETE", "/v1/cache", "user_id", "is required"),
        ("GET", "/v1/cache?kind=chunk", "kind", "give 'conversation' or 'prefix'"),
        ("GET", "/v1/cache?limit=0", "limit", "give 1 or more"),
        ("GET", "/v1/cache?limit=all", "limit", "has a value"),
        ("GET", f"/v1/cache?user_id={'x' * 513}", "user_id", ""),
        ("GET", "/v1/cache/tree?limit=0", "limit", "give 1 or more"),
        ("GET", "/v1/cache/tree?limit=10001", "limit", "give 10000 or less"),
        ("GET", f"/v1/cache/tree?at={'a' * 65}", "at", ""),
        ("GET", "/v1/requests?limit=x", "limit", "has a value"),
        ("GET", "/v1/requests?limit=1001", "limit", "give 1000 or less"),
        ("GET", "/v1/requests?offset=", "offset", "has a value"),
        ("POST", "/slots/first?action=save", "slot", "has a value"),
        ("POST", "/slots/-1?action=save", "slot", "give 0 or more"),
        ("POST", "/slots/0?action=dance", "action", "give 'save', 'restore' or 'erase'"),
        ("GET", "/v1/responses/x?stream=perhaps", "stream", "has a value"),
        ("GET", "/v1/memory/facts/x?user_id=%C3%BC", "user_id", "use up to 512 letters"),
    ],
)
def test_a_bad_parameter_is_refused_like_a_bad_field(
    http: httpx.Client, method: str, url: str, param: str, words: str
) -> None:
    response = http.request(method, url)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert words in error["message"]


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
