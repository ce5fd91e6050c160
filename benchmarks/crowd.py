"""crowd: many conversations over a budget that holds a few of them. Does it hold, and who is still there?

Real scheduler, store and files; the engine is the fake one, which needs no time, because what is measured is what
is found again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.listener import Listener
from emberkeep.bench.report import BenchResult, Row, Table
from emberkeep.bench.workspace import Workspace
from emberkeep.chat.prompt import prompt_of_ids
from emberkeep.engine.fake import FakeEngine
from emberkeep.errors import EmberkeepError
from emberkeep.kv.disk.chunk_files import ChunkFiles
from emberkeep.kv.policy import Keeping, Rate, Worth, worth
from emberkeep.kv.store import Budgets, KvStore
from emberkeep.kv.tree import Chunk
from emberkeep.sched.lifetimes import SchedulerSettings
from emberkeep.sched.sampling import Sampler
from emberkeep.sched.scheduler import Scheduler
from emberkeep.sched.sequence import Sequence as Sequence_
from emberkeep.sched.sequence_state import Ending
from emberkeep.types.cache import EntryKind, Label
from emberkeep.types.request import Request, Sampling

_CONTEXT = 4096
_PRINTABLE = (32, 127)
_PLENTY = 1 << 40


@dataclass(frozen=True, slots=True)
class CrowdPlan:
    conversations: int = 100
    holds: int = 20
    """How many of them the budgets hold when they are complete."""
    requests: int = 1500
    turns: int = 8
    """After so many a conversation is over, and a new one takes its place."""
    prefix: int = 300
    """Tokens that all begin with."""
    message: int = 120
    """Tokens of a user's message."""
    answer: int = 8
    skew: float = 1.0
    """How much more some conversations are asked than others (Zipf)."""

    def quick(self) -> CrowdPlan:
        return CrowdPlan(conversations=12, holds=3, requests=60)


@dataclass(frozen=True, slots=True)
class Outcome:
    asked: int
    reused: int
    most_warm: int
    most_cold: int
    """Bytes of each tier, as large as they were ever seen."""
    failures: int


async def run(workspace: Workspace, plan: CrowdPlan) -> BenchResult:
    budget = plan.holds * _bytes_of_a_conversation(workspace.new_data_dir(), plan)
    rows = []
    for label, policy in (("by value", worth), ("least recently used", _least_recently_used)):
        workspace.say(f"{plan.requests:,} requests, evicting {label}")
        rows.append(Row(label, _values(_served(workspace.new_data_dir(), plan, budget, policy), budget)))
    title = f"{plan.conversations} conversations over budgets of {budget:,} bytes, which hold {plan.holds} of them"
    return BenchResult("crowd", (Table(title, tuple(rows)),))


def _values(outcome: Outcome, budget: int) -> dict[str, str | int]:
    return {
        "tokens reused": f"{outcome.reused / outcome.asked:.1%}",
        "most in RAM": f"{outcome.most_warm / budget:.1%}",
        "most on disk": f"{outcome.most_cold / budget:.1%}",
        "failures": outcome.failures,
    }


def _least_recently_used(chunk: Chunk, now: int, rhythm: float) -> float:
    return float(chunk.last_used)


@dataclass(eq=False, slots=True)
class _Conversation:
    name: str
    tokens: list[int]
    turns: int = 0


class _Crowd:
    """Who says what next: the same for every policy."""

    def __init__(self, plan: CrowdPlan) -> None:
        self._plan = plan
        self._random = np.random.default_rng(5)
        self._prefix = self._some(plan.prefix)
        self._talking: dict[int, _Conversation] = {}
        self._begun = 0

    def turns(self) -> Iterator[_Conversation]:
        plan = self._plan
        weights = 1 / np.arange(1, plan.conversations + 1) ** plan.skew
        for place in self._random.choice(plan.conversations, plan.requests, p=weights / weights.sum()):
            yield self.next_turn(int(place))

    def next_turn(self, place: int) -> _Conversation:
        known = self._talking.get(place)
        if known is None or known.turns == self._plan.turns:
            self._begun += 1
            known = self._talking[place] = _Conversation(f"{self._begun}", list(self._prefix))
        known.tokens += self._some(self._plan.message)
        known.turns += 1
        return known

    def _some(self, count: int) -> list[int]:
        return [int(token) for token in self._random.integers(*_PRINTABLE, count)]


class _House:
    """A store and a loop."""

    def __init__(self, folder: Path, budget: int, policy: Worth) -> None:
        engine = FakeEngine(cells=2 * _CONTEXT, context=_CONTEXT, sequences=2)
        self.store = KvStore(
            engine.fingerprint,
            Budgets(budget, budget),
            ChunkFiles(folder, engine.fingerprint),
            keeping=Keeping(worth=policy),
        )
        self.store.costs.evaluate = _Unmeasured()
        self._loop = Scheduler(
            engine, self.store, SchedulerSettings(parallel=1, prefill_slice=engine.capabilities.batch)
        )

    def answer(self, conversation: _Conversation, length: int) -> Ending:
        """One turn; what was said becomes part of the conversation. Raises EmberkeepError."""
        label = Label(EntryKind.CONVERSATION, conversation.name, "")
        listener = Listener()
        prompt = prompt_of_ids(np.array(conversation.tokens, np.int32), max_new=length)
        sequence = Sequence_(prompt, Request(), Sampler(Sampling(temperature=0.0)), listener)
        sequence.label = label
        self._loop.submit(sequence)
        try:
            return listener.ending.result()
        finally:
            conversation.tokens += listener.tokens

    def close(self) -> None:
        self._loop.close()
        self.store.close()


class _Unmeasured(Rate):
    """Loading is always worth it: this engine is quicker than any disk."""

    def measure(self, amount: float, seconds: float) -> None:
        pass


def _served(folder: Path, plan: CrowdPlan, budget: int, policy: Worth) -> Outcome:
    house = _House(folder, budget, policy)
    asked = reused = most_warm = most_cold = failures = 0
    try:
        for conversation in _Crowd(plan).turns():
            try:
                ending = house.answer(conversation, plan.answer)
            except EmberkeepError:
                failures += 1
                continue
            asked += ending.lookup.prompt_tokens
            reused += ending.lookup.reused_tokens
            warm, cold = house.store.held_bytes()
            most_warm, most_cold = max(most_warm, warm), max(most_cold, cold)
    finally:
        house.close()
    return Outcome(asked, reused, most_warm, most_cold, failures)


def _bytes_of_a_conversation(folder: Path, plan: CrowdPlan) -> int:
    """What one that is complete takes on disk."""
    house, crowd = _House(folder, _PLENTY, worth), _Crowd(plan)
    try:
        for _ in range(plan.turns):
            house.answer(crowd.next_turn(0), plan.answer)
    finally:
        house.close()
    return sum(path.stat().st_size for path in folder.rglob("*.kv"))
