from __future__ import annotations

from pathlib import Path

from emberkeep.config import Config, accepts, help_for, public_values

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
NOT_A_CONSTANT = {
    "data_dir": "your data folder",
    "ram_budget": "auto",
    "disk_budget": "20 GiB",
    "ctx": "auto",
    "threads": "auto",
}


def row(key: str, value: object) -> str:
    default = NOT_A_CONSTANT.get(key) or ("none" if value in (None, []) else f"`{value}`")
    return f"| `{key}` | {default} | {accepts(key)} | {help_for(key)} |"


def test_the_page_lists_every_setting_as_the_code_has_it() -> None:
    table = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert table == [row(key, value) for key, value in public_values(Config()).items()]
