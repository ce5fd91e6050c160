"""Rows of a step of which more is wanted than choosing a token: those that came before are less likely, a grammar
allows some only, or it is told how likely they are.

They are chosen behind the step, by one kernel more: a step without such rows has nothing of it. Counts of tokens
are on the device. Those of the latest one come with the step, or (the step was launched before it was known) the
kernel reads which it is: nothing that was launched and does not count is left in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from emberkeep.engine.base import MOST_BIASED, MOST_TOLD, Choosing, Penalties, Rows
from emberkeep.engine.hf.choosing import CHUNK, NUMBERS, ROUNDS, add_biases, choose, find_highest, numbers_of
from emberkeep.engine.hf.step_batch import DeviceBiases, StepBatch

_NUMBERS = NUMBERS + 10
"""What is told of each row behind `NUMBERS`: the row of its logits, and of its counts or -1; repetition, frequency
and presence penalty; a token or -1, and how often it came; whether the step's own token came, too; how many
likeliest ones are told or -1; the row of its mask or -1."""
_TOLD = 2 * (MOST_TOLD + 1)
"""What a row tells: the chosen token's logprob, then ids and logprobs of the likeliest ones, until an id is -1."""


@triton.jit
def _penalise(logit_ptr, number_ptr, count_ptr, own, width, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    """As `sampling.penalise`, rounded as there: nothing here may be fused."""
    factor = tl.load(number_ptr + 8).to(tl.float32)
    frequency = tl.load(number_ptr + 9).to(tl.float32)
    presence = tl.load(number_ptr + 10).to(tl.float32)
    latest = tl.load(number_ptr + 11).to(tl.int64)
    if latest >= 0:
        tl.store(count_ptr + latest, tl.load(number_ptr + 12).to(tl.int32))
        tl.debug_barrier()
    for part in range(CHUNKS):
        at = part * CHUNK + tl.arange(0, CHUNK)
        count = tl.load(count_ptr + at, at < width, other=0) + tl.where(at == own, 1, 0)
        x = tl.load(logit_ptr + at, at < width, other=0.0)
        lower = tl.where(x > 0.0, tl.div_rn(x, factor), x * factor)
        lower -= count.to(tl.float32) * frequency + presence
        tl.store(logit_ptr + at, lower, (at < width) & (count > 0))
    tl.debug_barrier()


@triton.jit
def _forbid(logit_ptr, mask_ptr, width, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    for part in range(CHUNKS):
        at = part * CHUNK + tl.arange(0, CHUNK)
        bits = tl.load(mask_ptr + (at >> 5), at < width, other=0)
        tl.store(logit_ptr + at, -float("inf"), (at < width) & (((bits >> (at & 31)) & 1) == 0))
    tl.debug_barrier()


@triton.jit
def _tell(logit_ptr, told_ptr, chosen, likeliest, width, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    highest, _ = find_highest(logit_ptr, width, float("inf"), -1, CHUNKS, CHUNK)
    masses = tl.zeros((CHUNK,), tl.float64)
    for part in range(CHUNKS):
        at = part * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logit_ptr + at, at < width, other=-float("inf"))
        masses += tl.exp(x - highest).to(tl.float64)
    whole = highest.to(tl.float64) + tl.log(tl.sum(masses, axis=0))
    tl.store(told_ptr, tl.load(logit_ptr + chosen).to(tl.float64) - whole)
    below, after = float("inf"), -1
    for place in range(likeliest):
        below, after = find_highest(logit_ptr, width, below, after, CHUNKS, CHUNK)
        tl.store(told_ptr + 1 + 2 * place, tl.where(below > -float("inf"), after, -1).to(tl.float64))
        tl.store(told_ptr + 2 + 2 * place, below.to(tl.float64) - whole)
    tl.store(told_ptr + 1 + 2 * likeliest, -1.0)


@triton.jit
def _adjusted_kernel(
    logit_ptr,
    row_width,
    number_ptr,
    changed_ptr,
    bias_id_ptr,
    bias_ptr,
    count_ptr,
    mask_ptr,
    words,
    token_ptr,
    wanted_ptr,
    chosen_ptr,
    told_ptr,
    width,
    NUMBERS: tl.constexpr,
    BIASES: tl.constexpr,
    TOLD: tl.constexpr,
    ROUNDS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    number_ptr += place * NUMBERS
    row = tl.load(number_ptr + 6).to(tl.int64)
    logit_ptr += row * row_width
    changed_ptr += place * width
    for part in range(CHUNKS):
        at = part * CHUNK + tl.arange(0, CHUNK)
        tl.store(changed_ptr + at, tl.load(logit_ptr + at, at < width, other=0.0), at < width)
    tl.debug_barrier()
    add_biases(changed_ptr, number_ptr, bias_id_ptr, bias_ptr, width, BIASES)
    counted = tl.load(number_ptr + 7).to(tl.int64)
    if counted >= 0:
        token = tl.load(token_ptr + tl.load(wanted_ptr + row))
        own = tl.where(tl.load(number_ptr + 13) > 0.0, token, -1)
        _penalise(changed_ptr, number_ptr, count_ptr + counted * width, own, width, CHUNKS, CHUNK)
    mask = tl.load(number_ptr + 15).to(tl.int64)
    if mask >= 0:
        _forbid(changed_ptr, mask_ptr + mask * words, width, CHUNKS, CHUNK)
    chosen = choose(changed_ptr, number_ptr, width, ROUNDS, CHUNKS, CHUNK)
    tl.store(chosen_ptr + row, chosen)
    likeliest = tl.load(number_ptr + 14).to(tl.int32)
    if likeliest >= 0:
        _tell(logit_ptr, told_ptr + row * TOLD, chosen, likeliest, width, CHUNKS, CHUNK)


class _Counts:
    """How often each token came in every sequence, as far as the device was told."""

    def __init__(self, sequences: int, width: int, device: torch.device) -> None:
        self.all = torch.zeros((sequences, width), dtype=torch.int32, device=device)
        self._shown: list[tuple[object, int]] = [(None, 0)] * sequences
        """Whose they are, and how many of its tokens are counted."""

    def show(self, sequence: int, penalties: Penalties) -> tuple[int, int]:
        """What is launched from now on finds all, but for a token that the step has to be told, with its count: -1
        where there is none."""
        (known, before), count = self._shown[sequence], len(penalties.said)
        self._shown[sequence] = penalties.answer, count
        if known is not penalties.answer:
            before = 0
            self.all[sequence].zero_()
        if count - before > 1:
            ids, times = (
                torch.tensor(list(each)).pin_memory().to(self.all.device, non_blocking=True)
                for each in (penalties.counts.keys(), penalties.counts.values())
            )
            self.all[sequence].index_copy_(0, ids, times.int())
        if count - before != 1:
            return -1, 0
        return penalties.said[-1], penalties.counts[penalties.said[-1]]


class _HostInputs:
    def __init__(self, sequences: int, words: int) -> None:
        self.numbers = torch.zeros((sequences, _NUMBERS), dtype=torch.float64).pin_memory()
        self.masks = torch.zeros((sequences, words), dtype=torch.int32).pin_memory()


class Adjusting:
    """Belongs to the engine's thread."""

    def __init__(self, logits: torch.Tensor, sequences: int, biases: DeviceBiases) -> None:
        """For steps with so many sequences, whose scores are `logits`."""
        outputs, width = logits.shape
        device, words = logits.device, -(-width // 32)
        self._logits, self._biases = logits, biases
        self._counts = _Counts(sequences, width, device)
        self._changed = torch.empty((sequences, width), dtype=torch.float32, device=device)
        self._told = torch.zeros((outputs, _TOLD), dtype=torch.float64, device=device)
        # One is filled while the two latest steps may still have to copy from theirs.
        self._hosts = cycle([_HostInputs(sequences, words) for _ in range(3)])
        self._numbers = torch.zeros((sequences, _NUMBERS), dtype=torch.float64, device=device)
        self._masks = torch.zeros((sequences, words), dtype=torch.int32, device=device)

    def choose(
        self, batch: Sequence[Rows], step: StepBatch, chosen: torch.Tensor, further: int
    ) -> torch.Tensor | None:
        """Choose the tokens of such rows of a step that was launched, so many tokens (one at most) `further`; None
        where none of them tells anything. Does not wait."""
        host, places, masks = next(self._hosts), 0, 0
        numbers, host_masks, output, tells = host.numbers.numpy(), host.masks.numpy(), 0, False
        for rows in batch:
            how = rows.choosing
            if how is not None and how.is_adjusted:
                mask = -1
                if how.mask is not None:
                    mask, masks = masks, masks + 1
                    _put_mask(host_masks[mask], how.mask)
                numbers[places] = self._numbers_of(how, rows.sequence, output, mask, further)
                tells |= how.top_logprobs is not None
                places += 1
            output += rows.outputs
        if masks:
            self._masks[:masks].copy_(host.masks[:masks], non_blocking=True)
        self._numbers[:places].copy_(host.numbers[:places], non_blocking=True)
        self._launch(places, step, chosen)
        return self._told[:output] if tells else None

    def _numbers_of(self, how: Choosing, sequence: int, output: int, mask: int, further: int) -> Sequence[float]:
        self._biases.show(sequence, how.bias)
        told = -1 if how.top_logprobs is None else how.top_logprobs
        counts: tuple[float, ...] = (-1, 1, 0, 0, -1, 0, 0)
        if (each := how.penalties) is not None:
            latest = self._counts.show(sequence, each)
            counts = (sequence, each.repetition, each.frequency, each.presence, *latest, further > 0)
        return (*numbers_of(how, sequence, further), output, *counts, told, mask)

    def _launch(self, rows: int, step: StepBatch, chosen: torch.Tensor) -> None:
        width = self._logits.shape[1]
        _adjusted_kernel[(rows,)](
            self._logits,
            self._logits.stride(0),
            self._numbers,
            self._changed,
            self._biases.ids,
            self._biases.values,
            self._counts.all,
            self._masks,
            self._masks.shape[1],
            step.tokens,
            step.wanted,
            chosen,
            self._told,
            width,
            NUMBERS=_NUMBERS,
            BIASES=MOST_BIASED,
            TOLD=_TOLD,
            ROUNDS=ROUNDS,
            CHUNKS=triton.cdiv(width, CHUNK),
            CHUNK=CHUNK,
            num_warps=8,
            enable_fp_fusion=False,
        )


def _put_mask(host: npt.NDArray[np.int32], mask: npt.NDArray[np.uint32]) -> None:
    """What it does not reach is forbidden."""
    words = min(len(host), len(mask))
    host[:words], host[words:] = mask[:words].view(np.int32), 0
