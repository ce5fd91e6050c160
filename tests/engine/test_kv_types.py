"""Keys and values that are held in fewer bits while a model runs."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from emberkeep.engine.base import Outcome
from emberkeep.engine.llamacpp.c_api import TYPES
from emberkeep.engine.llamacpp.context import LlamaSettings
from emberkeep.engine.llamacpp.engine import LlamaEngine
from emberkeep.engine.llamacpp.learning import dequantize
from emberkeep.engine.llamacpp.model import LlamaModel
from emberkeep.errors import EngineError
from helpers import tiny_gguf
from helpers.engines import KINDS, TOKENS, evaluate, exported
from helpers.scheduling import Rig

BYTES_OF_32 = {"f16": 64, "q8_0": 34, "q4_0": 18}
QUANTISED = ["q8_0", "q4_0"]


@pytest.mark.parametrize("kv_type", QUANTISED)
def test_a_token_takes_as_many_bytes_as_its_type_says(open_engine, kv_type) -> None:
    plain, smaller = open_engine("wide").capabilities, open_engine("wide", kv_type=kv_type).capabilities
    assert smaller.kv_bytes_per_token * 64 == plain.kv_bytes_per_token * BYTES_OF_32[kv_type]


@pytest.mark.parametrize("kv_type", QUANTISED)
def test_fewer_bits_change_logits_a_little(open_engine, kv_type) -> None:
    plain, smaller = (evaluate(open_engine("wide", kv_type=each), 0, 0, 100) for each in ("f16", kv_type))
    assert 0 < np.abs(plain - smaller).max() < {"q8_0": 0.5, "q4_0": 3}[kv_type]


def test_the_planned_memory_counts_cells_in_their_type(model_file) -> None:
    def planned(kv_type: str) -> int:
        model = LlamaModel(model_file("wide"))
        settings = LlamaSettings(65_536, 65_536, sequences=2, batch=64, threads=1, kv_type=kv_type)
        engine = LlamaEngine(model, settings, "d")
        engine.close()
        return engine.footprint.fixed - model.resident_before

    saved = 65_536 * 4 * 64 * (BYTES_OF_32["f16"] - BYTES_OF_32["q4_0"]) // 32
    assert planned("f16") - planned("q4_0") == pytest.approx(saved, rel=0.1)


@pytest.fixture(params=[(kind, kv_type) for kind in KINDS for kv_type in QUANTISED], ids=str)
def pair(request, tmp_path, monkeypatch):
    """Two engines over a model of each kind whose heads can be quantised."""
    kind, kv_type = request.param
    for name, value in {"HEAD": 32, "HEADS": 2, "KV_HEADS": 1}.items():
        monkeypatch.setattr(tiny_gguf, name, value)
    path = KINDS[kind](tmp_path / "tiny.gguf")
    settings = LlamaSettings(context=512, cells=512, sequences=2, batch=128, threads=1, kv_type=kv_type)
    engines = [LlamaEngine(LlamaModel(path), settings, "d") for _ in range(2)]
    yield engines
    for engine in engines:
        engine.close()


def test_state_that_went_out_and_in_gives_bit_equal_logits(pair) -> None:
    source, target = pair
    evaluate(source, 0, 0, 200)
    for start, end in ((0, 64), (64, 66), (66, 200)):
        assert target.import_kv(0, start, end, [exported(source, 0, start, end)], start) is Outcome.DONE
    if source.capabilities.kv_unit.has_snapshots:
        assert target.import_snapshot(0, 200, source.export_snapshot(0)) is Outcome.DONE
    assert np.array_equal(evaluate(target, 0, 200, 208), evaluate(source, 0, 200, 208))


def test_each_type_has_a_fingerprint_of_its_own(open_engine) -> None:
    engines = [open_engine(kind, kv_type=kv_type) for kind in ("wide",) for kv_type in BYTES_OF_32]
    engines += [open_engine("recurrent", kv_type=kv_type) for kv_type in BYTES_OF_32]
    assert len({engine.fingerprint for engine in engines}) == len(engines)


@pytest.mark.parametrize("kv_type", QUANTISED)
def test_a_restart_with_the_same_type_reuses_everything_and_others_nothing(open_engine, tmp_path, kv_type) -> None:
    prompt = TOKENS[:300].tolist()
    with Rig(tmp_path, open_engine("wide", kv_type=kv_type)) as rig:
        first = rig.run(prompt, max_new=10)
    with Rig(tmp_path, open_engine("wide")) as rig:
        assert rig.run(prompt, max_new=1).lookup.reused_tokens == 0
    with Rig(tmp_path, open_engine("wide", kv_type=kv_type)) as rig:
        again = rig.run(prompt, max_new=10)
        assert (again.lookup.cold_tokens, again.answer) == (299, first.answer)


@pytest.mark.parametrize("kv_type", QUANTISED)
def test_what_is_held_in_fewer_bits_is_not_packed_again(open_engine, kv_type) -> None:
    assert open_engine("wide", kv_type=kv_type).capabilities.packs == {16}


@pytest.mark.parametrize(("kv_type", "near"), [("q8_0", 0.2), ("q4_0", 2.5)])
def test_whole_heads_of_64_are_moved_as_far_as_their_bits_allow(tmp_path, monkeypatch, kv_type, near) -> None:
    """A single layer, so that no state depends on what was removed; and no other sequence's keys are touched."""
    monkeypatch.setattr(tiny_gguf, "LAYERS", 1)
    model = LlamaModel(tiny_gguf.wide(tmp_path / "wide.gguf"))
    settings = LlamaSettings(context=1024, cells=1024, sequences=4, batch=64, threads=1, kv_type=kv_type)
    engine = LlamaEngine(model, settings, "d")
    assert engine.capabilities.can_shift
    for sequence in (0, 1):
        evaluate(engine, sequence, 0, 200)
    bystander = exported(engine, 1, 0, 200)
    assert engine.splice(0, 20, 120, TOKENS[500:510]) is Outcome.DONE
    assert exported(engine, 1, 0, 200) == bystander
    shorter = np.concatenate([TOKENS[:20], TOKENS[500:510], TOKENS[120:220]])
    spliced = evaluate(engine, 0, 110, 120, shorter)
    assert np.abs(spliced - evaluate(engine, 2, 0, 120, shorter)).max() < near
    assert np.abs(spliced - evaluate(engine, 3, 0, 120)).max() > near
    engine.close()


def test_heads_that_llama_cpp_would_die_of_moving_are_not_moved(tmp_path) -> None:
    """In a process of its own: quantised keys in heads of 32 end it when they are rotated."""
    script = (
        "import sys; from pathlib import Path\n"
        "from helpers import tiny_gguf\n"
        "from emberkeep.engine.llamacpp.context import LlamaSettings\n"
        "from emberkeep.engine.llamacpp.engine import LlamaEngine\n"
        "from emberkeep.engine.llamacpp.model import LlamaModel\n"
        "tiny_gguf.HEAD, tiny_gguf.HEADS, tiny_gguf.KV_HEADS = 32, 2, 1\n"
        "path = tiny_gguf.dense(Path(sys.argv[1]))\n"
        "settings = LlamaSettings(context=256, cells=256, sequences=2, batch=64, threads=1, kv_type='q8_0')\n"
        "print(LlamaEngine(LlamaModel(path), settings, 'd').capabilities.can_shift)\n"
    )
    folders = [path for path in sys.path if path]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {folders}\n{script}", str(tmp_path / "t.gguf")],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


def test_a_model_whose_heads_cannot_be_quantised_says_so(open_engine) -> None:
    with pytest.raises(
        EngineError, match=r"^This model's state cannot be held as q8_0 \(.*\): use --kv-type f16\.$"
    ):
        open_engine("dense", kv_type="q8_0")


@pytest.mark.parametrize("kv_type", ["f16", *QUANTISED])
def test_rows_are_read_as_ggml_reads_them(kv_type: str) -> None:
    from gguf import GGMLQuantizationType, quants

    numbers = np.random.default_rng(1).standard_normal((1, 128)).astype(np.float32)
    kind = GGMLQuantizationType[kv_type.upper()]
    row = quants.quantize(numbers, kind).view(np.uint8).ravel()
    assert np.array_equal(
        dequantize(row, TYPES[kv_type]), quants.dequantize(row.view(_stored(kv_type)), kind).ravel()
    )


def _stored(kv_type: str) -> type:
    return np.float16 if kv_type == "f16" else np.uint8
