from __future__ import annotations

from emberkeep.backend.choices import SamplerSource
from emberkeep.engine.fake import FakeVocab
from emberkeep.types.request import Request, Sampling

VOCAB = FakeVocab()


def settings_of(sampling: Sampling) -> Sampling:
    return SamplerSource(VOCAB).samplers(Request(prompt="", sampling=sampling), None).settings


def test_usual_settings_stay_as_they_are() -> None:
    usual = Sampling(seed=3)
    assert settings_of(usual) is usual


def test_the_bias_of_a_text_is_that_of_its_tokens() -> None:
    a, b = VOCAB.tokenize("ab")
    told = settings_of(Sampling(logit_bias={a: 1.0}, text_bias=(("ab", -0.5), ("b", -1.0))))
    assert told.logit_bias == {a: 0.5, b: -1.5}


def test_nothing_that_ends_an_answer_is_drawn_where_ends_are_ignored() -> None:
    told = settings_of(Sampling(ignore_eos=True))
    assert told.logit_bias == dict.fromkeys(VOCAB.eog, float("-inf"))


def test_texts_that_end_repetitions_are_looked_for_only_where_they_matter() -> None:
    source = SamplerSource(VOCAB)
    assert source.samplers(Request(prompt=""), None).breakers == {}
    wanted = Request(prompt="", sampling=Sampling(dry_multiplier=0.8))
    found = source.samplers(wanted, None).breakers
    assert found[VOCAB.tokenize("\n")[0]] == ((),)
    assert source.samplers(wanted, None).breakers is found
