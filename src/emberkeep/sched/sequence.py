"""One sequence: a prompt and its answer, from waiting for a slot to staying in the engine for its next turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from time import monotonic

import numpy as np

from emberkeep.chat.messages import label_of
from emberkeep.chat.prompt import Prompt, Splice, Stable
from emberkeep.kv.entries import Entry, EntryId
from emberkeep.kv.policy import Rate
from emberkeep.kv.tree import Chunk, Cursor, Made, place_at
from emberkeep.sched.drafts import SequenceDrafts
from emberkeep.sched.sampling import Sampler
from emberkeep.sched.sequence_state import (
    Arrivals,
    Load,
    Phase,
    Reuse,
    Save,
    SequenceOutput,
    Shapes,
    StoredPiece,
    TokenBuffer,
)
from emberkeep.token_arrays import TokenArray, common_prefix
from emberkeep.types.cache import Label
from emberkeep.types.events import LookupRecord, Marked, Progress, Source
from emberkeep.types.lineage import EXACT_BITS, Approximation, Lineage
from emberkeep.types.request import Request

FAIR_SLICE = 128
"""Slices of 100 tokens and more give the same bits however a prompt is cut into them."""
_BETWEEN_FORKS = FAIR_SLICE
"""Tokens between places where others part from a prompt: each of them ends a slice."""
PATIENCE_S = 60.0
"""Stored state of which nothing arrives for so long is evaluated instead: a disk may never answer."""


def slice_within(seconds: float, speed: Rate, least: int, most: int) -> int:
    """Prompt tokens that take about so long at that speed: a multiple of `least`, and no fewer."""
    fitting = int(speed.value * seconds) // least * least if speed.value else least
    return min(max(fitting, least), most)


class Sequence:
    """Tokens known, tokens computed, and what is still to be loaded.

    Made by any thread; belongs to the engine's thread once it is submitted. `submitted`, `request` and `prompt`
    may be read anywhere.
    """

    stable: Stable | None = None
    marked = Marked()
    """May be noted by any thread until the turn ends."""
    number = 0
    """Counts the sequences of a scheduler, once it is submitted."""
    entry: EntryId | None = None
    turn = 0
    """Which turn of which entry it holds, once it is idle."""
    splices = 0
    inserted_tokens = 0
    """Evaluated in the place of what was spliced out."""
    _first_lookup: LookupRecord | None = None
    """What was reused, where the prompt is not the same any more."""
    _forks: frozenset[int] = frozenset()
    """Borders of the prompt that are there because others part from it."""

    def __init__(
        self,
        prompt: Prompt,
        request: Request,
        sampler: Sampler,
        output: SequenceOutput | None,
        *,
        approximation: Approximation | None = None,
        arrived: float | None = None,
    ) -> None:
        """`approximation`: how state from other places may be moved into it. `arrived`: when its request did, on
        the monotonic clock; None: now."""
        self.prompt = prompt
        self.request = request
        self.sampler = sampler
        self.output = output
        """None: its answer is over, or its client is gone."""
        self.approximation = approximation
        self.submitted = monotonic() if arrived is None else arrived
        self.deadline = self.submitted + request.deadline_s if request.deadline_s is not None else None
        self.phase = Phase.WAITING
        self.is_kept = request.execution.is_kept
        self.label: Label | None = label_of(request) if request.execution.is_kept else None
        self.slot = -1
        self.tokens = TokenBuffer(prompt.tokens, min(prompt.max_new, 512) + len(prompt.closing))
        self.computed = 0
        self.shapes = Shapes()
        self.had_neighbours = False
        """Others have been in the engine since it is: its cells may lie anywhere, which changes how sums round."""
        self.holds_packed = False
        """Some of it was loaded from fewer bits than the engine's."""
        self.approximate_from: int | None = None
        """Where state begins that was moved there, now or before it was stored."""
        self.cursor: Cursor
        """How far the store is known to hold this sequence. From `occupy` on."""
        self.goes_on_from: Sequence | None = None
        """A turn that is over, and is stored before it."""
        self.saving: Save | None = None
        """What is on its way into the store: `cursor` does not count it yet."""
        self.reuse = Reuse()
        self.arrivals = Arrivals()
        self.splice: Splice | None = None
        """What is loaded is the state of its source: it becomes that of `tokens` when all has arrived."""
        self.pieces: deque[StoredPiece] = deque()
        """What is still to be moved here, in order."""
        self.started = self.last_used = self.submitted
        self.first_token_at: float | None = None
        self.prompt_length = self.answer_end = len(prompt)
        """Where what was sampled begins and ends."""
        self._lineage = prompt.lineage
        self.reusable = prompt.reusable
        """Its first tokens that need not be evaluated if their state is known."""
        self._apart_until = 0
        self.drafts: SequenceDrafts | None = None
        """Where its drafts come from, once there were any."""
        self.drafted_tokens = self.accepted_tokens = 0

    # ── what it needs ──

    @property
    def max_new(self) -> int:
        return self.prompt.max_new

    @property
    def cells(self) -> int:
        """The most token cells it can come to use."""
        if self.output is None:
            return len(self.tokens)
        return len(self.prompt) + self.max_new + len(self.prompt.closing)

    @property
    def memory(self) -> int:
        """The most bytes it can come to need, beyond what the engine always has."""
        return self.prompt.admitted.beyond if self.prompt.admitted else 0

    @property
    def lookup_tokens(self) -> TokenArray:
        return self.prompt.tokens[: self.prompt.reusable if self.request.use_cache else 0]

    # ── where it stands ──

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def is_active(self) -> bool:
        return self.phase is not Phase.IDLE

    @property
    def is_runnable(self) -> bool:
        is_evaluated = self.phase is Phase.EVALUATING or self.phase is Phase.CLOSING
        return is_evaluated and len(self.tokens) > self.computed

    @property
    def in_prompt(self) -> bool:
        """Still has prompt tokens to evaluate besides one that starts the answer."""
        return self.computed < self.reusable

    @property
    def fills(self) -> bool:
        """What it evaluates next is its prompt, or the end of its turn."""
        return self.computed < self.reusable or self.phase is Phase.CLOSING

    @property
    def is_blending(self) -> bool:
        """Its next tokens are moved, not evaluated."""
        return bool(self.pieces) and self.is_runnable and self.pieces[0].start <= self.computed

    @property
    def is_apart(self) -> bool:
        """It takes its steps by itself: one that it took with others failed, and it is not known because of
        which."""
        return self.computed < self._apart_until and self.is_runnable

    @property
    def scores_prompt(self) -> bool:
        """The tokens that it evaluates next are of a prompt whose log probabilities are wanted."""
        return self.request.scores_prompt and self.in_prompt and self.output is not None and not self.sampled_count

    @property
    def sampled_count(self) -> int:
        return self.answer_end - self.prompt_length

    @property
    def unsaved(self) -> int:
        return self.computed - self.cursor.position

    # ── whose it is ──

    @property
    def lineage(self) -> Lineage:
        """Whose state it computes now: its own from where it rests on moved or spliced state."""
        return self._lineage.in_place if self.approximate_from is None else self._lineage

    def shown_to(self, lineage: Lineage) -> int:
        """How many of its first tokens a request of that lineage may reuse."""
        if not lineage.sees(self._lineage.in_place) or self.splice is not None:
            return 0
        if lineage.sees(self._lineage) or (self.approximate_from is None and not self.pieces):
            return len(self.tokens)
        return self.pieces[0].start if self.approximate_from is None else self.approximate_from

    def forget(self) -> None:
        """Its user is forgotten: it is answered, and leaves nothing behind."""
        self.is_kept, self.label, self.stable = False, None, None
        self.saving = None

    # ── beginning ──

    def occupy(self, slot: int, cursor: Cursor, hot: Sequence | None, reused: int) -> None:
        """It has a slot, which holds the state of its first `reused` tokens, those of `hot`."""
        self.slot = slot
        self.cursor = cursor
        self.computed = reused
        self.reuse.spans.clear()
        self.reuse.add(0, reused, Source.HOT)
        self.phase = Phase.EVALUATING
        self.started = self.last_used = monotonic()
        self.arrivals.patience_ends = self.started + PATIENCE_S
        if hot is None:
            return
        self.goes_on_from = hot if hot.phase is Phase.CLOSING and not hot.pending else None
        self.holds_packed = hot.holds_packed
        self.shapes = hot.shapes.until(self.computed)
        self.had_neighbours = hot.had_neighbours
        begins = hot.approximate_from
        if begins is not None and begins < self.computed:
            self.rests_on_moved(begins)
        known = place_at(hot.cursor, min(hot.cursor.position, self.computed))
        if self.lineage.sees(known.chunk.lineage):
            self.cursor = replace(known, lineage=self.lineage)

    def wait_for(self, loads: Iterable[Load], from_disk: frozenset[bytes]) -> None:
        """Stored state is on its way, in this order; `from_disk` are the keys of what was not in RAM."""
        self.arrivals.loads.extend(loads)
        self.arrivals.from_disk = from_disk
        self.phase = Phase.LOADING

    def loaded(self, load: Load) -> None:
        chunk, before = load.chunk, self.computed
        is_packed = chunk.lineage.bits != EXACT_BITS
        self.holds(load.end, chunk.made.steps & ~Made.REPRODUCIBLE if is_packed else chunk.made.steps)
        self.arrivals.patience_ends = monotonic() + PATIENCE_S
        self.holds_packed |= is_packed
        if self.cursor.position < load.end:
            if not self.lineage.sees(chunk.lineage):
                self.rests_on_moved(chunk.start)
            here = Cursor(chunk, load.end - chunk.start, self.lineage)
            self.cursor = place_at(here, load.end) if chunk.is_snapshot else here
        self.reuse.add(before, load.end, self._source(chunk))

    def _source(self, chunk: Chunk) -> Source:
        if chunk.key in self.prompt.from_remote:
            return Source.REMOTE
        is_cold = chunk.key in self.prompt.read_ahead or chunk.key in self.arrivals.from_disk
        return Source.COLD if is_cold else Source.WARM

    def stop_loading(self) -> None:
        if self.phase is Phase.LOADING:
            self.phase = Phase.EVALUATING
            self.reuse.load_seconds = monotonic() - self.started

    # ── going on ──

    def next_slice(self, budget: int, *, joins_last: bool = False) -> tuple[TokenArray, int]:
        """The tokens to evaluate next, and after how many of them logits are needed. `joins_last`: the last prompt
        token need not go alone."""
        if self.phase is Phase.EVALUATING and self.sampled_count and self.computed + 1 == len(self.tokens):
            return self.tokens[self.computed :], int(self.output is not None)
        if self.largest_slice is not None:
            budget = min(budget, self.largest_slice)
        end = min(self.computed + budget, len(self.tokens))
        if self.in_prompt:
            end = self._prompt_slice_end(budget)
            if joins_last and self.reusable <= end < self.computed + budget and not self.scores_prompt:
                end = len(self.tokens)
        samples = self.phase is Phase.EVALUATING and end == len(self.tokens)
        assert self.output is None or samples or self.in_prompt or self.phase is Phase.CLOSING
        tokens = self.tokens[self.computed : end]
        if self.scores_prompt:
            return tokens, len(tokens)
        return tokens, int(samples and self.output is not None and self.max_new > 0)

    def _prompt_slice_end(self, budget: int) -> int:
        """A little rest is not left over: it would be evaluated in another batch shape, and round differently."""
        ahead = [border for border in self.prompt.borders if border > self.computed]
        ahead += [piece.start for piece in islice(self.pieces, 1)]
        remaining = min([*ahead, self.reusable]) - self.computed
        if FAIR_SLICE <= budget < remaining < budget + FAIR_SLICE:
            budget = (remaining + 1) // 2
        return self.computed + min(budget, remaining)

    def end_slice_at(self, position: int, earliest: int) -> int:
        """Let a slice of the prompt end, and its state be stored, at `position`, or where one ends anyhow between
        `earliest` and there. Says where."""
        near = [border for border in self.prompt.borders if max(earliest, self.computed + 1) <= border <= position]
        if near:
            return max(near)
        # Who parts a little later goes on from here: many that part one by one would make slices of one token.
        crowded = {fork for fork in self._forks if position < fork < position + _BETWEEN_FORKS}
        self._forks = self._forks - crowded | {position}
        self.prompt = replace(self.prompt, borders=self.prompt.borders - crowded | {position})
        return position

    @property
    def largest_slice(self) -> int | None:
        return self.prompt.admitted.plan.prefill_slice if self.prompt.admitted else self.request.prefill_slice

    def evaluated(self, count: int, wide_rows: int | None) -> None:
        """The next `count` tokens were computed in one step; from `wide_rows` on it is a wide one."""
        made = Made.NARROW
        if wide_rows is not None and count >= wide_rows:
            is_alone = not self.had_neighbours and self.shapes.reproducible(self.computed) == self.computed
            made = Made.WIDE | Made.REPRODUCIBLE if is_alone else Made.WIDE
        self.holds(self.computed + count, made)

    def holds(self, end: int, made: Made) -> None:
        """What it had not of the positions up to `end` is there now."""
        self.shapes.computed(self.computed, end, made)
        self.computed = end

    def holds_only(self, length: int) -> None:
        """What was computed and stored beyond that is not its own."""
        self.computed = min(self.computed, length)
        if self.cursor.position > length:
            self.cursor = place_at(self.cursor, length)

    def follow(self, tokens: TokenArray) -> int:
        """Its tokens become these; returns up to where what it has computed is theirs. The last one is always to
        be evaluated: what comes after it is asked for."""
        kept = common_prefix(self.tokens[: self.computed], tokens[:-1])
        self.holds_only(kept)
        self.tokens.cut(kept)
        self.tokens.extend(tokens[kept:].tolist())
        return kept

    def go_on_alone(self, kept: int) -> None:
        """A step with others has failed, and only the state of the first `kept` tokens is still there."""
        self._apart_until = self.computed + 1
        self.holds_only(kept)
        if self.sampled_count:
            # Whatever has to be evaluated again comes before the next sample.
            self.reusable = len(self.tokens) - 1

    def add_sampled(self, token: int) -> None:
        self.tokens.append(token)
        self.answer_end = len(self.tokens)

    def drop_sampled(self, kept: int) -> int:
        """Only the first `kept` sampled tokens are part of the answer (a stop string follows them); returns how
        many tokens there are then."""
        length = self.prompt_length + kept
        self.tokens.cut(length)
        self.answer_end = len(self.tokens)
        return length

    # ── state from other places ──

    def blended(self, end: int, repaired: int) -> None:
        """Everything up to `end` is there, with pieces moved into it."""
        self.rests_on_moved(self.computed)
        while self.pieces and self.pieces[0].start < end:
            piece = self.pieces.popleft()
            self.reuse.add(piece.start, min(piece.end, end), Source.MOVED)
            if piece.end > end:
                self.pieces.appendleft(piece.part(end, piece.end))
        self.reuse.repaired += repaired
        self.holds(end, Made.NARROW)

    def rests_on_moved(self, start: int) -> None:
        """From `start` on it is approximate, and what is stored of it from now on is stored as such."""
        if self.approximate_from is None or start < self.approximate_from:
            self.approximate_from = start
        self.cursor = replace(self.cursor, lineage=self.lineage)

    # ── context shift ──

    def spliced(self, splice: Splice, reached: int) -> None:
        """Its state was that of the splice's source up to `reached`, and is now that of its own tokens."""
        self.holds_only(splice.start)
        self.holds(splice.length(reached), Made.NARROW)
        self.rests_on_moved(splice.start)
        self.splices += 1
        self.inserted_tokens += len(splice.insert)

    def shorten(self, prompt: Prompt) -> None:
        """Its prompt becomes the shorter one; what was sampled stays, and what is told of its beginning."""
        assert prompt.splice is not None
        splice = prompt.splice
        self._first_lookup = self.lookup_record()
        parts = [self.tokens[: splice.start], splice.insert, self.tokens[splice.end :]]
        self.tokens = TokenBuffer(np.concatenate(parts), room=512)
        self.prompt = prompt
        self._lineage = prompt.lineage
        self.prompt_length -= splice.saved
        self.answer_end -= splice.saved
        # Whatever has to be evaluated again comes before the next sample.
        self.reusable = len(self.tokens) - 1

    # ── ending ──

    def close(self, closing: Iterable[int]) -> None:
        """It is answered: from here on no client waits for it, and the turn's last tokens are evaluated."""
        self.output = None
        self.phase = Phase.CLOSING
        self.tokens.extend(closing)

    def give_up_output(self) -> SequenceOutput | None:
        output, self.output = self.output, None
        return output

    def become_idle(self, entry: Entry | None = None) -> None:
        """Its state stays in the engine for the request that continues it, which may be the next turn of
        `entry`."""
        self.output = self.goes_on_from = None
        self.phase = Phase.IDLE
        self.tokens.cut(self.computed)
        self.last_used = monotonic()
        if entry is not None:
            self.entry, self.turn = entry.id, entry.turns

    def report_progress(self) -> None:
        """Tell a client who wants to know how much of the prompt is there."""
        if self.output is None or not self.request.want_progress or self.sampled_count:
            return
        cached, elapsed_ms = self.lookup_record().cached_tokens, 1e3 * (monotonic() - self.started)
        self.output.progress(Progress(self.prompt_length, cached, self.computed, elapsed_ms, self.marked))

    def lookup_record(self) -> LookupRecord:
        is_approximate = self.approximate_from is not None or self.holds_packed
        if self._first_lookup is not None:
            cut_ms = 1e3 * self.reuse.splice_seconds
            return replace(self._first_lookup, cut_ms=cut_ms, is_approximate=is_approximate)
        return self.reuse.record(self.prompt_length, self.reusable, self.shapes, is_approximate=is_approximate)
