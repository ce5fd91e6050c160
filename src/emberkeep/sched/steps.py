"""One step of the engine: schedule, execute, process what came out, store what was computed."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from time import monotonic

import numpy as np

from emberkeep.chat.prompt import Prompt
from emberkeep.engine.base import Outcome, Rows
from emberkeep.errors import EngineError
from emberkeep.kv.policy import Rate
from emberkeep.kv.tree import Made
from emberkeep.sched.drafts import Chosen
from emberkeep.sched.lifetimes import Endings, SchedulerParts
from emberkeep.sched.sampling import tell
from emberkeep.sched.sequence import FAIR_SLICE, Sequence, slice_within
from emberkeep.sched.sequence_state import EndReason, Phase
from emberkeep.sched.speculation import Speculation
from emberkeep.types.events import TokenLogprob
from emberkeep.values import dataclass

log = logging.getLogger("emberkeep.sched")


class _NoRoom(EngineError):
    """Nothing was evaluated."""

    def __init__(self) -> None:
        super().__init__("The context memory is full: try again with fewer requests.")


class Steps:
    """Belongs to the engine's thread."""

    def __init__(
        self,
        parts: SchedulerParts,
        endings: Endings,
        flush: Callable[[bool], None],
        is_wanted: Callable[[], bool],
    ) -> None:
        """`flush` wakes the readers of new output, in a hurry or not; `is_wanted`: whether something waits now."""
        self._engine, self._slots, self._cache = parts.engine, parts.slots, parts.cache
        self._commits = parts.cache.commits
        self._speculation = parts.speculation
        able = parts.engine.capabilities
        self._wide_rows, self._eog = able.wide_rows, parts.engine.vocab.eog
        self._planner = Planner(
            able.batch,
            parts.settings.prefill_slice,
            parts.store.costs.evaluate,
            parts.speculation,
            max(able.outputs - able.max_sequences, 0),
            is_wanted,
            joins_last=able.joins_last,
        )
        self._landed_at = self._took = 0.0
        self._counters, self._waiting = parts.counters, parts.waiting
        self._endings, self._only = endings, endings.only
        self._flush = flush
        self._hurries = False
        self._computed: list[Planned] = []  # the latest step, of which nothing is stored yet
        parts.engine.meanwhile = self._beside

    def run(self) -> None:
        batch = self._schedule()
        self._hurries = any(each.sequence.in_prompt for each in batch) or not batch
        if not (batch and self._engine.draws):
            begun = (each.sequence for each in batch if each.sequence.output is not None)
            is_awaited = any(s.first_token_at is None for s in begun)
            self._beside(waits=True, is_awaited=is_awaited and not len(self._waiting))
        if batch and self._execute(batch):
            for index, planned in enumerate(batch):
                try:  # as `only`, in less time
                    if planned.sequence.is_active:  # it has not failed beside the step
                        self._process_output(planned, index)
                except Exception as error:
                    self._endings.fail(planned.sequence, error)
            if self._engine.draws:
                self._computed = batch
            else:
                self._store_computed(batch, math.inf)
        self._blend()

    def _beside(self, *, waits: bool = False, is_awaited: bool = False) -> None:
        """What is done while the engine computes, and lets go of the interpreter: readers are woken, and what the
        step before computed is stored. `waits`: nothing is computed now. `is_awaited`: a first token is, and
        nobody waits for a slot, so turns that are over have time."""
        self._flush(self._hurries)
        until = monotonic() + max(_SPARED_S, _SPARED * self._took)
        batch, self._computed = self._computed, []
        self._store_computed(batch, until)
        if not is_awaited:
            self._endings.finish_closed(until, waits=waits)

    def _schedule(self) -> list[Planned]:
        try:
            return self._planner.plan(self._loaded(), is_ahead=self._engine.is_ahead, draws=self._engine.draws)
        except Exception:
            log.exception("a step could not be planned")
        for sequence in self._slots.active:
            with self._only(sequence):
                self._planner.plan([sequence])
        return self._planner.plan(self._slots.active)

    def _loaded(self) -> list[Sequence]:
        """Those whose state is in the engine, if any of them can go on: one whose state is still on its way there
        would hold up the others."""
        active = self._slots.active
        loaded = [s for s in active if not self._engine.is_loading(s.slot)]
        return loaded if any(s.is_runnable for s in loaded) else active

    def _blend(self) -> None:
        """One slice of one sequence into which state is moved; the others have had their step before it."""
        blending = [s for s in self._slots.active if s.pieces and s.is_blending]
        if not blending:
            return
        sequence = min(blending, key=lambda s: s.started)
        with self._only(sequence):
            before, moved = sequence.computed, sequence.reuse.moved
            if sequence.approximate_from is None:
                self._commits.commit_fork(sequence, before)
            is_decoding = any(s.is_runnable and not s.in_prompt for s in self._slots.active)
            room = self._planner.prompt_room(beside_decodes=is_decoding)
            if (blended := self._cache.blend.run(sequence, room)) is None:
                return
            self._counters.steps += 1
            outside = sequence.computed - before - (sequence.reuse.moved - moved)
            self._counters.evaluated_tokens += outside + blended.repaired
            self._counters.blended_tokens += sequence.computed - before
            self._counters.blended_token_layers += blended.token_layers
            self._commits.commit(sequence)
            self._go_on(sequence)

    def _execute(self, batch: list[Planned]) -> bool:
        begin = monotonic()
        try:
            self._planner.host_took(begin - self._landed_at)
            while batch and self._engine.evaluate([each.rows for each in batch]) is Outcome.NO_ROOM:
                if any(each.draft for each in batch):
                    batch[:] = [each.undrafted for each in batch]
                elif not self._slots.drop_one() and not self._set_aside(batch):
                    raise _NoRoom
            count = sum(len(each.rows.tokens) for each in batch)
            self._landed_at = monotonic()
            self._took = self._landed_at - begin
            self._planner.measure(count, len(batch), self._took)
        except Exception as error:
            # An error of its own is the engine's word that what was there before the step still is, where that is
            # not what a step changes.
            can_go_back = not self._engine.capabilities.kv_unit.has_snapshots
            is_intact = isinstance(error, _NoRoom) or (isinstance(error, EngineError) and can_go_back)
            self._endings.step_failed([each.sequence for each in batch], error, is_intact=is_intact)
            return False
        if not batch:
            return False
        self._counters.steps += 1
        self._counters.evaluated_tokens += count
        return True

    def _store_computed(self, batch: list[Planned], until: float) -> None:
        """Once everyone has what is new: storing a long prompt takes as long as some tokens."""
        if self._engine.capabilities.runs_ahead and not any(each.rows.outputs for each in batch):
            return  # the next step is prepared while this one runs
        storing = []
        for sequence in (each.sequence for each in batch):
            try:  # as `only`, in less time
                goes_on = sequence.phase is not Phase.IDLE and not self._endings.is_over(sequence)
                if goes_on and self._commits.has_to_commit(sequence, len(batch)):
                    storing.append(sequence)
            except Exception as error:
                self._endings.fail(sequence, error)
        if storing:
            self._flush(False)
        for sequence in storing:
            if monotonic() >= until:
                return  # a later step stores the rest
            with self._only(sequence):
                self._commits.commit(sequence)

    def _process_output(self, planned: Planned, index: int) -> None:
        sequence, drafted = planned.sequence, planned.draft.count if planned.draft else 0
        sequence.evaluated(len(planned.rows.tokens) - drafted, self._wide_rows)
        if planned.is_scored:
            self._score(planned, index)
        if planned.rows.outputs and not planned.is_scored:
            self._sample(planned, index)
        elif sequence.phase is Phase.CLOSING:
            self._endings.finish_if_closed(sequence)
        else:
            self._go_on(sequence)

    def _go_on(self, sequence: Sequence) -> None:
        if sequence.pending:
            sequence.report_progress()
        else:
            self._endings.end(sequence, EndReason.LENGTH)

    def _score(self, planned: Planned, index: int) -> None:
        """Tell how likely tokens of the prompt were. The logits after one of them are about the next."""
        sequence, rows = planned.sequence, planned.rows
        assert sequence.output is not None
        following = sequence.tokens[rows.start + 1 : rows.start + 1 + len(rows.tokens)].tolist()
        pieces, sampler = self._engine.vocab.pieces, sequence.sampler
        logits = (self._engine.logits(index, row) for row in range(len(following)))
        scored = [sampler.score(each, token, pieces) for each, token in zip(logits, following, strict=True)]
        sequence.output.scored(rows.start + 1, scored)

    def _sample(self, planned: Planned, index: int) -> None:
        """The next token, and as many more as were drafted rightly, or chosen by an engine that went on: each is
        what plain decoding would sample."""
        sequence, end = planned.sequence, None
        evaluated = planned.rows.tokens[1:].tolist() if planned.draft else self._went_on(planned, index)
        for row, following in enumerate([*evaluated, None]):
            token, logprob = self._choose(planned, index, row)
            end = self._take(sequence, token, logprob)
            if end is not None or token != following:
                break
        if row:
            sequence.holds(sequence.computed + row, Made.NARROW)
        if row < len(evaluated):
            self._engine.trim(sequence.slot, sequence.computed)
        if planned.draft:
            sequence.drafted_tokens += planned.draft.count
            sequence.accepted_tokens += row
            self._speculation.settle(sequence, planned.draft, accepted=row)
        assert sequence.output is not None
        if end is EndReason.LENGTH and sequence.output.full():
            sequence.phase = Phase.FULL  # it goes on when messages have left the context
        elif end is EndReason.STOPPED:
            self._stop(sequence)
        elif end is not None:
            self._endings.end(sequence, end)

    def _went_on(self, planned: Planned, index: int) -> list[int]:
        """With which tokens the engine went on by itself."""
        if planned.rows.choosing is None or self._engine.went_on is None:
            return []
        tokens = self._engine.went_on(index)
        self._counters.evaluated_tokens += len(tokens)
        return tokens

    def _choose(self, planned: Planned, index: int, row: int) -> tuple[int, TokenLogprob | None]:
        sampler = planned.sequence.sampler
        if (choosing := planned.rows.choosing) is not None:
            token = self._engine.likeliest(index, row)
            sampler.chose(token)
            if choosing.top_logprobs is None or self._engine.logprobs is None:
                return token, None
            return token, tell(token, self._engine.logprobs(index, row), self._engine.vocab.pieces)
        if sampler.takes_likeliest:
            return self._engine.likeliest(index, row), None
        return sampler.sample(self._engine.logits(index, row), self._engine.vocab.pieces)

    def _take(self, sequence: Sequence, token: int, logprob: TokenLogprob | None) -> EndReason | None:
        """A token was sampled; says whether the answer is over."""
        assert sequence.output is not None
        if sequence.first_token_at is None:
            sequence.first_token_at = monotonic()
            sequence.report_progress()
        if token in self._eog:
            return EndReason.END_OF_TURN
        sequence.add_sampled(token)
        self._counters.sampled_tokens += 1
        if sequence.output.token(token, logprob):
            return EndReason.STOPPED
        return EndReason.LENGTH if sequence.sampled_count >= sequence.max_new else None

    # ── a full context ──

    def _set_aside(self, batch: list[Planned]) -> bool:
        """Take the longest answer whose context can be shortened out of a step for which there is no room."""
        for planned in sorted(batch, key=lambda planned: -planned.sequence.computed):
            sequence, output = planned.sequence, planned.sequence.output
            if output is None or not planned.rows.outputs or not sequence.sampled_count:
                continue
            with self._only(sequence):
                if not output.full():
                    continue
                sequence.phase = Phase.FULL
            # It waits for room now, or it failed.
            batch[:] = [each for each in batch if each is not planned]
            return True
        return False

    def go_on_with(self, sequence: Sequence, prompt: Prompt | None) -> None:
        """It waited for room: it goes on with this prompt, or (None) ends where it is."""
        if sequence.phase is not Phase.FULL:
            return
        with self._only(sequence):
            sequence.phase = Phase.EVALUATING
            if prompt is None:
                self._endings.end(sequence, EndReason.LENGTH)
            else:
                self._cache.shift.shorten(sequence, prompt)

    def _stop(self, sequence: Sequence) -> None:
        """Drop sampled tokens that are not part of the answer (a stop string), here and in the engine."""
        assert sequence.output is not None
        length = sequence.drop_sampled(sequence.output.kept_tokens())
        if sequence.computed > length:
            if self._engine.capabilities.kv_unit.has_snapshots:
                length = 0  # such state cannot go back: it is given up
            self._engine.trim(sequence.slot, length)
            sequence.tokens.cut(length)
            sequence.computed = length
        self._endings.end(sequence, EndReason.STOPPED)


_SPARED_S, _SPARED = 0.002, 0.25
"""A step can spare about so long, and such a share of what the one before took, for storing what was computed."""
_STEP_S = 2.5
"""About the longest step while only prompts are evaluated: newcomers and cancellations wait for its end."""
_STEP_BESIDE_DECODES_S = 0.25
"""The same while answers are being written: each of them gets one token per step."""
_SMALLEST_SLICE_BESIDE_DECODES = 32
_SMOOTHING, _LONGEST_HOST_S = 0.1, 0.02


@dataclass(slots=True)
class Planned:
    """Never changed; see `Rows`."""

    sequence: Sequence
    rows: Rows
    draft: Chosen | None = None
    """What the last tokens of `rows` are, if they are not sampled yet."""
    is_scored: bool = False
    """Logits are wanted for the prompt's own tokens, and nothing is sampled."""

    @property
    def undrafted(self) -> Planned:
        if self.draft is None:
            return self
        rows, count = self.rows, len(self.rows.tokens) - self.draft.count
        return Planned(self.sequence, Rows(rows.sequence, rows.start, rows.tokens[:count], min(rows.outputs, 1)))


class Planner:
    """`speed` is prompt tokens per second, measured as steps are run."""

    def __init__(
        self,
        batch: int,
        largest_slice: int,
        speed: Rate,
        speculation: Speculation | None = None,
        spare_outputs: int = 0,
        is_wanted: Callable[[], bool] = lambda: False,
        *,
        joins_last: bool = False,
    ) -> None:
        """`spare_outputs`: rows with logits in one step, beyond one for each sequence. `is_wanted`: whether
        something waits now, which a step that is launched ahead would hold up. Else see `Capabilities`."""
        self._joins_last, self._is_wanted = joins_last, is_wanted
        self._host_s = 0.0
        self._batch = batch
        self._spare_outputs = spare_outputs
        self._speculation = speculation
        self._largest_slice = largest_slice
        self._speed = speed

    def plan(self, active: list[Sequence], *, is_ahead: bool = False, draws: bool = False) -> list[Planned]:
        """One row for every sequence that decodes, and drafts; prompts share the rest of the step, those apart
        that blend. `is_ahead`, `draws`: see `Engine`.

        The shortest goes first, which makes waits shortest on the whole; a quarter is kept for the oldest, so
        that no prompt waits for ever. One that has to go alone does.
        """
        decoding, filling = _divide(active)
        room = self.prompt_room(beside_decodes=bool(decoding)) if filling else 0
        room = min(room, self._batch - len(decoding))
        plan: list[Planned] = []
        spare = self._spare_outputs
        oldest = min(filling, key=lambda s: s.started, default=None)
        kept = room // 4 if len(filling) > 1 else 0
        for sequence in sorted(filling, key=lambda s: s.pending):
            if sequence is oldest:
                kept = 0
            is_scored = sequence.scores_prompt
            most = min(room - kept, 1 + spare) if is_scored else room - kept
            tokens, outputs = sequence.next_slice(most, joins_last=self._joins_last)
            room -= len(tokens)
            spare -= max(outputs - 1, 0)
            if len(tokens):
                choosing = sequence.sampler.choosing(draws=draws) if outputs and not is_scored else None
                rows = Rows(sequence.slot, sequence.computed, tokens, outputs, choosing)
                plan.append(Planned(sequence, rows, is_scored=is_scored))
        drafts: Mapping[Sequence, Chosen] = {}
        if self._speculation is not None and decoding and spare == self._spare_outputs:
            # They need the same rows with logits as prompts that are scored.
            beside = sum(len(each.rows.tokens) for each in plan)
            room = self._batch - len(decoding) - beside
            drafts = self._speculation.draft(
                decoding,
                beside=beside,
                room=room,
                host_s=self._host_s if draws else 0.0,
                is_ahead=is_ahead,
            )
        is_promising = self._speculation is not None and self._speculation.is_promising
        may_go_on = not (filling or is_promising or self._is_wanted())
        how = partial(_decoding, may_go_on=may_go_on, draws=draws)
        return [*(how(sequence, drafts.get(sequence)) for sequence in decoding), *plan]

    def prompt_room(self, *, beside_decodes: bool) -> int:
        """How many prompt tokens a step may evaluate, or what blending may cost in their place."""
        if beside_decodes:
            seconds, least = _STEP_BESIDE_DECODES_S, _SMALLEST_SLICE_BESIDE_DECODES
        else:
            seconds, least = _STEP_S, FAIR_SLICE
        return slice_within(seconds, self._speed, least, self._largest_slice)

    def measure(self, tokens: int, sequences: int, seconds: float) -> None:
        """A step took that long. Steps that hardly evaluate prompts say nothing about their speed."""
        if tokens >= max(_SMALLEST_SLICE_BESIDE_DECODES, 2 * sequences):
            self._speed.measure(tokens, seconds)
        elif self._speculation is not None:
            self._speculation.step_took(tokens, seconds)

    def host_took(self, seconds: float) -> None:
        """So long nothing was evaluated between two steps."""
        self._host_s += _SMOOTHING * (min(seconds, _LONGEST_HOST_S) - self._host_s)


def _divide(active: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
    """Those that decode, and those that have a prompt or the end of a turn to evaluate."""
    decoding: list[Sequence] = []
    filling: list[Sequence] = []
    for sequence in active:
        if sequence.is_runnable and not sequence.is_blending:
            if sequence.is_apart:
                return ([], [sequence]) if sequence.fills else ([sequence], [])
            (filling if sequence.fills else decoding).append(sequence)
    return decoding, filling


def _decoding(sequence: Sequence, draft: Chosen | None, *, may_go_on: bool, draws: bool) -> Planned:
    tokens, outputs = sequence.next_slice(1)
    if draft is None or not outputs:
        goes_on = sequence.max_new - sequence.sampled_count - 1 if may_go_on else 0
        choosing = sequence.sampler.choosing(draws=draws) if outputs else None
        return Planned(sequence, Rows(sequence.slot, sequence.computed, tokens, outputs, choosing, goes_on))
    tokens = np.concatenate([tokens, draft.draft.tokens[: draft.count]])
    return Planned(sequence, Rows(sequence.slot, sequence.computed, tokens, 1 + draft.count), draft)
