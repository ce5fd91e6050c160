"""Faults at the Nth call of any method, and a crowd of requests that goes through all of them.

A method that fails leaves the worst behind: the state of the sequences that it was about is garbage afterwards, as
far as the engine's contract lets it be.
"""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from emberkeep.chat.prompt import Splice, Stable
from emberkeep.engine.base import Engine, Footprint, KvUnit
from emberkeep.engine.fake import FakeEngine, _Cell
from emberkeep.errors import EngineError
from emberkeep.kv.entries import EntryKind
from emberkeep.kv.store import KvStore
from emberkeep.sched.sequence import Sequence as Sequence_
from emberkeep.types.cache import Label
from emberkeep.types.events import Admitted, Plan, TokenLogprob
from emberkeep.types.lineage import EXACT, Approximation, Lineage, Repair
from emberkeep.types.request import Sampling
from helpers.kv_building import check_ledger
from helpers.scheduling import ENDLESS, GREEDY, Recorder, Rig, no_pins, prompt_of, reference, text
from helpers.waiting import eventually

ERRORS = (EngineError("injected"), RuntimeError("injected"), MemoryError("injected"))

NOT_ASKED_BY_THE_LOOP: dict[type, set[str]] = {
    Engine: {"stats", "close"},
    KvStore: {
        *("peek", "peek_elsewhere", "touch", "other_model", "replay", "refresh", "readahead", "sweep"),
        *(
            "flush",
            "close",
            "stats",
            "notice_forgotten",
            "follow",
            "transact",
            "ram_room",
        ),
    },
}
"""Other threads ask these, or no sequence is there when the loop does. All others have to come up in a crowd."""


def methods(of: type) -> list[str]:
    """Its public ones, whichever they come to be."""
    listed = [name for name, _ in inspect.getmembers(of, inspect.isfunction) if not name.startswith("_")]
    return [name for name in listed if name not in NOT_ASKED_BY_THE_LOOP.get(of, ())]


class Faults:
    """Watches calls of a target's methods; one of them may fail, before it has done anything of use."""

    def __init__(self, target: object, names: Iterable[str]) -> None:
        self.calls: Counter[str] = Counter()
        self._fails: tuple[str, int, Exception] | None = None
        self.has_failed = False
        self.is_armed = False
        for name in names:
            setattr(target, name, self._watched(target, name, getattr(target, name)))

    def fail(self, name: str, at: int, error: Exception) -> None:
        self._fails = name, at, error

    def _watched(self, target: object, name: str, real: Callable) -> Callable:
        def call(*arguments, **named):
            if not self.is_armed:
                return real(*arguments, **named)
            self.calls[name] += 1
            if self._fails and self._fails[:2] == (name, self.calls[name]):
                self.has_failed = True
                error = self._fails[2]
                if isinstance(target, FakeEngine):
                    wreck(target, name, arguments, promised=isinstance(error, EngineError))
                raise error
            return real(*arguments, **named)

        return call


def wreck(engine: FakeEngine, name: str, arguments: tuple, *, promised: bool) -> None:
    """`promised`: it failed with an error of its own, after which it has promised something."""
    if name in ("evaluate", "blend"):
        for rows in arguments[0] if name == "evaluate" else [arguments[0]]:
            _scramble(engine, rows.sequence, rows.start if promised else 0)
    elif name == "import_kv":
        _scramble(engine, arguments[0], arguments[1] if promised else 0)
    elif name == "copy_kv":
        _scramble(engine, arguments[1], 0)
    elif name in ("import_snapshot", "trim", "splice") or (name.startswith("export_") and not promised):
        _scramble(engine, arguments[0], 0)
    elif name == "logits":
        _scramble(engine, engine._latest[arguments[0]][0], 0)


def _scramble(engine: FakeEngine, sequence: int, start: int) -> None:
    """As long as before and a little longer, but not what it was."""
    state = engine._state(sequence)
    state.rest ^= 0x5DEECE66D
    if engine.capabilities.kv_unit.has_ranges:
        state.cells[start:] = [_Cell(0xBAD) for _ in range(len(state.cells) - start + 3)]
        state.end = len(state.cells)


# ── the crowd ──

LEAD, OLD, KEPT = text(40, seed=1), text(150, seed=2), text(60, seed=3)
NOTICE, ASK = text(6, seed=4), text(12, seed=5)
STORED = [*LEAD, *OLD, *KEPT]
"""On disk when a crowd comes."""
DAMAGED = text(140, seed=6)
"""The same, but its bytes are no state."""
SHARED = text(150, seed=7)
SHUFFLED = [*KEPT, *OLD, *ASK]
MARKED = Lineage(splice="abc")
BLENDED = {
    "approximate": Approximation(Repair.NONE),
    "lineage": Lineage(repair=Repair.NONE),
}
NEW = 4


@dataclass
class Asked:
    sequence: Sequence_
    recorder: Recorder
    expected: list[int] | None = None
    """None: it is approximate, and a fault may make it more or less so."""
    is_cancelled: bool = False

    def is_right(self) -> bool:
        """Either it failed, or its answer is the one that it would have been without any fault."""
        if self.recorder.error is not None:
            return True
        if self.expected is not None:
            return self.recorder.tokens == self.expected[: len(self.recorder.tokens)] and (
                self.is_cancelled or self.recorder.tokens == self.expected
            )
        return True


@dataclass
class Crowd:
    """Jobs that come at once."""

    rig: Rig
    asked: list[Asked] = field(default_factory=list)

    def add(
        self,
        prompt: list[int],
        recorder: Recorder | None = None,
        *,
        exact: bool = True,
        stops_at: int = NEW,
        **more,
    ) -> Asked:
        recorder = recorder or Recorder()
        label = Label(EntryKind.CONVERSATION, f"talk {len(self.asked)}", "")
        prefix = Label(EntryKind.PREFIX, "prefix", "")
        stable = Stable(prefix, min(20, len(prompt)))
        admitted = Admitted(Plan(128, 16), len(prompt), NEW, 1000, 1000)
        noted = {"label": label, "stable": stable, "admitted": admitted, "max_new": NEW}
        sequence = self.rig.sequence(prompt, recorder, **{**noted, **more})
        sampling = more.get("sampling", GREEDY)
        expected = answer_of(self.rig, prompt, sampling)[:stops_at] if exact else None
        self.asked.append(Asked(sequence, recorder, expected))
        return self.asked[-1]

    def add_cancelled(self, prompt: list[int]) -> None:
        """Cancelled by its reader, after its first token."""
        asked = self.add(prompt, Quitting(lambda: self.rig.scheduler.cancel(asked.sequence)), max_new=40)
        asked.is_cancelled, asked.expected = True, answer_of(self.rig, prompt, GREEDY, 40)

    def add_growing(self, prompt: list[int]) -> None:
        """Its context is full after two tokens, and some of it leaves."""
        short = [*LEAD, *NOTICE, *prompt[len(LEAD) + len(OLD) :]]
        splice = _splice(prompt)

        def full() -> bool:
            shorter = prompt_of(short, max_new=NEW, splice=splice, lineage=MARKED)
            room = shorter if asked.sequence.max_new == 2 else None
            threading.Thread(target=lambda: self.rig.scheduler.make_room(asked.sequence, room)).start()
            return True

        asked = self.add(prompt, exact=False, max_new=2, sampling=ENDLESS, on_full=full, lineage=MARKED)

    def run(self) -> None:
        """The first comes alone. All others are there before their first step."""
        first, *others = self.asked
        self.rig.scheduler.submit(first.sequence)
        first.recorder.wait()
        together = threading.Event()
        holding = self.rig.scheduler.call(together.wait)
        for asked in others:
            self.rig.scheduler.submit(asked.sequence)
        together.set()
        holding.result(5)
        for asked in self.asked:
            if not asked.is_cancelled:
                asked.recorder.wait()
        self.rig.settle()


class Quitting(Recorder):
    def __init__(self, quit: Callable[[], None]) -> None:
        super().__init__()
        self._quit = quit

    def token(self, token: int, logprob: TokenLogprob | None) -> bool:
        if not self.tokens:
            self._quit()
        return super().token(token, logprob)


def _splice(source: list[int]) -> Splice:
    begin = len(LEAD)
    return Splice(np.array(source, np.int32), begin, begin + len(OLD), np.array(NOTICE, np.int32), may_shift=True)


_answers: dict[tuple, list[int]] = {}


def answer_of(rig: Rig, prompt: list[int], sampling: Sampling = GREEDY, max_new: int = NEW) -> list[int]:
    """Of an engine that has never seen anything; asked for so often that it is remembered."""
    unit = rig.engine.capabilities.kv_unit
    key = unit, tuple(prompt), sampling is GREEDY, max_new
    if key not in _answers:
        fresh = FakeEngine(cells=1 << 15, kv_unit=unit)
        _answers[key] = reference(prompt, sampling=sampling, max_new=max_new, engine=fresh)
    return _answers[key]


def crowd_of(rig: Rig) -> Crowd:
    """Conversations that go on, a shared prefix, cancels, stops, evictions: every way through the scheduler."""
    crowd = Crowd(rig)
    borders = frozenset({len(LEAD), 160})
    crowd.add(text(20, seed=9))
    crowd.add([*STORED, *ASK], borders=borders)
    crowd.add([*SHARED, *text(20, seed=10)], borders=borders)
    crowd.add([*SHARED, *text(30, seed=11)], borders=borders)
    crowd.add_cancelled([*SHARED, *text(25, seed=12)])
    stopped = Recorder(stop_at=lambda tokens: 1 if len(tokens) == 3 else None)
    crowd.add(text(60, seed=13), stopped, sampling=ENDLESS, stops_at=3)
    crowd.add([*DAMAGED, *ASK], want_progress=True)
    crowd.add(text(50, seed=14), use_cache=False, echo=True, top_logprobs=1)
    if rig.engine.capabilities.can_shift:
        crowd.add([*LEAD, *NOTICE, *KEPT, *ASK], exact=False, splice=_splice([*STORED, *ASK]), lineage=MARKED)
        crowd.add_growing([*LEAD, *OLD, *text(30, seed=15)])
        crowd.add(SHUFFLED, exact=False, **BLENDED)
    return crowd


PROMPTS = [
    [*STORED, *ASK],
    [*SHARED, *text(20, seed=10)],
    [*SHARED, *text(30, seed=11)],
    [*SHARED, *text(25, seed=12)],
    text(60, seed=13),
    [*DAMAGED, *ASK],
    [*LEAD, *NOTICE, *KEPT, *ASK],
    [*LEAD, *OLD, *text(30, seed=15)],
    SHUFFLED,
]
"""What the crowd asks, to be asked once more when it is gone: the answers come from what it has left behind."""


def new_engine(unit: KvUnit) -> FakeEngine:
    engine = FakeEngine(cells=2000, sequences=4, kv_unit=unit)
    engine.footprint = Footprint("cpu", 1 << 40, 0, 0, 0, 0, 0)
    engine.peak_bytes = lambda: 900  # type: ignore[method-assign]
    return engine


def new_rig(folder: Path, unit: KvUnit) -> Rig:
    return Rig(folder, new_engine(unit), parallel=3, prefill_slice=128)


def prepare(folder: Path, unit: KvUnit) -> None:
    """What is on disk when the crowd comes."""
    with new_rig(folder, unit) as rig:
        rig.run(STORED, max_new=NEW, borders=frozenset({len(LEAD)}))
        tokens = np.array(DAMAGED, np.int32)
        for start in range(0, len(tokens), 128):
            cursor = rig.store.advance(rig.store.origin(EXACT), tokens)
            rig.store.insert(cursor, tokens[start : start + 128], memoryview(b"no state"), (), fork=False)
        cursor = rig.store.advance(rig.store.origin(EXACT), tokens)
        if unit.has_snapshots:
            rig.store.insert_snapshot(cursor, memoryview(b"no state"))


# ── what must be true when it is gone ──


def leaks(rig: Rig) -> list[str]:
    """What is held though nothing runs."""
    found: list[str] = []

    def look() -> None:
        slots, states = rig.scheduler._slots, rig.engine._states
        idle = {s.slot: s.computed for s in slots.idle}
        held = {slot: state.end for slot, state in states.items() if state.end}
        found.extend(["active"] * len(slots.active))
        found.extend([f"cells {held} of {idle}"] if held != idle else [])
        found.extend(["waiting"] * len(rig.scheduler._waiting))
        found.extend(["between"] * len(rig.scheduler._when_idle))

    rig.scheduler.call(look).result(5)
    found += [] if no_pins(rig) else ["pins"]
    # Of a request that has failed some may still be under way.
    found += [] if eventually(lambda: not rig.store.loading) else ["fetches"]
    check_ledger(rig.store)
    return found


def answers_again(rig: Rig) -> list[str]:
    """Every question once more, now that all is well."""
    wrong = []
    for prompt in PROMPTS:
        again = rig.run(prompt, max_new=NEW)
        if again.answer != answer_of(rig, prompt):
            wrong.append(f"{len(prompt)} tokens, {again.lookup}")
    return wrong
