"""Tokens that are chosen where the logits are, against the sampler: on a GPU, or by Triton's interpreter. Skipped
where there is no Triton."""

# ruff: noqa: E402 (how Triton runs is decided before it is imported)

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
pytest.importorskip("triton", reason="needs Triton")

from emberkeep.engine.base import MOST_BIASED, Choosing
from emberkeep.engine.hf.choosing import NUMBERS, choose_tokens, numbers_of
from emberkeep.sched.sampling import Sampler
from emberkeep.types.request import Sampling

pytestmark = pytest.mark.slow

SETTINGS = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 1.3, "top_k": 40},
    {"temperature": 0.7, "top_k": 1},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.5, "top_k": 5000, "top_p": 0.5},
    {"temperature": 1.0, "top_k": 7, "logit_bias": {3: 4.0, 5: float("-inf")}},
    {"temperature": 0.0, "logit_bias": {9: 100.0, 5: float("-inf")}},
]


def chosen(logits: np.ndarray, settings: list[Sampling], uniforms: list[float]) -> list[int]:
    rows = len(logits)
    ids = torch.full((rows, MOST_BIASED), -1, dtype=torch.int64)
    biases = torch.zeros((rows, MOST_BIASED))
    numbers = torch.zeros((rows, NUMBERS), dtype=torch.float64)
    for row, (one, uniform) in enumerate(zip(settings, uniforms, strict=True)):
        bias = tuple(one.logit_bias.items())
        for place, (token, value) in enumerate(bias):
            ids[row, place], biases[row, place] = token, value
        how = Choosing(one.temperature, one.top_k, one.top_p, one.min_p, [uniform].__getitem__, bias)
        numbers[row] = torch.tensor(numbers_of(how, row, 0))
    out = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    given = torch.from_numpy(logits.copy()).to(DEVICE)
    choose_tokens(given, numbers.to(DEVICE), ids.to(DEVICE), biases.to(DEVICE), out)
    return out.tolist()


@pytest.mark.parametrize("width", [259, 3000])
@pytest.mark.parametrize("has_ties", [False, True])
def test_each_row_gets_the_token_that_the_sampler_draws(width: int, has_ties: bool) -> None:
    random = np.random.default_rng(3)
    logits = (3 * random.standard_normal((40, width))).astype(np.float32)
    if has_ties:
        logits = np.round(logits)
    settings = [Sampling(seed=row, **SETTINGS[row % len(SETTINGS)]) for row in range(len(logits))]
    samplers = [Sampler(one) for one in settings]
    uniforms = [sampler._uniforms.peek(0) for sampler in samplers]
    expected = [sampler.sample(row, ())[0] for sampler, row in zip(samplers, logits, strict=True)]
    assert chosen(logits, settings, uniforms) == expected
