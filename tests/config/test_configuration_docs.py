from __future__ import annotations

import re
from pathlib import Path

import pytest

from emberkeep.cli.main import COMMANDS
from emberkeep.config.settings import FIELDS, Config, accepts, default_of, help_for, is_harmless, public_values

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
DIFFERS_BETWEEN_MACHINES = {"data_dir": "your data folder", "tools_root": "the current folder"}
FLAGS = {name: {param.name for param in COMMANDS[name].command().params} for name in ("serve", "chat")}


def commands_with(key: str) -> str:
    found = [name for name, flags in FLAGS.items() if key in flags]
    return ", ".join(found) or "–"


def row(key: str) -> str:
    default = DIFFERS_BETWEEN_MACHINES.get(key) or default_of(key)
    return f"| `{key}` | {commands_with(key)} | {default} | {accepts(key)} | {help_for(key)} |"


def test_the_page_lists_what_a_file_of_the_current_folder_may_say() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("### A file of the current folder\n")[2]
    listed = re.findall(r"`(\w+)`", section.partition("Everything else")[0].partition("computed:")[2])
    assert sorted(listed) == sorted(key for key in FIELDS if is_harmless(key, default_of(key)))


def test_the_page_lists_every_setting_as_the_code_has_it() -> None:
    table = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert table == [row(key) for key in public_values(Config())]
