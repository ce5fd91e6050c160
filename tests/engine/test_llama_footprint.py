from __future__ import annotations

from dataclasses import replace

import pytest

from emberkeep.config import total_ram
from emberkeep.engine.llamacpp import LlamaEngine, LlamaModel, LlamaSettings, step_timing
from emberkeep.engine.llamacpp.context import footprint_of
from emberkeep.engine.llamacpp.shared_library import take_buffers
from emberkeep.engine.llamacpp.step_timing import measure
from emberkeep.engine.step_table import StepTable
from helpers.engines import KINDS, always, evaluate
from helpers.tiny_gguf import HEADS


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_always_there_holds_weights_cells_and_buffers(open_engine, model_file, kind):
    engine = open_engine(kind)
    footprint = engine.footprint
    cells = engine.capabilities.cells * engine.capabilities.kv_bytes_per_token
    assert footprint.device == "cpu"
    assert footprint.capacity == total_ram()
    assert footprint.fixed > model_file(kind).stat().st_size // 2 + cells


def test_more_cells_are_more_memory(open_engine):
    small, large = open_engine(cells=1024), open_engine(cells=65_536)
    growth = large.footprint.fixed - small.footprint.fixed
    assert growth >= (65_536 - 1024) * small.capabilities.kv_bytes_per_token


def test_the_process_holds_at_least_the_cells(open_engine):
    engine = open_engine(cells=65_536)
    held = engine.peak_bytes()
    assert held is None or held > 65_536 * engine.capabilities.kv_bytes_per_token


def test_an_engine_with_a_choice_has_room_for_scores(open_engine, monkeypatch):
    """A number for each row, cell and head, which it needs without flash attention only."""
    monkeypatch.setattr("emberkeep.engine.llamacpp.model.resident_ram", lambda: 0)
    table = StepTable((1,), (64,), ((1.0,),))
    fixed, either = (
        open_engine(tables=tables).footprint for tables in ({True: table}, {True: table, False: table})
    )
    assert either.fixed - fixed.fixed == 256 * 1024 * HEADS * 4


def test_what_was_only_measured_is_not_counted(open_engine, model_file, monkeypatch):
    """Nor what a context takes that is opened in the place of another."""
    monkeypatch.setattr("emberkeep.engine.llamacpp.model.resident_ram", lambda: 0)
    settings = LlamaSettings(context=1024, cells=1024, sequences=8, batch=256, threads=1)
    engines = []
    for is_measured in (False, True):
        model = LlamaModel(model_file("dense"))
        if is_measured:
            monkeypatch.setattr(step_timing, "_GRID_S", 0.02)
            measure(model, [settings, replace(settings, flash=False)])
        engines.append(LlamaEngine(model, settings, "digest"))
        engines[-1].close()
    assert engines[0].footprint == engines[1].footprint
    changing = open_engine(tables=always(False))
    take_buffers()
    evaluate(changing, 0, 0, 20)
    assert changing.stats()["flash_attention_changes"] == 1
    assert take_buffers() == 0


def test_with_layers_on_a_gpu_nothing_is_known(model_file):
    model = LlamaModel(model_file("dense"))
    model.offloads = True
    settings = LlamaSettings(context=1024, cells=1024, sequences=2)
    assert footprint_of(model, settings, 100, False) is None
    model.close()
