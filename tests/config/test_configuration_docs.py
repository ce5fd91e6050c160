"""The page of the settings is what `emberkeep config docs` writes."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from emberkeep.cli.commands import GROUPS, USED_FIRST, grouped
from emberkeep.cli.main import app
from emberkeep.config.settings import FIELDS

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


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
