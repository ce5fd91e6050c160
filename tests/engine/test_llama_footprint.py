from __future__ import annotations

import math
from dataclasses import replace

import pytest

from emberkeep.config.machine import total_ram
from emberkeep.engine.base import Footprint
from emberkeep.engine.llamacpp import context, tuning
from emberkeep.engine.llamacpp.context import LlamaSettings, on_gpu
from emberkeep.engine.llamacpp.engine import LlamaEngine
from emberkeep.engine.llamacpp.gpus import Gpu
from emberkeep.engine.llamacpp.model import LlamaModel
from emberkeep.engine.llamacpp.shared_library import Allocation, _on_log, take_buffers
from emberkeep.engine.llamacpp.tuning import measure
from emberkeep.engine.step_table import StepTable
from emberkeep.errors import TooLarge
from emberkeep.sched.admission import Admission, open_admission, peak
from emberkeep.types.events import Plan
from helpers.engines import KINDS, always, evaluate
from helpers.tiny_gguf import EXPERTS_USED, HEADS, INNER, LAYERS, WIDTH

MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture
def empty_process(monkeypatch):
    """Nothing but what llama.cpp says is held: what the process has is another number each time."""
    for module in ("model", "context"):
        monkeypatch.setattr(f"emberkeep.engine.llamacpp.{module}.resident_ram", lambda: 0)


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


@pytest.mark.parametrize("tokens", [40, 600, 1000])
def test_a_request_takes_what_is_predicted(open_engine, tokens):
    """Whatever of it llama.cpp does not say: what it is said to have allocated is a fraction of this process."""
    engine = open_engine("wide", batch=128)
    engine.peak_bytes()
    evaluate(engine, 0, 0, tokens)
    actual = engine.peak_bytes()
    assert actual is not None
    assert actual == pytest.approx(peak(engine.footprint, Plan(128, 16), tokens, 0, rows=1), rel=0.03)


def test_what_the_process_holds_beyond_its_buffers_is_always_there(open_engine, monkeypatch):
    """As the interpreter, vocabulary and threads, or copies of weights in a layout of its own."""
    engine = open_engine()
    for held in (0, engine.footprint.fixed + GIB):
        monkeypatch.setattr(context, "resident_ram", lambda held=held: held)
        assert open_engine().footprint.fixed >= held


def test_scores_behind_cells_to_come_are_counted_from_the_start(open_engine, empty_process):
    growing, steady = (
        open_engine(cells=16_384, flash=False, rope_switches=is_steady).footprint for is_steady in (False, True)
    )
    assert growing.fixed == pytest.approx(steady.fixed, rel=0.15)


def test_an_engine_with_a_choice_has_room_for_scores(open_engine, empty_process):
    """A number for each row, cell and head, which it needs without flash attention only."""
    table = StepTable((1,), (64,), ((1.0,),))
    fixed, either = (
        open_engine(tables=tables).footprint for tables in ({True: table}, {True: table, False: table})
    )
    assert either.fixed - fixed.fixed == 256 * 1024 * HEADS * 4


def test_what_was_only_measured_is_not_counted(open_engine, model_file, monkeypatch, empty_process):
    """Nor what a context takes that is opened in the place of another."""
    settings = LlamaSettings(context=1024, cells=1024, sequences=8, batch=256, threads=1)
    engines = []
    for is_measured in (False, True):
        model = LlamaModel(model_file("dense"))
        if is_measured:
            monkeypatch.setattr(tuning, "_GRID_S", 0.02)
            measure(model, [settings, replace(settings, flash=False)])
        engines.append(LlamaEngine(model, settings, "digest"))
        engines[-1].close()
    assert engines[0].footprint == engines[1].footprint
    changing = open_engine(tables=always(False))
    take_buffers()
    evaluate(changing, 0, 0, 20)
    assert changing.stats()["flash_attention_changes"] == 1
    assert take_buffers() == []


# ── GPUs that are not here ──

LOG = b"""\
load_tensors:   CPU_Mapped model buffer size =   100.00 MiB
load_tensors:        CUDA0 model buffer size =  4000.00 MiB
load_tensors:        CUDA1 model buffer size =  2000.00 MiB
llama_context:  CUDA_Host  output buffer size =     1.00 MiB
llama_kv_cache:      CUDA0 KV buffer size =   600.00 MiB
llama_kv_cache:      CUDA1 KV buffer size =   300.00 MiB
llama_kv_cache:        CPU KV buffer size =    50.00 MiB
sched_reserve:      CUDA0 compute buffer size =   200.00 MiB
sched_reserve:      CUDA1 compute buffer size =   210.50 MiB
sched_reserve:  CUDA_Host compute buffer size =    20.00 MiB
"""
KV_BYTES = 1200
SETTINGS = LlamaSettings(context=1024, cells=1024, sequences=2)


def gpu(number: int, free: int, total: int = 24 * GIB) -> Gpu:
    return Gpu(number, f"CUDA{number}", "of this test", free, total)


@pytest.fixture
def buffers() -> list[Allocation]:
    take_buffers()
    for line in LOG.splitlines():
        _on_log(1, line, None)
    return take_buffers()


@pytest.fixture
def planned(model_file, buffers):
    """The footprint of a tiny model whose buffers are on GPUs."""
    models = []

    def plan(*found: Gpu, kind: str = "dense", kv_type: str = "f16") -> Footprint | None:
        models.append(LlamaModel(model_file(kind)))
        return on_gpu(models[-1], replace(SETTINGS, kv_type=kv_type), buffers, KV_BYTES, found)

    yield plan
    for model in models:
        model.close()


def test_what_is_on_a_gpu_is_told_from_what_is_in_ram(planned):
    found = planned(gpu(0, free=9 * GIB), gpu(1, free=20 * GIB))
    assert (found.device, found.fixed, found.in_ram) == ("CUDA0", 4800 * MIB, 171 * MIB)
    assert found.capacity == 4800 * MIB + 9 * GIB


def test_the_gpu_with_least_room_decides(planned):
    found = planned(gpu(0, free=9 * GIB), gpu(1, free=2 * GIB))
    assert (found.device, found.fixed) == ("CUDA1", int(2510.5 * MIB))
    assert planned(gpu(0, free=9 * GIB), gpu(2, free=1 * GIB)).device == "CUDA0"  # the other one has nothing of it


def test_a_gpu_has_no_more_than_all_of_its_memory(planned):
    """Some drivers say that everything is free."""
    assert planned(gpu(0, free=24 * GIB)).capacity == 24 * GIB


def test_where_nothing_is_told_nothing_is_planned(planned):
    assert planned(gpu(7, free=GIB)) is None
    assert planned(gpu(0, free=0, total=0)) is None


def test_kernels_have_a_row_of_the_widest_product_in_hand_and_unpack_a_layer(planned):
    dense, experts = planned(gpu(0, GIB)), planned(gpu(0, GIB), kind="moe")
    assert dense.per_step_token == 4 * (WIDTH + INNER)
    assert experts.per_step_token == EXPERTS_USED * dense.per_step_token
    assert dense.per_context_token == 0
    assert planned(gpu(0, GIB), kv_type="q4_0").per_context_token == 4 * KV_BYTES / LAYERS


def admission(footprint: Footprint, open_engine) -> Admission:
    shape = open_engine().capabilities
    opened = open_admission(lambda: footprint, shape, largest_slice=512, margin=0.0, store_room=lambda: 0)
    assert opened is not None
    return opened


def test_where_a_gpu_is_nearly_full_the_slice_is_smaller_and_then_prompts_are_refused(planned, open_engine):
    plain = planned(gpu(0, free=GIB), kv_type="q8_0")
    room = math.ceil(100 * plain.per_step_token + 1000 * plain.per_context_token)
    tight = replace(plain, capacity=plain.fixed + room)
    assert admission(plain, open_engine).admit(1000, 0).plan.prefill_slice == 512
    assert admission(tight, open_engine).admit(1000, 0).plan.prefill_slice == 64
    with pytest.raises(
        TooLarge, match=r"A prompt of 5,000 tokens needs .* and there are .* \(CUDA0\): send at most"
    ):
        admission(tight, open_engine).admit(5000, 0)


def test_what_a_request_took_of_a_gpu_is_what_is_no_longer_free(open_engine, monkeypatch):
    engine = open_engine()
    engine._model.offloads = True
    engine.footprint = Footprint("CUDA0", 10 * GIB, 4 * GIB, 0, 0, 0, 0)
    monkeypatch.setattr("emberkeep.engine.llamacpp.engine.gpus", lambda: [gpu(1, GIB), gpu(0, 5 * GIB)])
    assert engine.peak_bytes() == 5 * GIB
    monkeypatch.setattr("emberkeep.engine.llamacpp.engine.gpus", list)
    assert engine.peak_bytes() is None
