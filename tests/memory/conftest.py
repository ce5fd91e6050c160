from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from emberkeep.memory.memory import Memory
from helpers.remembering import PLENTY


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "memory.sqlite"


@pytest.fixture
def memory(path: Path) -> Iterator[Memory]:
    opened = Memory(path, limit_bytes=PLENTY)
    yield opened
    opened.close()
