"""Chats in which the model acts: what is shown, what is asked, what is kept."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from emberkeep.api.openai_chat import MessageBody, to_messages
from emberkeep.backend.base import ModelCard
from emberkeep.backend.fallback import FallbackBackend, Link
from emberkeep.cli import chat
from emberkeep.cli.chat_history import ChatHistory, Journal, recap, with_its_model, write_messages
from emberkeep.cli.chat_session import ChatSession, Terminal, call_line
from emberkeep.config.settings import Config
from emberkeep.config.tables import McpServer
from emberkeep.errors import RemoteDown
from emberkeep.library.emberkeep import Emberkeep
from emberkeep.library.tool_session import ToolSession
from emberkeep.library.user_memory import UserMemory
from emberkeep.mcp import client
from emberkeep.memory.memory import Memory
from emberkeep.tools.function import Answered, ToolFunction, as_tool
from emberkeep.tools.toolbox import ToolBox, ToolPolicy
from emberkeep.types.events import (
    Completed,
    Finished,
    FinishReason,
    LookupRecord,
    TextDelta,
    Timings,
    ToolCallDelta,
    Usage,
)
from emberkeep.types.memory import SavedConversation
from emberkeep.types.request import Message, Request, ToolCall
from helpers.scripted_backend import ScriptedBackend, Step, answer
from helpers.tool_calls import depth, sink

PROMPTS = '''
from mcp.server.mcpserver import MCPServer

server = MCPServer("harbour")

@server.prompt()
def greet(name: str) -> str:
    """Greet a captain."""
    return f"Say good morning to {name}."

@server.tool()
def bell(times: int) -> str:
    """Ring the bell."""
    return "ding " * times

server.run()
'''


def calling(name: str, text: str = "", **arguments: object) -> list[Step]:
    said: list[Step] = [TextDelta(0, text)] if text else []
    completed = Completed(Usage(10, 5), Timings(predicted_n=5, predicted_ms=10), LookupRecord())
    call = ToolCallDelta(0, 0, "c1", name, json.dumps(arguments))
    return [*said, call, Finished(0, FinishReason.TOOL_CALLS), completed]


def interrupt() -> None:
    """Ctrl-C at the terminal of the program."""
    ident = threading.main_thread().ident
    assert ident is not None
    signal.pthread_kill(ident, signal.SIGINT)


class Bench:
    """A chat with tools over a scripted backend; `answers` are a person's, or what to do instead of one."""

    def __init__(
        self,
        *rounds: Iterable[Step],
        functions: Iterable[Callable[..., object]] = (depth, sink),
        answers: Iterable[str | type[BaseException]] = (),
        asks: bool = True,
        memory: Memory | None = None,
    ) -> None:
        left = iter(rounds)
        self.backend = ScriptedBackend(lambda request: next(left))
        self.backend.memory = memory
        self.llm = Emberkeep(self.backend)
        made: list[ToolFunction] = [as_tool(one) for one in functions]
        box = ToolBox(made, ToolPolicy(enabled=("all",)))
        self.acting = ToolSession(self.llm._bridge, self.backend, box, asks=asks)
        self.out = io.StringIO()
        self.conversation = ChatHistory()
        self.questions: list[str] = []
        self._answers = iter(answers)
        self.journal = Journal(UserMemory(memory) if memory else None)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.acting.close()
        self.llm.close()

    def _ask(self, question: str) -> str:
        self.questions.append(question)
        given = next(self._answers)
        if isinstance(given, str):
            return given
        raise given

    def say(self, *lines: str) -> None:
        ChatSession(
            self.llm,
            self.conversation,
            {"max_tokens": 90},
            Terminal(self.out, interactive=True, ask=self._ask),
            self.journal,
            self.acting,
        ).run(lines)

    @property
    def roles(self) -> list[str]:
        return [message.role for message in self.conversation.messages]

    @property
    def last(self) -> Request:
        return self.backend.requests[-1]


# ── what is shown, and kept ──


def test_a_call_is_shown_with_its_time_and_the_answer_alone_goes_to_the_output(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Bench(calling("depth", pier=3), answer("Seven metres.")) as bench:
        bench.say("How deep?")
    assert bench.out.getvalue() == "Seven metres.\n"
    started, ended, *_ = capsys.readouterr().err.splitlines()
    assert started == "→ depth(pier=3)"
    assert ended.startswith("  ✓ 7 metres · ")
    assert ended.endswith(" ms")
    assert bench.roles == ["user", "assistant", "tool", "assistant"]


def ask_harbour(question: str) -> Answered:
    """Ask another model."""
    return Answered("harbour says: Seven metres.\nAt low tide six.", "harbour (pilot-2), 9 + 8 tokens, 0.1 s")


def test_a_model_that_was_asked_is_named_and_its_answer_shown(capsys: pytest.CaptureFixture[str]) -> None:
    rounds = calling("ask_harbour", question="How deep?"), answer("Seven.")
    with Bench(*rounds, functions=[ask_harbour]) as bench:
        bench.say("How deep?")
    _, ended, *rest = capsys.readouterr().err.splitlines()
    assert ended.startswith("  ✓ harbour (pilot-2), 9 + 8 tokens")
    assert rest[:-1] == ["  harbour says: Seven metres.", "  At low tide six."]
    assert bench.out.getvalue() == "Seven.\n"


def test_the_next_turn_has_the_call_and_its_result() -> None:
    with Bench(calling("depth", pier=3), answer("Seven metres."), answer("Welcome.")) as bench:
        bench.say("How deep?", "Thanks.")
    assert [message.content for message in bench.last.messages if message.role == "tool"] == ["7 metres"]


def test_a_tool_that_was_made_up_does_not_end_the_chat_in_silence(capsys: pytest.CaptureFixture[str]) -> None:
    with Bench(calling("dephth", pier=3), answer("I cannot.")) as bench:
        bench.say("How deep?")
    assert "✗ Error: There is no tool 'dephth': did you mean depth?" in capsys.readouterr().err
    assert bench.out.getvalue() == "I cannot.\n"


def test_what_tools_did_is_kept_where_no_answer_follows() -> None:
    silent: list[Step] = [Finished(0, FinishReason.STOP), Completed(Usage(10, 1), Timings(), LookupRecord())]
    with Bench(calling("depth", pier=3), silent, silent, answer("Yes.")) as bench:
        bench.say("How deep?", "Did you measure?")
    assert [m.role for m in bench.last.messages] == ["user", "assistant", "tool", "assistant", "user"]


@pytest.mark.parametrize("suffix", [".md", ".json"])
def test_a_conversation_with_calls_can_be_saved_continued_and_taken_along(tmp_path: Path, suffix: str) -> None:
    memory = Memory(tmp_path / "memory.sqlite3", limit_bytes=1 << 30)
    with Bench(calling("depth", "Let me see.", pier=3), answer("Seven metres."), memory=memory) as bench:
        bench.say("How deep?", f"/save {tmp_path / 'talk'}{suffix}")
        saved = UserMemory(memory).conversation(bench.conversation.id)
    memory.close()
    assert saved is not None
    continued = ChatHistory.resume(saved)
    assert continued.messages == bench.conversation.messages
    assert recap(continued.turns) == "> How deep?\nLet me see.\nSeven metres."
    write_messages(continued.messages, tmp_path / f"again{suffix}")
    written = (tmp_path / f"again{suffix}").read_text()
    assert written == (tmp_path / f"talk{suffix}").read_text()
    assert "7 metres" in written
    if suffix == ".json":
        bodies = [MessageBody(**message) for message in json.loads(written)["messages"]]
        assert list(to_messages(bodies)) == list(continued.messages)


# ── permission ──


@pytest.mark.parametrize(
    ("answers", "questions", "sunk"),
    [
        (["y", "once"], 2, 2),
        (["what?", "always"], 2, 2),
        (["v"], 1, 0),
        (["never"], 1, 0),
        (["n", "y"], 2, 1),
        ([EOFError, "y"], 2, 1),
        (["yes", "no"], 2, 1),
    ],
)
def test_a_dangerous_call_waits_for_the_user(
    answers: list[str | type[BaseException]], questions: int, sunk: int, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds = [calling("sink", ship="Ark"), answer("One."), calling("sink", ship="Argo"), answer("Two.")]
    with Bench(*rounds, answers=answers) as bench:
        bench.say("Sink the Ark.", "And the Argo.")
    assert len(bench.questions) == questions
    results = [message.content for message in bench.conversation.messages if message.role == "tool"]
    assert len([result for result in results if result.endswith("is gone")]) == sunk
    assert '? sink(ship="Ark")' in capsys.readouterr().err


def test_who_has_to_decide_sees_all_of_it() -> None:
    long = "a" * 500
    assert long in call_line(ToolCall("1", "sink", json.dumps({"ship": long})), whole=True)
    assert long in call_line(ToolCall("1", "sink", f'"{long}"'), whole=True)
    assert long not in call_line(ToolCall("1", "sink", json.dumps({"ship": long})))


def test_what_is_shown_cannot_drive_the_terminal() -> None:
    shown = call_line(
        ToolCall("1", "sink", json.dumps({"ship": "\u202eA\x1b[2J"}, ensure_ascii=False)), whole=True
    )
    assert shown.isprintable()


def test_ctrl_c_at_the_question_ends_the_answer_and_decides_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    rounds = [calling("sink", ship="Ark"), calling("sink", ship="Argo"), answer("Gone.")]
    with Bench(*rounds, answers=[KeyboardInterrupt, "o"]) as bench:
        bench.say("Sink the Ark.", "Sink the Argo.")
    assert "stopped" in capsys.readouterr().err
    assert len(bench.questions) == 2
    assert bench.roles == ["user", "assistant", "tool", "assistant"]
    assert bench.conversation.messages[2].content == "Argo is gone"


def test_ctrl_c_while_a_tool_runs_stops_it_and_the_chat_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    stopped = threading.Event()

    async def endless(n: int) -> str:
        """Never end."""
        interrupt()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()
        return ""

    with Bench(calling("endless", n=1), answer("Hello."), functions=[endless]) as bench:
        bench.say("Wait.", "Hello?")
        assert stopped.is_set()
    assert "stopped" in capsys.readouterr().err
    assert bench.roles == ["user", "assistant"]
    assert bench.last.messages == (Message("user", "Hello?"),)


# ── which tools ──


def names(config: Config) -> list[str]:
    with Emberkeep(ScriptedBackend(lambda request: [])) as llm, chat.tools_of(llm, config) as acting:
        return [function.name for function in acting.functions()] if acting else []


def test_without_a_terminal_dangerous_tools_have_to_be_enabled(tmp_path: Path) -> None:
    assert not sys.stdin.isatty()
    config = Config(data_dir=tmp_path, tools_root=tmp_path)
    harmless = names(config)
    assert "read_file" in harmless
    assert "run_command" not in harmless
    assert "write_file" not in harmless
    assert names(Config(data_dir=tmp_path, enable_tools=("command",))) == ["run_command"]
    assert names(Config(data_dir=tmp_path, disable_tools=("all",))) == []
    assert names(Config(data_dir=tmp_path, tools="off")) == []


@pytest.mark.parametrize("asked", [{"enable_tools": ("files",)}, {"tools_from": (Path("mine.py"),)}])
def test_tools_that_were_asked_for_and_are_not_given_are_a_remark(
    tmp_path: Path, asked: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    class Small(ScriptedBackend):
        @property
        def card(self) -> ModelCard:
            return replace(super().card, calls_tools=False)

    with Emberkeep(Small(lambda request: [])) as llm:
        for config in (Config(data_dir=tmp_path), Config(data_dir=tmp_path, **asked)):
            with chat.tools_of(llm, config) as acting:
                assert acting is None
    assert capsys.readouterr().err.count("--tools on") == 1


def test_a_chat_without_a_single_tool_is_a_chat(capsys: pytest.CaptureFixture[str]) -> None:
    with Bench(answer("Hello."), functions=[]) as bench:
        bench.say("Hello", "/tools")
    assert bench.last.tools == ()
    assert bench.out.getvalue() == "Hello.\n"


def test_tools_lists_what_the_model_can_do_and_what_asks_first(capsys: pytest.CaptureFixture[str]) -> None:
    with Bench() as bench:
        bench.say("/tools", "/tools sink", "/tools nets", "/tools all")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["depth", "sink", "sink"]
    assert "asks first" in lines[1]
    assert "no tool, group or server 'nets'" in lines[3]
    assert lines[4:] == lines[:2]


def test_behind_a_chat_no_tools_run_for_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Config] = []

    def open_model(config: Config) -> Emberkeep:
        opened.append(config)
        return Emberkeep(ScriptedBackend(lambda request: answer("Hello.")))

    monkeypatch.setattr(chat, "open_model", open_model)
    monkeypatch.setattr(chat, "install_model", lambda config: None)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    config = Config(data_dir=tmp_path, tools="off", server_tools="safe", enable_tools=("command",))
    chat.talk(config, None, chat.AnswerFlags(), is_saving=False)
    assert [one.server_tools for one in opened] == ["off"]


# ── others that answer ──


def test_a_stand_in_is_told_once_and_so_is_the_first_when_it_is_back(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    down = [True]
    first = ScriptedBackend(lambda request: [RemoteDown("It is down.")] if down[0] else answer("First."))
    second = ScriptedBackend(lambda request: answer("Second."))
    links = [Link("first", lambda: first), Link("second", lambda: second)]  # type: ignore[arg-type, return-value]
    with Emberkeep(FallbackBackend(links)) as llm:
        session = ChatSession(llm, ChatHistory(), {}, Terminal(io.StringIO(), interactive=True), Journal(None))
        session.run(["one", "two"])
        told = capsys.readouterr().err
        assert told.count("second has answered instead of first (It is down.)") == 1
        down[0] = False
        links[0].note_success()
        session.run(["three"])
    assert "first has answered instead of second" in capsys.readouterr().err


def test_a_conversation_that_goes_on_elsewhere_does_not_take_the_name_of_a_file_along(tmp_path: Path) -> None:
    elsewhere = Config(data_dir=tmp_path, backend="compatible", base_url="http://127.0.0.1:9/v1")
    saved = SavedConversation("1", "Ships", "/models/own.gguf", 0.0, 0.0)
    assert with_its_model(elsewhere, saved) is elsewhere


# ── MCP ──


@pytest.mark.slow
def test_prompts_of_a_server_are_commands_and_one_that_is_down_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_PATIENCE_S", 120.0)
    program = tmp_path / "harbour.py"
    program.write_text(PROMPTS)
    servers = (
        McpServer("harbour", (sys.executable, str(program)), trusted=True),
        McpServer("wreck", (sys.executable, "-c", "raise SystemExit(1)")),
    )
    config = Config(data_dir=tmp_path, mcp=servers, enable_tools=("mcp",))
    backend = ScriptedBackend(lambda request: answer("Good morning."))
    with Emberkeep(backend) as llm, chat.tools_of(llm, config) as acting:
        out = io.StringIO()
        session = ChatSession(llm, ChatHistory(), {}, Terminal(out, interactive=True), Journal(None), acting)
        session.run(["/help", "/harbour__greet Ada Lovelace", "/harbour__greet name='Grace'", "/tools"])
        session.run(["/harbour__greet", "/harbour__greet name=Ada rank=captain", "/tools harbour"])
    said = capsys.readouterr().err
    assert "/harbour__greet name=…" in said
    assert "harbour__bell" in said
    assert said.count("wreck: stopped") == 1 and said.count("harbour: ready") == 2
    assert said.count("do not fit: write /harbour__greet name=….") == 2
    asked = [request.messages[-1].content for request in backend.requests]
    assert asked == ["Say good morning to Ada Lovelace.", "Say good morning to Grace."]
