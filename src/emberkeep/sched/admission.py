"""Does a request fit, and with which plan: its peak of memory is predicted before anything is allocated for it.
And whose state it may reuse, in how many bits.

Two places can run out: the engine's device, where a step needs room for its slice of the prompt, and RAM, which
takes up the state on its way into the store. A smaller slice helps the first, fewer bits help the second.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from emberkeep.config.kinds import readable_size
from emberkeep.config.machine import free_ram
from emberkeep.engine.base import Capabilities, Engine, Footprint
from emberkeep.errors import ConfigError, InvalidField, TooLarge
from emberkeep.sched.sequence import Sequence as Running
from emberkeep.types.events import Admitted, Plan
from emberkeep.types.lineage import EXACT_BITS, Approximation, Lineage
from emberkeep.types.request import Json, Request
from emberkeep.values import dataclass

log = logging.getLogger("emberkeep.sched")

_SMALLEST_SLICE = 32
_LEAST_ANSWER = 256
"""Room for so much of an answer is asked for; a longer one may end early where memory ends, as it does where the
context ends."""
_RAM = "RAM"


# ── prediction ──


def peak(footprint: Footprint, plan: Plan, prompt_tokens: int, max_new: int, rows: int) -> int:
    """The most bytes of the device at once, with what is always there, for a prompt and `rows` answers to it.

    That is when the prompt's last slice is evaluated, or the answers' last tokens. It grows with every argument.
    """
    prompt = _step(footprint, min(plan.prefill_slice, prompt_tokens), prompt_tokens)
    answers = _step(footprint, rows, rows * (prompt_tokens + max_new)) if max_new else 0.0
    return math.ceil(footprint.fixed + max(prompt, answers) + rows * footprint.per_logits_row)


def _step(footprint: Footprint, tokens: int, context: int) -> float:
    pairs = tokens * context * footprint.per_pair
    return tokens * footprint.per_step_token + context * footprint.per_context_token + pairs


def ladder(largest_slice: int, bits: Sequence[int]) -> list[Plan]:
    """Every plan, from the cheapest to run to the one that needs least; `bits` begins with the wanted ones."""
    slices = [largest_slice]
    while slices[-1] > _SMALLEST_SLICE:
        slices.append(max(slices[-1] // 2, _SMALLEST_SLICE))
    return [Plan(tokens, count) for count in bits for tokens in slices]


# ── choice ──


@dataclass(frozen=True, slots=True)
class Refusal:
    place: str
    """Whose memory it is that does not suffice."""
    needed: int
    available: int
    suggested_max_tokens: int = 0
    """The longest prompt that fits with the smallest plan; 0 if none does."""


@dataclass(frozen=True, slots=True)
class Room:
    footprint: Footprint
    margin: float
    """What is predicted may be wrong by this share."""
    free_ram: int | None
    """None: it is not known, and not looked at."""
    store_room: int
    """Bytes by which the store can still grow: what comes beyond them replaces something."""
    kv_bytes_per_token: int
    """0 where nothing is kept."""
    in_ram: int = 0
    """How many of the request's tokens the store holds in RAM already."""

    def lacks(self, plan: Plan, prompt_tokens: int, max_new: int) -> Refusal | None:
        """The place that has too little for this; None if it fits."""
        device = self.footprint
        most = peak(device, plan, prompt_tokens, max_new, rows=1)
        new = max(prompt_tokens + max_new - self.in_ram, 0)
        ram = min(math.ceil(self.kv_bytes_per_token * new * plan.kv_bits / 16), self.store_room)
        if device.device == "cpu":
            ram += most - device.fixed
        for place, bytes_, available in ((device.device, most, device.capacity), (_RAM, ram, self.free_ram)):
            needed = math.ceil(bytes_ * (1 + self.margin))
            if available is not None and needed > available:
                return Refusal(place, needed, available)
        return None


def choose(room: Room, plans: Sequence[Plan], prompt_tokens: int, max_new: int) -> Plan | Refusal:
    """The first of `plans` (see `ladder`) with which a request fits."""
    for plan in plans:
        refusal = room.lacks(plan, prompt_tokens, max_new)
        if refusal is None:
            return plan
    assert refusal is not None
    fitting = largest(lambda tokens: not room.lacks(plans[-1], tokens, max_new), prompt_tokens)
    return replace(refusal, suggested_max_tokens=fitting)


def largest(fits: Callable[[int], object], most: int) -> int:
    """The largest number up to `most` that fits, where all smaller ones do as well; 0 if not even 1 does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


# ── admission ──


class Admission:
    """May be used from any thread."""

    def __init__(
        self,
        footprint: Callable[[], Footprint],
        capabilities: Capabilities,
        *,
        largest_slice: int,
        margin: float,
        store_room: Callable[[], int],
        free: Callable[[], int | None] = free_ram,
    ) -> None:
        """`footprint`: as it is known now. `store_room`: bytes of RAM by which the store can still grow."""
        self._footprint = footprint
        self.margin = margin
        self._packs = capabilities.packs
        self._kv_bytes_per_token = capabilities.kv_bytes_per_token
        self._largest_slice = largest_slice
        self._store_room = store_room
        self._free = free

    @property
    def footprint(self) -> Footprint:
        return self._footprint()

    @property
    def budget(self) -> int:
        """What all requests in the engine together may need beyond what is always there."""
        return int(self.footprint.capacity / (1 + self.margin)) - self.footprint.fixed

    def admit(
        self,
        prompt_tokens: int,
        max_new: int,
        *,
        bits: int = 16,
        most_slice: int | None = None,
        is_kept: bool = True,
        in_ram: Callable[[], int] = lambda: 0,
    ) -> Admitted:
        """A plan for a request. Allocates nothing. Raises TooLarge.

        `most_slice`: no step takes more of its prompt. `in_ram` tells how many of its tokens the store holds in
        RAM; it is asked only where that could help.
        """
        footprint, largest_slice = self.footprint, min(self._largest_slice, most_slice or self._largest_slice)
        kv_bytes_per_token = self._kv_bytes_per_token if is_kept else 0
        room = Room(footprint, self.margin, self._free(), self._store_room(), kv_bytes_per_token)
        plans = ladder(largest_slice, self._bits(bits))
        least = min(max_new, _LEAST_ANSWER)
        chosen = choose(room, plans, prompt_tokens, least)
        if isinstance(chosen, Refusal) and chosen.place == _RAM:
            room = replace(room, in_ram=in_ram())
            chosen = choose(room, plans, prompt_tokens, least)
        if isinstance(chosen, Refusal):
            raise _too_large(chosen, prompt_tokens)
        plan = chosen
        answer = largest(lambda count: not room.lacks(plan, prompt_tokens, count), max_new)
        predicted = peak(footprint, plan, prompt_tokens, answer, rows=1)
        return Admitted(plan, prompt_tokens, answer, predicted, predicted - footprint.fixed)

    def _bits(self, wanted: int) -> list[int]:
        """Who wants exact state gets it or nothing; who does not may get less exact state where room is short."""
        lower = [bits for bits in sorted(self._packs, reverse=True) if bits < wanted]
        return [wanted, *lower] if wanted < 16 else [wanted]


def open_admission(
    known: Callable[[], Footprint | None],
    capabilities: Capabilities,
    *,
    largest_slice: int,
    margin: float,
    store_room: Callable[[], int],
) -> Admission | None:
    """None where nothing can be planned: what the engine needs is not known, or it has all there is already.

    `known`: what is known of that, which may become more exact."""
    footprint = known()
    if footprint is None:
        return None
    smallest = ladder(largest_slice, [16])[-1]
    bare = Room(footprint, margin, free_ram=None, store_room=0, kv_bytes_per_token=0)
    if bare.lacks(smallest, 1, 0):
        log.warning(
            "the model takes %s of %s on %s, so requests are admitted without a plan: "
            "choose a smaller ctx, parallel or memory_margin",
            readable_size(footprint.fixed),
            readable_size(footprint.capacity),
            footprint.device,
        )
        return None
    return Admission(
        lambda: known() or footprint,
        capabilities,
        largest_slice=largest_slice,
        margin=margin,
        store_room=store_room,
    )


def _too_large(refusal: Refusal, prompt_tokens: int) -> TooLarge:
    way_out = "free some memory, or load the model with a smaller ctx or parallel."
    if refusal.suggested_max_tokens:
        way_out = f"send at most {refusal.suggested_max_tokens:,} tokens, or start with --too-long truncate."
    return TooLarge(
        f"A prompt of {prompt_tokens:,} tokens needs {readable_size(refusal.needed)} and there are "
        f"{readable_size(refusal.available)} ({refusal.place}): {way_out}",
        prompt_tokens=prompt_tokens,
        needed=refusal.needed,
        available=refusal.available,
        suggested_max_tokens=refusal.suggested_max_tokens,
    )


# ── how good the predictions are ──


_REMEMBERED = 1024
_ENOUGH = 16
"""Comparisons from which on a margin is suggested."""
_LEAST_MARGIN, _MOST_MARGIN = 0.05, 0.5
"""Peaks that were alike so far say little about the next one, and beyond the other one a prediction is wrong."""


class Calibration:
    """Asks for the peak around every sequence that runs alone: only then is it that one's.

    `started` and `ended` are for the engine's thread, `stats` for any. Its memory is bounded.
    """

    def __init__(self, engine: Engine, others: Callable[[], int]) -> None:
        """`others`: bytes that the engine's measure counts as well, and that are not the engine's."""
        self._engine = engine
        self._others = others
        self._watched: Running | None = None
        self._latest: deque[float] = deque(maxlen=_REMEMBERED)
        self._count = 0

    def started(self, sequence: Running, *, alone: bool) -> None:
        self._watched = sequence if alone and sequence.prompt.admitted else None
        if self._watched:
            self._engine.peak_bytes()

    def ended(self, sequence: Running) -> None:
        admitted = sequence.prompt.admitted
        if sequence is not self._watched or admitted is None:
            return
        self._watched = None
        actual = self._engine.peak_bytes()
        if actual is not None:
            self._count += 1
            self._latest.append((actual - self._others()) / max(admitted.predicted, 1))

    def stats(self) -> dict[str, Json]:
        """With ratios above 1 more was used than predicted. `suggested_margin` would have covered 95 of 100; it is
        None before that can be told."""
        ratios = list(self._latest)
        shares = {"min": 0.0, "median": 0.5, "p95": 0.95, "max": 1.0}
        summary = {name: _quantile(ratios, share) if ratios else None for name, share in shares.items()}
        return {"suggested_margin": _margin(ratios), "actual_to_predicted": {**summary, "count": self._count}}


def _margin(ratios: list[float]) -> float | None:
    if len(ratios) < _ENOUGH:
        return None
    return min(max(round(_quantile(ratios, 0.95) - 1, 4), _LEAST_MARGIN), _MOST_MARGIN)


def _quantile(ratios: list[float], share: float) -> float:
    return round(float(np.quantile(ratios, share, method="higher")), 4)


# ── which lineage a request has ──

_CANNOT_MOVE = "needs an engine that can move stored state: use --engine hf, or ask for exact answers."


@dataclass(frozen=True, slots=True)
class Lineages:
    default_bits: int
    """In how many bits state is stored, unless a request says otherwise."""
    packs: frozenset[int]
    """What the engine can do."""
    approximation_by_default: Approximation | None = None
    """For requests that do not say whether state may be moved."""
    can_move: bool = False
    """The engine can move state."""
    exact: bool = False
    """Nothing is approximate, and who asks for it is refused."""
    can_splice: bool = False
    """The engine can splice its state."""

    def check(self) -> None:
        """Raises ConfigError unless the engine can do the default."""
        if self.exact and self.default_bits != EXACT_BITS:
            raise ConfigError(
                f"approximate = never wants exact state, and kv_bits = {self.default_bits} is not: leave one out."
            )
        if self.approximation_by_default is not None and not self.can_move:
            raise ConfigError(f"approximate = {self.approximation_by_default.repair} {_CANNOT_MOVE}")
        if self.default_bits not in self.packs:
            raise ConfigError(f"kv_bits {self.default_bits} is nothing for this model: {_possible(self.packs)}.")

    def of(self, request: Request) -> Lineage:
        """What `request` may reuse and may leave behind. Raises InvalidField for what the engine cannot do."""
        if request.execution.lineage is not None:
            return request.execution.lineage
        if self.exact:
            self._check_exact(request)
            return Lineage(request.namespace)
        if request.kv_bits is not None and request.kv_bits not in self.packs:
            raise InvalidField("kv_bits", f"this model cannot do {request.kv_bits}: {_possible(self.packs)}.")
        bits = self.default_bits if request.kv_bits is None else request.kv_bits
        approximation = self.approximation(request)
        return Lineage(request.namespace, bits, approximation.repair if approximation else None)

    def _check_exact(self, request: Request) -> None:
        """Raises InvalidField for a request that wants anything else."""
        wanted = {"approximate": bool(request.approximate), "kv_bits": request.kv_bits not in (None, EXACT_BITS)}
        for name, is_wanted in wanted.items():
            if is_wanted:
                raise InvalidField(name, "this server answers exactly only (approximate = never): leave it out.")

    def approximation(self, request: Request) -> Approximation | None:
        """How state from other places may be reused for `request`. None: it may not.

        Prefixes are made for others, who may want them exact. Raises InvalidField for what the engine cannot do.
        """
        if self.exact or request.execution.is_prefix or request.approximate is False:
            return None
        if request.approximate is not None and not self.can_move:
            raise InvalidField("approximate", _CANNOT_MOVE)
        return request.approximate or self.approximation_by_default

    def may_splice(self, request: Request) -> bool:
        """Where messages leave its context, its state may be spliced, and not be evaluated again."""
        return self.can_splice and not self.exact and request.approximate is not False

    def repacked(self, lineage: Lineage, bits: int) -> Lineage:
        """The same, stored in other bits."""
        return lineage if self.exact else replace(lineage, bits=bits)


def _possible(packs: frozenset[int]) -> str:
    return f"use {' or '.join(str(bits) for bits in sorted(packs, reverse=True))}"
