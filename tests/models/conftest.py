from __future__ import annotations

from pathlib import Path

import pytest

from emberkeep.models.library import ModelLibrary


@pytest.fixture
def library(tmp_path: Path) -> ModelLibrary:
    return ModelLibrary(tmp_path / "data" / "models")
