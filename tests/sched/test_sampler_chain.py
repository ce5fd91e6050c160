"""Each sampler against a calculation of its own, in plain Python and double precision."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from emberkeep.sched.sampler_chain import Chain, ChainedSampler, find_breakers
from emberkeep.sched.sampling import Sampler
from emberkeep.types.request import Sampling
from helpers.chance import seed, times

OFF = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0, seed=1)
PROBABILITIES = [0.4, 0.25, 0.15, 0.1, 0.06, 0.04]
LOGITS = np.log(PROBABILITIES).astype(np.float32)
WORDS = ["a", "b", "c", "d", ":", "\n", " :", "x\n", "he", "hello", "llo", "<end>"]


class Words:
    """A vocabulary of a few words; the last one ends a generation."""

    pieces = tuple(word.encode() for word in WORDS)
    eog = frozenset({len(WORDS) - 1})
    eos = len(WORDS) - 1

    def tokenize(self, text: str, *, parse_special: bool = True) -> list[int]:
        ids = []
        while text:
            word = max((word for word in WORDS if text.startswith(word)), key=len)
            ids.append(WORDS.index(word))
            text = text[len(word) :]
        return ids


def chain(settings: Sampling, prompt: list[int] | None = None, breakers: tuple[str, ...] = ()) -> Chain:
    return Chain(settings, Words(), np.array(prompt or [], np.int32), find_breakers(breakers, Words()))


def left(
    settings: Sampling, logits=LOGITS, prompt: list[int] | None = None, chance: float = 0.0
) -> dict[int, float]:
    """Every token that may be drawn, with its logit."""
    kept = chain(settings, prompt).candidates(np.asarray(logits, np.float32), (), chance)
    return {kept.token(place): float(logit) for place, logit in enumerate(kept.logits)}


def shares(logits: dict[int, float]) -> dict[int, float]:
    total = sum(math.exp(logit) for logit in logits.values())
    return {token: math.exp(logit) / total for token, logit in logits.items()}


def near(logits: dict[int, float]) -> object:
    return pytest.approx(logits, rel=1e-5, abs=1e-5)


# ── what needs it ──


@pytest.mark.parametrize(
    "settings",
    [
        Sampling(dry_multiplier=0.8),
        Sampling(xtc_probability=0.5),
        Sampling(mirostat=2),
        Sampling(top_n_sigma=1.0),
        Sampling(dynatemp_range=0.5),
        Sampling(samplers=("temperature",)),
        Sampling(min_keep=2),
        Sampling(repetition_penalty=1.1, repeat_last_n=64),
    ],
)
def test_what_few_requests_ask_for_needs_a_chain(settings: Sampling) -> None:
    assert settings.needs_chain


def test_a_chain_of_the_usual_samplers_draws_what_the_short_way_draws() -> None:
    settings = Sampling(seed=5, top_k=4, top_p=0.9, min_p=0.1, temperature=0.7)
    short, long = Sampler(settings), ChainedSampler(chain(settings), settings)
    pieces = Words.pieces
    assert [short.sample(LOGITS, pieces)[0] for _ in range(50)] == [
        long.sample(LOGITS, pieces)[0] for _ in range(50)
    ]


# ── cuts ──


@pytest.mark.parametrize("deviations", [0.2, 0.7, 1.0, 1.5, 9.0])
def test_top_n_sigma_keeps_what_is_near_the_highest(deviations: float) -> None:
    logits = [math.log(p) for p in PROBABILITIES]
    mean = sum(logits) / len(logits)
    deviation = math.sqrt(sum((logit - mean) ** 2 for logit in logits) / len(logits))
    kept = {i for i, logit in enumerate(logits) if logit >= max(logits) - deviations * deviation}
    assert set(left(replace(OFF, top_n_sigma=deviations))) == kept


def test_top_n_sigma_does_not_count_what_is_forbidden() -> None:
    allowed = left(replace(OFF, top_n_sigma=1.0), [3.0, 2.5, -1.0])
    assert set(left(replace(OFF, top_n_sigma=1.0), [3.0, 2.5, -1.0, -math.inf, -math.inf])) == set(allowed)


@pytest.mark.parametrize(
    ("settings", "least", "kept"),
    [
        (replace(OFF, top_p=0.3), 0, 1),
        (replace(OFF, top_p=0.3), 3, 3),
        (replace(OFF, min_p=0.9), 0, 1),
        (replace(OFF, min_p=0.9), 4, 4),
        (replace(OFF, typical_p=0.1), 0, 1),
        (replace(OFF, typical_p=0.1), 3, 3),
    ],
)
def test_min_keep_leaves_so_many_at_least(settings: Sampling, least: int, kept: int) -> None:
    assert len(left(replace(settings, min_keep=least, samplers=("top_p", "min_p", "typ_p")))) == kept


@pytest.mark.parametrize(
    ("threshold", "kept"), [(0.3, {0, 1, 2, 3, 4, 5}), (0.2, {1, 2, 3, 4, 5}), (0.12, {2, 3, 4, 5}), (0.0, {5})]
)
def test_xtc_leaves_out_all_but_the_least_likely_of_the_likely(threshold: float, kept: set[int]) -> None:
    assert set(left(replace(OFF, xtc_probability=0.5, xtc_threshold=threshold), chance=0.4)) == kept


def test_xtc_does_nothing_most_of_the_time_or_where_too_few_would_be_left() -> None:
    settings = replace(OFF, xtc_probability=0.5, xtc_threshold=0.12)
    assert len(left(settings, chance=0.6)) == 6
    assert len(left(replace(settings, min_keep=5), chance=0.4)) == 6
    assert len(left(replace(settings, min_keep=4), chance=0.4)) == 4


def test_xtc_happens_as_often_as_it_should() -> None:
    settings = replace(OFF, xtc_probability=0.3, xtc_threshold=0.12)
    sampler = ChainedSampler(chain(settings), settings)
    counts = Counter(sampler.sample(LOGITS, Words.pieces)[0] for _ in range(4000))
    assert counts[0] / 4000 == pytest.approx(0.7 * 0.4, abs=0.03)


# ── temperature ──


@pytest.mark.parametrize(("range_", "exponent"), [(0.5, 1.0), (0.5, 2.0), (2.0, 0.5)])
def test_dynamic_temperature_follows_the_entropy(range_: float, exponent: float) -> None:
    entropy = -sum(p * math.log(p) for p in PROBABILITIES) / math.log(len(PROBABILITIES))
    low, high = max(0.0, 1.0 - range_), 1.0 + range_
    temperature = low + (high - low) * entropy**exponent
    expected = {i: math.log(p) / temperature for i, p in enumerate(PROBABILITIES)}
    assert left(replace(OFF, dynatemp_range=range_, dynatemp_exponent=exponent)) == near(expected)


def test_samplers_run_in_the_order_that_is_given() -> None:
    cold = replace(OFF, temperature=0.25, top_p=0.6)
    assert set(left(replace(cold, samplers=("top_p", "temperature")))) == {0, 1}
    assert set(left(replace(cold, samplers=("temperature", "top_p")))) == {0}
    assert len(left(replace(cold, samplers=("temperature",)))) == 6
    assert left(replace(cold, samplers=("top_p",))) == near({0: math.log(0.4), 1: math.log(0.25)})


def test_no_temperature_takes_the_likeliest_of_what_is_left() -> None:
    assert set(left(replace(OFF, temperature=0, min_keep=3))) == {0}
    assert set(left(replace(OFF, temperature=0, xtc_probability=1.0, xtc_threshold=0.2))) == {1}


# ── repetition ──


def test_penalties_look_at_the_last_tokens_of_prompt_and_answer() -> None:
    settings = replace(OFF, repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25, repeat_last_n=3)
    logits = [1.0, -1.0, 2.0, 0.5, 0.0, 3.0]
    running = chain(settings, [5, 5, 0, 1])
    running.accept(0, 0.5)
    kept = running.candidates(np.array(logits, np.float32), [2], 0.0)
    seen = Counter([1, 0, 2])
    expected = {
        i: (logit / 2 if logit > 0 else logit * 2) - seen[i] * 0.5 - 0.25 if i in seen else logit
        for i, logit in enumerate(logits)
    }
    assert {kept.token(i): float(logit) for i, logit in enumerate(kept.logits)} == near(expected)


def test_penalties_after_a_cut_lower_only_what_is_left() -> None:
    settings = replace(OFF, frequency_penalty=1.0, repeat_last_n=8, top_k=3, samplers=("top_k", "penalties"))
    expected = {0: math.log(0.4), 1: math.log(0.25) - 2.0, 2: math.log(0.15)}
    assert left(settings, prompt=[1, 1, 5]) == near(expected)


def naive_dry(tokens: list[int], settings: Sampling, ends: set[int]) -> dict[int, float]:
    """For every place where the same tokens came before as come last now: how many, and what followed."""
    tokens = tokens[-settings.dry_penalty_last_n :]
    since = next((i for i, token in enumerate(reversed(tokens)) if token in ends), len(tokens))
    lengths: dict[int, int] = {}
    for end in range(1, len(tokens)):
        length = 0
        while length < min(end, since) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        if length >= settings.dry_allowed_length and since >= settings.dry_allowed_length:
            lengths[tokens[end]] = max(length, lengths.get(tokens[end], 0))
    return {
        token: settings.dry_multiplier * settings.dry_base ** (length - settings.dry_allowed_length)
        for token, length in lengths.items()
        if token not in ends and len(tokens) > settings.dry_allowed_length
    }


@pytest.mark.parametrize("number", range(times(60)))
def test_dry_penalises_what_goes_on_with_a_repetition(number: int) -> None:
    random = np.random.default_rng(seed(number))
    tokens = random.integers(0, 5, random.integers(1, 60)).tolist()
    settings = replace(
        OFF,
        dry_multiplier=0.8,
        dry_allowed_length=int(random.integers(0, 4)),
        dry_penalty_last_n=int(random.integers(1, 80)),
    )
    kept = chain(settings, tokens, (":",)).candidates(np.zeros(8, np.float32), (), 0.0)
    expected = naive_dry(tokens, settings, {4, 6})
    assert {i: -float(logit) for i, logit in enumerate(kept.logits) if logit} == near(expected)


def test_dry_knows_texts_of_several_tokens_that_end_a_repetition() -> None:
    breakers = find_breakers(("hello",), Words())
    assert breakers == {8: ((10,),), 9: ((),)}
    settings = replace(OFF, dry_multiplier=1.0, dry_base=2.0, dry_allowed_length=1)
    a, b, he, llo = 0, 1, 8, 10
    broken = chain(settings, [a, b, a, he, llo, b], ("hello",)).candidates(np.zeros(12, np.float32), (), 0.0)
    whole = chain(settings, [a, b, a, he, a, b], ("hello",)).candidates(np.zeros(12, np.float32), (), 0.0)
    assert -broken.logits[a] == 1.0
    assert -whole.logits[a] == 2.0


def test_dry_never_grows_beyond_what_a_number_can_be() -> None:
    settings = replace(OFF, dry_multiplier=1.0, dry_penalty_last_n=4000, dry_base=4.0)
    kept = chain(settings, [1] * 4000).candidates(np.zeros(4, np.float32), (), 0.0)
    assert math.isfinite(kept.logits[1])


# ── Mirostat ──


def test_mirostat_2_leaves_out_what_is_more_surprising_than_allowed() -> None:
    tau = 1.2
    kept = left(replace(OFF, mirostat=2, mirostat_tau=tau))
    assert set(kept) == {i for i, p in enumerate(PROBABILITIES) if -math.log2(p) <= 2 * tau}


def test_mirostat_1_keeps_as_many_as_zipf_says() -> None:
    ratios = [(math.log((i + 2) / (i + 1)), math.log(PROBABILITIES[i] / PROBABILITIES[i + 1])) for i in range(5)]
    s = sum(t * b for t, b in ratios) / sum(t * t for t, _ in ratios)
    k = ((s - 1) * 2 ** (2 * 1.0) / (1 - 6 ** (1 - s))) ** (1 / s)
    assert len(left(replace(OFF, mirostat=1, mirostat_tau=1.0))) == int(k)


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_goes_on_however_long_a_model_is_sure(version: int) -> None:
    running = chain(replace(OFF, mirostat=version, mirostat_tau=5.0, mirostat_eta=1.0))
    for _ in range(2000):
        running.accept(0, 1.0)
    assert len(running.candidates(LOGITS, (), 0.0).logits) == len(LOGITS)
    for _ in range(2000):
        running.accept(5, 1e-30)
    assert len(running.candidates(LOGITS, (), 0.0).logits) == 1


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_learns_from_what_was_sampled_and_from_nothing_else(version: int) -> None:
    settings = replace(OFF, mirostat=version, mirostat_tau=2.0, mirostat_eta=0.1)
    plain, watched = (ChainedSampler(chain(settings), settings) for _ in range(2))
    expected = []
    for _ in range(100):
        expected.append(plain.sample(LOGITS, Words.pieces)[0])
        watched.look_ahead(LOGITS, [])
        watched.look_ahead(LOGITS[::-1].copy(), [1, 2])
        assert watched.sample(LOGITS, Words.pieces)[0] == expected[-1]
    assert len(set(expected)) > 1


# ── infill ──


def infilled(probabilities: dict[str, float]) -> set[str]:
    logits = np.full(len(WORDS), -np.inf, np.float32)
    for word, p in probabilities.items():
        logits[WORDS.index(word)] = math.log(p)
    return {WORDS[i] for i in left(replace(OFF, samplers=("top_k", "infill"), top_k=8), logits)}


def test_infill_ends_where_an_end_is_likely() -> None:
    assert infilled({"a": 0.5, "b": 0.3, "<end>": 0.2}) == {"<end>"}


def test_infill_counts_a_token_and_its_beginning_together() -> None:
    assert infilled({"he": 0.25, "hello": 0.3, "a": 0.22, "b": 0.2299, "<end>": 0.0001}) == {"hello", "<end>"}


def test_infill_ends_where_nothing_is_likely() -> None:
    assert infilled({"a": 0.17, "b": 0.17, "c": 0.17, "d": 0.17, ":": 0.16, "\n": 0.16}) == {"<end>"}


class Piece(bytes):
    """Counts how often it is compared."""

    compared = 0

    def startswith(self, *args: Any) -> bool:
        Piece.compared += 1
        return super().startswith(*args)


class ManyWords:
    """Words that begin each other, and two ends: one is likely enough to be looked at, one is the last."""

    pieces = tuple(Piece(f"{word:x}".encode()) for word in range(1200))
    eog = frozenset({40, 1199})
    eos = 40


def naive_infill(p: list[float], vocab: ManyWords) -> set[int]:
    """Every pair of tokens, the likeliest first."""
    order = sorted(range(len(p)), key=lambda token: -p[token])
    texts = [piece.decode() for piece in vocab.pieces]
    for first, second in product(order, order):
        if first != second and p[first] and p[second] and texts[second].startswith(texts[first]):
            likelier, other = (second, first) if p[second] > p[first] else (first, second)
            p[likelier], p[other] = p[likelier] + p[other], 0.0
    kept = {token for token in order if p[token] >= 0.2 or token in vocab.eog}
    least = sum(p[token] for token in kept) / (len(kept - vocab.eog) + 1)
    return {token for token in kept if p[token] >= least or token in vocab.eog}


@pytest.mark.parametrize("seed", range(3))
def test_infill_of_a_large_vocabulary_compares_the_likeliest_only(seed: int) -> None:
    random, vocab = np.random.default_rng(seed), ManyWords()
    logits = random.normal(-12, 2, 1200)
    likely = [0x1F, 0x1, 0x1FA, 0x2B, 0x2, 0x30 + seed]
    logits[likely] = np.log(random.dirichlet([2.0] * len(likely)))
    logits[list(vocab.eog)] = [-18, -30]
    logits = logits.astype(np.float32)
    settings = replace(OFF, samplers=("infill",))
    Piece.compared = 0
    kept = Chain(settings, vocab, np.array([], np.int32), {}).candidates(logits, (), 0.0)
    assert Piece.compared < 260**2
    weights = np.exp(logits.astype(np.float64))
    expected = naive_infill((weights / weights.sum()).tolist(), vocab)
    assert len(expected) > len(vocab.eog)
    assert {kept.token(place) for place in range(len(kept.logits))} == expected


# ── what was drawn ──


def test_logprobs_as_drawn_are_those_of_the_candidates() -> None:
    settings = replace(OFF, top_k=3, temperature=0.5)
    sampler = ChainedSampler(chain(settings), settings, None, 5, as_drawn=True)
    token, logprob = sampler.sample(LOGITS, Words.pieces)
    squares = [p**2 / sum(p**2 for p in PROBABILITIES[:3]) for p in PROBABILITIES[:3]]
    assert logprob is not None
    assert [math.exp(one.logprob) for one in logprob.top] == pytest.approx(squares, rel=1e-4)
    assert math.exp(logprob.logprob) == pytest.approx(squares[token], rel=1e-4)


def test_a_look_ahead_with_a_chain_sees_what_sampling_will_draw() -> None:
    settings = replace(OFF, xtc_probability=0.5, frequency_penalty=0.5, repeat_last_n=8, seed=3)
    sampler = ChainedSampler(chain(settings, [0, 1]), settings)
    for _ in range(50):
        first, _ = sampler.look_ahead(LOGITS, [])
        second, _ = sampler.look_ahead(LOGITS, [first])
        assert sampler.sample(LOGITS, Words.pieces)[0] == first
        assert sampler.sample(LOGITS, Words.pieces)[0] == second
