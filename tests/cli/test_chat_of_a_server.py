"""`emberkeep chat` where a server runs on the same data folder: it answers, and no model is loaded twice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from emberkeep.cli import chat
from emberkeep.config.settings import Config
from emberkeep.errors import EmberkeepError, InvalidField, ModelNotFound
from emberkeep.library.emberkeep import Emberkeep
from emberkeep.server.presence import announce
from emberkeep.types.events import (
    Completed,
    Eviction,
    Finished,
    FinishReason,
    Fit,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
)
from helpers import scripted_backend
from helpers.commands import Commands
from helpers.scripted_server import COMPLETED, Running, ScriptedBackend, running, says

commands = Commands(chat.app)
ok = commands.ok


@pytest.fixture
def own(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> scripted_backend.ScriptedBackend:
    """The model that a chat loads itself."""
    backend = scripted_backend.ScriptedBackend(lambda request: scripted_backend.answer("My own words."))
    monkeypatch.setattr(chat, "install_model", lambda config: None)
    monkeypatch.setattr(Emberkeep, "open", lambda config: Emberkeep(backend))
    return backend


@pytest.fixture
def served() -> ScriptedBackend:
    backend = ScriptedBackend()
    backend.card = replace(backend.card, id="tiny")
    return backend


@pytest.fixture
def server(served: ScriptedBackend, own: scripted_backend.ScriptedBackend, data_dir: Path) -> Iterator[Running]:
    with running(served, Config(data_dir=data_dir)) as server, announce(data_dir, server.url):
        yield server


@pytest.mark.usefixtures("server")
def test_the_running_server_answers_and_nothing_is_loaded(
    served: ScriptedBackend, own: scripted_backend.ScriptedBackend
) -> None:
    result = commands.run("Why is the sky blue?", "-t", "0", "--max-tokens", "9", "--system", "Be brief.")
    assert result.stdout == "Hello world\n"
    assert "reused 8/12 tokens · first token 21 ms · 3 tokens at 100/s" in result.stderr
    asked = served.last
    assert [(message.role, message.content) for message in asked.messages] == [
        ("system", "Be brief."),
        ("user", "Why is the sky blue?"),
    ]
    assert (asked.sampling.temperature, asked.max_tokens, asked.user) == (0.0, 9, "")
    assert own.requests == []


@pytest.mark.usefixtures("server")
def test_a_conversation_with_it_is_saved_and_goes_on(served: ScriptedBackend) -> None:
    ok("-m", "tiny", "hello")
    first = served.last.conversation_id
    assert "hello" in ok("--list") and "tiny" in ok("--list")
    ok("--continue", first or "", input="and again\n")
    assert served.last.conversation_id == first
    assert [message.content for message in served.last.messages] == ["hello", "Hello world", "and again"]


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(
    "arguments", [("--own",), ("--ctx", "512"), ("-m", "another"), ("--too-long", "truncate")]
)
def test_a_chat_that_wants_another_model_loads_its_own(
    arguments: tuple[str, ...], served: ScriptedBackend
) -> None:
    assert ok(*arguments, "hello") == "My own words.\n"
    assert served.requests == []


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(("too_long", "evict"), [("evict", True), ("refuse", False)])
def test_whether_messages_may_leave_is_said_to_the_server(
    too_long: str, evict: bool, served: ScriptedBackend
) -> None:
    assert ok("--too-long", too_long, "hello") == "Hello world\n"
    assert served.last.evict is evict


def test_without_a_server_it_loads_its_own(own: scripted_backend.ScriptedBackend) -> None:
    assert ok("hello", "there") == "My own words.\n"
    assert own.requests[-1].messages[-1].content == "hello there"


def test_a_server_whose_key_is_not_known_is_told_of(
    served: ScriptedBackend, own: scripted_backend.ScriptedBackend, data_dir: Path
) -> None:
    config = Config(data_dir=data_dir, api_key="secret-key")
    with running(served, config) as server, announce(data_dir, server.url):
        result = commands.run("hello")
        assert result.stdout == "My own words.\n"
        assert "EMBERKEEP_API_KEY, or api_key in the file. This chat loads the model itself." in result.stderr


def test_tools_run_here_and_their_results_go_to_the_server(
    served: ScriptedBackend, server: Running, data_dir: Path
) -> None:
    (data_dir.parent / "boat.txt").write_text("Marigold")
    arguments = '{"path": "boat.txt"}'
    calls = [
        ToolCallDelta(0, 0, "call_1", "read_file", arguments[:5]),
        ToolCallDelta(0, 0, None, None, arguments[5:]),
        Finished(0, FinishReason.TOOL_CALLS),
        COMPLETED,
    ]
    scripts = iter([calls, says("It is Marigold.")])
    answer = served.generate

    def next_script(request):
        served.script = next(scripts)
        return answer(request)

    served.generate = next_script  # type: ignore[method-assign]
    assert ok("What is in boat.txt?", "--enable-tools", "read_file") == "It is Marigold.\n"
    assert [tool.name for tool in served.last.tools] == ["read_file", "more_output"]
    call, result = served.last.messages[-2:]
    assert (call.tool_calls[0].id, call.tool_calls[0].arguments) == ("call_1", arguments)
    assert (result.role, result.tool_call_id) == ("tool", "call_1") and "Marigold" in result.content


@pytest.mark.usefixtures("server")
def test_thoughts_and_what_left_the_context_are_told(served: ScriptedBackend) -> None:
    cost = replace(COMPLETED, fit=Fit(evictions=(Eviction(2, 80, 2),), recalled=1))
    served.reset(ReasoningDelta(0, "Hm."), TextDelta(0, "Blue."), Finished(0, FinishReason.LENGTH), cost)
    served.card = replace(served.card, id="tiny")
    result = commands.run("Why?")
    assert result.stdout == "Blue.\n"
    assert "2 messages left the context (archived) · recalled 1" in result.stderr


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("begun", [[], [TextDelta(0, "Hel")]])
def test_what_the_server_refuses_or_breaks_off_is_its_sentence(served: ScriptedBackend, begun: list) -> None:
    served.script = [*begun, InvalidField("messages", "there is too much of it.")]
    assert commands.refused("hello") == "messages: there is too much of it."


@pytest.mark.usefixtures("server")
def test_an_answer_without_its_end_is_no_answer(served: ScriptedBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emberkeep.backend.running._AnswerReader.read", lambda self, chunk: iter(()))
    assert "broke off: ask again, or load the model in this chat with --own." in commands.refused("hello")


@pytest.mark.usefixtures("server")
def test_a_server_of_another_version_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emberkeep.backend.running._completed", lambda *_: {}["reused"])
    assert "broke off: ask again" in commands.refused("hello")


def test_a_question_in_a_terminal_is_asked_once_and_no_more(own: scripted_backend.ScriptedBackend) -> None:
    ok("hello", input="this is not read\n")
    assert len(own.requests) == 1


def test_a_word_that_is_nearly_a_model_is_no_question(own: scripted_backend.ScriptedBackend) -> None:
    result = commands.run("smolm2-135m")
    assert isinstance(result.exception, ModelNotFound)
    assert "No model called smolm2-135m" in str(result.exception)
    assert own.requests == []


def test_a_path_is_a_model_and_never_a_question(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = commands.run("./mine.gguf", "hello")
    assert isinstance(result.exception, EmberkeepError)
    assert "mine.gguf" in str(result.exception)


def test_what_an_answer_cost_arrives_whole(served: ScriptedBackend, server: Running) -> None:
    from emberkeep.backend.running import RunningModel

    with Emberkeep(RunningModel(served.card, {"base_url": server.url}, None)) as llm:
        result = llm.chat("hello")
        assert llm.stats() == {"requests": 1}
    cost = Completed(COMPLETED.usage, COMPLETED.timings, COMPLETED.lookup)
    assert result.timings == cost.timings
    assert (result.usage.prompt_tokens, result.usage.cached_tokens) == (12, 8)
