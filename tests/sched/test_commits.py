"""What is computed is stored with the right bytes, however late they arrive."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from emberkeep.chat.messages import label_of
from emberkeep.chat.prompt import Splice
from emberkeep.engine.base import KvUnit
from emberkeep.engine.fake import FakeEngine
from emberkeep.errors import EngineError
from emberkeep.kv.tree import Chunk, path_to
from emberkeep.sched.commits import Commits
from emberkeep.sched.sequence import Sequence
from emberkeep.types.lineage import EXACT, Lineage
from emberkeep.types.request import Request
from helpers.kv_building import check_ledger, chunks_of, exported
from helpers.scheduling import (
    CLOSING,
    ENDLESS,
    LONG,
    PATIENCE,
    PROMPT,
    SLICE,
    DeviceEngine,
    Gate,
    LateEngine,
    Recorder,
    Rig,
    no_pins,
    prompt_of,
    reference,
    text,
)

MARKED = Lineage(splice="abc")


@pytest.fixture
def engine() -> LateEngine:
    return LateEngine()


@pytest.fixture
def rig(tmp_path: Path, engine: LateEngine):
    with Rig(tmp_path, engine, prefill_slice=SLICE) as rig:
        yield rig
        rig.settle()
        assert no_pins(rig)
        check_ledger(rig.store)
        assert_bytes_are_right(rig)


def assert_bytes_are_right(rig: Rig) -> None:
    """Exact chunks of the store. A turn lets go of the tail before it in RAM, if that is written by then."""
    for chunk in chunks_of(rig.store):
        if chunk.lineage != MARKED:
            expected = exported(whole(chunk), chunk.start, chunk.start + len(chunk.tokens))
            assert chunk.on_disk if chunk.payload is None else bytes(chunk.payload) == bytes(expected)


def whole(chunk: Chunk) -> np.ndarray:
    """The tokens of its path, to its end."""
    if chunk.parent is None:
        return chunk.tokens
    return np.concatenate([whole(chunk.parent)[: chunk.start], chunk.tokens])


def stored(rig: Rig, tokens: list[int]) -> int:
    return rig.store.advance(rig.store.origin(prompt_of(tokens).lineage), np.array(tokens, np.int32)).position


def test_what_a_step_computed_is_stored_after_the_next_one(rig, engine):
    gate = Gate(engine, holds=lambda step: step == 3)
    recorder = rig.start(LONG)
    gate.reached()
    assert (engine.begun, engine.asked) == (3, 2)
    assert stored(rig, LONG) == 2 * SLICE
    gate.open()
    assert recorder.answer == reference(LONG)
    rig.settle()
    assert engine.asked == engine.begun


def test_when_a_turn_ends_all_of_it_is_stored(rig):
    answer = rig.run(PROMPT).answer
    assert stored(rig, [*PROMPT, *answer, *CLOSING]) == len(PROMPT) + len(answer) + len(CLOSING)
    again = rig.run(PROMPT, from_store=True)
    assert again.answer == answer
    assert again.lookup.reused_tokens == len(PROMPT) - 1


def test_nothing_is_copied_twice(rig, engine):
    rig.run(LONG, max_new=0)
    rig.run(LONG, max_new=0)
    assert engine.copied_tokens == len(LONG)


def test_a_failed_step_leaves_nothing_on_its_way(rig, engine):
    def fail_at_third(batch) -> None:
        if batch[0].start == 2 * SLICE:
            raise EngineError("no")

    engine.on_evaluate = fail_at_third
    sequence = rig.sequence(LONG, recorder := Recorder())
    rig.scheduler.submit(sequence)
    assert isinstance(recorder.wait().error, EngineError)
    rig.settle()
    assert sequence.saving is None
    engine.on_evaluate = None
    assert stored(rig, LONG) == SLICE
    assert rig.run(LONG).answer == reference(LONG)


@pytest.mark.parametrize("shared", [SLICE - 20, 2 * SLICE, 2 * SLICE + 50])
def test_one_that_branches_off_meanwhile_stores_what_is_its_own(rig, engine, shared):
    gate = Gate(engine, holds=lambda step: step == 3)
    first = rig.start(LONG)
    gate.reached()
    other = [*LONG[:shared], *text(300, seed=8)]
    second = rig.start(other)
    gate.open()
    assert (first.answer, second.answer) == (reference(LONG), reference(other))
    rig.settle()
    assert stored(rig, other) == len(other)
    evaluated = len(LONG) + len(other) - shared + len(first.tokens) + len(second.tokens) + 2 * len(CLOSING)
    assert engine.evaluated_tokens == evaluated


def test_what_was_on_its_way_when_the_context_became_shorter_is_stored_as_it_was(rig, monkeypatch):
    prompt, notice, recorder, saving = text(4 * SLICE + 98), text(12, seed=4), Recorder(), []

    def make_room() -> bool:
        source, is_first = np.array([*prompt, *recorder.tokens], np.int32), len(recorder.tokens) == 31
        splice = Splice(source, 50, 350, np.array(notice, np.int32), may_shift=True)
        shorter = prompt_of([*prompt[:50], *notice, *prompt[350:]], max_new=200, splice=splice, lineage=MARKED)
        saving.append(sequence.saving)
        rig.scheduler.make_room(sequence, shorter if is_first else None)
        return True

    shift = rig.scheduler._parts.cache.shift
    monkeypatch.setattr(shift, "shorten", _noting(shift.shorten, saving))
    # The step that samples its last token fills a chunk.
    sequence = rig.sequence(prompt, recorder, on_full=make_room, max_new=31, sampling=ENDLESS, lineage=MARKED)
    rig.scheduler.submit(sequence)
    assert len(recorder.answer) == 200
    rig.settle()
    assert saving[1] is not None
    assert stored(rig, [*prompt, *recorder.tokens]) == 5 * SLICE


def _noting(shorten, saving: list):
    def noting(sequence, prompt) -> None:
        saving.append(sequence.saving)
        shorten(sequence, prompt)

    return noting


def test_a_copy_that_fails_is_made_again(tmp_path):
    with Rig(tmp_path, engine := LateEngine(failing=(1, 3)), prefill_slice=SLICE) as rig:
        answer = rig.run(LONG)
        assert answer.answer == reference(LONG)
        assert stored(rig, LONG) == len(LONG)
        assert_bytes_are_right(rig)
        assert engine.asked == engine.begun


def test_of_a_user_that_is_forgotten_nothing_arrives(rig, engine):
    gate = Gate(engine, holds=lambda step: step == 2)
    sequence = rig.sequence(LONG)
    rig.scheduler.submit(sequence)
    gate.reached()
    forgotten = rig.scheduler.forget({sequence.lineage.owner})
    gate.open()
    forgotten.result()
    rig.settle()
    assert engine.begun == 3
    assert stored(rig, LONG) == 2 * SLICE


# ── a device, beside whose steps state is stored ──


def test_answers_that_end_together_are_told_before_they_are_stored(tmp_path, monkeypatch):
    events: list[str] = []
    commit, ended = Commits.commit_turn, Recorder.ended
    monkeypatch.setattr(Commits, "commit_turn", lambda *given: events.append("stored") or commit(*given))
    monkeypatch.setattr(Recorder, "ended", lambda *given: events.append("told") or ended(*given))
    prompts = [text(100, seed=seed) for seed in range(4)]
    with Rig(tmp_path, engine := DeviceEngine()) as rig:
        gate = Gate(engine)
        recorders = [rig.start(prompt) for prompt in prompts]
        gate.reached()
        gate.open()
        assert [recorder.answer for recorder in recorders] == [reference(prompt) for prompt in prompts]
        rig.settle()
        assert all(stored(rig, prompt) == len(prompt) for prompt in prompts)
        assert_bytes_are_right(rig)
    assert events.index("stored") > events.index("told")
    assert events.count("stored") == events.count("told") == 4


def test_a_turn_that_fails_when_it_is_over_is_not_stored(tmp_path, monkeypatch):
    """Its slot is another's soon."""
    begin, commit = Commits.begin_turn, Commits.commit_turn
    begun: list[Sequence] = []
    committed: list[Sequence] = []

    def break_the_first(commits: Commits, sequence: Sequence) -> None:
        begun.append(sequence)
        if sequence is begun[0]:
            raise RuntimeError("a bug")
        begin(commits, sequence)

    monkeypatch.setattr(Commits, "begin_turn", break_the_first)
    monkeypatch.setattr(Commits, "commit_turn", lambda each, s: committed.append(s) or commit(each, s))
    with Rig(tmp_path, DeviceEngine(), parallel=1) as rig:
        prompts = [text(100, seed=seed) for seed in range(3)]
        recorders = [rig.start(prompt) for prompt in prompts]
        assert [recorder.answer for recorder in recorders] == [reference(prompt) for prompt in prompts]
        rig.settle()
        assert begun[0] not in committed
        assert [stored(rig, prompt) == len(prompt) for prompt in prompts] == [False, True, True]
        assert_bytes_are_right(rig)


def test_who_waits_for_a_place_begins_beside_turns_that_are_only_to_be_stored(tmp_path, monkeypatch):
    commit, committed, seen = Commits.commit_turn, [], []
    monkeypatch.setattr(Commits, "commit_turn", lambda each, s: committed.append(s) or commit(each, s))
    with Rig(tmp_path, engine := DeviceEngine(), parallel=1) as rig:
        gate = Gate(engine)
        first = rig.start(text(100, seed=1), closing=())
        gate.reached()
        second = rig.start(
            text(100, seed=2), Recorder(then=lambda _: seen.append(len(committed)) or None), closing=()
        )
        gate.open()
        assert first.answer == reference(text(100, seed=1))
        assert second.answer == reference(text(100, seed=2))
        rig.settle()
        assert seen == [0]
        assert len(committed) == 2
        assert_bytes_are_right(rig)


def test_the_next_turn_goes_on_where_one_is_still_to_be_stored(tmp_path):
    with Rig(tmp_path, DeviceEngine()) as rig:
        second = Recorder()

        def go_on(first: Recorder) -> None:
            rig.start([*PROMPT, *first.tokens, *CLOSING, *text(30, seed=4)], second, closing=())

        first = rig.start(PROMPT, Recorder(then=go_on), closing=())
        assert first.answer == reference(PROMPT)
        assert second.answer == reference([*PROMPT, *first.tokens, *CLOSING, *text(30, seed=4)])
        assert second.lookup.hot_tokens >= len(PROMPT)


# ── an engine that computes on when `evaluate` has returned ──
class AheadEngine(FakeEngine):
    """Tells in which order steps and exports were asked for."""

    def __init__(self) -> None:
        super().__init__(cells=1 << 15, context=1 << 14)
        self.capabilities = replace(self.capabilities, runs_ahead=True)
        self.asked: list[str] = []
        self.exported_tokens: list[int] = []
        self.on_export: Callable[[], None] = lambda: None

    def evaluate(self, batch):
        self.asked.append("outputs" if any(rows.outputs for rows in batch) else "step")
        return super().evaluate(batch)

    def export_kv(self, sequence, borders, bits=16):
        self.asked.append("export")
        self.exported_tokens.append(borders[-1] - borders[0])
        self.on_export()
        return super().export_kv(sequence, borders, bits)


def test_a_turn_that_goes_on_does_not_wait_for_the_one_before_to_be_stored(tmp_path):
    """Which still comes first: what was sampled is known to be."""
    engine, second = AheadEngine(), Recorder()
    with Rig(tmp_path, engine) as rig:

        def go_on(first: Recorder) -> None:
            engine.asked.clear()
            rig.start([*PROMPT, *first.tokens, *text(30, seed=4)], second, closing=(), max_new=4)

        first = rig.start(PROMPT, Recorder(then=go_on), closing=(), max_new=40)
        asked = [*PROMPT, *first.answer, *text(30, seed=4)]
        assert second.answer == reference(asked, max_new=4)
        rig.settle()
        assert engine.asked[:3] == ["step", "outputs", "export"]
        assert second.lookup.hot_tokens == len(PROMPT) + len(first.answer)
        chunks = path_to(rig.store.advance(rig.store.origin(EXACT), np.array(asked, np.int32)))
        sampled = [(s.start + a, s.start + b) for s in chunks for a, b in s.chunk.sampled]
        assert (sampled[0][0], sampled[-1][1]) == (len(PROMPT), second.lookup.hot_tokens)
        assert_bytes_are_right(rig)


def going_on(engine, first_more, second, **more):
    """(what the store was told of ended turns, the second request): it goes on from one that is still to be
    stored."""
    with Rig(None, engine) as rig:
        ended, turn_ended = [], rig.store.turn_ended
        rig.store.turn_ended = lambda label, cursor: ended.append(turn_ended(label, cursor)) or ended[-1]

        def go_on(first: Recorder) -> None:
            more.get("then", lambda _: None)(rig)
            asked = [*PROMPT, *first.tokens, *text(200, seed=4)]
            rig.start(asked, second, closing=(), max_new=20, from_store=more.get("from_store", False))

        rig.start(PROMPT, Recorder(then=go_on), closing=(), max_new=40, sampling=ENDLESS, **first_more).wait()
        second.wait()
        rig.settle()
    return ended


def test_its_entry_is_there_though_its_last_chunk_became_a_part_of_another():
    ended = going_on(AheadEngine(), {"label": label_of(Request(conversation_id="c"))}, Recorder())
    assert ended[0] is not None


def test_what_cannot_be_stored_of_it_does_not_end_the_one_that_goes_on():
    def fail_once(rig: Rig) -> None:
        insert = rig.store.insert

        def failing(*_: object, **__: object) -> None:
            rig.store.insert = insert
            raise ValueError("injected")

        rig.store.insert = failing

    second = Recorder()
    going_on(AheadEngine(), {}, second, then=fail_once)
    assert second.error is None and second.tokens


def test_who_takes_state_from_the_store_only_finds_all_of_it_there():
    second = Recorder()
    going_on(AheadEngine(), {}, second, from_store=True)
    assert second.lookup.hot_tokens == 0 and second.lookup.reused_tokens > len(PROMPT)


@pytest.mark.parametrize("unit", [KvUnit.SNAPSHOT, KvUnit.BOTH])
def test_a_snapshot_is_of_the_tokens_under_which_it_is_stored(unit):
    """Also where one goes on from a turn whose end is evaluated in the same step."""
    with Rig(None, FakeEngine(cells=1 << 15, kv_unit=unit), parallel=4) as rig:
        second = Recorder(stop_at=lambda _: 0)

        def go_on(first: Recorder) -> None:
            rig.start([*PROMPT, *first.tokens], second, closing=(), max_new=4)

        rig.start(PROMPT, Recorder(then=go_on), closing=CLOSING, max_new=10, sampling=ENDLESS).wait()
        second.wait()
        rig.settle()
        snapshots = [chunk for chunk in chunks_of(rig.store) if chunk.is_snapshot]
        assert snapshots
        assert all(struct.unpack("<4siQ", chunk.payload)[1] == chunk.start for chunk in snapshots)


def test_who_waits_for_room_gets_that_of_a_turn_which_is_only_to_be_stored(tmp_path):
    engine = AheadEngine()
    engine.capabilities = replace(engine.capabilities, cells=9000, context=8000)
    steps: list[list[tuple[int, int]]] = []
    engine.on_evaluate = lambda batch: steps.append([(rows.start, len(rows.tokens)) for rows in batch])
    with Rig(tmp_path, engine, prefill_slice=128) as rig:
        base, second, other = text(3000, seed=1), Recorder(), Recorder()

        def go_on(first: Recorder) -> None:
            steps.clear()
            rig.start(text(3000, seed=2), other, closing=(), max_new=2)
            rig.start([*base, *first.tokens, *text(30, seed=4)], second, closing=(), max_new=2)

        rig.start(base, Recorder(then=go_on), closing=(), max_new=10, sampling=ENDLESS).wait()
        second.wait()
        other.wait()
    goes_on = [any(start >= len(base) and count > 1 for start, count in step) for step in steps]
    assert goes_on.index(True) < 10


def test_who_comes_while_a_long_turn_is_stored_waits_for_a_part_of_it(tmp_path, monkeypatch):
    for name in ("_SPARED_S", "_SPARED"):  # one slice at a time, however quick it is
        monkeypatch.setattr(f"emberkeep.sched.steps.{name}", 0)
    engine = AheadEngine()
    with Rig(tmp_path, engine) as rig:
        other = Recorder()

        def come(_: object) -> None:
            """Once, when storing has begun."""
            engine.on_export = lambda: None
            rig.start(text(30, seed=4), other, closing=(), max_new=4)

        engine.on_export = lambda: come(None)
        rig.run(text(9000), max_new=1, closing=())
        assert other.answer == reference(text(30, seed=4), max_new=4)
        storing = engine.asked[engine.asked.index("export") :]
        assert storing[:3] == ["export", "step", "outputs"] and storing.count("export") > 3
        assert_bytes_are_right(rig)


def test_nothing_waits_for_a_step_that_nobody_waits_for(tmp_path):
    """A prompt of several slices is stored when its first token is there."""
    engine = AheadEngine()
    with Rig(tmp_path, engine, prefill_slice=SLICE) as rig:
        first = rig.run(LONG, max_new=4)
        steps = engine.asked[: engine.asked.index("outputs")]
        assert len(steps) > 2 and set(steps) == {"step"}
        assert "export" in engine.asked
        assert rig.run(LONG, max_new=4).answer == first.answer == reference(LONG, max_new=4)
        rig.scheduler.forget({""}).result(PATIENCE)
        again = rig.run(LONG, max_new=4)
        assert (again.answer, again.lookup.reused_tokens) == (first.answer, len(LONG) - 1)


def test_a_long_prompt_is_stored_between_several_steps(tmp_path):
    prompt, engine = text(9000), AheadEngine()
    with Rig(tmp_path, engine, prefill_slice=512) as rig:
        assert rig.run(prompt, max_new=8).answer == reference(prompt, max_new=8)
        assert len(engine.exported_tokens) > 2 and max(engine.exported_tokens) <= 4096
        rig.scheduler.forget({""}).result(PATIENCE)
        assert rig.run(prompt, max_new=8).lookup.reused_tokens == len(prompt) - 1
