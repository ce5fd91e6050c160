"""Tokens with penalties, under a grammar or with logprobs, chosen where the logits are, against the sampler: on a
GPU, or by Triton's interpreter. Skipped where there is no Triton."""

# ruff: noqa: E402 (how Triton runs is decided before it is imported)

from __future__ import annotations

import os
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch

IS_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if IS_CUDA else "cpu")
if not IS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
pytest.importorskip("triton", reason="needs Triton")

from emberkeep.engine.base import Choosing, Rows
from emberkeep.engine.hf.adjusting import Adjusting
from emberkeep.engine.hf.staging import ChosenTokens
from emberkeep.engine.hf.step_batch import DeviceBiases
from emberkeep.sched.sampling import Sampler, tell
from emberkeep.types.events import TokenLogprob
from emberkeep.types.request import Sampling

pytestmark = pytest.mark.slow

PIECES = [str(token).encode() for token in range(3000)]
LOWER = {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": 0.3}
SETTINGS = [
    {"temperature": 0.0, "frequency_penalty": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.7},
    {"temperature": 0.0, **LOWER, "logit_bias": {2: 3.0, 5: float("-inf")}},
    {"temperature": 0.8, **LOWER},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9, **LOWER},
    {"temperature": 1.0, "min_p": 0.05, "frequency_penalty": -0.4, "logit_bias": {7: 2.5}},
]


class Passed:
    """An event of a device that has done everything at once."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    if not IS_CUDA:
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
        monkeypatch.setattr(torch.cuda, "Event", Passed)


class Odd:
    """A grammar that never allows the same tokens twice running."""

    def __init__(self, width: int) -> None:
        self.allowed = np.arange(width) % 3 == 1

    def mask(self) -> np.ndarray:
        bits = np.zeros(-(-len(self.allowed) // 32) * 32, bool)
        bits[: len(self.allowed)] = self.allowed
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def advance(self, token: int) -> None:
        assert self.allowed[token]
        self.allowed = np.roll(self.allowed, token % 5 + 1)


class Device:
    """A few sequences, each of which has one row in a step behind rows that are somebody else's."""

    BEFORE = 2

    def __init__(self, sequences: int, width: int) -> None:
        self.rows = self.BEFORE + sequences
        self.logits = torch.zeros((self.rows, width), device=DEVICE)
        self.chosen = torch.full((self.rows,), -5, dtype=torch.int64, device=DEVICE)
        self.adjusting = Adjusting(self.logits, sequences, DeviceBiases(sequences, DEVICE))

    def step(
        self, logits: np.ndarray, tokens: Sequence[int], hows: Sequence[Choosing | None], *, is_next: bool = False
    ) -> ChosenTokens:
        """`tokens`: of which each sequence's logits are."""
        self.logits[self.BEFORE :].copy_(torch.from_numpy(logits))
        inputs = torch.tensor([*[1] * self.BEFORE, *tokens], device=DEVICE)
        step = SimpleNamespace(tokens=inputs, wanted=torch.arange(self.rows, device=DEVICE))
        array = np.zeros(1, np.int32)
        others = Rows(0, 0, np.zeros(self.BEFORE, np.int32), outputs=self.BEFORE)
        batch = [others, *(Rows(sequence, 9, array, 1, how) for sequence, how in enumerate(hows))]
        told = self.adjusting.choose(batch, step, self.chosen, further=int(is_next))
        assert self.chosen[: self.BEFORE].tolist() == [-5] * self.BEFORE
        return ChosenTokens(
            self.chosen[self.BEFORE :].tolist(), [] if told is None else told[self.BEFORE :].tolist()
        )


def scores(random: np.random.Generator, count: int, width: int) -> np.ndarray:
    """Of which many are equal, and some tokens come again and again."""
    logits = np.round(2 * random.standard_normal((count, width)) * 4).astype(np.float32) / 4
    logits[:, :12] += 5
    return logits


def hows(samplers: list[Sampler]) -> list[Choosing]:
    found = [sampler.choosing(draws=True) for sampler in samplers]
    assert all(how is not None and how.is_adjusted for how in found)
    return found


@pytest.mark.parametrize("width", [259, 2100])
def test_tokens_that_came_before_are_less_likely_as_the_sampler_has_it(width: int) -> None:
    random = np.random.default_rng(5)
    count = len(SETTINGS)
    expected = [Sampler(Sampling(seed=row, **how)) for row, how in enumerate(SETTINGS)]
    told = [Sampler(Sampling(seed=row, **how)) for row, how in enumerate(SETTINGS)]
    device = Device(count, width)

    def sampled(by: list[Sampler], logits: np.ndarray) -> list[int]:
        return [sampler.sample(row, PIECES)[0] for sampler, row in zip(by, logits, strict=True)]

    def chose(tokens: list[int]) -> None:
        for sampler, token in zip(told, tokens, strict=True):
            sampler.chose(token)

    latest, expecting = [], []
    for _ in range(3):  # the host's, which the device learns of afterwards
        logits = scores(random, count, width)
        latest = sampled(told, logits)
        assert latest == sampled(expected, logits)
    for turn in range(7):
        how, logits = hows(told), scores(random, count, width)
        tokens = device.step(logits, latest, how).tokens
        expecting = sampled(expected, logits)
        assert tokens == expecting
        if turn % 2:  # launched ahead of a token that does not come, and of no use
            device.step(scores(random, count, width), [11] * count, how, is_next=True)
        for _ in range(turn % 3):
            logits = scores(random, count, width)
            ahead = device.step(logits, tokens, how, is_next=True).tokens
            chose(tokens)
            tokens, how = ahead, hows(told)
            expecting = sampled(expected, logits)
            assert tokens == expecting
        chose(tokens)
        latest = tokens
    assert len({*expecting}) > 1


def test_a_new_answer_in_the_place_of_another_one_begins_without_its_tokens() -> None:
    random, device = np.random.default_rng(6), Device(1, 300)
    for seed in range(2):
        settings = Sampling(temperature=0.0, seed=seed, presence_penalty=2.0)
        expected, sampler = Sampler(settings), Sampler(settings)
        latest = 1
        for _ in range(4):
            logits = scores(random, 1, 300)
            (token,) = device.step(logits, [latest], hows([sampler])).tokens
            assert token == expected.sample(logits[0], PIECES)[0]
            sampler.chose(token)
            latest = token


@pytest.mark.parametrize("width", [259, 2100])
def test_what_a_grammar_forbids_is_not_chosen(width: int) -> None:
    random = np.random.default_rng(7)
    all_settings = [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_k": 9},
        {"temperature": 1.1, "top_p": 0.8, **LOWER},
    ]
    expected = [Sampler(Sampling(seed=3, **how), Odd(width)) for how in all_settings]
    told = [Sampler(Sampling(seed=3, **how), Odd(width)) for how in all_settings]
    device, latest = Device(3, width), [1, 1, 1]
    for _ in range(5):
        logits, how = scores(random, 3, width), hows(told)
        tokens = device.step(logits, latest, how).tokens
        assert tokens == [one.sample(row, PIECES)[0] for one, row in zip(expected, logits, strict=True)]
        for sampler, token in zip(told, tokens, strict=True):
            sampler.chose(token)
        latest = tokens


def test_a_row_that_wants_nothing_more_is_left_as_it_was_chosen() -> None:
    device = Device(2, 300)
    logits = scores(np.random.default_rng(8), 2, 300)
    sampler = Sampler(Sampling(temperature=0.0), top_logprobs=0)
    plain = Sampler(Sampling(temperature=0.0)).choosing(draws=True)
    chosen = device.step(logits, [1, 1], [plain, *hows([sampler])])
    assert chosen.tokens == [-5, int(logits[1].argmax())]


@pytest.mark.parametrize("width", [19, 259, 2100])
@pytest.mark.parametrize("has_ties", [False, True])
def test_logprobs_are_those_that_the_sampler_tells(width: int, has_ties: bool) -> None:
    random = np.random.default_rng(9)
    asked = [
        (0, {}),
        (1, {}),
        (5, {"temperature": 0.9}),
        (20, {"temperature": 0.0, **LOWER, "logit_bias": {3: 99.0}}),
    ]
    expected = [
        Sampler(Sampling(**{"temperature": 0.0, "seed": 1, **how}), top_logprobs=top) for top, how in asked
    ]
    told = [Sampler(Sampling(**{"temperature": 0.0, "seed": 1, **how}), top_logprobs=top) for top, how in asked]
    device, latest = Device(len(asked), width), [1] * len(asked)
    for _ in range(3):
        logits = scores(random, len(asked), width)
        logits = (
            logits if has_ties else random.permuted(logits + np.arange(width, dtype=np.float32) / 9999, axis=1)
        )
        chosen = device.step(logits, latest, hows(told))
        for row, (one, other) in enumerate(zip(told, expected, strict=True)):
            token, logprob = other.sample(logits[row], PIECES)
            assert chosen.tokens[row] == token
            assert logprob is not None
            agree(tell(token, chosen.logprobs(row), PIECES), logprob)
            one.chose(token)
        latest = chosen.tokens


def agree(found: TokenLogprob, expected: TokenLogprob) -> None:
    ids, expected_ids = ([one.token_id for one in (each, *each.top)] for each in (found, expected))
    assert ids == expected_ids
    for one, other in zip((found, *found.top), (expected, *expected.top), strict=True):
        assert (one.piece, one.logprob) == (other.piece, pytest.approx(other.logprob, rel=1e-6, abs=1e-6))
