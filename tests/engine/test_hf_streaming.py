"""Weights in four bits, and weights that pass through a device: the answers are those of weights that stay."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest
import torch

from emberkeep.engine.base import Outcome, Rows
from emberkeep.engine.hf.checkpoint import Checkpoint
from emberkeep.engine.hf.engine import HfEngine
from emberkeep.engine.hf.residency import Placing
from emberkeep.engine.hf.streaming import WeightsFile
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
        model = tiny_hf.load(folder, device=DEVICE, dtype=dtype, placing=placing)
        engines.append(HfEngine(model, tiny_hf.settings(512, 1024, batch=64, threads=None), "digest"))
        if DEVICE == "cuda":
            engines[-1].improve(lambda: False)  # steps are recorded, with their copies
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def assert_alike(given: tuple[list[int], np.ndarray], expected: tuple[list[int], np.ndarray]) -> None:
    assert given[0] == expected[0]
    np.testing.assert_allclose(given[1], expected[1], rtol=1e-3, atol=1e-3)


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
    assert_alike(answer(opened(folder, placing)), answer(opened(folder)))


@pytest.mark.parametrize("placing", MODES, ids=lambda placing: f"{placing.residency} {placing.keep_first}")
def test_weights_that_pass_are_computed_to_the_bit_where_the_same_code_computes(
    folder, opened, placing, monkeypatch
):
    """Layers that stay are computed by other code, which rounds differently."""
    dtype = "bfloat16" if DEVICE == "cuda" else "float32"
    streamed = answer(opened(folder, placing, dtype))
    if DEVICE == "cuda":
        monkeypatch.setattr("emberkeep.engine.hf.own_steps.OwnSteps.fuse_layers", lambda *_: None)
        monkeypatch.setattr("emberkeep.engine.hf.cuda_graphs.compile_parts", lambda _: [])
    monkeypatch.setattr("emberkeep.engine.hf.own_steps.OwnSteps.open_cpu_layers", lambda _: None)
    resident = answer(opened(folder, dtype=dtype))
    assert streamed[0] == resident[0]
    np.testing.assert_array_equal(streamed[1], resident[1])


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_weights_that_come_layer_by_layer_give_the_same_answers(opened, tmp_path, family):
    folder = tiny_hf.write(tmp_path / family, family)
    size = Checkpoint(folder).size(torch.float32)
    assert_alike(answer(opened(folder, Placing(Residency.STREAM, ram=size - 1))), answer(opened(folder)))


def some_ram(
    opened: Callable[..., HfEngine], folder: Path, share: float, mode: Residency = Residency.STREAM
) -> int:
    """For that share of the weights that pass."""
    return int(share * opened(folder, Placing(mode)).stats()["streaming"]["passing_bytes"])


def break_disk(*_):
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize("share", [0.4, 0.7, 0.9])
@pytest.mark.parametrize("mode", [Residency.STREAM, Residency.FFN])
def test_weights_on_disk_give_the_same_answers(folder, opened, tmp_path, mode, share):
    placing = Placing(mode, ram=some_ram(opened, folder, share, mode), spill=tmp_path)
    engine = opened(folder, placing)
    assert_alike(answer(engine), answer(opened(folder)))
    stats = engine.stats()["streaming"]
    assert stats["units_on_disk"] > 1
    assert stats["ram_bytes"] <= placing.ram
    assert stats["read_bytes"] > stats["disk_bytes"]


def test_four_bits_on_disk_give_the_same_answers(folder, opened, tmp_path):
    packed, whole = quantise(folder, tmp_path, group=32)
    engine = opened(packed, Placing(Residency.STREAM, ram=75_000, spill=tmp_path))
    assert_alike(answer(engine), answer(opened(whole)))
    assert engine.stats()["streaming"]["units_on_disk"]


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_a_step_that_fails_in_the_middle_does_not_spoil_the_next(folder, opened, tmp_path, is_on_disk):
    expected = answer(opened(folder))
    ram = some_ram(opened, folder, 0.6) if is_on_disk else None
    engine = opened(folder, Placing(Residency.STREAM, ram=ram, spill=tmp_path))
    engine.attention.switch(AttentionTier.PLAIN)  # what is recorded does not run Python
    for failing in range(LAYERS):
        hook = engine._network.layers[failing].register_forward_pre_hook(_fail)
        with pytest.raises(EngineError):
            engine.evaluate([Rows(0, 0, TOKENS[:5], outputs=1)])
        hook.remove()
    engine.trim(0, 0)
    assert answer(engine)[0] == expected[0]


def _fail(*_):
    raise RuntimeError("in the middle")


def test_a_disk_that_fails_fails_the_step_with_a_sentence_and_not_the_next(folder, opened, tmp_path, monkeypatch):
    expected = answer(opened(folder))
    engine = opened(folder, Placing(Residency.STREAM, ram=some_ram(opened, folder, 0.6), spill=tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", break_disk)
        with pytest.raises(EngineError, match="cannot be read from disk"):
            for start in range(3):  # what was read ahead suffices for some
                engine.evaluate([Rows(0, start, TOKENS[start : start + 1], outputs=1)])
    engine.trim(0, 0)
    assert answer(engine)[0] == expected[0]


def test_what_fits_neither_into_ram_nor_on_disk_is_refused_with_a_sentence(folder, opened):
    with pytest.raises(EngineError, match=r"GB of RAM and 0.0 GB of disk for them: make room"):
        opened(folder, Placing(Residency.STREAM, ram=some_ram(opened, folder, 0.6)))


def test_what_passes_is_told(folder, opened):
    engine = opened(folder, Placing(Residency.STREAM))
    before = engine.stats()["streaming"]
    engine.evaluate([Rows(0, 0, TOKENS[:1], outputs=1)])
    stats = engine.stats()["streaming"]
    assert stats["residency"] == "stream"
    assert stats["streamed_units"] == LAYERS
    assert stats["copied_bytes"] - before["copied_bytes"] == stats["passing_bytes"]
    assert stats["missed_units"] == before["missed_units"]  # each was on its way when it was wanted
    assert "streaming" not in opened(folder).stats()


def test_weights_of_a_model_whose_state_is_whole_pass_too(tmp_path):
    folder, tokens = tiny_hf.write(tmp_path / "mamba", "mamba"), []
    for placing in (None, Placing(Residency.STREAM)):
        model = tiny_hf.load(folder, device=DEVICE, dtype="float32", attention="eager", placing=placing)
        engine = open_engine(model, tiny_hf.settings(batch=64), "digest")
        engine.evaluate([Rows(0, 0, TOKENS[:20], outputs=1)])
        tokens.append(int(engine.logits(0).argmax()))
        assert ("streaming" in engine.stats()) is (placing is not None)
        engine.close()
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(("version", "group"), [("gemm", 32), ("gemm", 16), ("gemv", 32)])
@pytest.mark.parametrize("placing", [None, Placing(Residency.STREAM), Placing(Residency.FFN)])
def test_four_bits_give_the_answers_of_the_same_numbers_in_full(folder, opened, tmp_path, version, group, placing):
    packed, whole = quantise(folder, tmp_path, group=group, version=version)
    assert_alike(answer(opened(packed, placing)), answer(opened(whole)))


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_four_bits_with_biases_and_tied_weights_give_the_same_answers(opened, tmp_path, family):
    packed, whole = quantise(tiny_hf.write(tmp_path / family, family), tmp_path, group=32)
    assert_alike(answer(opened(packed, Placing(Residency.STREAM))), answer(opened(whole)))


def test_other_kinds_of_quantised_weights_are_refused_with_a_sentence(folder, tmp_path):
    packed, _ = quantise(folder, tmp_path, group=32)
    config = json.loads((packed / "config.json").read_text())
    for unknown in ({"bits": 3}, {"version": "marlin"}):
        changed = {**config, "quantization_config": config["quantization_config"] | unknown}
        (packed / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ModelBroken, match="choose another"):
            tiny_hf.load(packed)


def test_a_checkpoint_in_four_bits_that_lacks_something_is_refused(folder, tmp_path):
    from safetensors.torch import load_file, save_file

    packed, _ = quantise(folder, tmp_path, group=32)
    tensors = load_file(packed / "model.safetensors")
    for gone in ("model.layers.2.mlp.up_proj.scales", "model.norm.weight"):
        save_file({n: t for n, t in tensors.items() if n != gone}, packed / "model.safetensors", {"format": "pt"})
        with pytest.raises(ModelBroken, match="pull a complete model"):
            tiny_hf.load(packed)


# ── weights that RAM has no room for ──

SIZES = [5000, 9000, 1, 4096, 7000]


def part_of(number: int) -> torch.Tensor:
    return torch.full((SIZES[number],), number + 1, dtype=torch.uint8)


@pytest.fixture
def file(tmp_path: Path):
    buffers = [torch.empty(max(SIZES), dtype=torch.uint8) for _ in range(2)]
    file = WeightsFile(tmp_path / "spill", SIZES, buffers)
    for number in range(len(SIZES)):
        file.write(number, part_of(number))
    file.start()
    yield file
    file.close()


def took(file: WeightsFile, number: int) -> bool:
    buffer = file.take(number)
    is_right = torch.equal(buffer.memory[: SIZES[number]], part_of(number))
    file.give_back(buffer)
    return is_right


def test_parts_come_in_their_order_again_and_again(file):
    assert all(took(file, number) for _ in range(3) for number in range(len(SIZES)))


def test_another_part_may_be_asked_for_at_any_time(file):
    assert all(took(file, number) for number in (0, 3, 4, 0, 0, 2, 1, 2, 4))


def test_a_buffer_that_was_taken_stays_as_it_is(file):
    held = file.take(0)
    assert all(took(file, number) for number in (1, 2, 3, 4, 1))
    assert torch.equal(held.memory[: SIZES[0]], part_of(0))


def test_a_buffer_is_filled_again_once_its_copy_is_done(file):
    class Copying:
        done = Event()

        def synchronize(self) -> None:
            self.done.wait()

    copying = Copying()
    held = [file.take(number) for number in (0, 1)]
    for buffer in held:
        file.give_back(buffer, copying)
    assert torch.equal(held[0].memory[: SIZES[0]], part_of(0))
    copying.done.set()
    assert took(file, 2)


def test_nothing_has_a_name(file, tmp_path):
    assert list((tmp_path / "spill").iterdir()) == []


def test_a_read_that_fails_is_told_when_its_part_is_wanted_and_tried_again(file, monkeypatch):
    real, broken = os.preadv, {SIZES[1]}

    def read(handle: int, data: list[memoryview], offset: int) -> int:
        if len(data[0]) in broken:
            raise OSError(5, "Input/output error")
        return real(handle, data, offset)

    monkeypatch.setattr(os, "preadv", read)
    assert took(file, 4)
    assert took(file, 0)  # although what comes behind it cannot be read
    for _ in range(2):
        with pytest.raises(EngineError, match=r"cannot be read from disk \(Input/output error\): check the disk"):
            file.take(1)
    broken.clear()
    assert all(took(file, number) for number in (1, 2, 3, 4, 0, 1))


def test_a_file_that_became_shorter_is_told(file, monkeypatch):
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(EngineError, match="has become shorter"):
        took(file, 4)


def test_closing_waits_for_a_read_and_ends_the_thread(file, monkeypatch):
    began, may_end, real = Event(), Event(), os.preadv

    def read(*args: object) -> int:
        began.set()
        may_end.wait()
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "preadv", read)
    errors: list[str] = []

    def take() -> None:
        try:
            file.take(4)
        except EngineError as error:
            errors.append(str(error))

    waiting = Thread(target=take)
    waiting.start()
    began.wait()
    closing = Thread(target=file.close)
    closing.start()
    waiting.join()  # it does not wait for a read that is of no use any more
    may_end.set()
    closing.join()
    assert errors == ["The model is being closed."]


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(EngineError, match="cannot be written to disk"):
        WeightsFile(tmp_path / "file", [1], [torch.empty(1, dtype=torch.uint8)])
