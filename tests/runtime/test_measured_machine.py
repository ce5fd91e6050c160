"""What a model runs on is measured after the start, when nothing is computed for a moment."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from emberkeep.backend.local import LocalBackend
from emberkeep.config.settings import Config
from emberkeep.engine.fake import CHATML, FakeEngine
from emberkeep.runtime import local_model
from emberkeep.runtime.parts import OpenedModel
from emberkeep.sched import gaps, probe
from emberkeep.sched.probe import DeviceProbe
from helpers import tiny_gguf
from helpers.waiting import eventually


def test_what_is_measured_beside_the_model_may_wait_for_its_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_fake(*_: object, **__: object) -> OpenedModel:
        return OpenedModel(FakeEngine(), CHATML, {}, device=DeviceProbe(lambda: 50e9, lambda: 4e12))

    monkeypatch.setattr(local_model, "open_llamacpp", open_fake)
    monkeypatch.setattr(gaps, "GAP_S", 0.01)
    monkeypatch.setattr(probe, "_EACH_S", 0.0)  # a gap takes longer
    path = tiny_gguf.dense(tmp_path / "tiny.gguf")
    backend = local_model.open_local(Config(data_dir=tmp_path, model=str(path)))
    assert isinstance(backend, LocalBackend)
    try:
        assert eventually(lambda: backend.machine.step_seconds.measured)
        assert backend.machine.load_speed == probe.Reading(50e9, measured=True)
        assert backend.machine.device_speed == probe.Reading(4e12, measured=True)
    finally:
        asyncio.run(backend.close())
