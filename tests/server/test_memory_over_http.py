"""`/v1/memory`: searching, facts, answers, saved conversations, export and forgetting, each for one user only."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from starlette.applications import Starlette
from starlette.types import ASGIApp

from emberkeep.backend.models import Models
from emberkeep.config.settings import Config
from emberkeep.errors import MemoryFailed
from emberkeep.library.user_memory import open_memory
from emberkeep.memory.memory import Memory
from emberkeep.server.app import create_app
from emberkeep.server.request_log import RequestLog
from emberkeep.types.events import Eviction, Finished, FinishReason, Fit
from emberkeep.types.lineage import private_namespace
from emberkeep.types.memory import ToolUse, Turn
from emberkeep.types.request import Json, Message, Recall, ToolCall
from helpers.cache_server import served
from helpers.scripted_server import COMPLETED, Running, ScriptedBackend, running

KEY = "sk-proj-Abcd1234Efgh5678Ijkl9012Mnop3456Qrst7890Uvwx"
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
_names = itertools.count()


class Site:
    """A server whose memory is a real one."""

    def __init__(self, server: Running, client: httpx.Client, memory: Memory) -> None:
        self.server, self.client, self.memory = server, client, memory

    def ask(self, method: str, path: str, **options: Any) -> Json:
        response = self.client.request(method, f"/v1/memory{path}", **options)
        assert response.status_code == 200, response.text
        return response.json()

    def get(self, path: str, **query: Json) -> Json:
        return self.ask("GET", path, params=query)

    def found(self, query: str, **more: Json) -> list[str]:
        return [found["user_text"] for found in self.get("/search", query=query, **more)["data"]]

    def set_fact(self, name: str, value: str, **whose: Json) -> Json:
        return self.ask("PUT", f"/facts/{quote(name, safe='')}", json={"value": value, **whose})

    def facts(self, **whose: Json) -> dict[str, str]:
        return {fact["name"]: fact["value"] for fact in self.get("/facts", **whose)["data"]}

    def archive(self, user: str, *texts: str, conversation: str = "c1") -> None:
        uses = (ToolUse("look", "{}", "seen"),)
        turns = [Turn(text.encode(), conversation, 1000.0, text, "I see.", uses) for text in texts]
        self.memory.archive(private_namespace(user), turns)

    def exported(self, **whose: Json) -> list[Json]:
        response = self.client.get("/v1/memory/export", params=whose)
        assert response.headers["content-type"] == "application/x-ndjson"
        return [json.loads(line) for line in response.text.splitlines()]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    memory = Memory(tmp_path_factory.mktemp("data") / "memory.sqlite3", limit_bytes=1 << 30)
    backend = ScriptedBackend()
    backend.memory = memory
    with running(backend, Config()) as server, httpx.Client(base_url=server.url, timeout=20) as client:
        yield Site(server, client, memory)
    memory.close()


@pytest.fixture
def user_id() -> str:
    """A user with nothing in the memory yet."""
    return f"user-{next(_names)}"


# ── what it does ──


def test_an_archived_turn_is_found(site: Site, user_id: str) -> None:
    site.archive(user_id, "The spare key is under the blue pot.")
    (found,) = site.get("/search", query="Where is the spare key?", user_id=user_id)["data"]
    assert 0 < found.pop("score") <= 1
    assert "**spare**" in found.pop("highlight")
    assert isinstance(found.pop("id"), int)
    assert found == {
        "kind": "turn",
        "user_text": "The spare key is under the blue pot.",
        "assistant_text": "I see.",
        "tool_uses": [{"name": "look", "arguments": "{}", "result": "seen"}],
        "at": 1000.0,
        "conversation": "c1",
    }


def test_a_stored_answer_is_found_beside_turns(site: Site, user_id: str) -> None:
    site.archive(user_id, "The tide turns at noon.")
    body = {"question": "When does the tide turn?", "answer": "At noon.", "user_id": user_id}
    stored = site.ask("POST", "/answers", json=body)
    assert stored["object"] == "memory.answer"
    found = site.get("/search", query="tide", user_id=user_id)["data"]
    answers = [(one["id"], one["assistant_text"], one["conversation"]) for one in found if one["kind"] == "answer"]
    assert answers == [(stored["id"], "At noon.", None)]
    assert len(found) == 2
    assert len(site.found("tide", user_id=user_id, max_results=1)) == 1
    assert site.found("tide", user_id=user_id, conversation_id="c1") == ["The tide turns at noon."]


@pytest.mark.parametrize(
    "name", ["cat", "a/b", "/", "a/", "//", "ü 🐈", "a\nb", "?x=1&y#z", "%2F", "\x00", "x" * 256]
)
def test_a_fact_may_have_any_name(site: Site, user_id: str, name: str) -> None:
    path = f"/facts/{quote(name, safe='')}"
    told = site.set_fact(name, "Tom", user_id=user_id)
    assert {key: told[key] for key in ("object", "name", "value")} == {
        "object": "memory.fact",
        "name": name,
        "value": "Tom",
    }
    assert site.set_fact(name, "Murr", user_id=user_id)["value"] == "Murr"
    assert site.get(path, user_id=user_id)["value"] == "Murr"
    assert site.facts(user_id=user_id) == {name: "Murr"}
    removed = site.ask("DELETE", path, params={"user_id": user_id})
    assert (removed["object"], removed["removed"]["facts"]) == ("memory.removed", 1)
    assert site.facts(user_id=user_id) == {}
    for method in ("GET", "DELETE"):
        response = site.client.request(method, f"/v1/memory{path}", params={"user_id": user_id})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "entry_not_found")


def test_a_saved_conversation_is_shown_in_openais_shape(site: Site, user_id: str) -> None:
    call = ToolCall("t1", "add", '{"a": 1}')
    messages = [
        Message("user", "Add."),
        Message("assistant", "", reasoning="Hm.", tool_calls=(call,)),
        Message("tool", "2", tool_call_id="t1", name="add"),
    ]
    site.memory.save_messages(private_namespace(user_id), "a/b c", messages, model="tiny")
    (listed,) = site.get("/conversations", user_id=user_id)["data"]
    assert (listed["id"], listed["model"], listed["message_count"]) == ("a/b c", "tiny", 3)
    assert "messages" not in listed
    shown = site.get(f"/conversations/{quote('a/b c', safe='')}", user_id=user_id)
    function = {"name": "add", "arguments": '{"a": 1}'}
    assert shown.pop("messages") == [
        {"role": "user", "content": "Add."},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "t1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "t1", "name": "add"},
    ]
    assert shown == listed
    missing = site.client.get("/v1/memory/conversations/other", params={"user_id": user_id})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "entry_not_found")


def test_everything_of_a_user_can_be_taken_along(site: Site, user_id: str, memory: Memory) -> None:
    site.archive(user_id, *(f"word number {number}" for number in range(600)))  # more than are sent at a time
    site.set_fact("cat", "Kater Murr 🐈", user_id=user_id)
    exported = site.exported(user_id=user_id)
    memory.import_(exported)
    assert memory.stats(private_namespace(user_id))["turns"] == 600
    assert [fact.value for fact in memory.facts(private_namespace(user_id))] == ["Kater Murr 🐈"]
    counted = site.get("/stats", user_id=user_id)
    assert (counted["turns"], counted["facts"]) == (600, 1)
    assert "bytes" not in counted


def test_a_conversation_or_a_user_is_forgotten(site: Site, user_id: str) -> None:
    site.archive(user_id, "tides of spring", conversation="c1")
    site.archive(user_id, "tides of autumn", conversation="c2")
    site.set_fact("moon", "full", user_id=user_id)
    one = site.ask("DELETE", "", params={"user_id": user_id, "conversation_id": "c1"})
    assert (one["object"], one["removed"]["turns"], one["removed"]["facts"]) == ("memory.removed", 1, 0)
    assert site.found("tides", user_id=user_id) == ["tides of autumn"]
    rest = site.ask("DELETE", "", params={"user_id": user_id})["removed"]
    assert (rest["turns"], rest["facts"]) == (1, 1)
    assert site.found("tides", user_id=user_id) == []


def test_those_who_gave_no_name_are_forgotten_when_that_is_said(site: Site) -> None:
    site.set_fact("without a user", "x")
    response = site.client.delete("/v1/memory")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "user_id")
    assert "without a user" in site.facts()
    assert site.ask("DELETE", "", params={"user_id": ""})["removed"]["facts"] >= 1
    assert site.facts() == {}


def test_a_server_and_a_program_beside_it_have_one_memory(tmp_path: Path) -> None:
    with served(tmp_path) as sea, open_memory(Config(data_dir=tmp_path)) as beside:
        beside.store_answer("When is high tide?", "At noon.", user="ann")
        found = sea.client.get("/v1/memory/search", params={"query": "tide", "user_id": "ann"}).json()["data"]
        assert [one["assistant_text"] for one in found] == ["At noon."]
        sea.client.put("/v1/memory/facts/moon", json={"value": "full", "user_id": "ann"}).raise_for_status()
        assert [fact.value for fact in beside.facts(user="ann")] == ["full"]
        told = sea.client.get("/v1/stats").json()["memory"]
        assert (told["answers"], told["facts"]) == (1, 1)


# ── what it refuses ──


@pytest.mark.parametrize(
    ("method", "path", "options", "param"),
    [
        ("GET", "/search", {}, "query"),
        ("GET", "/search", {"params": {"query": ""}}, "query"),
        ("GET", "/search", {"params": {"query": "x" * 4097}}, "query"),
        ("GET", "/search", {"params": {"query": "x", "max_results": 0}}, "max_results"),
        ("GET", "/search", {"params": {"query": "x", "max_results": "all"}}, "max_results"),
        ("GET", "/search", {"params": {"query": "x", "user_id": "a b"}}, "user_id"),
        ("GET", "/search", {"params": {"query": "x", "user_id": "a", "llama_user_id": "b"}}, "llama_user_id"),
        ("GET", "/facts", {"params": {"user_id": '["ann", ""]'}}, "user_id"),
        ("GET", "/facts", {"params": {"user": "u" * 513}}, "user"),
        ("GET", "/facts", {"params": {"cache_salt": ""}}, "cache_salt"),
        ("GET", f"/facts/{'x' * 257}", {}, "name"),
        ("PUT", "/facts/x", {"json": {}}, "value"),
        ("PUT", "/facts/x", {"json": {"value": ""}}, "value"),
        ("PUT", "/facts/x", {"json": {"value": "v" * 65_537}}, "value"),
        ("PUT", "/facts/x", {"json": {"value": KEY}}, "value"),
        ("PUT", f"/facts/{KEY}", {"json": {"value": "x"}}, "value"),
        ("PUT", "/facts/password", {"json": {"value": "hunter2-and-more"}}, "value"),
        ("PUT", "/facts/x", {"json": {"value": "x", "user_id": "a/b"}}, "user_id"),
        ("PUT", "/facts/x", {"json": {"value": "x", "user_id": "a"}, "params": {"user_id": "b"}}, "user_id"),
        ("POST", "/answers", {"json": {"question": "x"}}, "answer"),
        ("POST", "/answers", {"json": {"question": "", "answer": "x"}}, "question"),
        ("GET", "/conversations", {"params": {"limit": 0}}, "limit"),
        ("GET", f"/conversations/{'x' * 513}", {}, "conversation_id"),
        ("DELETE", "", {"params": {"cache_salt": "s"}}, "user_id"),
        ("DELETE", "", {"params": {"user_id": "a", "conversation_id": ""}}, "conversation_id"),
        ("GET", "/export", {"params": {"user_id": "*"}}, "user_id"),
    ],
)
def test_a_bad_request_names_its_field(site: Site, method: str, path: str, options: Json, param: str) -> None:
    response = site.client.request(method, f"/v1/memory{path}", **options)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_memory_that_is_switched_off_says_the_way_out(http: httpx.Client, backend: ScriptedBackend) -> None:
    assert backend.memory is None
    for method, path in (
        ("GET", "/facts"),
        ("GET", "/search?query=x"),
        ("GET", "/export"),
        ("DELETE", "?user_id="),
    ):
        response = http.request(method, f"/v1/memory{path}")
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (404, "memory_off")
        assert "set memory = true" in error["message"]


class _Broken:
    """A disk that gives up, when an export is under way at the latest."""

    def facts(self, owner: str) -> None:
        raise MemoryFailed("The disk is full: make room.")

    def export(self, owner: str) -> Iterator[dict[str, Json]]:
        if owner:
            yield from ({"kind": "fact"} for _ in range(1000))
        raise MemoryFailed("The disk is gone: look for it.")


def test_memory_that_fails_says_why_and_the_rest_goes_on() -> None:
    backend = ScriptedBackend()
    backend.memory = _Broken()  # type: ignore[assignment]
    with running(backend, Config()) as server, httpx.Client(base_url=server.url, timeout=20) as client:
        for path, message in (
            ("facts", "The disk is full: make room."),
            ("export", "The disk is gone: look for it."),
        ):
            response = client.get(f"/v1/memory/{path}")
            error = response.json()["error"]
            assert (response.status_code, error["type"], error["code"]) == (500, "server_error", "memory_failed")
            assert error["message"] == message
        *_, last = client.get("/v1/memory/export?user_id=ann").text.splitlines()
        assert json.loads(last)["error"]["code"] == "memory_failed"
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200


def test_a_server_that_stops_takes_nothing_in_any_more(memory: Memory) -> None:
    app = app_over(memory)
    app.state.drain.begin()
    assert asked(app, "PUT", "/v1/memory/facts/x", json={"value": "x"}).status_code == 503
    assert memory.facts("") == []


def test_a_client_that_got_everything_has_not_left(memory: Memory, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="emberkeep.server.request_log")
    asked(RequestLog(app_over(memory)), "GET", "/v1/memory/export")
    assert caplog.messages == ["GET /v1/memory/export 200"]


def app_over(memory: Memory) -> Starlette:
    backend = ScriptedBackend()
    backend.memory = memory
    return create_app(Models(backend), Config())


def asked(app: ASGIApp, method: str, path: str, **options: Any) -> httpx.Response:
    """Without the network."""

    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.request(method, path, **options)

    return asyncio.run(send())


# ── whose it is ──

ANN: list[Json] = [
    {"user_id": "ann"},
    {"llama_user_id": "ann"},
    {"user": "ann"},
    {"user_id": "ann", "user": "bob"},
]
OTHERS: list[Json] = [
    {},
    {"user_id": "bob"},
    {"user_id": "Ann"},
    {"user": '["ann", ""]'},
    {"user": "ann\x00"},
    {"user": "ann' OR 1=1 --"},
    {"user": "*"},
    {"user": "%"},
    {"user_id": "ann", "cache_salt": "salt"},
    {"cache_salt": "ann"},
    {"cache_salt": '["ann", ""]'},
]


def test_what_one_user_has_told_no_other_user_sees(site: Site) -> None:
    site.archive("ann", "the treasure is buried")
    site.memory.save_messages(private_namespace("ann"), "c1", [Message("user", "treasure")], model="tiny")
    site.set_fact("treasure", "gold", user_id="ann")
    for whose in OTHERS:
        assert site.found("treasure", **whose) == []
        assert site.found("treasure", **whose, conversation_id="c1") == []
        assert site.facts(**whose) == {}
        assert site.get("/conversations", **whose)["data"] == []
        assert site.get("/stats", **whose)["facts"] == 0
        assert "treasure" not in json.dumps(site.exported(**whose))
        for method, path in (
            ("GET", "/facts/treasure"),
            ("DELETE", "/facts/treasure"),
            ("GET", "/conversations/c1"),
        ):
            assert site.client.request(method, f"/v1/memory{path}", params=whose).status_code == 404
        site.ask("DELETE", "", params={"user_id": "", **whose})
        site.ask("DELETE", "", params={"user_id": "", **whose, "conversation_id": "c1"})
    for whose in ANN:
        assert site.found("treasure", **whose) == ["the treasure is buried"]
        assert site.facts(**whose) == {"treasure": "gold"}
        assert site.get("/conversations/c1", **whose)["message_count"] == 1


def test_a_salt_is_a_memory_of_its_own(site: Site, user_id: str) -> None:
    salted = {"user_id": user_id, "cache_salt": "s1"}
    site.set_fact("colour", "red", **salted)
    site.set_fact("colour", "blue", user_id=user_id)
    assert [site.facts(**salted), site.facts(user_id=user_id)] == [{"colour": "red"}, {"colour": "blue"}]
    assert site.facts(user_id=user_id, cache_salt="s2") == {}
    site.ask("DELETE", "", params={"user_id": user_id})
    assert [site.facts(**salted), site.facts(user_id=user_id)] == [{"colour": "red"}, {}]


def test_who_writes_may_be_named_in_the_query_too(site: Site, user_id: str) -> None:
    site.ask("PUT", "/facts/x", json={"value": "1"}, params={"user_id": user_id})
    site.ask("PUT", "/facts/y", json={"value": "2", "user_id": user_id}, params={"user_id": user_id})
    answer = {"question": "Which letter?", "answer": "z"}
    site.ask("POST", "/answers", json=answer, params={"user_id": user_id})
    assert site.facts(user_id=user_id) == {"x": "1", "y": "2"}
    assert site.found("letter", user_id=user_id) == ["Which letter?"]
    assert site.found("letter") == []


# ── chats ──


def test_a_chat_says_whether_messages_may_leave_and_how_they_come_back(
    http: httpx.Client, backend: ScriptedBackend
) -> None:
    for more in ({}, {"evict": False, "recall": "auto"}, {"evict": None, "recall": None}):
        assert http.post("/v1/chat/completions", json=CHAT | more).status_code == 200
    asked = [(request.evict, request.recall) for request in backend.requests]
    assert asked == [(None, None), (False, Recall.AUTO), (None, None)]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_tells_what_left_and_what_came_back(
    http: httpx.Client, backend: ScriptedBackend, stream: bool
) -> None:
    left = (Eviction(4, 300, 10, plan_ms=0.5, archive_ms=1.5, engine_ms=40.0), Eviction(2, 90, 12, False, "Full."))
    end = Finished(0, FinishReason.STOP)
    backend.reset(end, replace(COMPLETED, fit=Fit(evictions=left, recalled=2)))
    detail = _detail(http, stream)
    assert detail["recalled"] == 2
    first = {"messages": 4, "tokens": 300, "out": 10, "archived": True, "error": ""}
    first |= {"plan_ms": 0.5, "archive_ms": 1.5, "engine_ms": 40.0}
    assert detail["evictions"][0] == first
    assert (detail["evictions"][1]["archived"], detail["evictions"][1]["error"]) == (False, "Full.")
    backend.reset()
    assert not {"evictions", "recalled"} & _detail(http, stream).keys()


def _detail(http: httpx.Client, stream: bool) -> Json:
    text = http.post("/v1/chat/completions", json=CHAT | {"stream": stream}).text
    if not stream:
        return json.loads(text)["emberkeep"]
    (event,) = (part for part in text.split("\n\n") if part.startswith("event: emberkeep\n"))
    return json.loads(event.split("data: ", 1)[1])["emberkeep"]
