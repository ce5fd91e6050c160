from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from emberkeep.engine.base import Choosing
from emberkeep.errors import InvalidField
from emberkeep.sched.sampling import Sampler, describe
from emberkeep.types.request import Sampling

PLAIN = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0, seed=1)
PIECES = [bytes([65 + i]) for i in range(26)]
PROBABILITIES = np.array([0.5, 0.25, 0.125, 0.0625, 0.0625])
LOGITS = np.log(PROBABILITIES).astype(np.float32)


class Only:
    """A constraint that allows a few tokens."""

    def __init__(self, *allowed: int) -> None:
        bits = np.zeros(32, np.uint8)
        bits[list(allowed)] = 1
        self._mask = np.packbits(bits, bitorder="little").view(np.uint32)
        self.seen: list[int] = []

    def mask(self):
        return self._mask

    def advance(self, token: int) -> None:
        self.seen.append(token)


def drawn(settings: Sampling, logits: np.ndarray = LOGITS, count: int = 4000, **more) -> dict[int, float]:
    """Share of each token among `count` independent first draws."""
    sampler = Sampler(settings, **more)
    counts = Counter(sampler.sample(logits, PIECES)[0] for _ in range(count))
    return {token: number / count for token, number in counts.items()}


def support(settings: Sampling, logits: np.ndarray = LOGITS, count: int = 1500) -> set[int]:
    return set(drawn(settings, logits, count))


def test_tokens_are_drawn_with_their_probabilities():
    shares = drawn(PLAIN)
    assert [shares[i] for i in range(5)] == pytest.approx(PROBABILITIES, abs=0.03)


def test_temperature_sharpens_and_flattens():
    cold = drawn(replace(PLAIN, temperature=0.5))
    squares = PROBABILITIES**2 / (PROBABILITIES**2).sum()
    assert [cold.get(i, 0) for i in range(5)] == pytest.approx(squares, abs=0.03)
    hot = drawn(replace(PLAIN, temperature=100.0))
    assert [hot[i] for i in range(5)] == pytest.approx([0.2] * 5, abs=0.03)


def test_a_seed_makes_draws_repeatable():
    def draws(settings: Sampling) -> list[int]:
        sampler = Sampler(settings)
        return [sampler.sample(LOGITS, PIECES)[0] for _ in range(40)]

    assert draws(PLAIN) == draws(PLAIN)
    assert draws(PLAIN) != draws(replace(PLAIN, seed=2))
    assert draws(replace(PLAIN, seed=None)) != draws(replace(PLAIN, seed=None))


@pytest.mark.parametrize("logits", [[1, 3, 2], [1, 3, 3]])
def test_greedy_takes_the_first_of_the_likeliest(logits):
    assert support(Sampling(temperature=0), np.array(logits, np.float32)) == {1}


def test_only_a_plain_greedy_sampler_does_without_logits():
    greedy = Sampling(temperature=0)
    assert Sampler(greedy).takes_likeliest
    assert not Sampler(PLAIN).takes_likeliest
    assert not Sampler(greedy, top_logprobs=0).takes_likeliest
    assert not Sampler(greedy, forced=[1]).takes_likeliest
    for settings in ({"logit_bias": {1: 2.0}}, {"frequency_penalty": 1.0}):
        assert not Sampler(replace(greedy, **settings)).takes_likeliest


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        *(({"top_k": k}, set(range(min(k, 5)))) for k in (1, 2, 4, 5, 50)),
        *(({"top_k": k}, set(range(5))) for k in (0, -1)),  # as good as none
        *(
            ({"top_p": p}, set(range(n)))
            for p, n in ((0.0, 1), (0.5, 1), (0.51, 2), (0.75, 2), (0.8, 3), (0.9, 4), (1.0, 5))
        ),
        *(({"min_p": p}, set(range(n))) for p, n in ((1.0, 1), (0.6, 1), (0.4, 2), (0.2, 3), (0.1, 5), (0.0, 5))),
        # The entropy is 1.875 bits: token 1 (2 bits) is the most typical, then 0 (1) and 2 (3 bits).
        *(({"typical_p": p}, left) for p, left in ((0.2, {1}), (0.7, {0, 1}), (1.0, set(range(5))))),
        ({"top_k": 4, "top_p": 0.9, "min_p": 0.3}, {0, 1}),
        ({"logit_bias": {4: 100.0}}, {4}),
        ({"logit_bias": {0: -100.0, 1: -100.0}}, {2, 3, 4}),
        ({"logit_bias": {3: 100.0}, "temperature": 0}, {3}),
    ],
)
def test_only_what_the_settings_leave_is_drawn(settings, left):
    assert support(replace(PLAIN, **settings)) == left


def test_top_k_looks_far_below_the_best_when_it_must():
    logits = np.array([0, -50, -60, -10], np.float32)
    assert support(replace(PLAIN, top_k=2, temperature=100.0), logits) == {0, 3}


def repeated(settings: Sampling, logits: list[float], count: int) -> list[int]:
    sampler = Sampler(replace(settings, temperature=0))
    return [sampler.sample(np.array(logits, np.float32), PIECES)[0] for _ in range(count)]


def test_a_presence_penalty_counts_once_and_a_frequency_penalty_every_time():
    logits = [3.0, 1.5]
    assert repeated(Sampling(presence_penalty=1.0), logits, 4) == [0, 0, 0, 0]
    assert repeated(Sampling(presence_penalty=2.0), logits, 3) == [0, 1, 0]
    assert repeated(Sampling(frequency_penalty=1.0), logits, 4) == [0, 0, 1, 0]


def test_a_repetition_penalty_divides_what_is_positive_and_multiplies_what_is_negative():
    assert repeated(Sampling(repetition_penalty=3.0), [3.0, 1.5], 2) == [0, 1]
    assert repeated(Sampling(repetition_penalty=3.0), [-1.0, -2.0], 2) == [0, 1]
    assert repeated(Sampling(repetition_penalty=1.5), [-1.0, -2.0], 2) == [0, 0]


def test_a_mask_leaves_what_it_allows_in_its_proportions():
    shares = drawn(PLAIN, matcher=Only(1, 2))
    assert [shares.get(i, 0) for i in range(5)] == pytest.approx([0, 2 / 3, 1 / 3, 0, 0], abs=0.03)
    assert set(drawn(replace(PLAIN, temperature=0.0), matcher=Only(2, 4), count=5)) == {2}
    assert set(drawn(replace(PLAIN, logit_bias={0: 100.0}), matcher=Only(3), count=20)) == {3}  # whatever the bias


def test_a_constraint_is_told_of_every_token():
    matcher = Only(1, 2)
    sampler = Sampler(PLAIN, matcher)
    chosen = [sampler.sample(LOGITS, PIECES)[0] for _ in range(10)]
    assert matcher.seen == chosen


def test_logits_are_left_as_they_were():
    logits = LOGITS.copy()
    logits.flags.writeable = False
    settings = replace(PLAIN, logit_bias={1: 2.0}, frequency_penalty=1.0)
    sampler = Sampler(settings, Only(1, 2), top_logprobs=2)
    for _ in range(3):
        sampler.sample(logits, PIECES)
    assert np.array_equal(logits, LOGITS)


def test_logprobs_are_the_models_own_and_add_up_to_one():
    sampler = Sampler(replace(PLAIN, temperature=0, logit_bias={2: 100.0}), top_logprobs=4)
    token, logprob = sampler.sample(LOGITS + 7, PIECES)
    assert (token, logprob.token_id, logprob.piece) == (2, 2, b"C")
    assert logprob.logprob == pytest.approx(np.log(0.125), abs=1e-5)
    assert [top.token_id for top in logprob.top][:3] == [0, 1, 2]
    assert [np.exp(top.logprob) for top in logprob.top] == pytest.approx([0.5, 0.25, 0.125, 0.0625], abs=1e-5)
    every = [Sampler(replace(PLAIN, temperature=0, logit_bias={i: 100.0}), top_logprobs=0) for i in range(5)]
    assert sum(np.exp(s.sample(LOGITS, PIECES)[1].logprob) for s in every) == pytest.approx(1, abs=1e-5)


def test_logprobs_come_only_when_asked_for_and_no_more_than_there_are_tokens():
    assert Sampler(PLAIN).sample(LOGITS, PIECES)[1] is None
    assert Sampler(PLAIN, top_logprobs=0).sample(LOGITS, PIECES)[1].top == ()
    assert [top.token_id for top in Sampler(PLAIN, top_logprobs=20).sample(LOGITS, PIECES)[1].top][:3] == [0, 1, 2]


def test_a_large_vocabulary_is_cut_down_without_changing_the_result():
    random = np.random.default_rng(5)
    logits = (4 * random.standard_normal(50_000)).astype(np.float32)
    best = set(np.argsort(-logits)[:40].tolist())
    assert support(replace(PLAIN, top_k=40, temperature=50.0), logits, 700) == best
    probabilities = np.exp(logits - logits.max())
    order = np.argsort(-probabilities)
    needed = int(np.searchsorted(np.cumsum(probabilities[order] / probabilities.sum()), 0.3)) + 1
    chosen = support(replace(PLAIN, top_p=0.3, temperature=1.0), logits, 200)
    assert chosen <= set(order[:needed].tolist())


def test_a_temperature_next_to_nothing_is_greedy():
    sampler = Sampler(Sampling(temperature=1e-300, seed=1))
    logits = np.array([0.1, 3.0, 2.9], np.float32)
    assert [sampler.sample(logits, [b""] * 3)[0] for _ in range(5)] == [1] * 5


def test_forced_tokens_come_first_with_what_the_model_thinks_of_them():
    sampler = Sampler(replace(PLAIN, temperature=0), top_logprobs=1, forced=[4, 3])
    drawn = [sampler.sample(LOGITS, PIECES) for _ in range(3)]
    best = int(LOGITS.argmax())
    assert [token for token, _ in drawn] == [4, 3, best]
    assert all(logprob.token_id == token and logprob.top[0].token_id == best for token, logprob in drawn)


# ── what an engine chooses ──


def test_an_engine_chooses_what_it_can_be_told_of():
    greedy = Sampling(temperature=0)

    def choosing(settings: Sampling, **more) -> Choosing | None:
        return Sampler(settings, **more).choosing(draws=True)

    assert choosing(replace(greedy, frequency_penalty=0.5, presence_penalty=0.25)).penalties.frequency == 0.5
    assert choosing(PLAIN).penalties is None
    assert choosing(PLAIN, top_logprobs=20).top_logprobs == 20
    assert choosing(PLAIN, top_logprobs=21) is None
    assert choosing(PLAIN, forced=[1]) is None
    assert choosing(replace(PLAIN, typical_p=0.5)) is None
    masked = choosing(PLAIN, matcher=Only(1, 2))
    assert masked.mask.tolist() == [6]
    assert Sampler(PLAIN, Only(1)).choosing(draws=False) is None


def test_an_engine_is_told_the_random_numbers_of_the_tokens_to_come():
    sampler, other = Sampler(PLAIN), Sampler(PLAIN)
    how = sampler.choosing(draws=True)
    ahead = [how.uniform(further) for further in range(4)]
    assert len(set(ahead)) == 4
    for _ in range(2):
        sampler.chose(1)
    assert [sampler.choosing(draws=True).uniform(further) for further in range(2)] == ahead[2:]
    assert [other.sample(LOGITS, PIECES) for _ in range(3)]  # who draws by itself takes the same ones
    assert other.choosing(draws=True).uniform(0) == ahead[3]


def test_a_grammar_that_takes_too_much_work_fails_where_tokens_are_sampled():
    class Complex(Only):
        def mask(self):
            raise InvalidField("tools", "is too complex to follow: make it simpler.")

    sampler = Sampler(PLAIN, Complex())
    assert sampler.choosing(draws=True) is None
    with pytest.raises(InvalidField):
        sampler.sample(LOGITS, PIECES)


def test_a_token_that_an_engine_chose_counts_as_one_that_was_sampled():
    settings = replace(PLAIN, frequency_penalty=1.5, repetition_penalty=1.2)
    by_host, by_engine = (Sampler(settings, Only(0, 1, 2, 3)) for _ in range(2))
    for turn in range(60):
        token, _ = by_host.sample(LOGITS, PIECES)
        if turn % 3:
            by_engine.chose(token)
        else:
            assert by_engine.sample(LOGITS, PIECES)[0] == token
    penalties = by_engine.choosing(draws=True).penalties
    assert penalties.said == by_host._matcher.seen == by_engine._matcher.seen
    assert penalties.counts == Counter(penalties.said)


def test_of_equal_logprobs_those_of_the_lowest_ids_come_first():
    logits = np.zeros(200, np.float32)
    logits[[7, 150, 99]] = 1.0
    assert [one.token_id for one in describe(logits, 3, 5, [b""] * 200).top] == [7, 99, 150, 0, 1]
