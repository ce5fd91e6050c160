"""From a model's header, the settings and the GPUs that are here to what goes where."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from emberkeep.config.settings import Config
from emberkeep.engine.llamacpp import gpus as llama_gpus
from emberkeep.engine.llamacpp.context import LlamaSettings
from emberkeep.engine.llamacpp.gpus import ON_CPU, Gpu, Placement
from emberkeep.errors import EngineError, ModelBroken
from emberkeep.models.gguf import GgufHeader, read_header
from emberkeep.models.profile import ModelProfile, profile
from emberkeep.runtime.placement import bytes_on_gpus, layer_sizes, live_kv_bytes, open_placed, place
from helpers import tiny_gguf

MIB = 1 << 20

SETTINGS = LlamaSettings(context=1024, cells=4096, sequences=8, batch=512)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def dense(folder: Path) -> GgufHeader:
    return read_header(tiny_gguf.dense(folder / "dense.gguf"))


@pytest.fixture
def moe(folder: Path) -> GgufHeader:
    return read_header(tiny_gguf.moe(folder / "moe.gguf"))


def gpu(free: int, number: int = 0) -> Gpu:
    return Gpu(number, f"GPU{number}", "of this test", free, free)


def placed(
    monkeypatch: pytest.MonkeyPatch, header: GgufHeader, *found: Gpu, shape: ModelProfile | None = None, **settings
) -> tuple[Placement, LlamaSettings]:
    monkeypatch.setattr(llama_gpus, "gpus", lambda: list(found))
    shape = shape or profile(header)
    return place(replace(Config(), **settings), [header], shape, SETTINGS, live_kv_bytes(shape, "f16"))


def test_every_byte_of_a_layer_is_counted_and_embeddings_as_output_only_if_they_are_that(
    dense: GgufHeader,
) -> None:
    shape = profile(dense)
    size = bytes_on_gpus([dense], shape, SETTINGS, live_kv_bytes(shape, "f16"))
    sizes = {tensor.name: tensor.size for tensor in dense.tensors}
    assert [layer.weights for layer in size.layers] == [
        sum(count for name, count in sizes.items() if name.startswith(f"blk.{number}.")) for number in range(2)
    ]
    assert sum(layer.state for layer in size.layers) == SETTINGS.cells * shape.kv_bytes_per_token
    assert size.output == sizes["token_embd.weight"] + sizes["output_norm.weight"]


def test_an_output_of_its_own_leaves_the_embeddings_in_ram(folder: Path) -> None:
    header = read_header(tiny_gguf.recurrent(folder / "recurrent.gguf"))
    sizes = {tensor.name: tensor.size for tensor in header.tensors}
    size = bytes_on_gpus([header], profile(header), SETTINGS, 0)
    assert size.output == sizes["output.weight"] + sizes["output_norm.weight"]


def test_experts_are_counted_apart(moe: GgufHeader) -> None:
    size = bytes_on_gpus([moe], profile(moe), SETTINGS, 0)
    experts = 3 * tiny_gguf.EXPERTS * tiny_gguf.INNER * tiny_gguf.WIDTH * 4
    assert [layer.experts for layer in size.layers] == [experts, experts]


def test_adapters_take_room_in_the_layers_that_they_change(dense: GgufHeader, folder: Path) -> None:
    adapter = read_header(tiny_gguf.lora(folder / "lora.gguf"))
    plain, adapted = (
        bytes_on_gpus(headers, profile(dense), SETTINGS, 0) for headers in ([dense], [dense, adapter])
    )
    more = sum(each.weights for each in adapted.layers) - sum(each.weights for each in plain.layers)
    assert more == sum(tensor.size for tensor in adapter.tensors)


@pytest.mark.parametrize(("kv_type", "share"), [("f16", 1), ("q8_0", 34 / 64), ("q4_0", 18 / 64)])
def test_a_token_takes_as_much_as_its_type_says(dense: GgufHeader, kv_type: str, share: float) -> None:
    shape = profile(dense)
    assert live_kv_bytes(shape, kv_type) == shape.kv_bytes_per_token * share


def test_without_a_gpu_all_is_as_it_was(monkeypatch: pytest.MonkeyPatch, dense: GgufHeader, caplog) -> None:
    assert placed(monkeypatch, dense) == (ON_CPU, SETTINGS)
    assert not caplog.records
    assert placed(monkeypatch, dense, gpu_layers=7, tensor_split=(1.0, 2.0), cpu_moe=1) == (
        ON_CPU,
        SETTINGS,
    )
    assert [record.args for record in caplog.records] == [("gpu_layers",), ("cpu_moe",), ("tensor_split",)]


def test_what_fits_is_put_on_the_gpu_and_a_number_is_obeyed(
    monkeypatch: pytest.MonkeyPatch, dense: GgufHeader
) -> None:
    large = gpu(8 << 30)
    assert placed(monkeypatch, dense, large) == (Placement(2, 3), replace(SETTINGS, batch=2048))
    assert placed(monkeypatch, dense, large, gpu_layers=1) == (Placement(2, 1), SETTINGS)
    assert placed(monkeypatch, dense, large, gpu_layers=0) == (Placement(2, 0), SETTINGS)
    assert placed(monkeypatch, dense, gpu(1 << 30)) == (Placement(2, 0), SETTINGS)


def test_steps_are_longer_where_nothing_else_pays_for_it(
    monkeypatch: pytest.MonkeyPatch, dense: GgufHeader, moe: GgufHeader, folder: Path
) -> None:
    """With 128 Ki cells a row of a step takes 512 KiB for what it sees: 2,048 of them are 1 GiB."""
    large, cells = gpu(8 << 30), replace(SETTINGS, context=128 << 10, cells=128 << 10)
    monkeypatch.setattr("test_placing.SETTINGS", cells)
    for free, batch in ((3000, 2048), (2100, 1024), (1600, 512)):
        placement, settings = placed(monkeypatch, dense, gpu(free * MIB))
        assert (placement.count, settings.cells, settings.batch) == (3, cells.cells, batch), free
    assert placed(monkeypatch, moe, large, cpu_moe=1)[1].batch == 2048
    assert placed(monkeypatch, dense, large, gpu_layers=3)[1].batch == 2048
    assert placed(monkeypatch, dense, gpu(1600 * MIB), gpu_layers=3)[1].batch == 512
    for kind in (tiny_gguf.sliding_window, tiny_gguf.recurrent, tiny_gguf.hybrid):
        header = read_header(kind(folder / f"{kind.__name__}.gguf"))
        assert placed(monkeypatch, header, large)[1].batch == 512, kind


def test_cells_for_fewer_contexts_make_room_for_all_layers(
    monkeypatch: pytest.MonkeyPatch, dense: GgufHeader
) -> None:
    """A token of 256 KiB: four contexts are 1 GiB, and one is a quarter of that."""
    shape = replace(profile(dense), kv_bytes_per_token=256 << 10)
    for free, contexts in ((2600, 4), (2100, 3), (1600, 1)):
        placement, settings = placed(monkeypatch, dense, gpu(free * MIB), shape=shape)
        assert (placement.count, settings.cells) == (3, contexts * 1024), free


def test_more_shares_than_gpus_are_an_error(monkeypatch: pytest.MonkeyPatch, dense: GgufHeader) -> None:
    with pytest.raises(EngineError, match="tensor_split has 3 shares, and the GPUs here are GPU0, GPU1"):
        placed(monkeypatch, dense, gpu(8 << 30), gpu(8 << 30, 1), tensor_split=(1.0, 1.0, 1.0))


def test_experts_that_are_not_there_are_said(monkeypatch: pytest.MonkeyPatch, dense: GgufHeader, caplog) -> None:
    placed(monkeypatch, dense, gpu(8 << 30), cpu_moe=1)
    assert "this model has no experts: cpu_moe changes nothing" in caplog.messages


def opened(layers: int, *, is_planned: bool, holds: int = 3) -> Placement:
    """On a GPU that holds three layers."""

    def load(placement: Placement) -> Any:
        if placement.gpu_layers > holds:
            raise ModelBroken("The GPU has no room.")

    return open_placed(load, Placement(32, layers), lambda model: model, is_planned=is_planned)[2]


def test_a_plan_that_was_too_bold_is_made_smaller(caplog) -> None:
    assert opened(33, is_planned=True).gpu_layers == 2
    assert caplog.messages[-1] == "The GPU has no room. So 2 layers are put on the GPU."
    assert opened(3, is_planned=True).gpu_layers == 3


def test_a_number_that_was_asked_for_is_not_changed() -> None:
    with pytest.raises(ModelBroken):
        opened(33, is_planned=False)


def test_what_fails_without_a_gpu_as_well_is_an_error() -> None:
    with pytest.raises(ModelBroken):
        opened(2, is_planned=True, holds=-1)


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
    from helpers.tiny_hf import quantise

    packed, _ = quantise(tiny_hf.write(tmp_path / "tiny"), tmp_path, group=32)
    model = load_model(HfSource(packed), device="cpu", dtype="float32", attention="eager")
    assert layer_sizes(packed, "float32").all == model.weights_bytes
