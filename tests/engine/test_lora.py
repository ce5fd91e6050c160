"""LoRA adapters in llama.cpp: they change what is computed, and state never crosses over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from emberkeep.engine.llamacpp.model import Adapter, LlamaModel
from emberkeep.errors import EngineError
from helpers import tiny_gguf
from helpers.engines import NOISE, TOKENS, evaluate, exported
from helpers.scheduling import Rig

Make = Callable[..., Adapter]


@pytest.fixture
def adapter(tmp_path: Path) -> Make:
    def make(scale: float = 1.0, *, seed: int = 0) -> Adapter:
        path = tmp_path / f"{seed}.gguf"
        return Adapter(f"digest {seed}", scale, path if path.exists() else tiny_gguf.lora(path, seed=seed))

    return make


def test_an_adapter_changes_logits_and_state(open_engine, adapter) -> None:
    plain, adapted = open_engine(), open_engine(adapters=[adapter()])
    assert np.abs(evaluate(plain, 0, 0, 40) - evaluate(adapted, 0, 0, 40)).max() > 0.1
    assert exported(plain, 0, 0, 40) != exported(adapted, 0, 0, 40)


def test_the_scale_says_how_strongly(open_engine, adapter) -> None:
    logits = [
        evaluate(open_engine(adapters=adapters), 0, 0, 40)
        for adapters in ([], [adapter(0.0)], [adapter(0.1)], [adapter(1.0)])
    ]
    plain, nothing, little, much = logits
    assert np.array_equal(plain, nothing)
    assert 0 < np.abs(little - plain).max() < np.abs(much - plain).max()


def test_each_adapter_and_each_scale_has_a_fingerprint_of_its_own(open_engine, adapter) -> None:
    one, other = adapter(seed=1), adapter(seed=2)
    sets = [[], [one], [other], [adapter(0.5, seed=1)], [adapter(0.0, seed=1)], [one, other]]
    assert len({open_engine(adapters=adapters).fingerprint for adapters in sets}) == len(sets)


def test_the_order_in_which_adapters_are_named_changes_nothing(open_engine, adapter) -> None:
    one, other = adapter(seed=1), adapter(0.5, seed=2)
    there, back = open_engine(adapters=[one, other]), open_engine(adapters=[other, one])
    assert there.fingerprint == back.fingerprint
    assert np.array_equal(evaluate(there, 0, 0, 40), evaluate(back, 0, 0, 40))


def test_a_restart_with_the_same_adapter_reuses_everything(open_engine, adapter, tmp_path) -> None:
    prompt = TOKENS[:300].tolist()
    with Rig(tmp_path, open_engine(adapters=[adapter()])) as rig:
        first = rig.run(prompt, max_new=10)
    with Rig(tmp_path, open_engine(adapters=[adapter()])) as rig:
        again = rig.run(prompt, max_new=10)
        assert (again.lookup.cold_tokens, again.answer) == (299, first.answer)


def test_the_plain_model_and_other_scales_find_nothing_of_it(open_engine, adapter, tmp_path) -> None:
    prompt = TOKENS[:300].tolist()
    for adapters in ([adapter()], [], [adapter(0.5)], [adapter(0.0)]):
        with Rig(tmp_path, open_engine(adapters=adapters)) as rig:
            assert rig.run(prompt).lookup.reused_tokens == 0


def test_spliced_state_is_the_adapters(open_engine, adapter) -> None:
    """The keys that are moved were computed with it, and so is what takes their place."""
    engine, fresh = open_engine(adapters=[adapter()]), open_engine(adapters=[adapter()])
    assert engine.capabilities.can_shift
    evaluate(engine, 0, 0, 60)
    engine.splice(0, 20, 60, TOKENS[500:510])
    shorter = np.concatenate([TOKENS[:20], TOKENS[500:520]])
    logits = evaluate(engine, 0, 30, 40, shorter)
    assert np.abs(logits - evaluate(fresh, 0, 0, 40, shorter)).max() < NOISE
    assert np.abs(logits - evaluate(open_engine(), 0, 0, 40, shorter)).max() > 0.1


def test_a_context_that_is_opened_again_has_it_too(open_engine, tmp_path) -> None:
    path = tiny_gguf.lora(tmp_path / "moe.gguf")
    engine = open_engine("moe", adapters=[Adapter("d", 1.0, path)])
    before = evaluate(engine, 0, 0, 40)
    engine.experts.track(True)
    assert np.array_equal(evaluate(engine, 0, 0, 40), before)
    engine.experts.track(False)
    assert np.array_equal(evaluate(engine, 0, 0, 40), before)


def test_an_adapter_that_cannot_be_loaded_is_one_sentence(model_file, tmp_path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(EngineError, match=r"cannot use the adapter bad.gguf, .*: leave --lora out\."):
        LlamaModel(model_file("dense"), adapters=[Adapter("d", 1.0, tmp_path / "bad.gguf")])
