"""`emberkeep memory`: on the file itself, with no model and no server."""

from __future__ import annotations

import io
import json
import re
import stat
import time
from pathlib import Path

import pytest
from rich.console import Console

from emberkeep.cli.chat_history import ChatHistory, Journal
from emberkeep.cli.chat_session import ChatSession, Terminal
from emberkeep.cli.memory import app
from emberkeep.config.settings import Config
from emberkeep.errors import InvalidField, MemoryFailed, MemoryOff, NoSuchEntry
from emberkeep.library.emberkeep import Emberkeep
from emberkeep.library.user_memory import open_memory
from emberkeep.runtime.parts import open_memory as open_file
from emberkeep.types.lineage import private_namespace
from emberkeep.types.memory import ToolUse, Turn
from emberkeep.types.request import Json, Message
from helpers.commands import Commands
from helpers.scripted_backend import ScriptedBackend, answer

pytestmark = pytest.mark.usefixtures("data_dir")

commands = Commands(app)
run, ok, refused = commands.run, commands.ok, commands.refused

DAY_S = 86_400.0
BOAT = ("What did we call the boat?", "The boat is called Marigold.")
TREE = ("Which tree is the oldest?", "The oldest tree is a bristlecone pine.")


def archive(
    data_dir: Path,
    *turns: tuple[str, str],
    user: str = "",
    conversation: str = "c1",
    age_s: float = 0,
    uses: tuple[ToolUse, ...] = (),
) -> None:
    memory = open_file(Config(data_dir=data_dir))
    assert memory is not None
    memory.archive(
        private_namespace(user),
        [
            Turn(f"{conversation}{user}{asked}".encode(), conversation, time.time() - age_s, asked, answered, uses)
            for asked, answered in turns
        ],
    )
    memory.close()


def found(*arguments: str) -> list[Json]:
    return json.loads(ok("search", "--json", *arguments))


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines()]


# ── search ──


def test_who_said_what_and_when_is_found(data_dir: Path) -> None:
    archive(data_dir, BOAT, TREE, age_s=3 * DAY_S, uses=(ToolUse("look_up", "{}", "a long list"),))
    head, asked, answered, used = lines(ok("search", "the name of the boat", "-n", "1"))
    assert head.split() == ["score", "when", "said"]
    assert re.fullmatch(r"[01]\.\d\d +3 days ago +user +What did we call the boat\?", asked)
    assert answered.split(None, 1) == ["assistant", "The boat is called Marigold."]
    assert used.split(None, 1) == ["look_up", "a long list"]


def test_json_is_what_the_server_says(data_dir: Path) -> None:
    archive(data_dir, BOAT, TREE)
    (boat,) = found("boat")
    assert (boat["kind"], boat["user_text"], boat["assistant_text"]) == ("turn", *BOAT)
    assert (boat["conversation"], "**boat**" in boat["highlight"]) == ("c1", True)


def test_search_stays_with_a_user_and_a_conversation(data_dir: Path) -> None:
    archive(data_dir, BOAT, user="alice", conversation="c1")
    archive(data_dir, BOAT, user="alice", conversation="c2")
    assert found("boat") == []
    assert len(found("boat", "--user", "alice")) == 2
    assert [one["conversation"] for one in found("boat", "--user", "alice", "--conversation", "c2")] == ["c2"]


def test_matched_words_are_marked_on_a_terminal_only(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive(data_dir, ("What of the boat? [red]", "The boat \x1b[2Jis in the boathouse."))
    assert "\x1b" not in ok("search", "boat")
    terminal = Console(width=80, force_terminal=True, color_system="standard")
    monkeypatch.setattr("emberkeep.cli.console.console", lambda: terminal)
    with terminal.capture() as captured:
        ok("search", "boat")
    assert captured.get().count("\x1b[1;33mboat\x1b[0m") == 2
    assert "\x1b[2J" not in captured.get()
    assert "[red]" in captured.get()


def test_a_long_text_is_shown_around_its_match(data_dir: Path) -> None:
    archive(data_dir, ("Tell me.", "word " * 400 + "and the boat is Marigold " + "word " * 400))
    *_, shown = lines(ok("search", "Marigold"))
    assert "boat is Marigold" in shown
    assert len(shown) < 350


def test_finding_nothing_is_no_error(data_dir: Path) -> None:
    assert "Nothing like that is remembered" in ok("search", "boat")
    assert found("boat") == []


def test_chat_searches_too(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archive(data_dir, BOAT, TREE, age_s=3 * DAY_S)
    backend = ScriptedBackend(lambda request: answer("never asked"))
    with Emberkeep(backend) as llm, open_memory(Config(data_dir=data_dir)) as memory:
        session = ChatSession(llm, ChatHistory(), {}, Terminal(io.StringIO(), interactive=True), Journal(memory))
        session.run(["/memory boat", "/memory zebra"])
    when, asked, answered, nothing = capsys.readouterr().err.splitlines()
    assert when.startswith("3 days ago, score ")
    assert (asked, answered) == (f"  user: {BOAT[0]}", f"  assistant: {BOAT[1]}")
    assert nothing.startswith("Nothing like that is remembered")
    assert backend.requests == []


# ── facts ──


def test_facts_are_set_listed_read_and_deleted() -> None:
    assert "`emberkeep memory facts set NAME VALUE`" in ok("facts")
    assert ok("facts", "set", "favourite colour", "green") == "favourite colour is set.\n"
    ok("facts", "set", "home", "Lyon")
    ok("facts", "set", "home", "Paris")
    assert lines(ok("facts")) == ["favourite colour  green", "home              Paris"]
    assert ok("facts", "get", "home") == "Paris\n"
    assert ok("facts", "delete", "home") == "home is deleted.\n"
    assert [fact["name"] for fact in json.loads(ok("facts", "--json"))] == ["favourite colour"]


def test_facts_belong_to_a_user() -> None:
    ok("facts", "set", "home", "Lyon", "--user", "alice")
    assert "Lyon" in ok("facts", "--user", "alice")
    assert "No facts yet" in ok("facts")
    assert ok("facts", "get", "home", "--user", "alice") == "Lyon\n"
    assert isinstance(run("facts", "get", "home").exception, NoSuchEntry)


def test_a_fact_that_is_not_there_is_one_sentence() -> None:
    assert refused("facts", "get", "home") == "There is no fact 'home': `emberkeep memory facts` lists them."
    assert refused("facts", "delete", "home") == refused("facts", "get", "home")


# ── export, import ──


def test_what_is_exported_can_be_imported_elsewhere_and_nothing_twice(data_dir: Path, tmp_path: Path) -> None:
    archive(data_dir, BOAT, TREE, user="alice")
    ok("facts", "set", "home", "Lyon")
    assert "emberkeep memory import all.jsonl" in ok("export", "all.jsonl")
    assert stat.S_IMODE((tmp_path / "all.jsonl").stat().st_mode) == 0o600
    assert ok("export").splitlines()[1:] == (tmp_path / "all.jsonl").read_text().splitlines()[1:]
    other = ("--data-dir", "other")
    assert ok("import", "all.jsonl", *other) == "3 things added from all.jsonl.\n"
    assert ok("import", "all.jsonl", *other) == "0 things added from all.jsonl.\n"
    assert ok("facts", "get", "home", *other) == "Lyon\n"
    assert len(found("boat", "--user", "alice", *other)) == 1


def test_one_users_memory_is_exported_alone(data_dir: Path) -> None:
    archive(data_dir, BOAT, user="alice")
    archive(data_dir, TREE, user="bob")
    exported = ok("export", "--user", "alice")
    assert "Marigold" in exported
    assert "bristlecone" not in exported


# ── forget, stats ──


def test_everything_of_a_user_is_forgotten_and_counted(data_dir: Path) -> None:
    archive(data_dir, BOAT, TREE, user="alice")
    archive(data_dir, BOAT, user="bob")
    ok("facts", "set", "home", "Lyon", "--user", "alice")
    line = ok("forget", "--user", "alice", "--yes")
    assert re.fullmatch(r"Forgot 2 archived turns, 1 fact; the file is .+ smaller\.\n", line)
    assert found("boat", "--user", "alice") == []
    assert len(found("boat", "--user", "bob")) == 1
    assert ok("forget", "--user", "alice", "-y") == "Nothing of that was remembered.\n"


def test_one_conversation_is_forgotten_archived_and_saved(data_dir: Path) -> None:
    archive(data_dir, BOAT, conversation="c1")
    archive(data_dir, TREE, conversation="c2")
    with open_memory(Config(data_dir=data_dir)) as memory:
        memory.save_messages("c1", [Message("user", BOAT[0]), Message("assistant", BOAT[1])], model="m")
    assert ok("forget", "--conversation", "c1", "-y").startswith("Forgot 1 archived turn, 1 saved conversation; ")
    assert found("boat") == []
    assert len(found("tree")) == 1


def test_nothing_is_forgotten_without_a_terminal(data_dir: Path) -> None:
    archive(data_dir, BOAT)
    assert "say --yes" in refused("forget", "--conversation", "c1")
    assert len(found("boat")) == 1


@pytest.mark.parametrize(("reply", "left"), [("n\n", 1), ("y\n", 0)])
def test_at_a_terminal_it_is_asked(data_dir: Path, monkeypatch: pytest.MonkeyPatch, reply: str, left: int) -> None:
    archive(data_dir, BOAT, user="alice")
    monkeypatch.setattr("emberkeep.cli.console._is_terminal", lambda: True)
    result = run("forget", "--user", "alice", input=reply)
    assert "Forget everything of the user alice (1 thing)?" in result.stderr
    assert len(found("boat", "--user", "alice")) == left


def test_forgetting_without_naming_a_user_is_wrong_usage() -> None:
    assert run("forget", "--yes").exit_code == 2


def test_stats_tell_how_much_there_is(data_dir: Path) -> None:
    archive(data_dir, BOAT, TREE, age_s=3 * DAY_S)
    archive(data_dir, BOAT, user="alice")
    ok("facts", "set", "home", "Lyon")
    figures = dict(line.split("  ", 1) for line in lines(ok("stats")))
    assert figures["archived turns"].strip() == "3"
    assert figures["facts"].strip() == "1"
    assert figures["size"].strip().endswith("of 10 GiB")
    assert figures["oldest turn"].strip() == "3 days ago"
    assert json.loads(ok("stats", "--user", "alice", "--json"))["turns"] == 1


# ── what is wrong ──


@pytest.mark.parametrize("command", [["search", "boat"], ["facts"], ["export"], ["stats"]])
def test_memory_that_is_switched_off_says_how_to_switch_it_on(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setenv("EMBERKEEP_MEMORY", "false")
    result = run(*command)
    assert isinstance(result.exception, MemoryOff)
    assert "memory = true" in str(result.exception)
    assert not data_dir.exists()


def test_a_damaged_file_is_one_sentence(data_dir: Path) -> None:
    data_dir.mkdir()
    (data_dir / "memory.sqlite3").write_bytes(b"no database" * 1000)
    result = run("search", "boat")
    assert isinstance(result.exception, MemoryFailed)
    assert str(data_dir / "memory.sqlite3") in str(result.exception)


def test_a_user_that_cannot_be_is_named(data_dir: Path) -> None:
    assert isinstance(run("facts", "--user", "a" * 600).exception, InvalidField)
