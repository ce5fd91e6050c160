"""A setting that there is no more is refused with what to use instead, wherever it is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from emberkeep.cli.main import COMMANDS
from emberkeep.config.settings import FIELDS
from emberkeep.config.sources import REMOVED, load_config
from emberkeep.errors import ConfigError

ROOT = Path(__file__).parents[2]
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
