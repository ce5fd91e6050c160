"""What is measured of memory, with an engine that needs none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from emberkeep.engine.hf.footprint import footprint
from emberkeep.engine.hf.model_loader import HfSettings
from helpers.engines import RecordingEngine


@pytest.mark.parametrize("context", [100, 1344, 8192])
def test_no_prompt_is_longer_than_the_context(monkeypatch, context):
    for name in ("reset_peak_memory_stats", "max_memory_allocated", "memory_allocated", "memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1, 1))
    engine = RecordingEngine(cells=1 << 14, context=context, batch=4096)
    channels = SimpleNamespace(channels=8)
    memory = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16)
    model = SimpleNamespace(vocab=SimpleNamespace(size=100))
    layers = [SimpleNamespace(keys=channels, values=channels)]
    footprint(model, memory, layers, engine, HfSettings(context, None, 4, 4096))
    ends = [shape[1] + shape[2] for (shape,) in engine.shapes]
    assert 0 < max(ends) <= context
