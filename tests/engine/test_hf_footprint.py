"""What is measured of memory, with an engine that needs none, and how a GPU that is not there is shared out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from emberkeep.engine.base import Footprint
from emberkeep.engine.hf import device as devices
from emberkeep.engine.hf import footprint as footprints
from emberkeep.engine.hf.device import kv_bytes_per_token, state_reserve
from emberkeep.engine.hf.footprint import affordable_batch, affordable_cells, footprint, measure_step, with_step
from emberkeep.engine.hf.model_loader import HfSettings
from emberkeep.engine.hf.pool import LayerShape, StreamShape
from emberkeep.engine.hf.residency import LayerBytes, plan_residency
from emberkeep.sched.admission import peak
from emberkeep.types.events import Plan
from helpers.engines import RecordingEngine, evaluate

pytestmark = pytest.mark.slow

ESTIMATE = Footprint("cpu", 1 << 40, 0, per_step_token=1e3, per_context_token=64, per_pair=5, per_logits_row=800)


@pytest.mark.parametrize("context", [100, 1344, 8192])
def test_no_prompt_is_longer_than_the_context(monkeypatch, context):
    for name in ("reset_peak_memory_stats", "max_memory_allocated", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 1)
    engine = RecordingEngine(cells=1 << 14, context=context, batch=4096)
    measure_step(ESTIMATE, torch.device("cuda"), engine, 4096)
    ends = [shape[1] + shape[2] for (shape,) in engine.shapes]
    assert 0 < max(ends) <= context


def test_a_step_adds_nothing_where_memory_was_freed_meanwhile(monkeypatch):
    """As of an engine closed while this one measures: peaks are then less than what lay there before."""
    for name, bytes_used in (
        ("reset_peak_memory_stats", 0),
        ("max_memory_allocated", 900),
        ("memory_allocated", 1000),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda device, bytes_used=bytes_used: bytes_used)
    engine = RecordingEngine(cells=1 << 14, context=4096, batch=512)
    step = measure_step(ESTIMATE, torch.device("cuda"), engine, 512)
    assert step == {"per_step_token": 0, "per_pair": 0}
    assert with_step(ESTIMATE, step).per_step_token == 0


class Slow(RecordingEngine):
    """A step of 128 rows takes so long."""

    def __init__(self, seconds: float | None) -> None:
        super().__init__(cells=1 << 14, context=4096, batch=512)
        self.seconds = seconds

    def step_seconds(self, rows: int, depth: int, outputs: int) -> float | None:
        return self.seconds


@pytest.mark.parametrize(
    ("seconds", "steps"), [(0.01, [512, 512]), (0.5, [128, 128]), (10.0, []), (None, [])], ids=str
)
def test_steps_on_a_cpu_are_measured_unless_they_take_long(seconds, steps):
    engine = Slow(seconds)
    found = measure_step(ESTIMATE, torch.device("cpu"), engine, 512)
    assert [shape[2] for (shape,) in engine.shapes] == steps
    assert found["per_step_token"] >= ESTIMATE.per_step_token
    assert found["per_pair"] == ESTIMATE.per_pair


def test_what_a_step_takes_on_a_cpu_is_measured_where_that_is_more_than_estimated(monkeypatch):
    """As a library's workspaces are: nobody knows them before."""
    peaks = {"now": 0}
    monkeypatch.setattr(footprints, "resident_ram", lambda: 1000 * MB)
    monkeypatch.setattr(footprints, "peak_bytes", lambda device: peaks["now"])
    estimate = footprint(*on_cpu(), HfSettings(4096, None, 4, 512), has_masks=True)
    taken = []
    for peaks["now"] in (1000 * MB, 1600 * MB):
        taken.append(with_step(estimate, measure_step(estimate, torch.device("cpu"), Slow(0.01), 512)))
    little, much = taken
    assert little.fixed == much.fixed == 1000 * MB
    assert little.per_step_token == 4 * (8 * 64 + 4 * 128)
    assert 512 * (much.per_step_token + much.per_context_token + 512 * much.per_pair) == pytest.approx(600 * MB)


def on_cpu() -> tuple[object, ...]:
    config = SimpleNamespace(
        get_text_config=lambda decoder: SimpleNamespace(hidden_size=64, intermediate_size=128)
    )
    model = SimpleNamespace(network=SimpleNamespace(config=config), vocab=SimpleNamespace(size=100))
    channels = SimpleNamespace(channels=8)
    memory = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32)
    return model, memory, [SimpleNamespace(keys=channels, values=channels)]


MB, GB = 10**6, 10**9
CUDA = torch.device("cuda")
SHAPE = SimpleNamespace(
    num_hidden_layers=64,
    num_attention_heads=40,
    num_key_value_heads=8,
    head_dim=128,
    hidden_size=5120,
    intermediate_size=27_648,
)
LAYERS, REST = [LayerBytes(40 * 10**6, 220 * 10**6)] * 64, 3 * GB
"""About those of a model with 32 billion weights, in four bits."""


class Gpu:
    """Of so many bytes, of which some are used."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
        self.size, self.used = size, 0
        for module in (devices, footprints):
            monkeypatch.setattr(module, "free_bytes", lambda device, limit: self.size - self.used)
        monkeypatch.setattr(devices, "shares_ram", lambda device: False)


@pytest.mark.parametrize(("size", "asked"), [(12 * GB, 8192), (12 * GB, 2048), (16 * GB, 8192), (24 * GB, 8192)])
def test_a_model_larger_than_a_gpu_has_room_for_the_context_that_was_asked_for(monkeypatch, size, asked):
    gpu = Gpu(monkeypatch, size)
    text = SimpleNamespace(get_text_config=lambda decoder: SHAPE)
    network = SimpleNamespace(config=text, device=CUDA, dtype=torch.bfloat16)
    model = SimpleNamespace(network=network, vocab=SimpleNamespace(size=152_000))
    reserve = state_reserve(CUDA, None, asked * kv_bytes_per_token(SHAPE, torch.bfloat16))
    gpu.used = plan_residency(LAYERS, REST, devices.weights_budget(CUDA, None), for_state=reserve).device_bytes
    batch = affordable_batch(model, 4096, None)
    stream = StreamShape(8, 128)
    settings = HfSettings(32_768, None, 16, batch)
    cells = affordable_cells(model, [LayerShape(stream, stream)] * 64, torch.bfloat16, settings)
    assert cells >= asked
    assert batch >= 512


@pytest.mark.parametrize(
    ("kind", "is_integrated", "expected"),
    [("mps", False, True), ("cuda", True, True), ("cuda", False, False), ("cpu", False, False)],
)
def test_which_devices_share_ram(monkeypatch, kind, is_integrated, expected):
    found = SimpleNamespace(is_integrated=is_integrated)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    assert devices.shares_ram(torch.device(kind)) is expected


@pytest.mark.parametrize(("most", "expected"), [(4096, 512), (512, 512), (256, 256)])
def test_steps_are_smaller_where_memory_is_short(monkeypatch, most, expected):
    Gpu(monkeypatch, devices.RESERVE + GB // 2)
    network = SimpleNamespace(
        config=SimpleNamespace(get_text_config=lambda decoder: SHAPE), device=CUDA, dtype=torch.bfloat16
    )
    assert affordable_batch(SimpleNamespace(network=network), most, None) == expected


def test_steps_on_a_cpu_are_as_large_as_asked_for():
    network = SimpleNamespace(device=torch.device("cpu"))
    assert affordable_batch(SimpleNamespace(network=network), 4096, None) == 4096
    assert state_reserve(torch.device("cpu"), None, GB) == 0


@pytest.mark.parametrize("tokens", [40, 250, 1000])
def test_a_request_in_ram_takes_what_is_predicted(open_hf, tokens):
    engine = open_hf(cells=2048, batch=256)
    engine.peak_bytes()
    evaluate(engine, 0, 0, tokens)
    actual = engine.peak_bytes()
    assert actual is not None
    assert actual == pytest.approx(peak(engine.footprint, Plan(256, 16), tokens, 0, rows=1), rel=0.03)
