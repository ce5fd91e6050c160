"""What an engine offers besides answers, as a program uses it: ways to compute attention, counts of experts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from emberkeep import Emberkeep
from emberkeep.config.settings import Config
from emberkeep.engine.fake import FakeEngine, FakeTiers
from emberkeep.errors import RequestError
from emberkeep.types.events import MissReason
from emberkeep.types.request import Request
from helpers import tiny_gguf
from helpers.scripted_backend import fake_backend

STORY = "Once upon a time there was a harbour with seven ships. " * 10


def opened(folder: Path, engine: FakeEngine) -> Emberkeep:
    return Emberkeep(fake_backend(Config(data_dir=folder), engine))


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[Emberkeep]:
    engine = FakeEngine()
    engine.attention = FakeTiers()
    with opened(tmp_path, engine) as llm:
        yield llm


def test_nothing_is_stored_or_loaded_until_the_first_tier_is_back(llm: Emberkeep) -> None:
    assert llm.attention_tier() == "flash"
    first = llm.generate(STORY, max_tokens=8, temperature=0)
    assert llm.attention_tier("plain") == "plain"
    other = llm.generate(STORY, max_tokens=8, temperature=0)
    assert other.usage.cached_tokens == 0
    assert other.text != first.text
    llm.generate("A sentence that is new here. " * 10, max_tokens=8, temperature=0)
    assert len(llm.cache.entries()) == 1
    assert llm.attention_tier("flash") == "flash"
    again = llm.generate(STORY, max_tokens=8, temperature=0)
    assert again.usage.cached_tokens == again.usage.prompt_tokens - 1
    assert again.text == first.text


def test_why_nothing_is_reused_is_told(llm: Emberkeep) -> None:
    llm.generate(STORY, max_tokens=8, temperature=0)
    llm.attention_tier("plain")
    explanation = llm.cache.explain(Request(prompt=STORY))
    assert explanation.lookup.reason is MissReason.OTHER_MODEL
    assert "another way" in explanation.sentence


def test_the_tier_in_use_stays_when_it_is_asked_for(llm: Emberkeep) -> None:
    llm.generate(STORY, max_tokens=8, temperature=0)
    llm.attention_tier("flash")
    assert llm.generate(STORY, max_tokens=8, temperature=0).lookup.hot_tokens > 0


def test_an_engine_without_a_choice_says_so(tmp_path: Path) -> None:
    with opened(tmp_path, FakeEngine()) as llm:
        assert llm.attention_tier() is None
        with pytest.raises(RequestError, match="one way"):
            llm.attention_tier("plain")


def serving(model: Path, folder: Path) -> Emberkeep:
    return Emberkeep.open(Config(model=str(model), data_dir=folder))


def test_what_is_evaluated_while_tracking_is_on_is_counted(tmp_path: Path) -> None:
    with serving(tiny_gguf.moe(tmp_path / "moe.gguf"), tmp_path) as llm:
        assert llm.track_experts(True).enabled
        evaluated = llm.warm("a prefix of some length").tokens
        (layer,) = llm.expert_stats().layers
        assert (layer.tokens, sum(layer.counts)) == (evaluated, evaluated * tiny_gguf.EXPERTS_USED)
        assert llm.track_experts(reset=True).layers == ()
        assert not llm.track_experts(False).enabled


def test_a_model_without_experts_says_so(tmp_path: Path) -> None:
    with serving(tiny_gguf.dense(tmp_path / "dense.gguf"), tmp_path) as llm:
        for ask in (llm.expert_stats, llm.track_experts):
            with pytest.raises(RequestError, match="not a mixture"):
                ask()
