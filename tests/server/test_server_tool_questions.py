"""A person is asked before a dangerous tool of the server runs, where the client can ask one."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest

from emberkeep.backend.fallback import FallbackBackend, Link
from emberkeep.config.settings import Config
from emberkeep.errors import RemoteError
from emberkeep.tools import permissions
from emberkeep.types.events import Event
from emberkeep.types.request import Json, Request
from helpers.conversing import Harbour, ScriptedEngine, asking_server
from helpers.scripted_server import ScriptedBackend, running
from helpers.waiting import eventually

WRITE = '<tool_call>\n{"name": "write_file", "arguments": {"path": "log.txt", "content": "noon"}}\n</tool_call>'
HELLO: Any = [{"role": "user", "content": "Write down when the Zephyr came."}]


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(context=4096)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (root := tmp_path / "root").mkdir()
    return root


@contextmanager
def serving(engine: ScriptedEngine, root: Path, **config: Any) -> Iterator[httpx.Client]:
    with asking_server(engine, root, **config) as server, httpx.Client(base_url=server.url, timeout=30) as http:
        yield http


@pytest.fixture
def http(engine: ScriptedEngine, root: Path) -> Iterator[httpx.Client]:
    with serving(engine, root) as http:
        yield http


class Talk:
    """A stream whose questions are answered as they come."""

    def __init__(self, http: httpx.Client, *decisions: str, **fields: Json) -> None:
        self.questions: list[Json] = []
        self.results: list[str] = []
        self.text = ""
        answers = iter(decisions)
        body = {"messages": HELLO, "stream": True, "ask_permission": True, "max_tokens": 900, "temperature": 0}
        with http.stream("POST", "/v1/chat/completions", json={**body, **fields}) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                self.text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
                told = chunk.get("emberkeep") or {}
                if "tool" in told and "result" in told["tool"]:
                    self.results.append(told["tool"]["result"])
                if "permission" in told:
                    self.questions.append(told["permission"])
                    if (decision := next(answers, None)) is None:
                        return
                    self.answer(http, told["permission"]["id"], decision)

    def answer(self, http: httpx.Client, question: str, decision: str) -> None:
        decide(http, question, decision).raise_for_status()


def decide(http: httpx.Client, question: str, decision: str) -> httpx.Response:
    return http.post("/v1/tools/decisions", json={"id": question, "decision": decision})


def test_a_call_runs_once_it_is_allowed(http, engine, root):
    engine.will_say(WRITE, "Done.")
    talk = Talk(http, "once")
    (question,) = talk.questions
    assert (question["name"], question["group"]) == ("write_file", "files")
    assert json.loads(question["arguments"]) == {"path": "log.txt", "content": "noon"}
    assert talk.text == "Done."
    assert (root / "log.txt").read_text() == "noon"


def test_a_call_that_is_not_allowed_does_nothing_and_the_model_is_told(http, engine, root):
    engine.will_say(WRITE, "I may not.")
    talk = Talk(http, "no")
    assert "did not allow" in talk.results[0]
    assert talk.text == "I may not."
    assert not (root / "log.txt").exists()


def test_always_holds_for_this_conversation_and_for_no_other(http, engine, root):
    engine.will_say(WRITE, "Done.", WRITE, "Again.", WRITE, "I may not.")
    assert len(Talk(http, "always", conversation_id="a").questions) == 1
    assert Talk(http, conversation_id="a").questions == []
    assert len(Talk(http, "no", conversation_id="b").questions) == 1


def test_never_is_not_asked_again(http, engine, root):
    engine.will_say(WRITE, "I may not.", WRITE, "I still may not.")
    Talk(http, "never", conversation_id="a")
    later = Talk(http, conversation_id="a")
    assert later.questions == [] and "did not allow" in later.results[0]
    assert not (root / "log.txt").exists()


@pytest.mark.parametrize("fields", [{"ask_permission": False}, {"ask_permission": None}])
def test_a_client_that_asks_nobody_does_not_get_them(http, engine, root, fields):
    engine.will_say(WRITE, "I cannot.")
    talk = Talk(http, **fields)
    assert talk.questions == [] and "no user to ask" in talk.results[0]
    assert not (root / "log.txt").exists()


def test_an_answer_that_is_no_stream_has_nobody_to_ask(http, engine, root):
    engine.will_say(WRITE, "I cannot.")
    body = {"messages": HELLO, "ask_permission": True, "max_tokens": 900, "temperature": 0}
    answer = http.post("/v1/chat/completions", json=body).json()
    assert "no user to ask" in answer["emberkeep"]["tools"][0]["result"]
    assert not (root / "log.txt").exists()


def test_without_the_setting_no_client_gets_them(engine, root):
    engine.will_say(WRITE, "I cannot.")
    with serving(engine, root, server_tools="safe") as http:
        talk = Talk(http)
        modes = {tool["name"]: tool["mode"] for tool in http.get("/v1/tools").json()["data"]}
    assert talk.questions == []
    assert modes["write_file"] == "off" and modes["read_file"] == "runs"
    assert not (root / "log.txt").exists()


def test_silence_is_a_no(engine, root, monkeypatch):
    monkeypatch.setattr(permissions, "PATIENCE_S", 0.2)
    engine.will_say(WRITE, "I may not.")
    with serving(engine, root) as http:
        body = {"messages": HELLO, "stream": True, "ask_permission": True, "max_tokens": 900, "temperature": 0}
        answer = http.post("/v1/chat/completions", json=body)
    assert '"permission"' in answer.text and "did not allow" in answer.text
    assert not (root / "log.txt").exists()


def test_nobody_waits_any_more_for_a_client_that_has_left(http, engine, root):
    engine.will_say(WRITE, "Done.")
    talk = Talk(http)  # it leaves with its question
    assert eventually(lambda: decide(http, talk.questions[0]["id"], "once").status_code == 404)
    assert not (root / "log.txt").exists()


def test_the_tools_are_listed_with_what_happens_when_they_are_called(http):
    told = http.get("/v1/tools").json()
    modes = {tool["name"]: tool["mode"] for tool in told["data"]}
    assert told["enabled"]
    assert (modes["read_file"], modes["write_file"]) == ("runs", "asks")
    assert all(tool["description"] and tool["group"] for tool in told["data"])


def test_a_server_without_tools_says_so():
    with running(ScriptedBackend(), Config()) as server, httpx.Client(base_url=server.url) as http:
        assert http.get("/v1/tools").json() == {"object": "list", "enabled": False, "data": [], "servers": []}


def test_an_enabled_tool_asks_too_and_is_for_those_who_ask(engine, root):
    engine.will_say("I cannot.", WRITE, "Done.")
    with serving(engine, root, enable_tools=("write_file",)) as http:
        modes = {tool["name"]: tool["mode"] for tool in http.get("/v1/tools").json()["data"]}
        assert (modes["write_file"], modes["read_file"]) == ("asks", "off")
        unasked = Talk(http, ask_permission=False)
        assert unasked.questions == [] and unasked.text == "I cannot."
        assert len(Talk(http, "once").questions) == 1
    assert (root / "log.txt").read_text() == "noon"


def test_the_first_decision_counts(http, engine, root):
    engine.will_say(WRITE, "I may not.")
    answers = []

    def both(question: str) -> None:
        answers.extend(decide(http, question, decision).status_code for decision in ("no", "once", "always"))

    with patch.object(Talk, "answer", lambda self, http, question, decision: both(question)):
        talk = Talk(http, "no")
    assert answers == [200, 404, 404]
    assert talk.text == "I may not." and not (root / "log.txt").exists()


def test_so_many_questions_wait_at_a_time(engine, root, monkeypatch):
    monkeypatch.setattr(permissions, "MOST_OPEN", 0)
    engine.will_say(WRITE, "I may not.")
    body = {"messages": HELLO, "stream": True, "ask_permission": True, "max_tokens": 900, "temperature": 0}
    with serving(engine, root) as http:
        assert "did not allow" in http.post("/v1/chat/completions", json=body).text


def test_of_a_user_who_was_forgotten_meanwhile_no_name_is_left(http, engine, root):
    engine.will_say(WRITE, "Done.")

    def forget(question: str) -> None:
        http.delete("/v1/cache", params={"user_id": "alice"}).raise_for_status()
        decide(http, question, "once").raise_for_status()

    with patch.object(Talk, "answer", lambda self, http, question, decision: forget(question)):
        Talk(http, "once", user_id="alice", conversation_id="alice-private")
    assert "alice" not in http.get("/v1/requests").text
    assert http.get("/v1/requests").json()["data"]


def test_what_is_warmed_for_those_who_ask_is_what_they_use(http, engine):
    system = {"role": "system", "content": "You keep the books of a harbour. " * 8}
    warmed = http.post("/v1/warm", json={"messages": [system], "ask_permission": True}).json()
    engine.will_say("Hello.")
    body = {"messages": [system, *HELLO], "max_tokens": 8, "temperature": 0, "ask_permission": True}
    explained = http.post("/v1/cache/explain", json=body).json()
    assert sum(explained["reused"].values()) >= warmed["tokens"] - 1


def test_a_backend_that_another_stands_in_for_still_gets_its_decision(tmp_path, root):
    options: dict[str, Any] = {"server_tools": "ask", "tools_root": root}
    engines, failing = [ScriptedEngine(context=4096) for _ in range(2)], threading.Event()
    with ExitStack() as stack:
        a, b = (
            stack.enter_context(Harbour(tmp_path / name, engine, **options)).backend
            for name, engine in zip("ab", engines, strict=True)
        )
        answer = a.generate

        async def generate(request: Request) -> AsyncIterator[Event]:
            if failing.is_set():
                raise RemoteError("a does not answer.")
            async for event in answer(request):
                yield event

        a.generate = generate  # type: ignore[method-assign]
        either = FallbackBackend([Link("a", lambda: a), Link("b", lambda: b)])
        server = stack.enter_context(running(either, Config()))  # type: ignore[arg-type]
        http, other = (stack.enter_context(httpx.Client(base_url=server.url, timeout=30)) for _ in range(2))
        engines[0].will_say(WRITE, "Done.")
        engines[1].will_say("I am b.")

        def replace_and_allow(question: str) -> None:
            failing.set()
            whole = other.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 50})
            assert whole.json()["choices"][0]["message"]["content"] == "I am b."
            decide(other, question, "once").raise_for_status()
            assert len(other.get("/v1/requests").json()["data"]) == 2

        allowing = patch.object(Talk, "answer", lambda self, http, question, decision: replace_and_allow(question))
        with allowing, suppress(httpx.HTTPError):
            Talk(http, "once")
        assert eventually((root / "log.txt").exists)
