"""What leaves a prompt is spliced out of its state; the rest is not evaluated again. Exact state is untouched."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.chat.prompt import Splice
from emberkeep.engine.base import KvUnit, Outcome
from emberkeep.engine.fake import FakeEngine
from emberkeep.errors import EngineError
from emberkeep.sched.sequence_state import EndReason
from emberkeep.types.lineage import Lineage
from helpers.chance import examples
from helpers.kv_building import check_ledger, chunk_files
from helpers.scheduling import CLOSING, ENDLESS, Recorder, Rig, no_pins, prompt_of, reference, text

LEAD, OLD, KEPT = text(50, seed=1), text(300, seed=2), text(260, seed=3)
NOTICE, ASK = text(12, seed=4), text(30, seed=5)
MARKED = Lineage(splice="abc")


def splice_of(source: list[int], start: int = 50, end: int = 350, insert: list[int] = NOTICE) -> Splice:
    return Splice(np.array(source, np.int32), start, end, np.array(insert, np.int32), may_shift=True)


def shorter(source: list[int]) -> tuple[list[int], dict]:
    """The prompt without OLD, and what its sequence needs to come by the longer one's state."""
    made = splice_of(source)
    return [*source[: made.start], *NOTICE, *source[made.end :]], {"splice": made, "lineage": MARKED}


@pytest.fixture
def rig(tmp_path: Path):
    with Rig(tmp_path) as rig:
        yield rig
        rig.settle()
        assert no_pins(rig)
        check_ledger(rig.store)


def first_turn(rig: Rig) -> list[int]:
    """What a conversation says up to its next question."""
    asked = [*LEAD, *OLD, *KEPT]
    answer = rig.run(asked).answer
    return [*asked, *answer, *CLOSING, *ASK]


def test_only_what_is_new_is_evaluated(rig):
    longer = first_turn(rig)
    prompt, how = shorter(longer)
    before = rig.engine.evaluated_tokens
    answer = rig.run(prompt, **how, max_new=1, closing=())
    assert rig.engine.evaluated_tokens - before == len(NOTICE) + len(ASK) + len(answer.answer)
    lookup = answer.lookup
    assert (lookup.hot_tokens, lookup.moved_tokens) == (len(LEAD), len(prompt) - len(LEAD + NOTICE + ASK))
    assert lookup.is_approximate
    assert lookup.cut_ms > 0
    assert rig.scheduler.stats()["cuts"] == 1


def test_the_next_turn_finds_all_of_it_in_the_lineage_and_nothing_outside(rig):
    prompt, how = shorter(first_turn(rig))
    answer = rig.run(prompt, **how)
    again = [*prompt, *answer.answer, *CLOSING, *ASK]
    rig.scheduler.drop_idle([])
    exact = rig.run(again, max_new=1, closing=())
    assert exact.lookup.reused_tokens == len(LEAD)
    assert not exact.lookup.is_approximate
    assert exact.answer == reference(again, max_new=1)
    marked = rig.run(again, max_new=1, closing=(), lineage=MARKED)
    assert (
        marked.lookup.reused_tokens == len(again) - 1
    )  # what the exact sequence computed is better, and is there too
    assert not marked.lookup.is_approximate


def test_the_longer_state_is_loaded_from_disk_to_be_spliced_and_the_spliced_one_is_found_there(tmp_path):
    with Rig(tmp_path) as rig:
        longer = first_turn(rig)
    with Rig(tmp_path) as rig:
        prompt, how = shorter(longer)
        answer = rig.run(prompt, **how)
        moved = len(prompt) - len(LEAD + NOTICE + ASK)
        assert (answer.lookup.cold_tokens, answer.lookup.moved_tokens) == (len(LEAD), moved)
        again = [*prompt, *answer.answer, *CLOSING, *ASK]
    with Rig(tmp_path) as rig:
        lookup = rig.run(again, lineage=MARKED).lookup
        assert lookup.cold_tokens == len(again) - len(ASK)
        assert lookup.is_approximate
        assert rig.run(again).lookup.reused_tokens == len(LEAD)


def test_a_damaged_file_is_evaluated_again(tmp_path):
    with Rig(tmp_path) as rig:
        longer = first_turn(rig)
    for path in chunk_files(tmp_path)[2:]:
        path.write_bytes(path.read_bytes()[:-1] + b"\0")
    with Rig(tmp_path) as rig:
        prompt, how = shorter(longer)
        answer = rig.run(prompt, **how)
        assert answer.lookup.moved_tokens == 0
        assert answer.answer == reference(prompt)
        assert not answer.lookup.is_approximate


def test_without_state_of_the_longer_prompt_everything_is_exact(rig):
    source = [*LEAD, *OLD, *KEPT, *ASK]
    prompt, how = shorter(source)
    answer = rig.run(prompt, **how)
    assert answer.answer == reference(prompt)
    assert not answer.lookup.is_approximate
    assert rig.run(prompt).lookup.reused_tokens == len(prompt) - 1  # and so every user may have it


def test_state_that_is_there_without_a_splice_is_preferred(rig):
    longer = first_turn(rig)
    prompt, how = shorter(longer)
    rig.run(prompt)
    answer = rig.run(prompt, **how)
    assert answer.lookup.reused_tokens == len(prompt) - 1
    assert answer.lookup.moved_tokens == 0
    assert rig.scheduler.stats()["cuts"] == 0


@pytest.mark.parametrize("unit", [KvUnit.SNAPSHOT, KvUnit.BOTH])
def test_state_that_cannot_be_spliced_is_evaluated_again(unit):
    with Rig(engine=FakeEngine(cells=1 << 15, kv_unit=unit)) as rig:
        prompt, how = shorter(first_turn(rig))
        answer = rig.run(prompt, **how)
        assert answer.answer == reference(prompt, engine=FakeEngine(cells=1 << 15, kv_unit=unit))
        assert not answer.lookup.is_approximate


@pytest.mark.parametrize("outcome", ["fails", "no room"])
def test_an_engine_that_does_not_splice_costs_an_evaluation_and_nothing_else(rig, monkeypatch, outcome):
    def splice(*args):
        if outcome == "fails":
            raise EngineError("No.")
        return Outcome.NO_ROOM

    longer = first_turn(rig)
    monkeypatch.setattr(rig.engine, "splice", splice)
    prompt, how = shorter(longer)
    answer = rig.run(prompt, **how)
    assert answer.answer == reference(prompt)
    assert not answer.lookup.is_approximate


def test_a_sequence_that_is_cancelled_while_its_state_arrives_leaves_nothing_wrong_behind(tmp_path):
    with Rig(tmp_path) as rig:
        longer = first_turn(rig)
    with Rig(tmp_path) as rig:
        prompt, how = shorter(longer)
        sequence = rig.sequence(prompt, Recorder(), **how)
        rig.scheduler.submit(sequence)
        rig.scheduler.cancel(sequence)
        rig.settle()
        assert rig.run(prompt).answer == reference(prompt)
        assert rig.run(longer).answer == reference(longer)


# ── while an answer is written ──


class Growing:
    """Makes room as a conversation would: the first time OLD leaves, then nothing does."""

    def __init__(self, rig: Rig, prompt: list[int], may_shift: bool = True, more: int = 20) -> None:
        self._rig, self._prompt, self._may_shift, self._more = rig, prompt, may_shift, more
        self.sequence = rig.sequence(
            prompt, sampling=ENDLESS, max_new=10, closing=(), on_full=self._full, lineage=MARKED
        )
        self.asked = 0

    def _full(self) -> bool:
        self.asked += 1
        threading.Thread(target=self._answer).start()
        return True

    def _answer(self) -> None:
        if self.asked > 1:
            self._rig.scheduler.make_room(self.sequence, None)
            return
        tokens = [*LEAD, *NOTICE, *self._prompt[350:]]
        made = Splice(np.array(self._prompt, np.int32), 50, 350, np.array(NOTICE, np.int32), self._may_shift)
        shorter = prompt_of(tokens, max_new=self._more, closing=(), splice=made, lineage=MARKED)
        self._rig.scheduler.make_room(self.sequence, shorter)

    def run(self) -> Recorder:
        recorder = self.sequence.output
        self._rig.scheduler.submit(self.sequence)
        assert isinstance(recorder, Recorder)
        return recorder.wait()


PROMPT = [*LEAD, *OLD, *KEPT]


def test_an_answer_goes_on_when_room_was_made(rig):
    growing = Growing(rig, PROMPT)
    recorder = growing.run()
    assert len(recorder.answer) == 20
    assert recorder.answer[:10] == reference(PROMPT, max_new=20, sampling=ENDLESS)[:10]
    assert recorder.ending.reason is EndReason.LENGTH
    assert recorder.ending.lookup.prompt_tokens == len(PROMPT)
    assert recorder.lookup.is_approximate
    assert growing.asked == 2
    evaluated = len(PROMPT) + len(NOTICE) + 20
    assert rig.engine.evaluated_tokens == evaluated
    again = [*LEAD, *NOTICE, *KEPT, *recorder.answer, *ASK]
    lookup = rig.run(again, lineage=MARKED).lookup
    assert lookup.reused_tokens == len(again) - len(ASK)
    assert rig.run([*PROMPT, *recorder.answer]).lookup.reused_tokens == 512  # its full chunks


def test_where_nothing_may_be_moved_what_stays_is_evaluated_again(rig):
    recorder = Growing(rig, PROMPT, may_shift=False).run()
    first, short = recorder.answer[:10], [*LEAD, *NOTICE, *KEPT]
    assert first == reference(PROMPT, max_new=10, sampling=ENDLESS)
    assert recorder.answer[10:] == reference([*short, *first], max_new=10, sampling=ENDLESS)
    assert not recorder.lookup.is_approximate
    again = [*short, *recorder.answer, *ASK]
    assert rig.run(again).answer == reference(again)


@pytest.mark.parametrize("unit", [KvUnit.SNAPSHOT, KvUnit.BOTH])
def test_the_same_for_state_that_cannot_be_spliced(unit):
    with Rig(engine=FakeEngine(cells=1 << 15, kv_unit=unit)) as rig:
        recorder = Growing(rig, PROMPT).run()
        first = recorder.answer[:10]
        fresh = FakeEngine(cells=1 << 15, kv_unit=unit)
        again = [*LEAD, *NOTICE, *KEPT, *first]
        assert recorder.answer[10:] == reference(again, max_new=10, engine=fresh, sampling=ENDLESS)


def test_a_full_answer_can_be_cancelled(rig):
    is_full = threading.Event()

    def full() -> bool:
        is_full.set()
        return True

    sequence = rig.sequence(PROMPT, max_new=5, on_full=full)
    rig.scheduler.submit(sequence)
    assert is_full.wait(10)
    rig.scheduler.cancel(sequence)
    rig.settle()
    rig.scheduler.make_room(sequence, None)
    assert rig.run(PROMPT).lookup.reused_tokens == len(PROMPT) - 1


def test_the_engine_says_that_there_is_no_room(monkeypatch):
    """Then the longest answer whose context may be shortened is, and the others go on."""
    with Rig(parallel=2) as rig:
        growing = Growing(rig, PROMPT)
        evaluate, refused = rig.engine.evaluate, []

        def full_once(batch):
            if not refused and any(rows.start == len(PROMPT) + 4 for rows in batch):
                refused.append(len(batch))
                return Outcome.NO_ROOM
            return evaluate(batch)

        monkeypatch.setattr(rig.engine, "evaluate", full_once)
        recorder = growing.run()
        assert refused
        assert len(recorder.answer) == 20
        assert recorder.lookup.is_approximate


@given(data=st.data())
@examples(25)
def test_exact_answers_never_change_whatever_was_spliced(data):
    """Any order of spliced and exact sequences over a few prompts: exact requests get the reference."""
    with Rig() as rig:
        known: list[list[int]] = []
        for _ in range(data.draw(st.integers(2, 5))):
            if known and data.draw(st.booleans()):
                source = data.draw(st.sampled_from(known))
                start = data.draw(st.integers(0, min(60, len(source) - 30)))
                end = data.draw(st.integers(start, len(source) - 30))
                insert = text(data.draw(st.integers(1, 20)), seed=9)
                prompt = [*source[:start], *insert, *source[end:]]
                made = splice_of(source, start, end, insert)
                answer = rig.run(prompt, splice=made, lineage=MARKED, max_new=4)
                if not answer.lookup.is_approximate:
                    assert answer.answer == reference(prompt, max_new=4)
            else:
                prompt = [*LEAD, *text(data.draw(st.integers(40, 200)), seed=data.draw(st.integers(10, 13)))]
                answer = rig.run(prompt, max_new=4)
            known.append([*prompt, *answer.answer, *CLOSING, *ASK])
        for prompt in known:
            assert rig.run(prompt, max_new=4).answer == reference(prompt, max_new=4)
