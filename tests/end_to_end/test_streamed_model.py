from __future__ import annotations

from pathlib import Path

import pytest

from emberkeep.config.settings import Config
from emberkeep.library.emberkeep import Emberkeep
from helpers import tiny_hf

pytestmark = pytest.mark.slow


def test_what_of_a_model_passes_through_its_device_is_told_with_everything_else(tmp_path: Path) -> None:
    folder = tiny_hf.write(tmp_path / "tiny", layers=4)
    settings = {"device": "cpu", "dtype": "float32", "ctx": 256, "parallel": 1, "residency": "stream"}
    config = Config(model=str(folder), data_dir=tmp_path / "data", disk_budget=1 << 20, **settings)
    with Emberkeep.open(config) as opened:
        told = opened.stats()["engine"]["streaming"]
    assert (told["residency"], told["units_in_ram"], told["units_on_disk"]) == ("stream", 4, 0)
    assert told["copied_bytes"] > told["passing_bytes"] == told["ram_bytes"]
