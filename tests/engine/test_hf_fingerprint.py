"""Whatever changes the bytes of the Hugging Face engine's state changes its fingerprint."""

from __future__ import annotations

import platform
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from emberkeep.config.machine import cpu_facts
from emberkeep.engine.base import Rows
from emberkeep.engine.hf.engine import HfEngine
from emberkeep.engine.hf.model_loader import fingerprint
from emberkeep.types.models import AttentionTier
from helpers import tiny_hf
from helpers.engines import exported
from helpers.scheduling import PATIENCE, Rig, text

pytestmark = pytest.mark.slow

FLASH, PLAIN = AttentionTier.FLASH, AttentionTier.PLAIN
CAPABILITY = torch.backends.cpu.get_cpu_capability()


def opened(model, threads: int = 1, tier: AttentionTier | None = None) -> HfEngine:
    return HfEngine(model, tiny_hf.settings(512, 1024, attention=tier, threads=threads), "digest")


@pytest.fixture(autouse=True)
def one_thread():
    yield
    torch.set_num_threads(1)


def test_the_fingerprint_follows_the_tier_in_use_and_not_the_threads(hf_model):
    """A product over a long row adds up in another order with more threads, as it does with more rows."""
    model = hf_model("llama")
    flash, plain = opened(model, tier=FLASH).fingerprint, opened(model, 2, PLAIN).fingerprint
    engine = opened(model, 2)
    assert engine.fingerprint == flash != plain
    engine.attention.switch(PLAIN)
    assert engine.fingerprint == plain
    engine.attention.switch(FLASH)
    assert engine.fingerprint == flash


def test_a_store_of_before_is_known_by_its_number_of_threads(hf_model, monkeypatch):
    model, digests = hf_model("llama"), []
    own = fingerprint(model, [], "digest", FLASH)
    assert fingerprint(model, [], "digest", FLASH, stored=lambda names: digests.extend(names)) == own
    monkeypatch.setattr(
        "emberkeep.engine.hf.model_loader.cpu_facts", lambda facts=cpu_facts: (*facts(), CAPABILITY)
    )
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: 3)  # where the number stood
    assert digests.index(fingerprint(model, [], "digest", FLASH)) == 3


@pytest.mark.parametrize("family", ["llama", "mamba"])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (torch, "get_float32_matmul_precision"),
        (torch, "are_deterministic_algorithms_enabled"),
        (torch.backends.cuda, "flash_sdp_enabled"),
        (torch.backends.cpu, "get_cpu_capability"),
        (torch.__config__, "show"),
        (platform, "machine"),
    ],
)
def test_the_machine_and_the_switches_of_torch_are_known(open_hf, monkeypatch, family, owner, name):
    before = open_hf(family).fingerprint
    monkeypatch.setattr(owner, name, lambda: "another")
    assert open_hf(family).fingerprint != before


def test_tf32_has_a_fingerprint_of_its_own(hf_model):
    before = opened(hf_model("llama")).fingerprint
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert opened(hf_model("llama")).fingerprint != before
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def test_a_gpu_is_known_by_its_name_and_capability(hf_model, monkeypatch):
    model = hf_model("llama")
    config, dtype, modules = model.network.config, model.network.dtype, model.network.modules
    network = SimpleNamespace(config=config, dtype=dtype, modules=modules, device=torch.device("cuda:0"))
    there = replace(model, network=network)

    def on(name: str, capability: tuple[int, int]) -> bytes:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        return fingerprint(there, [], "digest", FLASH)

    of_cpu = fingerprint(model, [], "digest", FLASH)
    assert len({of_cpu, on("H200", (9, 0)), on("H100", (9, 0)), on("H200", (9, 1))}) == 4


def test_the_code_of_steps_and_of_attention_has_fingerprints_of_its_own(hf_model):
    model, own = hf_model("llama"), AttentionTier.OWN
    names = [fingerprint(model, [], "digest", own, layers=layers) for layers in (None, "fused", "plain")]
    names += [fingerprint(model, "whole", "digest", attention) for attention in ("sdpa", "eager")]
    assert len(set(names)) == 5


def test_every_stored_byte_is_of_the_tier_that_the_store_was_opened_for(hf_model, tmp_path):
    prompts = [text(257, seed=seed) for seed in range(3)]
    engine = opened(hf_model("llama"))
    with Rig(tmp_path, engine) as rig:
        for tier in (FLASH, PLAIN, FLASH, PLAIN):
            rig.scheduler.when_idle(lambda tier=tier: engine.attention.switch(tier)).result(PATIENCE)
            for prompt in prompts:
                lookup = rig.run(prompt, closing=(), max_new=1).lookup
                assert tier is FLASH or lookup.reused_tokens == lookup.hot_tokens
        rig.store.flush()
        stored = {bytes(chunk.payload) for chunk in rig.store._ledger.tree if len(chunk.tokens) == 128}
    assert stored == {part for prompt in prompts for part in computed(opened(hf_model("llama")), prompt)}
    assert stored.isdisjoint(
        part for prompt in prompts for part in computed(opened(hf_model("llama"), tier=PLAIN), prompt)
    )


def computed(engine: HfEngine, prompt: list[int]) -> list[bytes]:
    for begin in (0, 128):  # as the scheduler does: slices round in their own way
        engine.evaluate([Rows(0, begin, np.array(prompt[begin : begin + 128], np.int32), outputs=0)])
    return [bytes(exported(engine, 0, begin, begin + 128)) for begin in (0, 128)]
