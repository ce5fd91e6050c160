"""Whose turn it is: users share the engine fairly, whatever each of them asks for."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.engine.fake import FakeEngine
from emberkeep.sched.sampling import Sampler
from emberkeep.sched.sequence import Sequence
from emberkeep.sched.slots import WaitingQueue
from emberkeep.types.request import Request
from helpers.scheduling import ENDLESS, GREEDY, Gate, Recorder, Rig, prompt_of, text


def sequence_of(user: str) -> Sequence:
    return Sequence(prompt_of([0], max_new=1), Request(user=user), Sampler(GREEDY), Recorder())


class Queue:
    """A waiting queue before `parallel` slots, driven as the loop drives it, that records what happened."""

    def __init__(self, parallel: int) -> None:
        self.waiting = WaitingQueue()
        self.parallel = parallel
        self.running: list[Sequence] = []
        self.arrived: defaultdict[str, list[Sequence]] = defaultdict(list)
        self.started: list[Sequence] = []
        self.held_back: set[Sequence] = set()
        """Passed over, as those are who wait for a prefix that is being computed."""

    def arrive(self, user: str) -> None:
        self.arrived[user].append(sequence_of(user))
        self.waiting.add(self.arrived[user][-1])

    def finish(self, index: int) -> None:
        if self.running:
            self.running.pop(index % len(self.running))

    def admit(self) -> None:
        for sequence in self.waiting.in_turn(self.load):
            if len(self.running) >= self.parallel:
                return
            if sequence in self.held_back:
                continue
            self.start(sequence)
            self.waiting.remove(sequence)

    def start(self, sequence: Sequence) -> None:
        self.running.append(sequence)
        self.started.append(sequence)

    def drain(self) -> str:
        """Let everything finish, the oldest first; the users in the order in which their sequences started."""
        begin = len(self.started)
        self.admit()
        while self.running:
            self.finish(0)
            self.admit()
        return "".join(sequence.request.user for sequence in self.started[begin:])

    @property
    def load(self) -> Counter[str]:
        return Counter(sequence.request.user for sequence in self.running)

    @property
    def startable(self) -> set[str]:
        return {sequence.request.user for sequence in self.waiting if sequence not in self.held_back}


def arrivals(parallel: int, users: str) -> Queue:
    queue = Queue(parallel)
    for user in users:
        queue.arrive(user)
    return queue


@pytest.mark.parametrize(
    ("parallel", "arriving", "starting"),
    [
        (1, "aaab", "abaa"),
        (1, "aaabbb", "ababab"),
        (1, "aaabbc", "abcaba"),
        (2, "aaaabb", "ababaa"),
        (3, "aaaaab", "abaaaa"),
        (1, "abcd", "abcd"),
        (1, "", ""),
    ],
)
def test_users_who_came_together_take_turns(parallel: int, arriving: str, starting: str) -> None:
    assert arrivals(parallel, arriving).drain() == starting


@pytest.mark.parametrize("first", ["arrive", "finish"])
def test_who_comes_as_another_is_done_is_next(first: str) -> None:
    queue = arrivals(1, "aaa")
    queue.admit()
    if first == "arrive":
        queue.arrive("b")
        queue.finish(0)
    else:
        queue.finish(0)
        queue.arrive("b")
    assert queue.drain() == "baa"


def test_among_those_who_have_as_much_running_the_one_served_longest_ago_is_next() -> None:
    queue = arrivals(3, "abcaab")
    queue.admit()
    queue.finish(0)
    queue.admit()
    assert [sequence.request.user for sequence in queue.running] == ["b", "c", "a"]
    queue.finish(1)
    queue.admit()
    assert queue.started[-1].request.user == "b"


def test_who_leaves_the_line_and_comes_back_gains_nothing() -> None:
    queue = arrivals(1, "abc")
    queue.waiting.remove(queue.arrived["a"][0])
    queue.arrive("a")
    assert queue.drain() == "bca"


def test_a_sequence_that_is_passed_over_is_not_a_turn() -> None:
    queue = arrivals(1, "aab")
    queue.held_back.add(queue.arrived["a"][0])
    assert queue.drain() == "ab"
    assert queue.started[0] is queue.arrived["a"][1]
    queue.held_back.clear()
    assert queue.drain() == "a"


class Watched(Queue):
    """Checks of every start that it is fair. What ends between two admissions ends at the same time."""

    def __init__(self, parallel: int) -> None:
        super().__init__(parallel)
        self._served: set[str] = set()
        self._ahead: dict[str, Counter[str]] = {}
        """For every user who waits with nothing running: who ran when the wait began, and who started since."""

    def arrive(self, user: str) -> None:
        super().arrive(user)
        self._look({user} - self._served)

    def admit(self) -> None:
        self._ahead = {user: ahead for user, ahead in self._ahead.items() if user in self.startable}
        self._look(self.startable)
        super().admit()
        self._served = set(self.load)

    def start(self, sequence: Sequence) -> None:
        self._check(sequence)
        super().start(sequence)

    def _look(self, users: set[str]) -> None:
        for user in users - self.load.keys():
            self._ahead.setdefault(user, Counter(self.load.keys()))

    def _check(self, sequence: Sequence) -> None:
        assert self.load[sequence.request.user] == min(self.load[user] for user in self.startable)
        self._ahead.pop(sequence.request.user, None)
        for user, ahead in self._ahead.items():
            ahead[sequence.request.user] += 1
            assert ahead[sequence.request.user] == 1, (
                f"{sequence.request.user} went before {user}, and had had its turn"
            )


USERS = st.sampled_from("abcd")
ACTIONS = st.one_of(
    st.tuples(st.just("arrive"), USERS),
    st.tuples(st.just("finish"), st.integers(0, 3)),
    st.tuples(st.just("hold back"), st.integers(0, 9)),
    st.tuples(st.just("admit"), st.none()),
)


@given(parallel=st.integers(1, 4), actions=st.lists(ACTIONS, max_size=80))
def test_whatever_happens_turns_are_fair(parallel: int, actions: list[tuple[str, str | int | None]]) -> None:
    queue = Watched(parallel)
    for action in actions:
        match action:
            case "arrive", str(user):
                queue.arrive(user)
            case "finish", int(index):
                queue.finish(index)
            case "hold back", int(index):
                queue.held_back |= set(list(queue.waiting)[index : index + 1])
            case _:
                queue.admit()
    queue.held_back.clear()
    queue.drain()
    assert len(queue.waiting) == 0
    assert Counter(queue.started) == Counter(
        sequence for sequences in queue.arrived.values() for sequence in sequences
    )


@given(users=st.lists(USERS, max_size=30), parallel=st.integers(1, 4))
def test_sequences_of_one_user_start_in_order_of_arrival(users: list[str], parallel: int) -> None:
    queue = arrivals(parallel, "".join(users))
    queue.drain()
    for user, sequences in queue.arrived.items():
        assert [sequence for sequence in queue.started if sequence.request.user == user] == sequences


@pytest.mark.parametrize("parallel", [1, 3])
def test_in_the_engine_a_first_request_waits_only_for_those_that_run(parallel: int) -> None:
    engine = FakeEngine(cells=1 << 15)
    gate = Gate(engine)
    ended: list[str] = []

    def start(user: str, seed: int) -> Recorder:
        recorder = Recorder(then=lambda _: ended.append(user))
        return rig.start(text(20, seed), recorder, user=user, namespace=user, max_new=2, closing=())

    with Rig(engine=engine, parallel=parallel) as rig:
        many = [start("many", seed) for seed in range(50)]
        gate.reached()
        one = start("one", 99)
        gate.open()
        for recorder in [*many, one]:
            recorder.wait()
    assert Counter(ended) == {"many": 50, "one": 1}
    assert ended.index("one") < 2 * parallel


def test_who_waits_costs_no_step_time_while_no_slot_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    in_turn = WaitingQueue.in_turn
    monkeypatch.setattr(
        WaitingQueue, "in_turn", lambda self, running: looked.append(len(self)) or in_turn(self, running)
    )
    engine = FakeEngine(cells=1 << 15)
    gate = Gate(engine)
    with Rig(engine=engine, parallel=1) as rig:
        recorders = [
            rig.start(text(20, seed), sampling=ENDLESS, user=f"{seed}", max_new=40, closing=())
            for seed in range(4)
        ]
        gate.reached()
        gate.open()
        for recorder in recorders:
            recorder.wait()
        assert rig.scheduler.counters.steps >= 160
    assert len(looked) < 20


@given(
    waits=st.lists(st.tuples(st.integers(0, 9), st.none() | st.integers(0, 9), st.integers(0, 9)), max_size=12),
)
def test_deadlines_are_noticed_whoever_comes_and_leaves(waits: list[tuple[int, int | None, int]]) -> None:
    """Each comes, leaves and has a deadline at some time; times are odd and even, so that none are the same."""
    queue, told = WaitingQueue(), dict[Sequence, int]()
    everyone = [(came, deadline, left, sequence_of("a")) for came, deadline, left in waits]
    for _, deadline, _, sequence in everyone:
        sequence.deadline = None if deadline is None else deadline
    for now in range(12):
        for came, _, _, sequence in everyone:
            if came == now:
                queue.add(sequence)
        for sequence in queue.expired(now - 0.5):
            told[sequence] = now
            queue.remove(sequence)
        for _, _, left, sequence in everyone:
            if left == now:
                queue.remove(sequence)
    for came, deadline, left, sequence in everyone:
        due = None if deadline is None else max(came, deadline + 1)
        gone_first = left < (due or 0) and left >= came
        assert told.get(sequence) == (None if due is None or gone_first else due)
