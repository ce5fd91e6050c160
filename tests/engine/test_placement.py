"""What goes onto GPUs: planned from sizes alone, and told to llama.cpp as it was planned."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

from emberkeep.engine.llamacpp.c_api import defaults
from emberkeep.engine.llamacpp.context import LlamaSettings, thread_count
from emberkeep.engine.llamacpp.gpus import (
    ON_CPU,
    Gpu,
    ModelBytes,
    PlacedLayer,
    Placement,
    gpus,
    plan_placement,
    put_placement,
    share_layers,
)
from emberkeep.engine.llamacpp.model import LlamaModel
from emberkeep.engine.llamacpp.shared_library import llama

GIB = 1 << 30
MODEL = ModelBytes((PlacedLayer(weights=GIB, state=GIB // 4),) * 8, output=GIB // 2, buffers=GIB // 2)
EXPERTS = ModelBytes((PlacedLayer(weights=GIB // 4, experts=4 * GIB),) * 8, output=GIB // 2, buffers=GIB // 2)


def gpu(free: float, total: float = 64, name: str = "GPU0") -> Gpu:
    return Gpu(0, name, f"{name} of this test", int(free * GIB), int(total * GIB))


def layers(
    *found: Gpu, model: ModelBytes = MODEL, split: tuple[float, ...] | None = None, cpu_moe: int = 0
) -> int:
    return plan_placement(model, found, split, cpu_moe).gpu_layers


def test_without_a_gpu_nothing_is_put_anywhere() -> None:
    assert layers() == 0


def test_all_layers_and_the_output_go_where_there_is_room() -> None:
    assert layers(gpu(64)) == 9


def test_as_many_as_fit_with_their_state_beside_buffers_and_a_margin() -> None:
    # 1 GiB is left alone, and half of one for buffers: the output is the first to go.
    assert [layers(gpu(free)) for free in (0, 1.5, 2, 3, 4, 6, 12, 14)] == [0, 0, 1, 1, 2, 4, 9, 9]


def test_a_little_more_or_less_free_memory_changes_nothing() -> None:
    """Another number of layers would be another fingerprint, and nothing stored could be used."""
    assert len({layers(gpu(8.05 + step / 100)) for step in range(30)}) == 1


def test_experts_in_ram_make_room_for_more_layers() -> None:
    crowded = gpu(16)
    assert layers(crowded, model=EXPERTS) == 4
    assert layers(crowded, model=EXPERTS, cpu_moe=6) == 9
    assert layers(crowded, model=EXPERTS, cpu_moe=100) == 9


def test_several_gpus_share_layers_by_their_free_memory() -> None:
    both = [gpu(9, 32, "GPU0"), gpu(5, 32, "GPU1")]
    placement = plan_placement(MODEL, both, None, 0)
    assert placement.gpu_layers == 9
    where = placement.assign(2)
    assert (where.count(0), where.count(1)) == (6, 3)


def test_none_of_several_gpus_gets_more_than_it_holds() -> None:
    both = [gpu(9, 32, "GPU0"), gpu(5, 32, "GPU1")]
    even = plan_placement(MODEL, both, (1.0, 1.0), 0)
    assert (even.gpu_layers, even.assign(2).count(1)) == (7, 3)


def test_a_gpu_without_a_share_gets_nothing() -> None:
    both = [gpu(64, name="GPU0"), gpu(64, name="GPU1")]
    assert set(plan_placement(MODEL, both, (1.0,), 0).assign(2)) == {0}
    assert set(plan_placement(MODEL, both, (0.0, 1.0), 0).assign(2)) == {1}


def test_full_gpus_get_nothing_unless_told() -> None:
    full = [gpu(0.5, name="GPU0"), gpu(0.5, name="GPU1")]
    assert layers(*full) == 0
    assert Placement(8, 9, share_layers(full, None)).assign(2).count(1) == 4


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ((1.0, 1.0), [0, 0, 0, 0, 0, 1, 1, 1, 1]),
        ((3.0, 1.0), [0, 0, 0, 0, 0, 0, 0, 1, 1]),
        ((1.0, 1.0, 1.0), [0, 0, 0, 1, 1, 1, 2, 2, 2]),
        ((0.0, 1.0, 1.0), [1, 1, 1, 1, 1, 2, 2, 2, 2]),
    ],
)
def test_layers_are_shared_out_as_llama_cpp_does(split: tuple[float, ...], expected: list[int]) -> None:
    assert Placement(8, 9, split).assign(len(split)) == expected


def test_the_last_layers_and_the_output_are_those_on_a_gpu() -> None:
    assert Placement(4, 2).assign(1) == [None, None, None, 0, 0]
    assert Placement(4, 100).assign(1) == [0] * 5
    assert Placement(4, 100).assign(0) == [None] * 5


def test_only_layers_on_a_gpu_leave_their_experts_behind() -> None:
    assert list(Placement(4, 5, (), 2).experts_in_ram()) == [0, 1]
    assert list(Placement(4, 3, (), 3).experts_in_ram()) == [2]
    assert list(Placement(4, 3, (), 1).experts_in_ram()) == []
    assert list(Placement(4, 5, (), 100).experts_in_ram()) == [0, 1, 2, 3]
    assert list(ON_CPU.experts_in_ram()) == []


def test_whatever_says_what_is_computed_where_changes_the_facts() -> None:
    one, two = gpu(8), [gpu(8, name="GPU0"), gpu(8, name="GPU1")]
    facts = [
        ON_CPU.facts([]),
        Placement(8, 4).facts([one]),
        Placement(8, 4).facts([gpu(8, name="GPU7")]),
        Placement(8, 4, (), 6).facts([one]),
        Placement(8, 4, (1.0, 1.0)).facts(two),
        Placement(8, 4, (1.0, 3.0)).facts(two),
    ]
    assert len({repr(each) for each in facts}) == len(facts)


def test_facts_are_the_same_for_all_ways_to_say_the_same() -> None:
    one, less_free = gpu(8), gpu(5)
    assert Placement(8, 9).facts([one]) == Placement(8, 100).facts([less_free])
    assert Placement(8, 4, (), 0).facts([one]) == Placement(8, 4, (), 5).facts([one])
    assert Placement(8, 99).facts([]) == Placement(8, 0).facts([one]) == ON_CPU.facts([])


def test_llama_cpp_is_told_which_gpus_how_many_layers_and_what_stays() -> None:
    found = [Gpu(0x10, "GPU0", "", GIB, GIB), Gpu(0x20, "GPU1", "", GIB, GIB)]
    params = defaults(llama().llama_model_default_params)
    put_placement(params, Placement(4, 5, (3.0, 1.0), 2), found)
    assert params.n_gpu_layers == 5
    assert list(params.tensor_split[:2]) == [3.0, 1.0]
    overrides = [params.tensor_buft_overrides[index] for index in range(3)]
    assert overrides[0].pattern == rb"blk\.0\.ffn_(up|down|gate|gate_up)_(ch|)exps"
    assert overrides[1].buffer == llama().ggml_backend_cpu_buffer_type()
    assert overrides[2].pattern is None


def test_a_gpu_without_layers_is_denied_to_llama_cpp() -> None:
    """It would compute long prompts on it all the same."""
    params = defaults(llama().llama_model_default_params)
    put_placement(params, Placement(4, 0), [gpu(8)])
    assert ctypes.cast(params.devices, ctypes.POINTER(ctypes.c_void_p))[0] is None


def test_without_a_gpu_llama_cpp_is_told_nothing_new() -> None:
    params, untouched = (defaults(llama().llama_model_default_params) for _ in range(2))
    put_placement(params, Placement(4, 5, (), 2), [])
    untouched.n_gpu_layers = 5
    assert all_fields(params) == all_fields(untouched)


def all_fields(params: ctypes.Structure) -> list[bytes]:
    """Without the room between them, which may hold anything."""
    places = [getattr(type(params), name) for name, *_ in type(params)._fields_]
    return [bytes(params)[place.offset : place.offset + place.size] for place in places]


def test_a_model_leaves_gpus_alone_that_it_has_no_layers_on(model_file, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is told of them goes to the real library: a handle that it looked at would end the process."""
    monkeypatch.setattr("emberkeep.engine.llamacpp.model.gpus", lambda: [Gpu(16, "GPU0", "", GIB, GIB)])
    model = LlamaModel(model_file("moe"), placement=Placement(2, 0, (), 2))
    assert (model.placement, model.offloads) == ("CPU", False)
    model.close()


@pytest.mark.skipif(bool(gpus()), reason="there is a GPU")
def test_a_model_on_a_machine_without_a_gpu_is_on_the_cpu(model_file) -> None:
    models = [LlamaModel(model_file("moe"), placement=each) for each in (ON_CPU, Placement(2, 99, (), 2))]
    assert [model.placement for model in models] == ["CPU", "CPU"]
    assert not any(model.offloads for model in models)
    for model in models:
        model.close()


@pytest.mark.parametrize(("asked", "is_offloaded", "expected"), [(None, True, 4), (None, False, 16), (7, True, 7)])
def test_few_threads_wait_beside_gpus_that_compute_all(
    asked: int | None, is_offloaded: bool, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emberkeep.engine.llamacpp.context.available_cores", lambda: 16)
    settings = LlamaSettings(context=256, cells=256, sequences=1, batch=256, threads=asked)
    assert thread_count(SimpleNamespace(is_offloaded=is_offloaded), settings) == expected
