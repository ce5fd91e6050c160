"""Tokens are chosen where the logits are: the likeliest, or one drawn as `sched/sampling` draws it, of every row
at once. Nothing is sorted: what top-k and top-p leave is all above a threshold, which is searched for, and of
those that are equal to it the first ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from emberkeep.engine.base import MOST_BIASED, Choosing

NUMBERS = 6
"""What is told of each row: temperature, top-k, top-p, min-p, a random number, the row of its biases or -1."""
CHUNK = 1024
ROUNDS = 12
"""Each leaves a ninth of the range in which a threshold lies: less than what logits differ by."""


@triton.jit
def find_highest(logit_ptr, width, below, after, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    """The highest logit, and the first token that has it: of those lower than `below`, and of those equal to it
    behind the token `after`."""
    lane = tl.arange(0, CHUNK)
    highest = tl.full((CHUNK,), -float("inf"), tl.float32)
    places = lane
    for part in range(CHUNKS):
        at = part * CHUNK + lane
        x = tl.load(logit_ptr + at, at < width, other=-float("inf"))
        is_higher = (x > highest) & ((x < below) | ((x == below) & (at > after)))
        highest = tl.where(is_higher, x, highest)
        places = tl.where(is_higher, at, places)
    top = tl.max(highest, axis=0)
    return top, tl.min(tl.where(highest == top, places, 1 << 30), axis=0)


@triton.jit
def _above(logit_ptr, width, bound, highest, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    """How many logits are at least as high as `bound`, and their weights."""
    counts, masses = tl.zeros((CHUNK,), tl.float32), tl.zeros((CHUNK,), tl.float32)
    for part in range(CHUNKS):
        at = part * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logit_ptr + at, at < width, other=-float("inf"))
        counts += tl.where((x >= bound) & (at < width), 1.0, 0.0)
        masses += tl.where(x >= bound, tl.exp(x - highest), 0.0)
    return tl.sum(counts), tl.sum(masses)


@triton.jit
def _search(
    logit_ptr,
    width,
    highest,
    lowest,
    wanted,
    BY_MASS: tl.constexpr,
    ROUNDS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The bounds [low, high) of the one value at which as much as `wanted` (a count, or weights) is above."""
    low, high = lowest, highest + 1e-3 + tl.abs(highest) * 1e-6
    for _ in range(ROUNDS):
        step = (high - low) / 9.0
        bounds = low + step * (tl.arange(0, 8) + 1).to(tl.float32)
        totals = tl.zeros((CHUNK, 8), tl.float32)  # added up over threads once a round
        for part in range(CHUNKS):
            at = part * CHUNK + tl.arange(0, CHUNK)
            x = tl.load(logit_ptr + at, at < width, other=-1e30)
            value = tl.where(at < width, tl.exp(x - highest) if BY_MASS else 1.0, 0.0)
            totals += tl.where(x[:, None] >= bounds[None, :], value[:, None], 0.0)
        enough = tl.sum(tl.where(tl.sum(totals, axis=0) >= wanted, 1, 0))
        next_low = tl.where(enough > 0, low + step * enough.to(tl.float32), low)
        high = tl.where(enough < 8, low + step * (enough + 1).to(tl.float32), high)
        low = next_low
    return low, high


@triton.jit
def _weigh(logit_ptr, at, width, low, high, ties, seen, highest, temperature):
    """Which of the tokens `at` are left, how likely each is (not of 1), and how many tokens up to their end are
    equal to the threshold, with the `seen` before them."""
    x = tl.load(logit_ptr + at, at < width, other=-1e38)
    tied = (x >= low) & (x < high)
    rank = seen + tl.cumsum(tl.where(tied, 1.0, 0.0), axis=0)
    left = (x >= high) | (tied & (rank <= ties))
    weight = tl.where(left, tl.exp((x - highest) / temperature), 0.0)
    return left, weight, tl.max(rank, axis=0)


@triton.jit
def _draw(
    logit_ptr, width, low, high, ties, highest, temperature, uniform, CHUNKS: tl.constexpr, CHUNK: tl.constexpr
):
    """One of the tokens that are left: of the logits in [low, high), which are equal, the first `ties`, and all
    that are higher."""
    total, seen = 0.0, 0.0
    for part in range(CHUNKS):
        at = part * CHUNK + tl.arange(0, CHUNK)
        _, weight, seen = _weigh(logit_ptr, at, width, low, high, ties, seen, highest, temperature)
        total += tl.sum(weight)
    before, seen, last = 0.0, 0.0, 0
    drawn = 1 << 30
    for part in range(CHUNKS):
        at = part * CHUNK + tl.arange(0, CHUNK)
        left, weight, seen = _weigh(logit_ptr, at, width, low, high, ties, seen, highest, temperature)
        reached = before + tl.cumsum(weight, axis=0)
        drawn = tl.minimum(drawn, tl.min(tl.where(left & (reached > uniform * total), at, 1 << 30)))
        last = tl.maximum(last, tl.max(tl.where(left, at, 0)))
        before += tl.sum(weight)
    return tl.minimum(drawn, last)


@triton.jit
def add_biases(logit_ptr, number_ptr, bias_id_ptr, bias_ptr, width, BIASES: tl.constexpr):
    biased = tl.load(number_ptr + 5).to(tl.int64)
    if biased >= 0:
        places = biased * BIASES + tl.arange(0, BIASES)
        ids = tl.load(bias_id_ptr + places)
        is_there = (ids >= 0) & (ids < width)
        found = tl.load(logit_ptr + ids, is_there, other=0.0)
        tl.store(logit_ptr + ids, found + tl.load(bias_ptr + places), is_there)
        tl.debug_barrier()


@triton.jit
def choose(logit_ptr, number_ptr, width, ROUNDS: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    """The likeliest, or one drawn."""
    highest, best = find_highest(logit_ptr, width, float("inf"), -1, CHUNKS, CHUNK)
    temperature = tl.load(number_ptr).to(tl.float32)
    if temperature > 0.0:
        top_k = tl.load(number_ptr + 1).to(tl.float32)
        top_p = tl.load(number_ptr + 2).to(tl.float32)
        min_p = tl.load(number_ptr + 3).to(tl.float32)
        uniform = tl.load(number_ptr + 4).to(tl.float32)
        low, high, ties = -1e30, -1e30, 1e30
        if top_k > 0.0:
            low, high = _search(logit_ptr, width, highest, highest - 1e4, top_k, False, ROUNDS, CHUNKS, CHUNK)
            count, _ = _above(logit_ptr, width, high, highest, CHUNKS, CHUNK)
            ties = top_k - count
        if top_p < 1.0:
            count, mass = _above(logit_ptr, width, high, highest, CHUNKS, CHUNK)
            each = tl.where(top_k > 0.0, tl.exp((low + high) * 0.5 - highest), 0.0)
            wanted = top_p * (mass + tl.minimum(ties, 1e9) * each)
            p_low, p_high = _search(
                logit_ptr, width, highest, highest - 128.0, wanted, True, ROUNDS, CHUNKS, CHUNK
            )
            _, above = _above(logit_ptr, width, p_high, highest, CHUNKS, CHUNK)
            p_ties = tl.maximum(tl.ceil((wanted - above) / tl.exp((p_low + p_high) * 0.5 - highest)), 1.0)
            is_tied = (top_k > 0.0) & (p_low < high)
            ties = tl.where(is_tied, tl.minimum(ties, p_ties), p_ties)
            low, high = tl.where(is_tied, low, p_low), tl.where(is_tied, high, p_high)
        if min_p > 0.0:
            bound = highest + tl.log(min_p)
            low, high = tl.maximum(low, bound), tl.maximum(high, bound)
        best = _draw(logit_ptr, width, low, high, ties, highest, temperature, uniform, CHUNKS, CHUNK)
    return best


@triton.jit
def _choose_kernel(
    logit_ptr,
    row_width,
    number_ptr,
    bias_id_ptr,
    bias_ptr,
    chosen_ptr,
    width,
    NUMBERS: tl.constexpr,
    BIASES: tl.constexpr,
    ROUNDS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logit_ptr += row * row_width
    number_ptr += row * NUMBERS
    add_biases(logit_ptr, number_ptr, bias_id_ptr, bias_ptr, width, BIASES)
    tl.store(chosen_ptr + row, choose(logit_ptr, number_ptr, width, ROUNDS, CHUNKS, CHUNK))


def choose_tokens(
    logits: torch.Tensor, numbers: torch.Tensor, bias_ids: torch.Tensor, biases: torch.Tensor, chosen: torch.Tensor
) -> None:
    """Choose one for every row of `logits`, to which the biases are added; `numbers` has a row of `NUMBERS` for
    each."""
    rows, width = logits.shape
    _choose_kernel[(rows,)](
        logits,
        logits.stride(0),
        numbers,
        bias_ids,
        biases,
        chosen,
        width,
        NUMBERS=NUMBERS,
        BIASES=MOST_BIASED,
        ROUNDS=ROUNDS,
        CHUNKS=triton.cdiv(width, CHUNK),
        CHUNK=CHUNK,
        num_warps=8,
    )


def numbers_of(choosing: Choosing, biases: int, further: int) -> Sequence[float]:
    """What the kernel is told. `biases`: their row; `further`: so many tokens after the one that comes now."""
    how = choosing
    uniform = how.uniform(further) if how.temperature else 0.0
    return (how.temperature, how.top_k, how.top_p, how.min_p, uniform, biases if how.bias else -1)
