from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _data_is_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Than in the data of whoever runs the tests."""
    monkeypatch.setenv("EMBERKEEP_DATA_DIR", str(tmp_path / "own"))
