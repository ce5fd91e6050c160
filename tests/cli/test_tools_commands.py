"""`emberkeep tools`: what there is, how it is called, and calling it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from emberkeep.cli.tools import app
from emberkeep.errors import ConfigError, EmberkeepError
from emberkeep.types.request import Json
from helpers.commands import Commands

commands = Commands(app)
run, ok = commands.run, commands.ok

MINE = '''
from emberkeep import tool

@tool(group="harbour", dangerous=True)
def berth(ship: str, metres: int = 20, flags: list[str] | None = None) -> dict:
    """Find a berth. It has to be asked for."""
    return {"ship": ship, "metres": metres, "flags": flags}
'''


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, data_dir: Path) -> Path:
    (tmp_path / "notes.txt").write_text("The boat is called Marigold.\n")
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def refused(*arguments: str) -> str:
    result = run(*arguments)
    assert isinstance(result.exception, EmberkeepError), (result.output, result.exception)
    assert result.stdout == ""
    return str(result.exception)


def listed(*arguments: str) -> dict[str, Json]:
    return {row["name"]: row for row in json.loads(ok("list", "--json", *arguments))}


# ── list ──


def test_every_tool_is_listed_with_where_it_is_used() -> None:
    rows = {cells[0]: cells[1:4] for cells in (line.split() for line in ok("list").splitlines())}
    assert rows["read_file"] == ["files", "yes", "yes"]
    assert rows["delete_file"] == ["files", "asks", "no"]
    assert rows["set_fact"] == ["memory", "yes", "yes"]
    assert {"run_command", "http_get", "json_query", "search_memory"} <= set(rows)


def test_json_has_the_definitions() -> None:
    row = listed()["read_file"]
    assert (row["group"], row["dangerous"], row["chat"], row["server"]) == ("files", False, True, True)
    assert row["parameters"]["required"] == ["path"]


def test_tools_are_chosen_by_flags_that_take_lists() -> None:
    chosen = listed(
        "--enable-tools", "files,json_parse", "--enable-tools", "command", "--disable-tools", "write_file"
    )
    assert set(chosen) == {"read_file", "list_files", "file_exists", "delete_file", "json_parse", "run_command"}
    assert chosen["delete_file"]["server"]
    everything = listed("--all", "--enable-tools", "files", "--disable-tools", "read_file")
    assert not everything["read_file"]["chat"] and not everything["json_parse"]["chat"]


def test_the_configuration_chooses_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "emberkeep.toml").write_text('enable_tools = ["json"]\ntools_from = ["mine.py"]\n')
    monkeypatch.setenv("EMBERKEEP_CONFIG", "emberkeep.toml")
    assert {row["group"] for row in listed().values()} == {"json"}
    assert "berth" in listed("--all")


def test_without_a_memory_there_are_no_tools_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBERKEEP_MEMORY", "false")
    assert "memory" not in {row["group"] for row in listed("--all").values()}


def test_where_none_is_used_it_says_how_to_see_them() -> None:
    assert "tools list --all" in ok("list", "--disable-tools", "all")


def test_an_unknown_name_is_one_sentence() -> None:
    assert refused("list", "--enable-tools", "file") == "There is no tool or group 'file': did you mean files?"


# ── show ──


def test_a_tool_is_shown_with_its_schema_and_a_call_that_works() -> None:
    shown = ok("show", "berth", "--tools-from", "mine.py")
    assert shown.startswith("berth (group harbour, dangerous; in chat: asks, in a server: no)\n")
    assert "Find a berth. It has to be asked for." in shown
    assert '"metres": {' in shown
    assert shown.endswith("""Example: emberkeep tools run berth '{"ship": "..."}'\n""")


def test_an_unknown_tool_is_one_sentence() -> None:
    assert refused("show", "nothing") == "There is no tool 'nothing': `emberkeep tools list --all` shows them."
    assert refused("show", "raed_file") == "There is no tool 'raed_file': did you mean read_file?"


# ── run ──


def test_a_tool_is_run_with_json_or_with_pairs() -> None:
    assert ok("run", "read_file", '{"path": "notes.txt"}') == "The boat is called Marigold.\n"
    assert ok("run", "read_file", "path=notes.txt") == "The boat is called Marigold.\n"


def test_pairs_are_json_where_the_tool_takes_no_text() -> None:
    given = ("run", "berth", "ship=12", "metres=30", 'flags=["red"]', "--yes", "--tools-from", "mine.py")
    assert json.loads(ok(*given)) == {"ship": "12", "metres": 30, "flags": ["red"]}


def test_the_whole_result_is_printed(folder: Path) -> None:
    (folder / "long.py").write_text("def long() -> str:\n  'Long.'\n  return 'x' * 100_000\n")
    assert ok("run", "long", "--tools-from", "long.py") == "x" * 100_000 + "\n"


def test_a_failure_is_an_error() -> None:
    assert "missing.txt" in refused("run", "read_file", "path=missing.txt")
    assert refused("run", "read_file") == "The arguments of read_file do not fit: path is missing."
    assert refused("run", "read_fil", "path=a") == "There is no tool 'read_fil': did you mean read_file?"
    assert "write KEY=VALUE" in refused("run", "read_file", "notes.txt")


def test_a_tool_that_is_switched_off_does_not_run() -> None:
    assert "switched off" in refused("run", "read_file", "path=notes.txt", "--disable-tools", "files")


def test_a_dangerous_tool_does_not_run_without_a_terminal(folder: Path) -> None:
    assert refused("run", "delete_file", "path=notes.txt") == (
        'Run delete_file with {"path": "notes.txt"}? There is no user to ask: say --yes.'
    )
    assert (folder / "notes.txt").exists()


@pytest.mark.parametrize(("reply", "is_left"), [("n\n", True), ("y\n", False)])
def test_at_a_terminal_it_is_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, reply: str, is_left: bool
) -> None:
    monkeypatch.setattr("emberkeep.cli.console._is_terminal", lambda: True)
    result = run("run", "delete_file", "path=notes.txt", input=reply)
    assert "Run delete_file with" in result.stderr
    assert (folder / "notes.txt").exists() is is_left


def test_memory_is_each_users_own() -> None:
    ok("run", "set_fact", "name=home", "value=Lyon", "--user", "alice")
    assert ok("run", "get_fact", "name=home", "--user", "alice") == "Lyon\n"
    assert "There is no fact" in refused("run", "get_fact", "name=home")


def test_files_stay_below_the_root(folder: Path) -> None:
    (folder / "inner").mkdir()
    assert refused("run", "read_file", "path=../notes.txt", "--tools-root", "inner")


def test_a_broken_file_of_tools_is_one_sentence(folder: Path) -> None:
    (folder / "broken.py").write_text("1 / 0\n")
    result = run("list", "--tools-from", "broken.py")
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).endswith(
        "broken.py cannot be used (line 1): ZeroDivisionError: division by zero."
    )
