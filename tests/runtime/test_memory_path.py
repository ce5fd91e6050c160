"""The memory can be placed alone: `memory_path`."""

from __future__ import annotations

import logging
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from emberkeep.cli.doctor import Level, examine
from emberkeep.cli.main import app
from emberkeep.config.settings import Config, memory_file
from emberkeep.config.sources import load_config
from emberkeep.errors import MemoryFailed
from emberkeep.library.user_memory import open_memory
from emberkeep.runtime.memory import open_memory_or_none

USUAL = "memory.sqlite3"


def remember(config: Config, key: str, value: str) -> None:
    with open_memory(config) as memory:
        memory.set_fact(key, value)


def facts(config: Config) -> dict[str, str]:
    with open_memory(config) as memory:
        return {fact.name: fact.value for fact in memory.facts()}


def test_it_is_in_the_data_folder_unless_the_configuration_says(tmp_path: Path) -> None:
    assert memory_file(Config(data_dir=tmp_path)) == tmp_path / USUAL


def test_a_relative_path_is_relative_to_the_folder_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    file = tmp_path / "etc" / "emberkeep.toml"
    file.write_text('memory_path = "notes/mine.sqlite3"\n')
    config = load_config({"config": file}, env={}, cwd=tmp_path).config
    assert memory_file(config) == tmp_path / "etc" / "notes" / "mine.sqlite3"
    config = load_config({"config": file}, env={"EMBERKEEP_MEMORY_PATH": "mine.sqlite3"}, cwd=tmp_path).config
    assert memory_file(config) == tmp_path / "mine.sqlite3"
    config = load_config({"config": file}, env={"EMBERKEEP_MEMORY_PATH": "auto"}, cwd=tmp_path).config
    assert memory_file(config) == config.data_dir / USUAL


def test_two_with_one_data_folder_remember_apart_and_for_their_owner_alone(tmp_path: Path) -> None:
    here = Config(data_dir=tmp_path / "data", memory_path=tmp_path / "a" / "memory.sqlite3")
    there = replace(here, memory_path=tmp_path / "b" / "other.sqlite3")
    remember(here, "home", "Lyon")
    remember(there, "home", "Oslo")
    assert (facts(here), facts(there)) == ({"home": "Lyon"}, {"home": "Oslo"})
    assert not (tmp_path / "data" / USUAL).exists()
    for path in (memory_file(here), memory_file(there)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_folder_in_its_place_is_one_sentence_and_serving_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config(data_dir=tmp_path, memory_path=tmp_path)
    with pytest.raises(MemoryFailed, match=r"that is a folder: name a file in it \(memory_path\)\.$"):
        remember(config, "home", "Lyon")
    assert open_memory_or_none(config) is None
    assert "nothing is remembered" in caplog.text
    assert dict(examine(config))["archive"].level is Level.FAIL


def test_a_memory_that_is_left_in_the_data_folder_is_told_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    usual = Config(data_dir=tmp_path)
    remember(usual, "home", "Lyon")
    moved = replace(usual, memory_path=tmp_path / "elsewhere.sqlite3")
    assert not caplog.records
    assert facts(moved) == {}
    (told,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert str(tmp_path / USUAL) in told and "\n" not in told
    finding = dict(examine(moved))["archive"]
    assert finding.level is Level.WARN and str(tmp_path / USUAL) in finding.text
    assert facts(usual) == {"home": "Lyon"}


def test_the_same_file_by_another_name_is_not_left_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / USUAL).symlink_to(tmp_path / "mine.sqlite3")
    config = Config(data_dir=tmp_path / "data", memory_path=tmp_path / "mine.sqlite3")
    remember(config, "home", "Lyon")
    assert facts(Config(data_dir=tmp_path / "data")) == {"home": "Lyon"}
    assert not caplog.records


def test_commands_use_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(data_dir=tmp_path / "data", memory_path=tmp_path / "mine.sqlite3")
    monkeypatch.setenv("EMBERKEEP_MEMORY_PATH", str(config.memory_path))
    data = ["--data-dir", str(config.data_dir)]
    ran = CliRunner().invoke(app, ["memory", "facts", "set", "home", "Lyon", *data])
    assert ran.exit_code == 0, ran.output
    assert facts(config) == {"home": "Lyon"}
    assert "Lyon" in CliRunner().invoke(app, ["memory", "export", *data]).output
    assert CliRunner().invoke(app, ["memory", "forget", "--user", "", "--yes", *data]).exit_code == 0
    assert facts(config) == {}
    assert not (config.data_dir / USUAL).exists()
