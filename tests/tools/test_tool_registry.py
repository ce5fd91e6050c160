"""Tools that users write: in a file, or in a package of theirs."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from emberkeep.config.settings import Config
from emberkeep.errors import ConfigError
from emberkeep.tools.registry import built_in, tools_in_file, tools_of_packages
from helpers.tool_calls import box_of, told

MARKED = '''
from __future__ import annotations
from dataclasses import dataclass
from emberkeep import tool

@dataclass
class Ship:
    name: str
    metres: int = 10

@tool(group="harbour", dangerous=True)
def berth(ship: Ship) -> str:
    """Find a berth."""
    return f"{ship.name} needs {ship.metres} m"

def helper(anything):
    return anything
'''

PLAIN = '''
from pathlib import Path

def double(number: int) -> int:
    """Double it."""
    return _times(2, number)

def _times(a, b):
    return a * b

class Ship:
    pass
'''


@pytest.fixture(autouse=True)
def modules_are_forgotten() -> Iterator[None]:
    known = set(sys.modules)
    yield
    for name in set(sys.modules) - known:
        if name.startswith(("emberkeep_tools_", "harbour_")):
            del sys.modules[name]


def file(folder: Path, text: str, name: str = "mine.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


# ── files ──


def test_marked_functions_of_a_file_are_tools(tmp_path: Path) -> None:
    (berth,) = tools_in_file(file(tmp_path, MARKED))
    assert (berth.name, berth.group, berth.is_dangerous) == ("berth", "harbour", True)
    assert asyncio.run(told(box_of(berth), "berth", ship={"name": "Ida"})) == "Ida needs 10 m"


def test_where_none_is_marked_public_functions_are_tools(tmp_path: Path) -> None:
    (double,) = tools_in_file(file(tmp_path, PLAIN))
    assert asyncio.run(told(box_of(double), "double", number=4)) == "8"


def test_files_of_the_same_name_are_two(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    first = tools_in_file(file(tmp_path, PLAIN))
    second = tools_in_file(file(tmp_path / "other", PLAIN.replace("_times(2", "_times(3")))
    assert [asyncio.run(told(box_of(one), "double", number=4)) for one in (*first, *second)] == ["8", "12"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def broken(:\n", r"mine.py cannot be used \(line 1\): SyntaxError"),
        ("\n\n1 / 0\n", r"\(line 3\): ZeroDivisionError: division by zero\."),
        ("import nothing_like_it", "No module named 'nothing_like_it'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("x = 1", "has no tools: mark a function"),
        ("def moor(ship):\n  'Moor.'\n", "give it a type"),
        ("def moor(ship: str): ...\n", "has no docstring"),
    ],
)
def test_a_broken_file_is_one_sentence(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        tools_in_file(file(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_no_python_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="There is no file"):
        tools_in_file(tmp_path / "missing.py")
    with pytest.raises(ConfigError, match=r"end in \.py"):
        tools_in_file(file(tmp_path, "{}", "mine.json"))


# ── packages ──


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an installed package, as pip leaves it."""
    site = tmp_path / "site"
    info = site / "harbour-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: harbour\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[emberkeep.tools]\n"
        "a-module = harbour_tools\n"
        "broken = harbour_missing\n"
        "factory = harbour_more:made\n"
        "function = harbour_more:tide\n"
        "silly = harbour_more:NUMBER\n"
    )
    (site / "harbour_tools.py").write_text(MARKED)
    (site / "harbour_more.py").write_text(
        "from emberkeep import tool\n"
        "from emberkeep.tools import as_tool\n"
        "NUMBER = 3\n"
        "@tool\n"
        "def tide() -> float:\n  'The tide.'\n  return 1.5\n"
        "def moon(day: int) -> str:\n  'The moon.'\n  return 'full'\n"
        "def made():\n  return [as_tool(moon)]\n"
    )
    monkeypatch.syspath_prepend(site)
    return site


def test_packages_offer_modules_functions_and_whatever_makes_tools(
    package: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "emberkeep.tools"):
        found = tools_of_packages()
    assert [function.name for function in found] == ["berth", "moon", "tide"]
    broken, silly = [record.getMessage() for record in caplog.records]
    assert broken.startswith("the tools of broken (harbour_missing) cannot be used: ModuleNotFoundError")
    assert silly.startswith("the tools of silly (harbour_more:NUMBER) cannot be used: it is neither")


# ── all together ──


def config(tmp_path: Path, *files: Path) -> Config:
    return Config(data_dir=tmp_path / "data", tools_root=tmp_path, tools_from=files)


def test_tools_of_users_stand_beside_ours(tmp_path: Path, package: Path) -> None:
    found = built_in(config(tmp_path, file(tmp_path, PLAIN)), memory=None)
    names = {function.name for function in found}
    assert {"read_file", "run_command", "http_get", "json_query", "tide", "double"} <= names
    assert "search_memory" not in names


@pytest.mark.parametrize("name", ["read_file", "more_output"])
def test_a_name_that_is_taken_is_an_error(tmp_path: Path, name: str) -> None:
    path = file(tmp_path, f"def {name}(path: str) -> str:\n  'Read.'\n  return path\n")
    with pytest.raises(ConfigError, match=f"There are two tools {name}: give one another name"):
        built_in(config(tmp_path, path), memory=None)


def test_a_name_like_a_servers_is_an_error(tmp_path: Path) -> None:
    path = file(tmp_path, "def time__now() -> str:\n  'Now.'\n  return ''\n")
    with pytest.raises(ConfigError, match="use no __ in its name"):
        built_in(config(tmp_path, path), memory=None)
