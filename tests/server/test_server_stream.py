"""Streams: batches, their order and their end; silence; and what every answer says of its request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from emberkeep.errors import EngineError
from emberkeep.server import stream
from emberkeep.server.middleware import Limits
from emberkeep.server.stream import ClientGone, Feed, ReadTooSlowly
from emberkeep.types.events import Accepted, Event, TextDelta
from helpers.scripted_server import HANG, ScriptedBackend, says

HELLO = {"role": "user", "content": "Hello"}
ASKED = {"messages": [HELLO], "stream": True}


async def stays() -> dict[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError


async def source(*steps: Event | Exception) -> AsyncIterator[Event]:
    for step in steps:
        if isinstance(step, Exception):
            raise step
        yield step


async def endless() -> AsyncIterator[Event]:
    while True:
        await asyncio.sleep(0)
        yield TextDelta(0, "x")


def test_what_is_already_there_comes_in_one_batch() -> None:
    async def batches() -> list[list[Any]]:
        async with Feed([source(*says("a", "b"))], stays) as feed:  # type: ignore[arg-type]
            first = await feed.take()
            assert feed.ended
            return [first, await feed.take()]

    assert asyncio.run(batches()) == [says("a", "b"), []]


def test_an_error_comes_after_the_events_before_it() -> None:
    async def taken() -> list[Event]:
        async with Feed([source(TextDelta(0, "a"), EngineError("x"))], stays) as feed:
            batch = await feed.take()
            assert not feed.ended
            with pytest.raises(EngineError):
                await feed.take()
            return batch

    assert asyncio.run(taken()) == [TextDelta(0, "a")]


def test_an_error_of_one_source_is_not_held_up_by_another() -> None:
    async def read() -> None:
        async with Feed([source(EngineError("x")), endless()], stays) as feed:
            while True:
                await feed.take()

    with pytest.raises(EngineError):
        asyncio.run(read())


def test_a_client_that_left_is_noticed_while_a_source_goes_on() -> None:
    async def leaves() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def read() -> None:
        async with Feed([endless()], leaves) as feed:
            while True:
                await feed.take()

    with pytest.raises(ClientGone):
        asyncio.run(read())


def test_who_does_not_read_in_time_gets_what_came_and_the_reason_and_its_work_stops() -> None:
    stopped = asyncio.Event()

    async def unread() -> AsyncIterator[Event]:
        try:
            async for event in endless():
                yield event
        finally:
            stopped.set()

    async def read() -> int:
        limits = Limits(unsent_bytes=10_000, stalled_s=0.01)
        async with Feed([unread()], stays, limits=limits) as feed:
            await stopped.wait()
            came = len(await feed.take())
            with pytest.raises(ReadTooSlowly):
                await feed.take()
            return came

    assert 10 < asyncio.run(read()) < 100


# ── silence ──


def test_headers_and_comments_come_before_the_first_token(
    http: httpx.Client, backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_SILENCE_S", 0.01)
    backend.reset(Accepted(12), HANG, *says("late"))
    with http.stream("POST", "/v1/chat/completions", json=ASKED) as response:
        lines = response.iter_lines()
        assert response.status_code == 200
        assert next(lines).startswith(": ")
        backend.release.set()
        assert "late" in "".join(lines)


def test_a_backend_that_is_silent_from_the_start_does_not_keep_the_headers_back(
    http: httpx.Client, backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_HEADERS_AFTER_S", 0.01)
    backend.reset(HANG, EngineError("It broke."))
    with http.stream("POST", "/v1/chat/completions", json=ASKED) as response:
        assert response.status_code == 200
        backend.release.set()
        assert "It broke." in response.read().decode()


# ── the name of a request ──


def test_an_answer_names_its_request(http: httpx.Client, backend: ScriptedBackend) -> None:
    ours = http.get("/v1/models").headers
    assert ours["x-request-id"].startswith("req_")
    assert ours["request-id"] == ours["x-request-id"]
    assert http.get("/v1/models", headers={"X-Request-Id": "mine-7"}).headers["x-request-id"] == "mine-7"


def test_a_name_that_could_break_a_log_is_not_taken(http: httpx.Client, backend: ScriptedBackend) -> None:
    assert http.get("/v1/models", headers={"X-Request-Id": "a b"}).headers["x-request-id"].startswith("req_")


# ── paths and shapes ──


@pytest.mark.parametrize("path", ["/chat/completions", "/models", "/models/org/tiny", "/v1/health"])
def test_paths_work_with_and_without_their_version(
    http: httpx.Client, backend: ScriptedBackend, path: str
) -> None:
    body = {"json": {"messages": [HELLO]}} if "chat" in path else {}
    assert http.request("POST" if body else "GET", path, **body).status_code == 200


def test_errors_have_the_shape_that_the_clients_of_a_path_expect(http: httpx.Client) -> None:
    there_is_none = "There is no"
    openai = http.get("/v1/nothing").json()
    assert openai["error"]["message"].startswith(there_is_none)
    anthropic = http.get("/v1/messages/nothing/here").json()
    assert (anthropic["type"], anthropic["error"]["type"]) == ("error", "not_found_error")
    assert anthropic["request_id"].startswith("req_")
    assert http.get("/api/nothing").json()["error"].startswith(there_is_none)
