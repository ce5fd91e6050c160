"""Where a page says what a setting is unless it is configured, it says what the code says.

The table of all settings is compared in `tests/config/test_configuration_docs.py`; this is about everything else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from emberkeep.cli.commands import default_of
from emberkeep.config.settings import Config, public_values

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

KEYS = list(public_values(Config()))
_KEY = rf"`(?:--)?({'|'.join(key.replace('_', '[_-]') for key in KEYS)})`"
_VALUE = r"`?(\d[\d.,]*(?: (?:KiB|MiB|GiB|TiB))?|[a-z][a-z0-9_.]*)`?"
_DEFAULT = [
    # `tool_timeout_s` (60 s); `queue` seconds (64 unless configured); | `disk_budget` | ... (20 GiB) |
    re.compile(
        _KEY + r"[^`().|]{0,40}\((\d[\d.,]*(?: (?:KiB|MiB|GiB|TiB))?)(?: s| seconds)?(?: unless configured)?\)"
    ),
    re.compile(r"^\| " + _KEY + r" \|[^|]*\((\d[\d.,]*(?: (?:KiB|MiB|GiB|TiB))?)(?: s)?\) \|$", re.MULTILINE),
    # **`gpu_layers`** is `auto` by default
    re.compile(_KEY + r"\W{0,2} is " + _VALUE + r" (?:by default|unless configured)"),
    re.compile(_KEY + r" \(" + _VALUE + r" (?:by default|unless configured)\)"),
]
_ENDLESS = re.compile(_KEY + r"[^`.|]{0,60}\b(?:no limit|unlimited|not limited|without a limit)")


def defaults_on(page: Path) -> Iterator[tuple[str, str]]:
    """Settings and what a page says they are."""
    for pattern in _DEFAULT:
        for key, value in pattern.findall(_without_the_table(page)):
            yield key.replace("-", "_"), value


def _without_the_table(page: Path) -> str:
    """Lines are joined, where a sentence goes on, and stay where a table has them."""
    text = page.read_text(encoding="utf-8")
    if page.name == "configuration.md":
        text = re.sub(r"^\| `.*$", "", text, flags=re.MULTILINE)
    return re.sub(r"(?<=[^\n|])\n(?=[^\n|])", " ", text)


def is_default(key: str, value: str) -> bool:
    number = value.replace(",", "")
    return number in (default_of(key), default_of(key).replace(".0 ", " "))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_default_that_is_told_beside_its_setting_is_the_codes(page: Path) -> None:
    wrong = [(key, value, default_of(key)) for key, value in defaults_on(page) if not is_default(key, value)]
    assert wrong == []


def test_such_places_are_found() -> None:
    keys = {key for page in PAGES for key, _ in defaults_on(page)}
    assert {"disk_writes_per_day", "tool_timeout_s"} <= keys


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_is_limited_is_not_called_unlimited(page: Path) -> None:
    endless = _ENDLESS.findall(_without_the_table(page))
    assert [key for key in endless if default_of(key.replace("-", "_")) != "none"] == []


def test_the_patterns_read_what_they_are_for(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "Both have `tool_timeout_s` (61 s).\nThey go on for up to `queue`\nseconds (64 unless configured).\n\n"
        "| `disk_budget` | bytes on disk (20 GiB) |\n- **`gpu_layers`** is `auto` by default.\n",
        encoding="utf-8",
    )
    assert set(defaults_on(page)) == {
        ("tool_timeout_s", "61"),
        ("queue", "64"),
        ("disk_budget", "20 GiB"),
        ("gpu_layers", "auto"),
    }
    assert not is_default("tool_timeout_s", "61")
    assert is_default("port", "8,080")


_NUMBERS = {1: "one", 2: "two", 4: "four", 5: "five", 10: "ten", 60: "sixty"}


def in_words(seconds: float) -> str:
    """As a page writes a time."""
    minutes = seconds / 60
    return f"{_NUMBERS.get(int(minutes), int(minutes))} minutes" if minutes >= 1 else f"{seconds:g} seconds"


DEFAULTS = Config()
SENTENCES = [
    ("docs/guide.md", f"unloaded {in_words(DEFAULTS.unload_after_s or 0)} after"),
    ("docs/cache-api.md", f"(`{DEFAULTS.ttl.short / 60:g}m`: `short`"),
    ("docs/cache-api.md", f"`{DEFAULTS.ttl.long / 3600:g}h`: `long`)"),
    (
        "docs/configuration.md",
        f'By default only programs on this machine can connect (`host = "{DEFAULTS.host}"`)',
    ),
    ("docs/benchmarks.md", f"uses the default settings (`recall = {DEFAULTS.recall}`)"),
    ("docs/apis.md", f'base_url="http://{DEFAULTS.host}:{DEFAULTS.port}/v1"'),
    ("README.md", DEFAULTS.local_model),
]
"""Defaults that pages tell in words. Who changes one changes the page."""


@pytest.mark.parametrize(("page", "sentence"), SENTENCES, ids=str)
def test_a_default_that_is_told_in_words_is_the_codes(page: str, sentence: str) -> None:
    text = re.sub(r"\s+", " ", (ROOT / page).read_text(encoding="utf-8"))
    assert sentence in text
