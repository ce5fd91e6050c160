"""The hot tier: which sequence lives in which of the engine's slots.

A finished sequence stays in its slot, so that its next turn continues without moving a byte. Everything it
holds is in the store as well, so that giving its slot away costs a reload and never an evaluation.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Container
from dataclasses import dataclass
from time import monotonic

from emberkeep.engine.base import Engine
from emberkeep.kv.entries import EntryId
from emberkeep.sched.engine_thread import insist
from emberkeep.sched.sequence import Phase, Sequence
from emberkeep.token_arrays import TokenArray, common_prefix
from emberkeep.types import Lineage


@dataclass(frozen=True, slots=True)
class HotMatch:
    """`tokens` leading tokens of a prompt are (or will soon be) in `sequence`."""

    sequence: Sequence | None
    tokens: int


class Slots:
    """Belongs to the engine's thread."""

    def __init__(self, engine: Engine, tracked: int) -> None:
        """`tracked`: conversations whose slot is remembered."""
        self._engine = engine
        self._affinity = Affinity(engine.capabilities.max_sequences, tracked)
        self._whole_only = engine.capabilities.kv_unit.has_snapshots
        self._by_slot: dict[int, Sequence] = {}
        self.stuck: set[int] = set()
        """Slots that the engine could not empty. Whatever is in there is used by nobody."""

    @property
    def active(self) -> list[Sequence]:
        return [s for s in list(self._by_slot.values()) if s.is_active]

    @property
    def idle(self) -> list[Sequence]:
        return [s for s in list(self._by_slot.values()) if not s.is_active]

    def computed_match(self, lineage: Lineage, tokens: TokenArray) -> HotMatch:
        """The sequence that shares the longest computed prefix with `tokens`."""
        best = HotMatch(None, 0)
        for sequence in self._by_slot.values():
            if sequence.phase is Phase.LOADING:
                continue
            length = common_prefix(sequence.tokens[: min(sequence.computed, sequence.shown_to(lineage))], tokens)
            if self._whole_only and length != sequence.computed:
                continue
            if length and (length, not sequence.is_active) > (best.tokens, False):
                best = HotMatch(sequence, length)
        return best

    def coming_match(self, lineage: Lineage, tokens: TokenArray) -> HotMatch:
        """The active sequence that will have computed the longest shared prefix when its prompt is done."""
        best = HotMatch(None, 0)
        for sequence in self.active:
            if not self._whole_only:
                length = common_prefix(sequence.tokens[: sequence.shown_to(lineage)], tokens)
                if length > max(best.tokens, sequence.computed):
                    best = HotMatch(sequence, length)
        return best

    def preferred(self, sequence: Sequence) -> int:
        """The slot that its conversation would like: what the client asked for, the one it had, or at first the
        one with the fewest others."""
        lineage, key = sequence.lineage, sequence.prompt.keys.affinity
        return self._affinity.slot_for(lineage, key, sequence.request.slot)

    def claim(self, avoid: Sequence | None = None, prefer: int = 0) -> int | None:
        """A free slot, taken from the least valuable idle sequence (not `avoid`) if it must be."""
        slots: list[int] = [prefer, *range(self._engine.capabilities.max_sequences)]
        for slot in slots:
            if slot not in self._by_slot and slot not in self.stuck:
                return slot
        while (victim := self._least_valuable(avoid)) is not None:
            self.drop(victim)
            if victim.slot not in self.stuck:
                return victim.slot
        return None

    def occupy(self, sequence: Sequence) -> None:
        self._by_slot[sequence.slot] = sequence
        if len(self._by_slot) > 1:
            for each in self._by_slot.values():
                each.is_beside = True

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence's state in the engine. Never raises; twice is harmless."""
        if self._by_slot.get(sequence.slot) is sequence:
            self.vacate(sequence.slot)

    def vacate(self, slot: int) -> None:
        """Forget whatever is in a slot, known or not. Never raises: see `stuck`."""
        self._by_slot.pop(slot, None)
        if not insist(lambda: self._engine.trim(slot, 0), f"emptying slot {slot}"):
            self.stuck.add(slot)

    def clear_the_way(self, avoid: Sequence | None) -> None:
        """Before new work: give up resting sequences (not `avoid`), which the store has as well.

        Attention walks over every used cell, whoever's it is: 8,192 tokens at rest make a decode step 1.5 times
        and prompt evaluation twice as long, and their reload takes two such steps.
        """
        for sequence in self.idle:
            if sequence is not avoid:
                self.drop(sequence)

    def demote(self, entry: EntryId, before_turn: int) -> None:
        """Give up branches of a conversation that it has left alone since that turn."""
        for sequence in self.idle:
            if sequence.entry == entry and sequence.turn <= before_turn:
                self.drop(sequence)

    def forget(self, owners: Container[str]) -> None:
        """Give up everything that rests for these, exact or not; of what is being computed nothing is kept."""
        for sequence in [*self.idle, *self.active]:
            if sequence.lineage.owner not in owners:
                continue
            if sequence.is_active:
                sequence.forget()
            else:
                self.drop(sequence)
        self._affinity.forget(owners)

    def free_cells(self, avoid: Sequence | None = None) -> bool:
        """Give up one idle sequence; False when there is none left."""
        victim = self._least_valuable(avoid)
        if victim is not None:
            self.drop(victim)
        return victim is not None

    def _least_valuable(self, avoid: Sequence | None) -> Sequence | None:
        # Tokens per second of rest: a burst of short requests displaces itself, not a long conversation.
        now = monotonic()
        idle = [s for s in self.idle if s is not avoid]
        return min(idle, key=lambda s: s.computed / (now - s.last_used + 1), default=None)


class Affinity:
    """The `limit` conversations used last. Belongs to the engine's thread."""

    def __init__(self, slots: int, limit: int) -> None:
        self._slots = slots
        self._limit = limit
        self._pinned: OrderedDict[tuple[Lineage, str], int] = OrderedDict()

    def slot_for(self, lineage: Lineage, key: str, wanted: int | None = None) -> int:
        """`wanted`: what the client asked for, if it exists."""
        conversation = lineage, key
        slot = self._pinned.get(conversation)
        if wanted is not None and 0 <= wanted < self._slots:
            slot = wanted
        if slot is None:
            load = Counter(self._pinned.values())
            slot = min(range(self._slots), key=lambda candidate: load[candidate])
        self._pinned[conversation] = slot
        self._pinned.move_to_end(conversation)
        if len(self._pinned) > self._limit:
            self._pinned.popitem(last=False)
        return slot

    def forget(self, owners: Container[str]) -> None:
        for conversation in [c for c in self._pinned if c[0].owner in owners]:
            del self._pinned[conversation]
