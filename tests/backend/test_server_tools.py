"""Tools that the server runs by itself for clients that send none."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from emberkeep.errors import DeadlineExceeded, InvalidField, RateLimited
from emberkeep.types.events import CallEnded, CallStarted, FinishReason, TextDelta
from emberkeep.types.request import Message, Request, ToolChoice
from helpers.conversing import FERRY, GREEDY, Client, Harbour, ScriptedEngine

CALL = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
READ = CALL.format("read_file", '{"path": "log.txt"}')


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(context=2048)


@pytest.fixture
def harbour(tmp_path: Path, engine: ScriptedEngine) -> Iterator[Harbour]:
    root = tmp_path / "root"
    root.mkdir()
    (root / "log.txt").write_text("The Zephyr came in at noon.\n")
    with Harbour(tmp_path, engine, server_tools="safe", enable_tools=("files",), tools_root=root) as harbour:
        yield harbour


@pytest.fixture
def client(harbour: Harbour) -> Client:
    return Client(harbour, max_tokens=900)


def outcomes(events: list[object]) -> list[str]:
    return [event.outcome.text for event in events if isinstance(event, CallEnded)]


def test_a_call_runs_and_only_the_answer_is_the_clients(client, engine):
    engine.will_say(READ, "It came at noon.")
    answer = client.say("When did the Zephyr come?")
    assert answer.text == "It came at noon."
    assert answer.calls == []
    assert answer.reason is FinishReason.STOP
    assert any("came in at noon" in text for text in outcomes(answer.events))
    assert "The Zephyr came in at noon." in answer.prompts[1]
    assert answer.prompts[1].startswith(answer.prompts[0])


def test_the_same_question_in_another_chat_is_looked_up_anew(harbour, engine, tmp_path):
    engine.will_say(READ, "It came at noon.", READ, "It came at dusk.", "Hello.")
    Client(harbour, max_tokens=900).say("When did the Zephyr come?")
    (tmp_path / "root" / "log.txt").write_text("The Zephyr came in at dusk.\n")
    later = Client(harbour, max_tokens=900)
    answer = later.say("When did the Zephyr come?")
    assert "noon" not in "".join(answer.prompts)
    assert "came in at dusk" in answer.prompts[1]
    assert "came in at dusk" in later.say("Thanks.").prompt


def test_what_tools_said_is_not_told_to_a_client_with_its_own(harbour, engine):
    engine.will_say(READ, "It came at noon.", "I cannot tell.")
    Client(harbour, max_tokens=900).say("When did the Zephyr come?")
    answer = Client(harbour, max_tokens=900).say("When did the Zephyr come?", tools=(FERRY,))
    assert "noon" not in answer.prompt


def test_a_client_with_tools_of_its_own_gets_none_of_ours(client, engine):
    engine.will_say("Hello.")
    answer = client.say("Hello", tools=(FERRY,))
    assert "read_file" not in answer.prompt
    assert "ferry" in answer.prompt


@pytest.fixture
def bare(tmp_path: Path, engine: ScriptedEngine) -> Iterator[Harbour]:
    with Harbour(tmp_path, engine, server_tools="safe", recall="tool", tools="off") as harbour:
        yield harbour


def test_with_notools_the_model_is_told_of_none(bare, engine):
    engine.will_say(READ, "Hello.")
    own = Client(bare, max_tokens=900).say("Hello", tools=(FERRY,))
    assert (own.text, own.calls) == (READ, [])
    assert "ferry" not in own.prompt
    ours = Client(bare, max_tokens=900).say("Hello")
    assert ours.prompt == own.prompt


@pytest.mark.parametrize("choice", [ToolChoice("required"), ToolChoice("named", "ferry")])
def test_with_notools_a_call_cannot_be_forced(bare, choice):
    with pytest.raises(InvalidField, match=r"leaves tools out \(--tools off\): give auto or none"):
        Client(bare).say("Hello", tools=(FERRY,), tool_choice=choice)


def test_with_notools_what_is_warmed_and_explained_has_none_either(bare, engine):
    engine.will_say("Hello.")
    rules = Message("system", "Keep to the harbour rules, and tell captains about the tides. " * 4)
    chat = Request(messages=(rules, Message("user", "Hello")), tools=(FERRY,), sampling=GREEDY, max_tokens=9)
    prefix = Request(messages=(rules,), tools=(FERRY,))
    warmed = asyncio.run(bare.backend.warmer.warm(prefix))
    assert warmed.error is None
    found = bare.backend.cache.explain(chat)
    assert b"ferry" not in b"".join(found.pieces)
    assert found.lookup.reused_tokens >= warmed.tokens - 1


def test_a_model_that_falls_silent_over_results_is_asked_once_more(client, engine):
    engine.will_say(READ, "", "It came at noon.", "You are welcome.")
    answer = client.say("When did the Zephyr come?")
    assert answer.text == "It came at noon."
    assert "answer this in words" in answer.prompt
    assert "answer this in words" not in client.say("Thanks.").prompt


def test_results_that_fill_the_context_make_room_for_later_ones(harbour, engine, tmp_path):
    for name in "abcdefgh":
        (tmp_path / "root" / f"{name}.txt").write_text(f"{name} " * 700)
    reads = [CALL.format("read_file", f'{{"path": "{name}.txt"}}') for name in "abcdefgh"]
    engine.will_say(*reads, "Read all.")
    answer = Client(harbour, max_tokens=1200).say("Read everything.")
    assert answer.text == "Read all."
    assert "left out to make room" in answer.prompt
    assert sum(isinstance(event, CallStarted) for event in answer.events) == 8


def test_an_answer_has_one_place_for_all_its_rounds(tmp_path, engine):
    (tmp_path / "log.txt").write_text("At noon.")
    engine.will_say(READ, "It came at noon.")
    settings = {"server_tools": "safe", "enable_tools": ("files",), "max_concurrent_per_user": 1}
    with Harbour(tmp_path, engine, tools_root=tmp_path, **settings) as harbour:

        async def ask() -> str:
            said = ""
            async for event in harbour.backend.generate(Request(messages=(Message("user", "When?"),), user="ada")):
                if isinstance(event, (CallStarted, CallEnded)):
                    with pytest.raises(RateLimited):
                        await anext(harbour.backend.generate(Request(prompt="Hello", user="ada")))
                said += event.text if isinstance(event, TextDelta) else ""
            return said

        assert harbour._runner.run(ask()) == "It came at noon."
        harbour.backend._permits.acquire("ada", 1)  # it is free again


def test_a_deadline_holds_for_all_rounds_together(tmp_path, engine):
    asked = Request(messages=(Message("user", "When?"),), deadline_s=0.2)
    sleeping = CALL.format("run_command", '{"command": "sleep 60"}')
    engine.will_say(sleeping, "Too late.")
    with Harbour(tmp_path, engine, server_tools="safe", enable_tools=("command",), tools_root=tmp_path) as harbour:

        async def ask() -> None:
            async for _ in harbour.backend.generate(asked):
                pass

        with pytest.raises(DeadlineExceeded):
            harbour._runner.run(ask())
