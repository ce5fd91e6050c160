from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from emberkeep.cli.flags import with_settings
from emberkeep.config import Config
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
    harbour = Harbour("ctx", "evict", "enable_tools", "config")
    harbour.moor("ark", "--ctx", "512", "--no-evict", "--enable-tools", "a,b", "--enable-tools", "c")
    assert (harbour.config.ctx, harbour.config.evict) == (512, False)
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
