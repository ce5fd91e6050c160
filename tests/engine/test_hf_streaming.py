"""Weights in four bits, and weights that pass through a device: the answers are those of weights that stay."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from emberkeep.engine.base import Outcome, Rows
from emberkeep.engine.hf.checkpoint import Checkpoint
from emberkeep.engine.hf.device import is_unified
from emberkeep.engine.hf.engine import HfEngine
from emberkeep.engine.hf.model_loader import HfSettings, HfSource, load_model
from emberkeep.engine.hf.residency import LayerBytes, Placing, plan_host, plan_residency
from emberkeep.engine.hf.whole_engine import open_engine
from emberkeep.errors import EngineError, ModelBroken
from emberkeep.types.models import AttentionTier, Residency
from helpers import tiny_hf
from helpers.tiny_hf import quantise

pytestmark = pytest.mark.slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS = np.random.default_rng(3).integers(40, 120, 200, dtype=np.int32)
LAYERS = 6
MODES = [
    Placing(Residency.STREAM),
    Placing(Residency.FFN),
    Placing(Residency.PARTIAL, keep_first=1, keep_last=2),
    Placing(Residency.PARTIAL, keep_first=LAYERS - 1),
    Placing(keep_last=2),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_hf.write(tmp_path_factory.mktemp("llama"), "llama", layers=LAYERS)


@pytest.fixture
def opened():
    engines = []

    def make(folder: Path, placing: Placing | None = None, dtype: str = "float32") -> HfEngine:
        model = load_model(HfSource(folder), device=DEVICE, dtype=dtype, attention="emberkeep", placing=placing)
        engines.append(HfEngine(model, HfSettings(context=512, cells=1024, sequences=4, batch=64), "digest"))
        if DEVICE == "cuda":
            engines[-1].improve(lambda: False)  # steps are recorded, with their copies
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def answer(engine: HfEngine, count: int = 12) -> tuple[list[int], np.ndarray]:
    """Greedy, after a prompt in slices and beside another sequence; and the last logits."""
    for sequence, prompt in enumerate((TOKENS[:100], TOKENS[100:140])):
        for start in range(0, len(prompt), 64):
            rows = Rows(sequence, start, prompt[start : start + 64], outputs=1)
            assert engine.evaluate([rows]) is Outcome.DONE
        engine.logits(0)
    tokens = [int(TOKENS[150])]
    for step in range(count):
        last = np.array(tokens[-1:], np.int32)
        engine.evaluate([Rows(0, 100 + step, last, outputs=1), Rows(1, 40 + step, last, outputs=1)])
        tokens.append(int(engine.logits(0).argmax()))
    return tokens, engine.logits(0).copy()


@pytest.mark.parametrize("placing", MODES, ids=lambda placing: f"{placing.residency} {placing.keep_first}")
def test_weights_that_pass_give_the_same_answers(folder, opened, placing):
    resident, streamed = answer(opened(folder)), answer(opened(folder, placing))
    assert streamed[0] == resident[0]
    np.testing.assert_allclose(streamed[1], resident[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("placing", MODES, ids=lambda placing: f"{placing.residency} {placing.keep_first}")
def test_weights_that_pass_are_computed_to_the_bit_where_the_same_code_computes(
    folder, opened, placing, monkeypatch
):
    """On a GPU, layers that stay are computed by other kernels, which round differently."""
    dtype = "bfloat16" if DEVICE == "cuda" else "float32"
    streamed = answer(opened(folder, placing, dtype))
    if DEVICE == "cuda":
        monkeypatch.setattr("emberkeep.engine.hf.own_steps.fuse_layers", lambda *_: None)
        monkeypatch.setattr("emberkeep.engine.hf.cuda_graphs.compile_parts", lambda _: [])
    resident = answer(opened(folder, dtype=dtype))
    assert streamed[0] == resident[0]
    np.testing.assert_array_equal(streamed[1], resident[1])


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_weights_that_come_layer_by_layer_give_the_same_answers(opened, tmp_path, family):
    folder = tiny_hf.write(tmp_path / family, family)
    size = Checkpoint(folder).size(torch.float32)
    given, expected = answer(opened(folder, Placing(Residency.STREAM, ram=size - 1))), answer(opened(folder))
    assert given[0] == expected[0]
    np.testing.assert_allclose(given[1], expected[1], rtol=1e-4, atol=1e-4)


def some_ram(
    opened: Callable[..., HfEngine], folder: Path, share: float, mode: Residency = Residency.STREAM
) -> int:
    """For that share of the weights that pass."""
    return int(share * opened(folder, Placing(mode)).stats()["streaming"]["passing_bytes"])


@pytest.mark.parametrize("share", [0.4, 0.7, 0.9])
@pytest.mark.parametrize("mode", [Residency.STREAM, Residency.FFN])
def test_weights_on_disk_give_the_same_answers(folder, opened, tmp_path, mode, share):
    placing = Placing(mode, ram=some_ram(opened, folder, share, mode), spill=tmp_path)
    engine = opened(folder, placing)
    given, expected = answer(engine), answer(opened(folder))
    assert given[0] == expected[0]
    np.testing.assert_allclose(given[1], expected[1], rtol=1e-4, atol=1e-4)
    told = engine.stats()["streaming"]
    assert told["units_on_disk"] > 1
    assert told["ram_bytes"] <= placing.ram
    assert told["read_bytes"] > told["disk_bytes"]


def test_four_bits_on_disk_give_the_same_answers(folder, opened, tmp_path):
    packed, whole = quantise(folder, tmp_path, group=32)
    engine = opened(packed, Placing(Residency.STREAM, ram=75_000, spill=tmp_path))
    given, expected = answer(engine), answer(opened(whole))
    assert given[0] == expected[0]
    assert engine.stats()["streaming"]["units_on_disk"]


def test_a_step_that_fails_in_the_middle_does_not_spoil_the_next_from_disk(folder, opened, tmp_path):
    expected = answer(opened(folder))
    engine = opened(folder, Placing(Residency.STREAM, ram=some_ram(opened, folder, 0.6), spill=tmp_path))
    for failing in range(LAYERS):
        hook = engine._network.layers[failing].register_forward_pre_hook(_fail)
        with pytest.raises(EngineError):
            engine.evaluate([Rows(0, 0, TOKENS[:5], outputs=1)])
        hook.remove()
    engine.trim(0, 0)
    assert answer(engine)[0] == expected[0]


def test_a_disk_that_fails_fails_the_step_with_a_sentence_and_not_the_next(folder, opened, tmp_path, monkeypatch):
    expected = answer(opened(folder))
    engine = opened(folder, Placing(Residency.STREAM, ram=some_ram(opened, folder, 0.6), spill=tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr("emberkeep.engine.hf.streaming.os.preadv", _break_disk)
        with pytest.raises(EngineError, match="cannot be read from disk"):
            for start in range(3):  # what was read ahead suffices for some
                engine.evaluate([Rows(0, start, TOKENS[start : start + 1], outputs=1)])
    engine.trim(0, 0)
    assert answer(engine)[0] == expected[0]


def _break_disk(*_):
    raise OSError(5, "Input/output error")


def test_what_fits_neither_into_ram_nor_on_disk_is_refused_with_a_sentence(folder, opened):
    with pytest.raises(EngineError, match=r"GB of RAM and 0.0 GB of disk for them: make room"):
        opened(folder, Placing(Residency.STREAM, ram=some_ram(opened, folder, 0.6)))


def test_what_passes_is_told(folder, opened):
    engine = opened(folder, Placing(Residency.STREAM))
    before = engine.stats()["streaming"]
    engine.evaluate([Rows(0, 0, TOKENS[:1], outputs=1)])
    told = engine.stats()["streaming"]
    assert told["residency"] == "stream"
    assert told["streamed_units"] == LAYERS
    assert told["copied_bytes"] - before["copied_bytes"] == told["passing_bytes"]
    assert told["missed_units"] == before["missed_units"]  # each was on its way when it was wanted
    assert "streaming" not in opened(folder).stats()


def test_weights_of_a_model_whose_state_is_whole_pass_too(tmp_path):
    folder = tiny_hf.write(tmp_path / "mamba", "mamba")
    settings, tokens = HfSettings(context=512, cells=1024, sequences=4, batch=64), []
    for placing in (None, Placing(Residency.STREAM)):
        model = load_model(HfSource(folder), device=DEVICE, dtype="float32", attention="eager", placing=placing)
        engine = open_engine(model, settings, "digest")
        engine.evaluate([Rows(0, 0, TOKENS[:20], outputs=1)])
        tokens.append(int(engine.logits(0).argmax()))
        assert ("streaming" in engine.stats()) is (placing is not None)
        engine.close()
    assert tokens[0] == tokens[1]


def test_a_step_that_fails_in_the_middle_does_not_spoil_the_next(folder, opened):
    engine, expected = opened(folder, Placing(Residency.STREAM)), answer(opened(folder))
    engine.attention.switch(AttentionTier.PLAIN)  # what is recorded does not run Python
    hook = engine._network.layers[3].register_forward_pre_hook(_fail)
    with pytest.raises(EngineError):
        engine.evaluate([Rows(0, 0, TOKENS[:5], outputs=1)])
    hook.remove()
    engine.trim(0, 0)
    assert answer(engine)[0] == expected[0]


def _fail(*_):
    raise RuntimeError("in the middle")


@pytest.mark.parametrize("version", ["gemm", "gemv"])
@pytest.mark.parametrize("group", [32, 16])
@pytest.mark.parametrize("placing", [None, Placing(Residency.STREAM), Placing(Residency.FFN)])
def test_four_bits_give_the_answers_of_the_same_numbers_in_full(folder, opened, tmp_path, version, group, placing):
    if version == "gemv" and group == 16:
        pytest.skip("there is no such layout")
    packed, whole = quantise(folder, tmp_path, group=group, version=version)
    given, expected = answer(opened(packed, placing)), answer(opened(whole))
    assert given[0] == expected[0]
    np.testing.assert_allclose(given[1], expected[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_four_bits_with_biases_and_tied_weights_give_the_same_answers(opened, tmp_path, family):
    packed, whole = quantise(tiny_hf.write(tmp_path / family, family), tmp_path, group=32)
    given, expected = answer(opened(packed, Placing(Residency.STREAM))), answer(opened(whole))
    assert given[0] == expected[0]
    np.testing.assert_allclose(given[1], expected[1], rtol=1e-3, atol=1e-3)


def test_other_kinds_of_quantised_weights_are_refused_with_a_sentence(folder, tmp_path):
    packed, _ = quantise(folder, tmp_path, group=32)
    config = json.loads((packed / "config.json").read_text())
    for said in ({"bits": 3}, {"version": "marlin"}):
        changed = {**config, "quantization_config": config["quantization_config"] | said}
        (packed / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ModelBroken, match="choose another"):
            load_model(HfSource(packed), device="cpu", dtype="float32", attention="emberkeep")


def test_a_checkpoint_in_four_bits_that_lacks_something_is_refused(folder, tmp_path):
    from safetensors.torch import load_file, save_file

    packed, _ = quantise(folder, tmp_path, group=32)
    tensors = load_file(packed / "model.safetensors")
    for gone in ("model.layers.2.mlp.up_proj.scales", "model.norm.weight"):
        save_file({n: t for n, t in tensors.items() if n != gone}, packed / "model.safetensors", {"format": "pt"})
        with pytest.raises(ModelBroken, match="pull a complete model"):
            load_model(HfSource(packed), device="cpu", dtype="float32", attention="emberkeep")


# ── what stays ──

EVEN = [LayerBytes(10, 30)] * 8


def test_everything_stays_where_it_fits():
    plan = plan_residency(EVEN, rest=20, budget=340)
    assert (plan.mode, plan.streamed, plan.device_bytes) == (Residency.FULL, (), 340)


def test_as_much_stays_as_fits_beside_the_slots():
    plan = plan_residency(EVEN, rest=20, budget=265)
    assert plan.mode is Residency.PARTIAL
    assert plan.streamed == (2, 3, 4, 5)
    assert plan.device_bytes == 20 + 4 * 40 + 2 * 40 <= 265
    assert plan.passing_bytes == 160


def test_weights_leave_room_for_state_only_where_some_have_to_pass():
    assert plan_residency(EVEN, rest=20, budget=340, for_state=80).mode is Residency.FULL
    plan = plan_residency(EVEN, rest=20, budget=265, for_state=80)
    assert (plan.mode, len(plan.streamed), plan.device_bytes) == (Residency.PARTIAL, 6, 180)


def test_state_never_makes_weights_not_fit():
    assert plan_residency(EVEN, rest=20, budget=110, for_state=80).mode is Residency.STREAM


def test_nothing_but_the_rest_stays_where_no_layer_fits():
    plan = plan_residency(EVEN, rest=20, budget=110)
    assert (plan.mode, len(plan.streamed), plan.device_bytes) == (Residency.STREAM, 8, 100)


def test_feed_forward_parts_pass_alone():
    plan = plan_residency(EVEN, rest=20, budget=200, placing=Placing(Residency.FFN))
    assert (plan.resident_bytes, plan.slot_bytes, plan.passing_bytes) == (100, 60, 240)


@pytest.mark.parametrize("wanted", list(Residency))
def test_what_does_not_fit_is_refused_with_a_sentence(wanted):
    with pytest.raises(EngineError, match="choose"):
        plan_residency(EVEN, rest=20, budget=60, placing=Placing(wanted))


def test_layers_that_are_to_stay_do():
    plan = plan_residency(EVEN, rest=20, budget=1000, placing=Placing(keep_first=3, keep_last=1))
    assert plan.streamed == (3, 4, 5, 6)
    assert plan_residency(EVEN, rest=20, budget=1000, placing=Placing(keep_first=99)).streamed == ()


# ── where what passes waits ──


def test_units_wait_in_ram_if_they_fit():
    plan = plan_host([40] * 8, ram=320, disk=0)
    assert (plan.on_disk, plan.buffers, plan.ram_bytes, plan.disk_bytes) == ((), (), 320, 0)


def test_units_on_disk_are_spread_among_those_in_ram():
    plan = plan_host([40] * 12, ram=400, disk=1000)
    assert plan.on_disk == (1, 4, 7, 10)
    assert plan.ram_bytes == 8 * 40 + sum(plan.buffers) == 400
    assert plan.disk_bytes == 160


@pytest.mark.parametrize(("ram", "disk"), [(79, 10_000), (300, 59)])
def test_units_that_have_no_room_anywhere_are_refused_with_a_sentence(ram, disk):
    with pytest.raises(EngineError, match=r"need 0.0 GB to wait in, .* of RAM and .* of disk .*: make room"):
        plan_host([40] * 12, ram, disk)


# ── a GPU that computes from RAM ──


@pytest.mark.parametrize(
    ("kind", "is_integrated", "expected"),
    [("mps", False, True), ("cuda", True, True), ("cuda", False, False), ("cpu", False, False)],
)
def test_which_devices_share_ram(kind, is_integrated, expected):
    assert is_unified(kind, is_integrated=is_integrated) is expected


@pytest.mark.parametrize("asked", [Placing(Residency.STREAM), Placing(Residency.FFN), Placing(keep_first=2)])
def test_nothing_passes_to_a_device_that_shares_ram_and_who_asks_for_it_is_told(asked, caplog):
    given = replace(asked, ram=100).in_unified_memory(100)
    assert (given.residency, given.lets_weights_pass) == (Residency.FULL, False)
    assert caplog.messages == [
        "every weight stays where it is, whatever residency says: this GPU computes from RAM"
    ]


def test_what_is_promised_to_others_is_there_for_weights_that_stay_in_ram(caplog):
    assert Placing(ram=60, promised_ram=40).in_unified_memory(100).residency is Residency.FULL
    assert caplog.messages == []
    with pytest.raises(EngineError, match=r"RAM that this GPU shares.*: close other programs"):
        Placing(ram=60, promised_ram=39).in_unified_memory(100)
