from __future__ import annotations

import pytest

from emberkeep.backend import choices
from emberkeep.backend.choices import Samplers
from emberkeep.engine.fake import FakeVocab
from emberkeep.types.request import Request, Sampling

VOCAB = FakeVocab()


def settings_of(sampling: Sampling) -> Sampling:
    return Samplers(VOCAB).with_ids(sampling)


def test_usual_settings_stay_as_they_are() -> None:
    usual = Sampling(seed=3)
    assert settings_of(usual) is usual


def test_the_bias_of_a_text_is_that_of_its_tokens() -> None:
    a, b = VOCAB.tokenize("ab")
    settings = settings_of(Sampling(logit_bias={a: 1.0}, text_bias=(("ab", -0.5), ("b", -1.0))))
    assert settings.logit_bias == {a: 0.5, b: -1.5}


def test_nothing_that_ends_an_answer_is_drawn_where_ends_are_ignored() -> None:
    settings = settings_of(Sampling(ignore_eos=True))
    assert settings.logit_bias == dict.fromkeys(VOCAB.eog, float("-inf"))


def test_texts_that_end_repetitions_are_looked_for_once_and_only_where_they_matter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_for: list[tuple[str, ...]] = []
    monkeypatch.setattr(choices, "find_breakers", lambda texts, vocab: looked_for.append(texts) or {})
    samplers = Samplers(VOCAB)
    samplers.of_request(Request(prompt=""), None)
    assert looked_for == []
    for _ in range(2):
        samplers.of_request(Request(prompt="", sampling=Sampling(dry_multiplier=0.8)), None)
    assert looked_for == [Sampling().dry_sequence_breakers]
