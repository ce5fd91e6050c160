"""Settings that contradict each other, or that the engine would ignore, are refused with the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from emberkeep.config.kinds import LoraFile
from emberkeep.config.settings import Config
from emberkeep.errors import EmberkeepError
from emberkeep.runtime.local_model import open_local
from helpers import tiny_gguf


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"engine": "hf", "lora": (LoraFile(Path("a.gguf")),)},
            "--lora is for GGUF models in llama.cpp: leave it",
        ),
        (
            {"engine": "hf", "flash_attention": "off"},
            "--flash-attention is for GGUF models in llama.cpp: leave it",
        ),
        ({"kv_type": "q8_0", "kv_bits": 8}, "kv_bits packs state that is held as f16, and kv_type = q8_0 "),
    ],
)
def test_what_does_not_fit_is_one_sentence(tmp_path: Path, settings: dict[str, Any], sentence: str) -> None:
    model = tiny_gguf.dense(tmp_path / "tiny.gguf")
    with pytest.raises(EmberkeepError) as refused:
        open_local(Config(data_dir=tmp_path, model=str(model), **settings))
    assert str(refused.value).startswith(sentence)
