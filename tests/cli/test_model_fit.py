from __future__ import annotations

from pathlib import Path

import pytest

from emberkeep.cli.model_fit import Speeds, explain_plan, explain_ram, fits
from emberkeep.config.settings import Config
from emberkeep.engine.hf.residency import LayerBytes, Placing, plan_host, plan_residency
from emberkeep.models.layer_sizes import layer_sizes
from emberkeep.models.library import ModelFile
from emberkeep.types.models import Residency

GIB = 1 << 30
LAYERS = [LayerBytes(GIB // 4, 3 * GIB // 4)] * 16


def explained(budget: int, ram: int, speeds: Speeds, placing: Placing | None = None) -> str:
    plan = plan_residency(LAYERS, 2 * GIB, budget, placing)
    return explain_plan(plan, plan_host(plan.units, ram, 99 * GIB), 16, budget, "cuda:0", speeds)


def test_what_fits_stays():
    told = explained(20 * GIB, 0, Speeds())
    assert told == "18 GiB of weights, 20 GiB for them on cuda:0: all of them stay there"


def test_what_passes_bounds_how_fast_answers_are():
    told = explained(12 * GIB, 30 * GIB, Speeds(link=16 * GIB))
    assert told == (
        "18 GiB of weights, 12 GiB for them on cuda:0, so 8 of 16 layers stay there (residency partial), and "
        "8.0 GiB pass through it for every token: at most about 2 tokens per second"
    )


def test_many_tokens_per_second_are_told_in_full():
    told = explained(12 * GIB, 30 * GIB, Speeds(link=15_000 * GIB))
    assert told.endswith("at most about 1,875 tokens per second")


def test_a_slow_disk_bounds_it_more():
    told = explained(12 * GIB, 6 * GIB, Speeds(link=16 * GIB, disk=2 * GIB))
    assert told.endswith(
        "pass through it for every token, 4.0 GiB of them from disk: at most about 0.5 tokens per second"
    )


def test_feed_forward_parts_are_called_so_and_an_unknown_speed_is_not_made_up():
    told = explained(12 * GIB, 30 * GIB, Speeds(), Placing(Residency.FFN))
    assert told.endswith(
        "so 0 of 16 feed-forward parts stay there (residency ffn), and 12 GiB pass through it for every token"
    )


def test_weights_in_ram_fit_or_do_not():
    assert explain_ram(2 * GIB, 3 * GIB) == "2.0 GiB of weights, 3.0 GiB for them: they fit into RAM"
    assert explain_ram(4 * GIB, 3 * GIB).endswith("more than RAM has room for: choose a smaller model")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
def test_sizes_are_told_by_headers_as_they_are_in_memory(tmp_path, family):
    from helpers import tiny_hf

    folder, network = tiny_hf.write(tmp_path / family, family, layers=3), tiny_hf.build(family, layers=3)
    sizes = layer_sizes(folder, "float32")
    assert sizes.all == sum(weight.nbytes for weight in network.parameters())
    assert sizes.layers[1].feed_forward == sum(w.nbytes for w in network.model.layers[1].mlp.parameters())
    assert 2 * layer_sizes(folder, "bfloat16").all == sizes.all


@pytest.mark.slow
def test_four_bits_are_told_by_headers_as_they_are_in_memory(tmp_path):
    from emberkeep.engine.hf.model_loader import HfSource, load_model
    from helpers import tiny_hf
    from helpers.awq import quantise

    packed, _ = quantise(tiny_hf.write(tmp_path / "tiny"), tmp_path, group=32)
    model = load_model(HfSource(packed), device="cpu", dtype="float32", attention="eager")
    assert layer_sizes(packed, "float32").all == model.weights_bytes


@pytest.mark.slow
def test_a_machine_without_a_gpu_computes_from_ram(tmp_path: Path):
    from helpers import tiny_hf

    folder = tiny_hf.write(tmp_path / "tiny")
    (tmp_path / "broken").mkdir()
    config = Config(device="cpu", data_dir=tmp_path / "data")
    told = list(fits(config, [ModelFile("tiny", folder), ModelFile("broken", tmp_path / "broken")]))
    assert told[0].text.startswith("models of transformers run on the CPU, from RAM, which has room for ")
    assert told[1].text.endswith("they fit into RAM")
    assert [fit.is_good for fit in told] == [True, True, False]
