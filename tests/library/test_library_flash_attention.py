"""Emberkeep's attention in models that the caller loaded: the same answers, and no trace of it afterwards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import emberkeep
from emberkeep.engine.hf import model_attention
from emberkeep.errors import EngineError
from helpers import tiny_hf

pytestmark = pytest.mark.slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FAMILIES = ["llama", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt_oss", "gpt2", "deepseek_v3", "phi3"]
KINDS = {"gemma2": ("eager",), "gpt_oss": ("eager",)}
"""Of attention, where transformers has not both."""
PROMPT = torch.arange(3, 23)[None]
LEFT = torch.stack([torch.arange(3, 23), torch.arange(40, 60)])
PADDING = torch.ones(2, 20, dtype=torch.long).index_put((torch.tensor(1), torch.arange(7)), torch.tensor(0))


@pytest.fixture
def seen(monkeypatch) -> list[str]:
    """Which code computed attention, call by call."""
    calls: list[str] = []

    def watch(name: str) -> None:
        code = getattr(model_attention, name)

        def call(*given: Any, **named: Any) -> Any:
            result = code(*given, **named)
            if result is not None:
                calls.append(name)
            return result

        monkeypatch.setattr(model_attention, name, call)

    for name in ("_attend_flash", "_attend_own", "_original"):
        watch(name)
    return calls


def loaded(family: str, kind: str) -> Any:
    network = copy.deepcopy(tiny_hf.build(family)).to(DEVICE)
    network.set_attn_implementation(kind)
    return network


def variants() -> list[Any]:
    return [(family, kind) for family in FAMILIES for kind in KINDS.get(family, ("sdpa", "eager"))]


@torch.no_grad()
def answers(network: Any) -> list[torch.Tensor]:
    """Logits of a prompt, of one in two parts, of a left-padded batch where it is text; and greedy tokens."""
    prompt, left, padding = (part.to(DEVICE) for part in (PROMPT, LEFT, PADDING))
    begun = network(input_ids=prompt[:, :9], use_cache=True)
    rest = network(input_ids=prompt[:, 9:], past_key_values=begun.past_key_values)
    positions = (padding.cumsum(1) - 1).clamp(min=0)
    padded = network(input_ids=left, attention_mask=padding, position_ids=positions).logits
    more = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    said = network.generate(left, attention_mask=padding, **more)
    return [network(input_ids=prompt).logits, rest.logits, padded[0], padded[1, 7:], said]


@pytest.mark.parametrize(("family", "kind"), variants())
def test_answers_are_the_same_and_nothing_is_left_afterwards(family, kind, seen):
    network = loaded(family, kind)
    before = answers(network)
    emberkeep.install_flash_attention(network)
    assert not seen
    for own, expected in zip(answers(network), before, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-3, atol=1e-3)
    assert "_attend_own" in seen or "_attend_flash" in seen or family in ("gemma2", "gpt_oss")
    emberkeep.uninstall_flash_attention(network)
    assert network.config._attn_implementation == kind
    seen.clear()
    for after, expected in zip(answers(network), before, strict=True):
        assert torch.equal(after, expected)
    assert not seen


def test_what_is_not_computed_here_is_passed_on(seen):
    network = loaded("llama", "eager")
    emberkeep.install_flash_attention(network)
    told = network(input_ids=PROMPT.to(DEVICE), output_attentions=True)
    assert set(seen) == {"_original"}
    assert told.attentions[0].shape == (1, 4, 20, 20)


def test_a_mask_of_the_callers_own_is_obeyed(seen):
    network = loaded("llama", "sdpa")
    mask = torch.ones(20, 20, dtype=torch.bool, device=DEVICE).tril()
    mask[:, 4:9] = False
    mask = (mask | torch.eye(20, dtype=torch.bool, device=DEVICE))[None, None]
    with torch.no_grad():
        expected = network(input_ids=PROMPT.to(DEVICE), attention_mask=mask).logits
        emberkeep.install_flash_attention(network)
        own = network(input_ids=PROMPT.to(DEVICE), attention_mask=mask).logits
    torch.testing.assert_close(own, expected, rtol=1e-3, atol=1e-3)
    assert "_attend_own" not in seen


def test_installing_twice_is_harmless_and_uninstalling_what_is_not_there_too():
    network = loaded("llama", "sdpa")
    emberkeep.uninstall_flash_attention(network)
    emberkeep.install_flash_attention(network)
    emberkeep.install_flash_attention(network)
    emberkeep.uninstall_flash_attention(network)
    assert network.config._attn_implementation == "sdpa"


def test_a_model_that_has_no_choice_is_refused_in_a_sentence():
    assert emberkeep.flash_attention_available()
    with pytest.raises(EngineError, match="GPTJForCausalLM computes attention in its own way: use it as it is"):
        emberkeep.install_flash_attention(copy.deepcopy(tiny_hf.build("gptj")))
    network = loaded("llama", "sdpa")
    network.set_attn_implementation("flex_attention")
    with pytest.raises(EngineError, match=r'set_attn_implementation\("sdpa"\) first'):
        emberkeep.install_flash_attention(network)
    assert network.config._attn_implementation == "flex_attention"


def test_without_torch_it_is_not_available(monkeypatch):
    monkeypatch.setattr("emberkeep.engine.devices.find_spec", lambda name: None)
    assert not emberkeep.flash_attention_available()
    with pytest.raises(EngineError, match="needs torch and transformers"):
        emberkeep.install_flash_attention(object())


def mask_of(first: list[int], start: int, queries: int, keys: int, window: int | None = None) -> torch.Tensor:
    at, key = torch.arange(start, start + queries)[:, None], torch.arange(keys)
    seen = torch.stack([(key >= begin) & (key <= at) & (key > at - (window or keys + 1)) for begin in first])
    return seen[:, None]


def test_a_mask_is_read_as_padding_position_and_window_or_not_at_all():
    read = model_attention.read_layout
    assert read(mask_of([0, 3], 0, 9, 9), None) == model_attention._Layout((0, 3), 0, None)
    assert read(mask_of([2, 0], 4, 5, 12), 4096) == model_attention._Layout((2, 0), 4, None)
    assert read(mask_of([0, 3], 0, 9, 9, window=4), 4) == model_attention._Layout((0, 3), 0, 4)
    broken = mask_of([0, 3], 0, 9, 9)
    for place in [(0, 0, 5, 2), (1, 0, 8, 8), (0, 0, 0, 8)]:
        other = broken.clone()
        other[place] = ~other[place]
        assert read(other, None) is None
    assert read(torch.ones(1, 1, 4, 4, dtype=torch.bool), None) is None
    assert read(mask_of([0], 0, 4, 4).expand(1, 2, 4, 4), None) is None
