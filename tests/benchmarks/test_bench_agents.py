from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.agents import AgentsPlan, Played, Player, rows, sent_back
from benchmarks.recorded_sessions import Session, read_sessions
from emberkeep.bench.servers import BenchClient
from emberkeep.errors import EmberkeepError

SESSION = Session("talk", "You are an agent.", ("Begin.", "result one", "result two"), ({"a": 1}, {"b": 2}))


class TimedExchange:
    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def body(self) -> bytes:
        return json.dumps(self._answer).encode()


class ScriptedClient(BenchClient):
    """Tokens are characters; half of every prompt is reused, and every second answer is a call."""

    def __init__(self) -> None:
        super().__init__(0)
        self.asked: list[Any] = []

    async def post(self, path: str, body: Any) -> Any:
        if path == "/apply-template":
            return TimedExchange({"prompt": json.dumps(body["messages"])})
        self.asked.append(body)
        call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": 2}'}}
        calls = {"content": None, "tool_calls": [call]} if len(self.asked) % 2 else {"content": "fine"}
        usage = {"prompt_tokens": 100, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 50}}
        message = {"role": "assistant", "reasoning_content": "hm", **calls}
        detail = {"hygiene": ["billing-header"]}
        return TimedExchange({"choices": [{"message": message}], "usage": usage, "emberkeep": detail})

    async def tokenize(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


def test_a_session_is_played_as_clients_do_it() -> None:
    client = ScriptedClient()
    played = asyncio.run(Player(client, SESSION, AgentsPlan(summary_every=2)).play())
    title, first, second, summary, third = client.asked
    assert "tools" not in title and "title" in title["messages"][0]["content"]
    assert "Summarise" in summary["messages"][0]["content"]
    headers = {body["messages"][0]["content"].splitlines()[0] for body in (first, second, third)}
    assert len(headers) == 3 and all(header.startswith("x-anthropic-billing-header:") for header in headers)
    assert [body["messages"][-1]["role"] for body in (first, second, third)] == ["user", "user", "tool"]
    assert not any("reasoning_content" in message for message in third["messages"])
    assert (played.requests, played.prompt_tokens, played.evaluated) == (5, 500, 5 * 55)
    assert played.rules == {"billing-header"}


def test_results_of_calls_name_them_and_arguments_are_written_anew() -> None:
    client = ScriptedClient()
    client.asked.append(None)  # so that the first turn is answered with a call
    asyncio.run(Player(client, SESSION, AgentsPlan()).play())
    call, result = client.asked[-2]["messages"][-2:]
    assert call["tool_calls"][0]["function"]["arguments"] == '{"a":2,"b":1}'
    assert (result["role"], result["tool_call_id"]) == ("tool", "c1")


def test_a_session_ends_before_the_context_is_full() -> None:
    client = ScriptedClient()
    long = Session("long", "You are an agent.", ("x" * 1000,) * 10)
    asyncio.run(Player(client, long, AgentsPlan(ctx=2048)).play())
    assert 1 < len(client.asked) < 6


def test_what_is_unique_is_counted_once() -> None:
    played = Played(evaluated=10)
    played.add([1, 2, 3])
    played.add([1, 2, 4, 5])
    played.add([2])
    assert (played.unique, played.ratio) == (6, 10 / 6)
    (row,) = rows([SESSION], {"ours": [played]})
    assert row.values["ratio"] == "1.667"


def test_an_answer_is_sent_back_without_reasoning() -> None:
    assert sent_back({"content": None, "reasoning_content": "hm"}) == {"role": "assistant", "content": ""}


def test_recorded_sessions_are_read(tmp_path: Path) -> None:
    roles = ("system", "user", "user", "assistant", "tool", "assistant", "user")
    messages = [{"role": role, "content": role + str(i)} for i, role in enumerate(roles)]
    (tmp_path / "one.json").write_text(json.dumps({"messages": messages}))
    (session,) = read_sessions(tmp_path)
    assert (session.name, session.system) == ("one", "system0")
    assert session.told == ("user1\n\nuser2", "tool4", "user6")


def test_the_session_that_is_here_is_one() -> None:
    (session,) = read_sessions(Path(__file__).parents[2] / "benchmarks" / "sessions")
    assert len(session.told) == 15 and len(session.tools) == 6


@pytest.mark.parametrize("content", ["[", "[]", "{}", '{"messages": [1]}'])
def test_what_is_no_session_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "one.json").write_text(content)
    with pytest.raises(EmberkeepError, match=r"is no recorded session|is not JSON"):
        read_sessions(tmp_path)


def test_a_folder_without_sessions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EmberkeepError, match="has no"):
        read_sessions(tmp_path)
