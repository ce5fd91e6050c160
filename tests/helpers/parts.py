"""A pytest plugin: `--part` chooses the tests of one command, and every test is in exactly one.

`make test` runs fast and smoke, `make bench-check` bench, and `make torture` all others. Torture also runs the
properties of the fast tests, with other examples than `make test`.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterable
from fnmatch import fnmatch
from itertools import chain
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FAST, SMOKE, BENCH, PROPERTIES = "fast", "smoke", "bench", "properties"
_FOLDERS = {
    "faults/*": "faults",
    "browser/*": "browser",
    "cluster/*": "cluster",
    "backend/*": "clients",
    "end_to_end/*_client.py": "clients",
    "end_to_end/*_agents.py": "clients",
    "end_to_end/*_library.py": "clients",
    "end_to_end/test_tools_real.py": "clients",
    "end_to_end/*": "models",
    "engine/*": "models",
    "models/*": "models",
    "library/*": "models",
    "bench/*": BENCH,
    "benchmarks/*": BENCH,
    "*": "server",
}
"""The part of what is slow or serial in a file: that of the first pattern that fits."""
TORTURE = (*dict.fromkeys(part for part in _FOLDERS.values() if part != BENCH), PROPERTIES)

_SHUFFLE = "EMBERKEEP_TEST_SHUFFLE"
_SLOW_FILE = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.(slow|serial)", re.MULTILINE)
_SLOW_TEST = re.compile(r"pytest\.mark\.(slow|serial)")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", choices=(FAST, SMOKE, BENCH, *TORTURE), help="only the tests of this part")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What is not going to run is not even imported: that takes half a minute."""
    part = config.getoption("--part")
    if not part or collection_path.suffix != ".py" or not collection_path.is_relative_to(TESTS):
        return None
    return None if part in _parts_in(collection_path) else True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = config.getoption("--part")
    for item in items:
        if item.path.parent.name == SMOKE:
            item.add_marker(SMOKE)
    if part:
        chosen = [item for item in items if part in _parts_of(item)]
        config.hook.pytest_deselected(items=[item for item in items if part not in _parts_of(item)])
        items[:] = chosen
    if seed := os.environ.get(_SHUFFLE):
        items[:] = _shuffled(items, random.Random(seed))


def _parts_in(path: Path) -> set[str]:
    """Which parts the tests of a file may be in, as far as its text tells."""
    if path.parent.name == SMOKE:
        return {SMOKE}
    text = path.read_text()
    parts = set() if _SLOW_FILE.search(text) else {FAST, *([PROPERTIES] if "hypothesis" in text else ())}
    return parts | ({_part_if_slow(path)} if _SLOW_TEST.search(text) else set())


def _parts_of(item: pytest.Item) -> set[str]:
    """One, and also the properties where it is fast and has examples of its own every time."""
    if item.get_closest_marker(SMOKE):
        return {SMOKE}
    if item.get_closest_marker("slow") or item.get_closest_marker("serial"):
        return {_part_if_slow(item.path)}
    has_examples = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
    return {FAST, PROPERTIES} if has_examples else {FAST}


def _part_if_slow(path: Path) -> str:
    name = path.relative_to(TESTS).as_posix()
    return next(part for pattern, part in _FOLDERS.items() if fnmatch(name, pattern))


def _shuffled(items: Iterable[pytest.Item], chance: random.Random) -> list[pytest.Item]:
    """Files in another order, and the tests in each: what a file's tests share is still made once."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    shuffled = list(files.values())
    chance.shuffle(shuffled)
    for tests in shuffled:
        chance.shuffle(tests)
    return list(chain.from_iterable(shuffled))
