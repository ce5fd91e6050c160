from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.conversing import Harbour


@pytest.fixture
def harbour(tmp_path: Path) -> Iterator[Harbour]:
    with Harbour(tmp_path, recall="off") as harbour:
        yield harbour
