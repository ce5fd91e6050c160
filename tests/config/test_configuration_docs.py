"""The page of the settings is what `emberkeep config docs` writes; and a setting that there is no more is
refused with what to use instead, wherever it is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from emberkeep.cli.commands import GROUPS, USED_FIRST, grouped
from emberkeep.cli.main import COMMANDS, app
from emberkeep.config.settings import FIELDS
from emberkeep.config.sources import REMOVED, load_config
from emberkeep.errors import ConfigError

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "configuration.md"


def test_the_page_has_every_setting_as_the_code_has_it(tmp_path: Path) -> None:
    page, written = tmp_path / "page.md", PAGE.read_text(encoding="utf-8")
    page.write_text(written.replace("| `model = auto` |", "| `model = mine` |"), encoding="utf-8")
    CliRunner().invoke(app, ["config", "docs", str(page)], catch_exceptions=False)
    assert page.read_text(encoding="utf-8") == written, "run `emberkeep config docs docs/configuration.md`"


def test_a_page_without_a_place_for_them_stays_as_it_is(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Mine\n")
    result = CliRunner().invoke(app, ["config", "docs", str(page)])
    assert "has no place for them" in str(result.exception)
    assert page.read_text() == "# Mine\n"


def test_every_setting_is_in_one_group() -> None:
    assert [key for keys in grouped().values() for key in keys] == list(FIELDS)
    assert list(grouped()) == list(GROUPS)


def test_help_begins_with_what_people_use_first_and_goes_on_by_group() -> None:
    text = CliRunner().invoke(app, ["serve", "--help"]).output
    titles = [line.removesuffix(":") for line in text.splitlines() if line[:1].isalpha() and line.endswith(":")]
    assert titles == ["Used first", "Options", *(group for group in GROUPS if group != "Cluster")]
    first = text.partition("Used first:")[2].partition("Options:")[0]
    assert [key for key in USED_FIRST if f"--{key.replace('_', '-')} " not in first] == []


KEY = "draft_max"


def test_no_setting_is_both_there_and_removed() -> None:
    assert REMOVED.keys() & FIELDS.keys() == set()


def test_the_changelog_lists_every_removed_setting() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert [key for key in REMOVED if f"`{key}`" not in text] == []


@pytest.mark.parametrize("place", ["file", "variable", "argument"])
def test_it_is_refused_with_what_to_use_instead(tmp_path: Path, place: str) -> None:
    (tmp_path / "emberkeep.toml").write_text(f"{KEY} = 3\n" if place == "file" else "")
    env = {"EMBERKEEP_DRAFT_MAX": "3"} if place == "variable" else {}
    with pytest.raises(ConfigError) as caught:
        load_config({KEY: 3} if place == "argument" else {}, env=env, cwd=tmp_path)
    assert str(caught.value).endswith(f" is gone: {REMOVED[KEY]}")


@pytest.mark.parametrize("flag", ["--draft-max=3", "--no-draft-max"])
def test_a_flag_is_refused_like_its_setting(flag: str) -> None:
    with pytest.raises(ConfigError, match=r"^--(no-)?draft-max is gone: "):
        COMMANDS["serve"].command().main([flag], standalone_mode=False)


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda page: page.name
)
def test_no_page_names_a_removed_setting(page: Path) -> None:
    text = "" if "decisions" in str(page) else page.read_text(encoding="utf-8")
    named = re.findall(r"--(?:no-)?([a-z-]+)", text)
    assert [name for name in named if name.replace("-", "_") in REMOVED] == []
