"""Which tokens the next step evaluates."""

from __future__ import annotations

from emberkeep.engine.base import Rows
from emberkeep.kv.policy import Rate
from emberkeep.sched.sequence import FAIR_SLICE, Phase, Sequence

_STEP_S = 2.5
"""About the longest step while only prompts are evaluated: newcomers and cancellations wait for its end."""
_STEP_BESIDE_DECODES_S = 0.25
"""The same while answers are being written: each of them gets one token per step."""
_SMALLEST_SLICE = FAIR_SLICE
_SMALLEST_SLICE_BESIDE_DECODES = 32


class Planner:
    """`speed` is prompt tokens per second, measured as steps are run."""

    def __init__(self, batch: int, largest_slice: int, speed: Rate) -> None:
        self._batch = batch
        self._largest_slice = largest_slice
        self._speed = speed

    def plan(self, active: list[Sequence]) -> list[tuple[Sequence, Rows]]:
        """One row for every sequence that decodes; prompts share the rest of the step, those apart that blend.

        The shortest goes first, which makes waits shortest on the whole; a quarter is kept for the oldest, so
        that no prompt waits for ever. One that has to go alone does.
        """
        runnable = [s for s in active if s.is_runnable and not s.is_blending]
        runnable = [s for s in runnable if s.is_apart][:1] or runnable
        decoding = [s for s in runnable if not s.in_prompt and s.phase is Phase.EVALUATING]
        filling = [s for s in runnable if s.in_prompt or s.phase is Phase.CLOSING]
        room = min(self._slice(beside_decodes=bool(decoding)), self._batch - len(decoding))
        plan = [(s, *s.next_slice(1)) for s in decoding]
        oldest = min(filling, key=lambda s: s.started, default=None)
        kept = room // 4 if len(filling) > 1 else 0
        for sequence in sorted(filling, key=lambda s: s.pending):
            if sequence is oldest:
                kept = 0
            tokens, wants = sequence.next_slice(room - kept)
            room -= len(tokens)
            plan.append((sequence, tokens, wants))
        return [(s, Rows(s.slot, s.computed, tokens, wants)) for s, tokens, wants in plan if len(tokens)]

    def blend_room(self, active: list[Sequence]) -> int:
        """How many prompt tokens a step may cost that blends one sequence."""
        decoding = any(s.is_runnable and not s.in_prompt for s in active)
        return self._slice(beside_decodes=decoding)

    def measure(self, tokens: int, seconds: float) -> None:
        """A step took that long. Steps that hardly evaluate prompts say nothing about their speed."""
        if tokens >= _SMALLEST_SLICE_BESIDE_DECODES:
            self._speed.measure(tokens, seconds)

    def _slice(self, *, beside_decodes: bool) -> int:
        """Prompt tokens for the next step."""
        seconds, least = _STEP_S, _SMALLEST_SLICE
        if beside_decodes:
            seconds, least = _STEP_BESIDE_DECODES_S, _SMALLEST_SLICE_BESIDE_DECODES
        fitting = int(self._speed.value * seconds) // least * least if self._speed.value else least
        return min(max(fitting, least), self._largest_slice)
