"""One sequence in the engine, from the first loaded chunk to resting for its next turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from itertools import islice
from time import monotonic

import numpy as np

from emberkeep.kv.content import Moved
from emberkeep.kv.entries import EntryId
from emberkeep.kv.fetch import Fetch
from emberkeep.kv.tree import Chunk, ChunkKey, Cursor, Made, Match, Span, TokenArray, place_at
from emberkeep.sched.job import Cut, Ending, EndReason, Job
from emberkeep.sched.shapes import Shapes
from emberkeep.types import Divergence, Lineage, LookupRecord, MissReason

FAIR_SLICE = 128
"""Slices of 100 tokens and more give the same bits however a prompt is cut into them."""
PATIENCE_S = 60.0
"""Stored state of which nothing arrives for so long is evaluated instead: a disk may never answer."""


class Phase(Enum):
    LOADING = "loading"  # stored state is on its way
    FULL = "full"  # the answer can go on when messages have left the context
    EVALUATING = "evaluating"  # prompt or answer
    CLOSING = "closing"  # answered; the end of the turn is still to be evaluated
    IDLE = "idle"  # resting in the engine, ready to be continued or copied


@dataclass(frozen=True, slots=True)
class Load:
    """A stored chunk on its way into the sequence, of which the positions up to `end` are wanted."""

    chunk: Chunk
    end: int
    fetch: Fetch


@dataclass(frozen=True, slots=True)
class Moving:
    """State of another place, for [start, end) of the sequence."""

    start: int
    end: int
    chunk: Chunk
    source: int
    """The position in its own sequence that goes to `start`."""
    fetch: Fetch

    def part(self, start: int, end: int) -> Moving:
        return replace(self, start=start, end=end, source=self.source + start - self.start)


class TokenBuffer:
    """Token ids that only grow or are cut, always visible as one array."""

    def __init__(self, tokens: TokenArray, room: int) -> None:
        self._data = np.empty(len(tokens) + room, np.int32)
        self._data[: len(tokens)] = tokens
        self._length = len(tokens)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice) -> TokenArray:
        return self._data[: self._length][part]

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            if self._length == len(self._data):
                self._data = np.concatenate([self._data, np.empty(max(64, self._length), np.int32)])
            self._data[self._length] = token
            self._length += 1

    def cut(self, length: int) -> None:
        self._length = min(self._length, length)


class Sequence:
    """Tokens known, tokens computed, and what is still to be loaded. Belongs to the engine's thread."""

    def __init__(self, slot: int, job: Job, cursor: Cursor, reused: int) -> None:
        self.slot = slot
        self.job: Job | None = job
        self._lineage = job.lineage
        """What it may become: see `lineage`."""
        self.approximate_from: int | None = None
        """Where state begins that was moved there, now or before it was stored."""
        self.holds_packed = False
        """Some of it was loaded from fewer bits than the engine's."""
        self.given = job.given
        self.notes = job.notes
        self.is_kept = job.is_kept
        self.borders: frozenset[int] = frozenset()
        """Where evaluation pauses so that the state can be stored."""
        self.entry: EntryId | None = None
        self.turn = 0
        """Whose turn it holds, and which one, once it rests."""
        self.phase = Phase.EVALUATING
        self.tokens = TokenBuffer(job.tokens, min(job.max_new, 512) + len(job.closing))
        self.prompt_length = len(job.tokens)
        self._reusable = job.reusable
        self._largest_slice = job.admitted.plan.prefill_slice if job.admitted else None
        self.memory = job.memory
        self.computed = reused
        self.shapes = Shapes()
        self.is_beside = False
        """Others have been in the engine since it is: its cells may lie anywhere, which changes how sums round."""
        self.cursor = cursor
        """How far the store holds this sequence."""
        self.hot_tokens = reused
        self.warm_tokens = 0
        self.cold_tokens = 0
        self.reason = MissReason.NEW
        self.divergence: Divergence | None = None
        self.match: Match | None = None
        self.cut: Cut | None = None
        """What is loaded is the state of the cut's source: it becomes that of `tokens` when all has arrived."""
        self._found: LookupRecord | None = None
        """What was reused, where the prompt is not the same any more."""
        self.cut_seconds = 0.0
        self.cuts = 0
        self.inserted_tokens = 0
        """Evaluated in the place of what was cut out."""
        self.loads: deque[Load] = deque()
        self.pieces: deque[Moving] = deque()
        """What is still to be moved here, in order."""
        self.moved: list[Moved] = []
        """Pinned for the sake of `pieces`."""
        self.one_by_one = False
        """The engine has refused several pieces together."""
        self.moved_tokens = 0
        self.repaired_tokens = 0
        self.from_disk: set[ChunkKey] = set()
        self.started = monotonic()
        self.load_seconds = 0.0
        self.patience_ends = self.started + PATIENCE_S
        self.first_token_at: float | None = None
        self.answer_end = self.prompt_length
        """Where what was sampled ends."""
        self.last_used = self.started
        self._apart_until = 0

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def is_active(self) -> bool:
        return self.phase is not Phase.IDLE

    @property
    def is_runnable(self) -> bool:
        return self.phase in (Phase.EVALUATING, Phase.CLOSING) and self.pending > 0

    @property
    def in_prompt(self) -> bool:
        """Still has prompt tokens to evaluate besides one that starts the answer."""
        return self.computed < self._reusable

    @property
    def is_blending(self) -> bool:
        """Its next tokens are moved, not evaluated."""
        return self.is_runnable and bool(self.pieces) and self.pieces[0].start <= self.computed

    @property
    def is_apart(self) -> bool:
        """It takes its steps by itself: one that it took with others failed, and nobody knows because of whom."""
        return self.computed < self._apart_until and self.is_runnable

    def goes_on_alone(self, kept: int) -> None:
        """A step with others has failed, and only the state of the first `kept` tokens is still there."""
        self._apart_until = self.computed + 1
        self.holds_only(kept)
        if self.sampled_count:
            # Whatever has to be evaluated again comes before the next sample.
            self._reusable = len(self.tokens) - 1

    @property
    def lineage(self) -> Lineage:
        """Of what it computes now: its own from the first token on that rests on something moved or cut."""
        return self._lineage.stored if self.approximate_from is None else self._lineage

    def shown_to(self, lineage: Lineage) -> int:
        """How many of its first tokens a job of that lineage may reuse."""
        if not lineage.sees(self._lineage.stored) or self.cut is not None:
            return 0
        return len(self.tokens) if lineage.sees(self._lineage) else self._exact_length

    @property
    def _exact_length(self) -> int:
        if self.approximate_from is not None:
            return self.approximate_from
        return self.pieces[0].start if self.pieces else len(self.tokens)

    @property
    def sampled_count(self) -> int:
        return self.answer_end - self.prompt_length

    @property
    def reserved(self) -> int:
        """The most token cells it can come to use."""
        return self.job.cells if self.job else len(self.tokens)

    @property
    def unsaved(self) -> int:
        return self.computed - self.cursor.position

    def evaluated(self, count: int, wide_rows: int | None) -> None:
        """The next `count` tokens were computed in one step; from `wide_rows` on it is a wide one."""
        made = Made.NARROW
        if wide_rows is not None and count >= wide_rows:
            is_alone = not self.is_beside and self.shapes.reproducible(self.computed) == self.computed
            made = Made.WIDE | Made.REPRODUCIBLE if is_alone else Made.WIDE
        self.holds(self.computed + count, made)

    def holds(self, end: int, made: Made) -> None:
        """What it had not of the positions up to `end` is there now."""
        self.shapes.computed(self.computed, end, made)
        self.computed = end

    def next_slice(self, budget: int) -> tuple[TokenArray, bool]:
        """The tokens to evaluate next and whether they need logits. The last prompt token goes alone."""
        if self._largest_slice is not None:
            budget = min(budget, self._largest_slice)
        end = min(self.computed + budget, len(self.tokens))
        if self.in_prompt:
            end = self._prompt_slice_end(budget)
        samples = self.phase is Phase.EVALUATING and end == len(self.tokens)
        assert self.job is None or samples or self.in_prompt or self.phase is Phase.CLOSING
        return self.tokens[self.computed : end], samples and self.job is not None and self.job.max_new > 0

    def _prompt_slice_end(self, budget: int) -> int:
        """A little rest is not left over: it would be evaluated in another batch shape, and round differently."""
        ahead = [border for border in self.borders if border > self.computed]
        ahead += [piece.start for piece in islice(self.pieces, 1)]
        remaining = min([*ahead, self._reusable]) - self.computed
        if FAIR_SLICE <= budget < remaining < budget + FAIR_SLICE:
            budget = (remaining + 1) // 2
        return self.computed + min(budget, remaining)

    def blend_end(self, room: int, rows: int, cost: float) -> int:
        """Where a slice of at most `rows` tokens ends that costs no more than evaluating `room` of them.

        A moved token costs `cost` of an evaluated one.
        """
        end, rows = self.computed, min(rows, self._largest_slice or rows)
        limit = min(end + rows, self.pieces[0].end if self.one_by_one else self._reusable)
        left = float(room)
        for piece in self.pieces:
            left -= piece.start - end
            affordable = max(int(left / cost), 0) if cost else rows
            if left < 0 or affordable < piece.end - piece.start:
                return min(piece.start + (int(left) if left < 0 else affordable), limit)
            left -= cost * (piece.end - piece.start)
            end = piece.end
        return min(end + int(left), limit)

    def blended(self, end: int, repaired: int) -> None:
        """Everything up to `end` is there, with pieces moved into it."""
        self.rests_on_moved(self.computed)
        while self.pieces and self.pieces[0].start < end:
            piece = self.pieces.popleft()
            self.moved_tokens += min(piece.end, end) - piece.start
            if piece.end > end:
                self.pieces.appendleft(piece.part(end, piece.end))
        self.repaired_tokens += repaired
        self.holds(end, Made.NARROW)

    def rests_on_moved(self, start: int) -> None:
        """From `start` on it is approximate, and what is stored of it from now on is stored as such."""
        if self.approximate_from is None or start < self.approximate_from:
            self.approximate_from = start
        self.cursor = replace(self.cursor, lineage=self.lineage)

    # ── cutting ──

    def was_cut(self, cut: Cut, reached: int) -> None:
        """Its state was that of the cut's source up to `reached`, and is now that of its own tokens."""
        assert cut.lineage is not None
        self._lineage = cut.lineage
        self.holds_only(cut.start)
        self.holds(cut.length(reached), Made.NARROW)
        self.rests_on_moved(cut.start)
        self.cuts += 1
        self.inserted_tokens += len(cut.insert)

    def holds_only(self, length: int) -> None:
        """What was computed and stored beyond that is not its own."""
        self.computed = min(self.computed, length)
        if self.cursor.position > length:
            self.cursor = place_at(self.cursor, length)

    def reused_only(self, length: int, moved: int = 0) -> None:
        """Of what was loaded, only the first tokens were of use, and `moved` that were moved up."""
        self.hot_tokens = min(self.hot_tokens, length)
        self.warm_tokens = min(self.warm_tokens, length - self.hot_tokens)
        self.cold_tokens = min(self.cold_tokens, length - self.hot_tokens - self.warm_tokens)
        self.moved_tokens = moved

    def becomes(self, cut: Cut) -> None:
        """Its prompt becomes the shorter one; what was sampled stays, and what is told of its beginning."""
        self._found = self.lookup_record()
        before, followed = self.tokens[: cut.start], self.tokens[cut.end :]
        self.tokens = TokenBuffer(np.concatenate([before, cut.insert, followed]), room=512)
        self.prompt_length -= cut.saved
        self.answer_end -= cut.saved
        # Whatever has to be evaluated again comes before the next sample.
        self._reusable = len(self.tokens) - 1

    def add_sampled(self, token: int) -> None:
        self.tokens.extend((token,))
        self.answer_end = len(self.tokens)

    def made(self, start: int, end: int) -> Made:
        """How the positions [start, end) came about."""
        return self.shapes.within(start, end) | (Made.GIVEN if self.given else Made.UNKNOWN)

    def sampled_spans(self, start: int, end: int) -> tuple[Span, ...]:
        """Which of the positions [start, end) were sampled here, relative to `start`."""
        begin, finish = max(start, self.prompt_length), min(end, self.answer_end)
        return ((begin - start, finish - start),) if begin < finish else ()

    def lookup_record(self) -> LookupRecord:
        if self._found is not None:
            is_approximate = self.approximate_from is not None or self.holds_packed
            return replace(self._found, cut_ms=1e3 * self.cut_seconds, is_approximate=is_approximate)
        reused = self.hot_tokens + self.warm_tokens + self.cold_tokens
        reused_all = reused + self.moved_tokens >= self._reusable
        is_approximate = self.approximate_from is not None or self.holds_packed
        return LookupRecord(
            prompt_tokens=self.prompt_length,
            hot_tokens=self.hot_tokens,
            warm_tokens=self.warm_tokens,
            cold_tokens=self.cold_tokens,
            moved_tokens=self.moved_tokens,
            repaired_tokens=self.repaired_tokens,
            wide_tokens=self.shapes.wide(reused),
            reproducible_tokens=0 if is_approximate else self.shapes.reproducible(reused),
            is_approximate=is_approximate,
            load_ms=1e3 * self.load_seconds,
            cut_ms=1e3 * self.cut_seconds,
            reason=MissReason.NONE if reused_all else self.reason,
            divergence=None if reused_all else self.divergence,
        )

    def ending(self, reason: EndReason) -> Ending:
        """How its job went, now that it is over."""
        job, now = self.job, monotonic()
        assert job is not None
        first = self.first_token_at or now
        lookup = self.lookup_record()
        return Ending(
            reason=reason,
            prompt_tokens=lookup.prompt_tokens,
            sampled_tokens=self.sampled_count,
            queue_ms=1e3 * (self.started - job.submitted),
            prompt_ms=1e3 * (first - self.started),
            ttft_ms=1e3 * (first - job.submitted),
            decode_ms=1e3 * (now - first),
            lookup=lookup,
        )

    def rest(self) -> None:
        """The job is over; the state stays in the engine for whoever continues it."""
        self.job = None
        self.phase = Phase.IDLE
        self.tokens.cut(self.computed)
        self.last_used = monotonic()
