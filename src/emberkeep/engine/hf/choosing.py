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
_CHUNK = 1024
_ROUNDS = 12
"""Each leaves a ninth of the range in which a threshold lies: less than what logits differ by."""


@triton.jit
def _above(logit_ptr, width, bound, highest, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    """How many logits are at least as high as `bound`, and their weights."""
    count, mass = 0.0, 0.0
    for part in range(CHUNKS):
        at = part * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logit_ptr + at, at < width, other=-1e30)
        taken = x >= bound
        count += tl.sum(tl.where(taken, 1.0, 0.0))
        mass += tl.sum(tl.where(taken, tl.exp(x - highest), 0.0))
    return count, mass


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
        total = tl.zeros((8,), tl.float32)
        for part in range(CHUNKS):
            at = part * CHUNK + tl.arange(0, CHUNK)
            x = tl.load(logit_ptr + at, at < width, other=-1e30)
            value = tl.where(at < width, tl.exp(x - highest) if BY_MASS else 1.0, 0.0)
            total += tl.sum(tl.where(x[:, None] >= bounds[None, :], value[:, None], 0.0), axis=0)
        enough = tl.sum(tl.where(total >= wanted, 1, 0))
        next_low = tl.where(enough > 0, low + step * enough.to(tl.float32), low)
        high = tl.where(enough < 8, low + step * (enough + 1).to(tl.float32), high)
        low = next_low
    return low, high


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
    biased = tl.load(number_ptr + 5).to(tl.int64)
    if biased >= 0:
        places = biased * BIASES + tl.arange(0, BIASES)
        ids = tl.load(bias_id_ptr + places)
        is_there = (ids >= 0) & (ids < width)
        found = tl.load(logit_ptr + ids, is_there, other=0.0)
        tl.store(logit_ptr + ids, found + tl.load(bias_ptr + places), is_there)
        tl.debug_barrier()
    highest = -float("inf")
    best = 0
    for part in range(CHUNKS):
        at = part * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logit_ptr + at, at < width, other=-float("inf"))
        top, place = tl.max(x, axis=0, return_indices=True)
        best = tl.where(top > highest, part * CHUNK + place, best)
        highest = tl.maximum(top, highest)
    temperature = tl.load(number_ptr).to(tl.float32)
    if temperature > 0.0:
        top_k = tl.load(number_ptr + 1).to(tl.float32)
        top_p = tl.load(number_ptr + 2).to(tl.float32)
        min_p = tl.load(number_ptr + 3).to(tl.float32)
        uniform = tl.load(number_ptr + 4).to(tl.float32)
        # Of the logits in [low, high), which are equal, the first `ties` are left, and all that are higher.
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
        total = 0.0
        seen = 0.0
        for part in range(CHUNKS):
            at = part * CHUNK + tl.arange(0, CHUNK)
            x = tl.load(logit_ptr + at, at < width, other=-1e38)
            tied = tl.where((x >= low) & (x < high), 1.0, 0.0)
            rank = seen + tl.cumsum(tied, axis=0)
            left = (x >= high) | ((tied > 0.0) & (rank <= ties))
            total += tl.sum(tl.where(left, tl.exp((x - highest) / temperature), 0.0))
            seen += tl.sum(tied)
        target = uniform * total
        before, seen, last = 0.0, 0.0, 0
        is_found = 0
        for part in range(CHUNKS):
            at = part * CHUNK + tl.arange(0, CHUNK)
            x = tl.load(logit_ptr + at, at < width, other=-1e38)
            tied = tl.where((x >= low) & (x < high), 1.0, 0.0)
            rank = seen + tl.cumsum(tied, axis=0)
            left = (x >= high) | ((tied > 0.0) & (rank <= ties))
            weight = tl.where(left, tl.exp((x - highest) / temperature), 0.0)
            reached = before + tl.cumsum(weight, axis=0)
            first = tl.min(tl.where(left & (reached > target), at, 1 << 30))
            last = tl.maximum(last, tl.max(tl.where(left, at, 0)))
            is_here = (is_found == 0) & (first < (1 << 30))
            best = tl.where(is_here, first, best)
            is_found = tl.where(is_here, 1, is_found)
            before += tl.sum(weight)
            seen += tl.sum(tied)
        best = tl.where(is_found == 0, last, best)
    tl.store(chosen_ptr + row, best)


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
        ROUNDS=_ROUNDS,
        CHUNKS=triton.cdiv(width, _CHUNK),
        CHUNK=_CHUNK,
        num_warps=8,
    )


def numbers_of(choosing: Choosing, biases: int, *, is_next: bool) -> Sequence[float]:
    """What the kernel is told. `biases`: their row; `is_next`: of the token after the one that comes now."""
    how = choosing
    return (how.temperature, how.top_k, how.top_p, how.min_p, how.uniforms[is_next], biases if how.bias else -1)
