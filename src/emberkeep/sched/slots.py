"""These classes know which sequence holds which of the engine's slots (the hot tier), which waits for one, and
which ended.

A finished sequence stays in its slot, so that its next turn continues without moving a byte. Everything it
holds is in the store as well, so that giving its slot away costs a reload and never an evaluation.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import replace
from heapq import heapify, heappop, heapreplace
from itertools import count
from math import inf
from time import monotonic

from emberkeep.engine.base import Engine, Outcome
from emberkeep.kv.entries import EntryId
from emberkeep.latest import Latest
from emberkeep.sched.engine_thread import insist
from emberkeep.sched.sequence import Sequence
from emberkeep.sched.sequence_state import Phase
from emberkeep.token_arrays import TokenArray, common_prefix
from emberkeep.types.events import Source
from emberkeep.types.lineage import Lineage
from emberkeep.types.models import RequestState, TimelineRecord
from emberkeep.types.request import Json
from emberkeep.values import dataclass

log = logging.getLogger("emberkeep.sched")


@dataclass(frozen=True, slots=True)
class HotMatch:
    """`tokens` leading tokens of a prompt are (or will soon be) in `sequence`."""

    sequence: Sequence | None
    tokens: int


class Slots:
    """Belongs to the engine's thread; any may read `active`, `idle` and `stats`."""

    def __init__(self, engine: Engine, tracked: int) -> None:
        """`tracked`: conversations whose slot is remembered."""
        self._engine = engine
        self._affinity = SlotAffinity(engine.capabilities.max_sequences, tracked)
        self._whole_only = engine.capabilities.kv_unit.has_snapshots
        self._by_slot: dict[int, Sequence] = {}
        self._busy: list[Sequence] = []
        """Those that are active, and some that were: asked for several times a step. Replaced, never changed."""
        self.stuck: set[int] = set()
        """Slots that the engine could not empty. What is in there is not used."""

    @property
    def active(self) -> list[Sequence]:
        return [s for s in self._busy if s.phase is not Phase.IDLE]

    @property
    def idle(self) -> list[Sequence]:
        return [s for s in list(self._by_slot.values()) if not s.is_active]

    def stats(self) -> list[dict[str, Json]]:
        """What is in each slot, without texts."""
        sequences = dict(self._by_slot)
        return [_slot_stats(slot, sequences.get(slot)) for slot in range(self._engine.capabilities.max_sequences)]

    def computed_match(self, lineage: Lineage, tokens: TokenArray) -> HotMatch:
        """The sequence that shares the longest computed prefix with `tokens`."""
        best = HotMatch(None, 0)
        for sequence in self._by_slot.values():
            if sequence.phase is Phase.LOADING or not sequence.tokens.begin_as(tokens):
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
            if not sequence.tokens.begin_as(tokens):
                continue
            shown = sequence.shown_to(lineage)
            ahead = sequence.prompt.tokens[: sequence.prompt.reusable] if self._whole_only else sequence.tokens
            length = common_prefix(ahead[:shown], tokens)
            if length > max(best.tokens, sequence.computed):
                best = HotMatch(sequence, length)
        return best

    def preferred_slot(self, sequence: Sequence) -> int:
        """Returns and remembers its conversation's slot: the one the client names, the one it had, or the one that
        fewest share."""
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
        self._busy = [*(s for s in self.active if s is not sequence), sequence]
        if len(self._by_slot) > 1:
            for each in self._by_slot.values():
                each.had_neighbours = True

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence's state in the engine. Never raises; twice is harmless."""
        if self._by_slot.get(sequence.slot) is sequence:
            log.debug("hot: %d tokens leave slot %d", sequence.computed, sequence.slot)
            self.vacate(sequence.slot)

    def vacate(self, slot: int) -> None:
        """Forget whatever is in a slot, known or not. Never raises: see `stuck`."""
        gone = self._by_slot.pop(slot, None)
        self._busy = [s for s in self._busy if s is not gone]
        if not insist(lambda: self._engine.trim(slot, 0), f"emptying slot {slot}"):
            self.stuck.add(slot)

    def clear_the_way(self, avoid: Sequence | None = None) -> None:
        """Before new work: give up idle sequences (not `avoid`), which the store has as well.

        Attention walks over every used cell: 8,192 idle tokens make a decode step 1.5 times
        and prompt evaluation twice as long, and their reload takes two such steps.
        """
        for sequence in self.idle:
            if sequence is not avoid:
                self.drop(sequence)

    def demote(self, entry: EntryId, last_turn: int) -> None:
        """Give up the idle branches that a conversation used last in `last_turn` or before."""
        for sequence in self.idle:
            if sequence.entry == entry and sequence.turn <= last_turn:
                self.drop(sequence)

    def drop_idle(self, entries: Container[EntryId], unnamed_s: float | None) -> None:
        """Give up the idle sequences of `entries`, and with `unnamed_s` those without an entry that have rested
        for so many seconds."""
        since = float("-inf") if unnamed_s is None else monotonic() - unnamed_s
        for sequence in self.idle:
            is_old = sequence.entry is None and sequence.last_used <= since
            if is_old or sequence.entry in entries:
                self.drop(sequence)

    def keep_latest(self, tokens: int) -> None:
        """Keep the idle sequences used last, up to `tokens` in all; give up the others."""
        for sequence in sorted(self.idle, key=lambda s: s.last_used, reverse=True):
            tokens -= sequence.computed
            if tokens < 0:
                self.drop(sequence)

    def forget(self, owners: Container[str]) -> None:
        """Drop the idle sequences of `owners`; what is computed for them now is not kept."""
        for sequence in [*self.idle, *self.active]:
            if sequence.lineage.owner not in owners:
                continue
            if sequence.is_active:
                sequence.forget()
            else:
                self.drop(sequence)
        self._affinity.forget(owners)

    def with_room(self, action: Callable[[], Outcome], avoid: Sequence | None = None) -> Outcome:
        """Run `action`, giving up idle sequences (not `avoid`) until it has room; NO_ROOM if none is left."""
        while (outcome := action()) is Outcome.NO_ROOM and self.drop_one(avoid):
            pass
        return outcome

    def drop_one(self, avoid: Sequence | None = None) -> bool:
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


def _slot_stats(slot: int, sequence: Sequence | None) -> dict[str, Json]:
    if sequence is None:
        return {"id": slot, "is_processing": False, "entry": None}
    answers = sequence.output is not None
    sampled = sequence.sampled_count if answers else 0
    left = sequence.max_new - sampled if answers else -1
    return {
        "id": slot,
        "is_processing": answers,
        "entry": None if sequence.entry is None else str(sequence.entry),
        "n_prompt_tokens": sequence.prompt_length,
        "n_prompt_tokens_cache": sequence.reuse.in_place,
        "n_prompt_tokens_processed": min(sequence.computed, sequence.prompt_length) - sequence.reuse.in_place,
        "n_tokens": sequence.computed,
        "next_token": [{"has_next_token": answers, "n_decoded": sampled, "n_remain": left}],
    }


class SlotAffinity:
    """Remembers the slots of the `limit` conversations used last. Belongs to the engine's thread."""

    def __init__(self, slots: int, limit: int) -> None:
        self._slots = slots
        self._pinned: Latest[tuple[Lineage, str], int] = Latest(limit)

    def slot_for(self, lineage: Lineage, key: str, client_slot: int | None = None) -> int:
        """Remembers what it returns. `client_slot` counts if it exists."""
        conversation = lineage, key
        slot = self._pinned.get(conversation)
        if client_slot is not None and 0 <= client_slot < self._slots:
            slot = client_slot
        if slot is None:
            load = Counter(self._pinned.values())
            least = min(load.values()) if len(load) == self._slots else 0
            slot = next(candidate for candidate in range(self._slots) if load.get(candidate, 0) == least)
        self._pinned[conversation] = slot
        return slot

    def forget(self, owners: Container[str]) -> None:
        for conversation in [c for c in self._pinned if c[0].owner in owners]:
            del self._pinned[conversation]


class WaitingQueue:
    """Any thread may count and iterate it; the rest is for the engine's thread."""

    def __init__(self) -> None:
        self._sequences: dict[Sequence, HotMatch | None] = {}
        self._by_user: dict[str, dict[Sequence, None]] = {}
        """Users by how long they have waited since they came or were served, the longest first."""
        self._served: set[str] = set()
        """Users who had a sequence in the engine at the last `in_turn`, or got one in it."""
        self._expires = inf
        """No deadline of those that wait is earlier."""

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(list(self._sequences))

    def forget(self) -> None:
        """Drop the names of users who do not wait."""
        self._served.clear()

    def in_turn(self, running: Mapping[str, int]) -> Iterator[Sequence]:
        """Every waiting sequence; `running` counts the sequences of each user that are in the engine.

        First comes the user with the fewest running, among those the one who has waited longest; the sequences of
        one user come in order of arrival. A sequence that is removed before the next one is asked for counts as
        running. So a user with nothing running, however long other queues are, waits for those that run when it
        comes, and for one sequence of each user who waits with nothing running too.
        """
        self._send_back(self._served)
        self._served = set(running)
        place = count()
        waiting = [(user, iter(list(sequences))) for user, sequences in self._by_user.items()]
        turns = [(running.get(user, 0), next(place), user, sequences) for user, sequences in waiting]
        heapify(turns)
        while turns:
            runs, _, user, sequences = turns[0]
            sequence = next(sequences, None)
            if sequence is None:
                heappop(turns)
                continue
            if sequence not in self._sequences:
                continue  # refused meanwhile
            yield sequence
            if sequence not in self._sequences:
                self._served.add(user)
                self._send_back({user})
                heapreplace(turns, (runs + 1, next(place), user, sequences))

    def add(self, sequence: Sequence) -> None:
        self._sequences[sequence] = None
        self._by_user.setdefault(sequence.request.user, {})[sequence] = None
        self._expires = min(self._expires, _deadline(sequence))

    def remove(self, sequence: Sequence) -> None:
        """Does nothing for a sequence that is not waiting."""
        if sequence not in self._sequences:
            return
        del self._sequences[sequence]
        queue = self._by_user[sequence.request.user]
        del queue[sequence]
        if not queue:
            del self._by_user[sequence.request.user]

    def wait_for(self, sequence: Sequence, coming: HotMatch) -> None:
        """Let `sequence` wait until `coming.sequence` has computed what both share."""
        self._sequences[sequence] = coming

    def still_waits(self, sequence: Sequence) -> bool:
        coming = self._sequences[sequence]
        if coming is None or coming.sequence is None:
            return False
        return coming.sequence.is_active and coming.sequence.computed < coming.tokens

    def expired(self, now: float) -> list[Sequence]:
        """Those whose time has run out since it was last asked."""
        if now <= self._expires:
            return []
        expired = [sequence for sequence in self._sequences if now > _deadline(sequence)]
        self._expires = min((end for end in map(_deadline, self._sequences) if end >= now), default=inf)
        return expired

    def _send_back(self, users: set[str]) -> None:
        """Put `users`, who were just served, behind the others, who have waited longer."""
        for user in [user for user in self._by_user if user in users]:
            self._by_user[user] = self._by_user.pop(user)


def _deadline(sequence: Sequence) -> float:
    return inf if sequence.deadline is None else sequence.deadline


# ── the latest requests ──

REMEMBERED = 200


class Timeline:
    """Written by the engine's thread, and read by any."""

    def __init__(self) -> None:
        self._latest: deque[TimelineRecord] = deque(maxlen=REMEMBERED)
        self._numbers = count(1)

    def came(self, sequence: Sequence) -> None:
        sequence.number = next(self._numbers)

    def ended(self, sequence: Sequence, state: RequestState) -> None:
        self._latest.append(replace(_record(sequence), state=state, ended_at=monotonic()))

    def forget(self, owners: Container[str]) -> None:
        kept = [record for record in self._latest if record.namespace not in owners]
        self._latest = deque(kept, maxlen=REMEMBERED)

    def read(self, present: Iterable[Sequence]) -> list[TimelineRecord]:
        """The latest first; `present` are those that have not ended."""
        running = [_record(sequence) for sequence in present if sequence.output is not None]
        # A request may get its slot or end while this runs: its last record counts.
        found = {record.number: record for record in (*running, *list(self._latest))}
        return [found[number] for number in sorted(found, reverse=True)]


def _record(sequence: Sequence) -> TimelineRecord:
    request, has_slot = sequence.request, sequence.phase is not Phase.WAITING
    may_name = sequence.is_kept  # else its user wants no trace, or was forgotten meanwhile
    reuse = sequence.reuse
    was_loaded = any(source is not Source.HOT for _, _, source in reuse.spans)
    return TimelineRecord(
        number=sequence.number,
        namespace=request.namespace if may_name else "",
        user=request.user if may_name else "",
        conversation_id=request.conversation_id if may_name else None,
        is_prefix=request.execution.is_prefix,
        state=_STATES.get(sequence.phase)
        or (RequestState.PREFILL if sequence.first_token_at is None else RequestState.DECODE),
        slot=sequence.slot,
        asked_at=sequence.submitted,
        started_at=sequence.started if has_slot else None,
        loaded_at=sequence.started + reuse.load_seconds if was_loaded and reuse.load_seconds else None,
        first_token_at=sequence.first_token_at,
        ended_at=None,
        computed_tokens=min(sequence.computed, sequence.prompt_length),
        sampled_tokens=sequence.sampled_count,
        lookup=sequence.lookup_record(),
    )


_STATES = {Phase.WAITING: RequestState.WAITING, Phase.LOADING: RequestState.LOADING}
