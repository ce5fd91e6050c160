from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from emberkeep.cli.commands import with_settings
from emberkeep.cli.main import COMMANDS, app
from emberkeep.config.settings import Config
from emberkeep.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Boat:
    name: Annotated[str, typer.Argument()]
    length: Annotated[int, typer.Option("--length")] = 7


class Harbour:
    """An application with one command, and what that was called with."""

    def __init__(self, *names: str) -> None:
        self.app = typer.Typer(rich_markup_mode=None)
        self.config = Config()
        self.arguments: list[Any] = []

        @self.app.command()
        @with_settings(*names)
        def moor(config: Config, boat: Boat, port: Annotated[str, typer.Option("--port")] = "9") -> None:
            """Tie up."""
            self.config, self.arguments = config, [boat, port]

    def moor(self, *arguments: str) -> None:
        CliRunner().invoke(self.app, arguments, catch_exceptions=False, standalone_mode=False)


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def test_settings_are_settled_and_a_dataclass_is_filled() -> None:
    harbour = Harbour("ctx", "memory", "enable_tools", "config")
    harbour.moor("ark", "--ctx", "512", "--no-memory", "--enable-tools", "a,b", "--enable-tools", "c")
    assert (harbour.config.ctx, harbour.config.memory) == (512, False)
    assert harbour.config.enable_tools == ("a", "b", "c")
    assert harbour.arguments == [Boat("ark", 7), "9"]


def test_what_is_not_given_comes_from_the_file(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('ctx = 256\nenable_tools = ["files"]\n')
    harbour = Harbour("ctx", "enable_tools", "config")
    harbour.moor("ark", "--config", "mine.toml")
    assert (harbour.config.ctx, harbour.config.enable_tools) == (256, ("files",))


@pytest.mark.parametrize(("names", "settled"), [((), Config().port), (("port",), 9)])
def test_a_flag_of_its_own_sets_a_setting_only_where_it_is_named(names: tuple[str, ...], settled: int) -> None:
    harbour = Harbour(*names)
    harbour.moor("ark")
    assert harbour.config.port == settled
    assert harbour.arguments[1] == "9"


def test_own_flags_come_first_unless_they_are_named() -> None:
    text = CliRunner().invoke(Harbour("ctx", "length", "data_dir").app, ["--help"]).output
    assert "Tie up." in text
    places = [text.index(flag) for flag in ("--port", "--ctx", "--length", "--data-dir")]
    assert places == sorted(places)
    assert "--config" not in text


def test_a_wrong_value_is_explained_by_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"ctx = 'x' \(flag --ctx\) is not a whole number from 128"):
        Harbour("ctx").moor("ark", "--ctx", "x")


def leaves(command: Any, path: str) -> list[tuple[str, Any]]:
    """Every command that does something."""
    inner = getattr(command, "commands", {})
    return [leaf for name, one in inner.items() for leaf in leaves(one, f"{path} {name}")] or [(path, command)]


@pytest.fixture(scope="module")
def commands() -> list[tuple[str, Any]]:
    return [leaf for name, home in COMMANDS.items() for leaf in leaves(home.command(), f"emberkeep {name}")]


@pytest.mark.parametrize("group", ["api", "cache", "memory", "tools", "mcp"])
def test_every_help_teaches_with_an_example(commands: list[tuple[str, Any]], group: str) -> None:
    found = [(path, command) for path, command in commands if path.startswith(f"emberkeep {group} ")]
    assert len(found) > 2
    assert [path for path, command in found if path not in command.epilog] == []


def test_every_command_says_how_much_is_logged(commands: list[tuple[str, Any]]) -> None:
    assert len(commands) > 40
    without = [path for path, command in commands if not {"-v", "--log-level"} <= flags_of(command)]
    assert without == []


def flags_of(command: Any) -> set[str]:
    return {flag for param in command.params for flag in param.opts}


@pytest.mark.parametrize(
    ("arguments", "level"),
    [
        (["config", "show"], "auto  default"),
        (["config", "show", "-v"], "debug  flag --log-level"),
        (["config", "show", "--log-level", "error"], "error  flag --log-level"),
        (["-v", "config", "show"], "debug  flag --log-level"),
        (["--log-level", "info", "config", "show"], "info  flag --log-level"),
        (["--log-level", "info", "config", "show", "--log-level", "error"], "error  flag --log-level"),
    ],
)
def test_the_log_is_chosen_before_or_behind_the_name_of_a_command(arguments: list[str], level: str) -> None:
    (line,) = [
        line for line in CliRunner().invoke(app, arguments).stdout.splitlines() if line.startswith("log_level")
    ]
    assert " ".join(line.split()[1:]) == " ".join(level.split())


def test_an_unknown_level_is_explained() -> None:
    with pytest.raises(ConfigError, match="log_level = 'loud'"):
        CliRunner().invoke(app, ["config", "show", "--log-level", "loud"], catch_exceptions=False)


def test_a_command_logs_as_its_settings_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.toml").write_text('log_level = "info"\n')
    Harbour("config").moor("ark", "--config", "mine.toml")
    logging.getLogger("emberkeep.kv").info("a move")
    assert capsys.readouterr().err.endswith(" INFO a move\n")
