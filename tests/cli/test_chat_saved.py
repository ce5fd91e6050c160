"""Chats that are saved, listed, exported and continued."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from emberkeep.cli.chat_history import ChatHistory, Journal
from emberkeep.cli.main import app
from emberkeep.config.settings import Config
from emberkeep.errors import EmberkeepError, MemoryFailed, MemoryOff, ModelNotFound, NoSuchEntry
from emberkeep.library.emberkeep import Emberkeep
from emberkeep.library.user_memory import UserMemory, open_memory
from emberkeep.runtime.parts import open_memory as open_file
from emberkeep.types.memory import SavedConversation
from emberkeep.types.request import Message, ToolCall
from helpers.kept_chats import open_emberkeep
from helpers.scripted_backend import ScriptedBackend, answer
from helpers.several_models import install

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("data_dir")]


@pytest.fixture
def gone() -> set[str]:
    """Models that are not on this machine."""
    return set()


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, gone: set[str]) -> list[Config]:
    """The settings of every model that was loaded."""

    def install(config: Config) -> None:
        if config.model in gone:
            raise ModelNotFound(f"There is no {config.model}.")

    for place in ("chat", "chat_history"):
        monkeypatch.setattr(f"emberkeep.cli.{place}.install_model", install)
    return []


class RememberingBackend(ScriptedBackend):
    async def close(self) -> None:
        if self.memory is not None:
            self.memory.close()


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch, loaded: list[Config]) -> ScriptedBackend:
    backend = RememberingBackend(lambda request: answer(f"re: {request.messages[-1].content}"))

    def open_scripted(config: Config) -> Emberkeep:
        loaded.append(config)
        backend.memory = open_file(config)
        return Emberkeep(backend)

    monkeypatch.setattr(Emberkeep, "open", open_scripted)
    return backend


def run(*arguments: str, input: str | None = None) -> Result:
    return CliRunner().invoke(app, ["chat", *arguments], input=input)


def ok(*arguments: str, input: str | None = None) -> Result:
    result = run(*arguments, input=input)
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def refused(*arguments: str) -> str:
    result = run(*arguments)
    assert isinstance(result.exception, EmberkeepError), result.output
    return str(result.exception)


@contextmanager
def memory(data_dir: Path) -> Iterator[UserMemory]:
    with open_memory(Config(data_dir=data_dir)) as opened:
        yield opened


def saved(data_dir: Path) -> list[SavedConversation]:
    """Every saved conversation with its messages, the latest first."""
    with memory(data_dir) as opened:
        whole = [opened.conversation(one.id) for one in opened.conversations()]
    return [one for one in whole if one is not None]


def said(*texts: str) -> tuple[Message, ...]:
    return tuple(m for text in texts for m in (Message("user", text), Message("assistant", f"re: {text}")))


# ── saving ──


def test_every_turn_of_a_chat_is_saved(backend: ScriptedBackend, data_dir: Path) -> None:
    ok("--system", "Be kind.", input="one\ntwo\n")
    (conversation,) = saved(data_dir)
    assert conversation.messages == (Message("system", "Be kind."), *said("one", "two"))
    assert conversation.model == Config().local_model
    assert {request.conversation_id for request in backend.requests} == {conversation.id}


def test_a_chat_of_which_nothing_was_said_is_not_saved(backend: ScriptedBackend, data_dir: Path) -> None:
    ok("--system", "Be kind.", input="/help\n")
    assert saved(data_dir) == []


def test_clear_begins_another_conversation_and_keeps_the_one_before(
    backend: ScriptedBackend, data_dir: Path
) -> None:
    ok(input="one\n/clear\ntwo\n")
    assert [conversation.messages for conversation in saved(data_dir)] == [said("two"), said("one")]


def test_another_system_message_is_saved_too(backend: ScriptedBackend, data_dir: Path) -> None:
    ok(input="one\n/system Be brief.\ntwo\n")
    (conversation,) = saved(data_dir)
    assert conversation.messages == (Message("system", "Be brief."), *said("one", "two"))


def test_saving_is_switched_off_for_one_chat(backend: ScriptedBackend, data_dir: Path) -> None:
    ok("--no-save", input="one\n")
    assert saved(data_dir) == []


def test_without_memory_a_chat_is_not_saved_and_says_nothing_about_it(
    backend: ScriptedBackend, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMBERKEEP_MEMORY", "false")
    assert ok(input="one\n").stderr.startswith("reused ")
    assert not (data_dir / "memory.sqlite3").exists()
    assert isinstance(run("--continue").exception, MemoryOff)
    assert isinstance(run("--list").exception, MemoryOff)


def test_a_memory_that_cannot_be_opened_is_one_warning(
    loaded: list[Config], data_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Emberkeep, "open", open_emberkeep)
    data_dir.mkdir()
    (data_dir / "memory.sqlite3").write_bytes(b"no database" * 1000)
    result = ok("--max-tokens", "4", input="one\ntwo\n")
    assert len(result.stdout.splitlines()) == 2
    assert [line.split()[0] for line in result.stderr.splitlines()] == ["nothing", "reused", "reused"]
    assert [str(data_dir / "memory.sqlite3") in record.getMessage() for record in caplog.records] == [True]


class FlakyMemory(UserMemory):
    """Its disk is full while `is_full`."""

    is_full = True

    def save_messages(self, *arguments: object, **named: object) -> None:
        if self.is_full:
            raise MemoryFailed("The disk is full: make room.")
        super().save_messages(*arguments, **named)  # type: ignore[arg-type]


def test_what_was_not_saved_is_told_once_and_made_up_for(
    data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with memory(data_dir) as opened:
        flaky = FlakyMemory(opened._memory)
        journal, conversation = Journal(flaky, "a model"), ChatHistory()
        for text in ("one", "two", "three"):
            conversation.add(*said(text))
            journal.save(conversation)
            flaky.is_full = text == "one"
    assert capsys.readouterr().err == "This conversation is not saved: The disk is full: make room.\n"
    assert saved(data_dir)[0].messages == said("one", "two", "three")


# ── continuing ──


def test_continue_sends_everything_that_was_said(backend: ScriptedBackend, data_dir: Path) -> None:
    ok("--system", "Be kind.", input="one\n")
    ok("--continue", input="two\nthree\n")
    everything = (Message("system", "Be kind."), *said("one", "two", "three"))
    assert backend.requests[-1].messages == everything[:-1]
    assert len({request.conversation_id for request in backend.requests}) == 1
    assert [conversation.messages for conversation in saved(data_dir)] == [everything]


KILLED_CHAT = """
from emberkeep.cli import chat
from emberkeep.cli.main import app
from emberkeep.library.emberkeep import Emberkeep
from helpers.kept_chats import open_emberkeep

chat.install_model = lambda config: None
Emberkeep.open = open_emberkeep
app(["chat", "--max-tokens", "4"])
"""


def test_a_killed_chat_goes_on_where_it_was(data_dir: Path, backend: ScriptedBackend) -> None:
    paths = os.pathsep.join(str(Path(__file__).parents[2] / folder) for folder in ("src", "tests"))
    with subprocess.Popen(
        [sys.executable, "-c", KILLED_CHAT],
        env={**os.environ, "PYTHONPATH": paths},
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    ) as child:
        assert child.stdin is not None
        assert child.stderr is not None
        child.stdin.write("Which ships are here?\n")
        child.stdin.flush()
        assert child.stderr.readline().startswith("reused ")
        child.kill()
    (conversation,) = saved(data_dir)
    ok("--continue", input="And yesterday?\n")
    assert backend.requests[0].messages == (*conversation.messages, Message("user", "And yesterday?"))
    assert conversation.messages[0].content == "Which ships are here?"


def test_an_older_conversation_is_continued_by_the_beginning_of_its_id(
    backend: ScriptedBackend, data_dir: Path
) -> None:
    ok(input="one\n")
    ok(input="two\n")
    latest, older = saved(data_dir)
    unique = next(older.id[:n] for n in range(1, 13) if not latest.id.startswith(older.id[:n]))
    ok("--continue", unique, input="three\n")
    assert [conversation.messages for conversation in saved(data_dir)] == [said("one", "three"), said("two")]


def test_an_id_must_lead_to_one_conversation(backend: ScriptedBackend, data_dir: Path) -> None:
    assert "No conversation is saved here yet" in refused("--continue")
    with memory(data_dir) as opened:
        for id_ in ("abc1", "abc2", "abc"):
            opened.save_messages(id_, said(id_), model="a model")
    assert isinstance(run("--continue", "xyz").exception, NoSuchEntry)
    assert "`emberkeep chat --list` lists them" in refused("--continue", "xyz")
    assert "3 conversations begin with 'ab'" in refused("-c", "ab")
    ok("-c", "abc", input="more\n")
    assert backend.requests[0].conversation_id == "abc"


def test_the_saved_system_message_gives_way_to_another_one(backend: ScriptedBackend, data_dir: Path) -> None:
    ok("--system", "Be kind.", input="one\n")
    ok("--continue", "--system", "Be brief.", input="two\n")
    assert backend.requests[-1].messages[0] == Message("system", "Be brief.")
    (conversation,) = saved(data_dir)
    assert conversation.messages == (Message("system", "Be brief."), *said("one", "two"))


def test_a_conversation_goes_on_with_its_model(
    backend: ScriptedBackend, loaded: list[Config], gone: set[str], data_dir: Path
) -> None:
    install(data_dir, "mine", "other")
    ok("mine", input="one\n")
    assert "another model" not in ok("--continue", input="two\n").stderr
    assert "was with mine; it goes on with another model" in ok("other", "--continue", input="three\n").stderr
    gone.add("other")
    assert "was with other; it goes on with another model" in ok("--continue", input="four\n").stderr
    assert [config.local_model for config in loaded] == ["mine", "mine", "other", Config().local_model]


def test_a_model_that_is_a_file_is_found_from_any_folder(
    backend: ScriptedBackend, loaded: list[Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.gguf").touch()
    (tmp_path / "elsewhere").mkdir()
    ok("own.gguf", input="one\n")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert "another model" not in ok("--continue", input="two\n").stderr
    assert loaded[-1].model == str(tmp_path / "own.gguf")
    assert ok("--list").stdout.splitlines()[1].split()[-1] == "own.gguf"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_user_who_comes_back_sees_what_was_said_last(
    backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ok("--system", "Be kind.", input="one\ntwo\nthree\n\x1b[2Jfour\n")
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("emberkeep.cli.chat.terminal_lines", lambda history: iter(()))
    app(["chat", "--continue"], standalone_mode=False)
    reminder = "…\n> three\nre: three\n> [2Jfour\nre: [2Jfour\n"
    assert reminder in capsys.readouterr().err


# ── listing and exporting ──


def test_saved_conversations_are_listed_the_latest_first(backend: ScriptedBackend, data_dir: Path) -> None:
    install(data_dir, "mine")
    assert "`emberkeep chat` begins one" in ok("--list").stdout
    ok(input="What is the tallest ship?\n")
    ok("mine", input="Who is at sea?\nAnd where?\n")
    head, *rows = ok("--list").stdout.splitlines()[:3]
    assert head.split() == ["id", "last", "messages", "title", "model"]
    latest, older = saved(data_dir)
    assert rows[0].split()[0] == latest.id
    assert "Who is at sea?" in rows[0]
    assert rows[0].split()[-1] == "mine"
    assert rows[1].split()[0] == older.id
    assert " 2 " in rows[1]
    assert backend.requests[2:] == backend.requests[-1:]


def test_a_saved_conversation_is_exported_with_its_tool_calls(data_dir: Path, tmp_path: Path) -> None:
    call = ToolCall("c1", "look", '{"at": "```sea```"}')
    messages = (
        Message("user", "Who is at sea?"),
        Message("assistant", "", "hm", tool_calls=(call,)),
        Message("tool", "two ships", tool_call_id="c1", name="look"),
        Message("assistant", "Two ships."),
    )
    with memory(data_dir) as opened:
        opened.save_messages("abc1", messages, model="a model")
    assert ok("--export", "abc", "talk.md").stdout == "Saved 4 messages to talk.md.\n"
    ok("--export", "latest", "talk.json")
    assert (tmp_path / "talk.md").read_text() == (
        "## user\n\nWho is at sea?\n\n"
        '## assistant\n\nCalls `look`:\n\n````\n{"at": "```sea```"}\n````\n\n'
        "## tool (look)\n\n```\ntwo ships\n```\n\n"
        "## assistant\n\nTwo ships.\n"
    )
    exported = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert exported[1] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "```sea```"}'}}
        ],
    }
    assert exported[2] == {"role": "tool", "content": "two ships", "tool_call_id": "c1", "name": "look"}
    assert "exists already" in refused("--export", "abc", "talk.md")
    assert "`emberkeep chat --list`" in refused("--export", "xyz", "other.md")
