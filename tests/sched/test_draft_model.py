"""A draft model writes ahead for the sequences of another engine; answers stay those of plain decoding."""

from __future__ import annotations

import threading
from collections import Counter
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.chat.prompt import Splice
from emberkeep.engine.base import Engine
from emberkeep.engine.fake import FakeEngine
from emberkeep.kv.forgetting import of_user
from emberkeep.sched.speculation import ModelDrafts, _Plan
from emberkeep.types.lineage import Lineage, private_namespace
from emberkeep.types.request import Sampling
from helpers.chance import examples
from helpers.drafting import LONG, PROMPT, SmallEngine, ToldCorpus, answer_of, knows
from helpers.engines import RecordingEngine
from helpers.faulty_crowd import ERRORS, Faults, methods
from helpers.kv_building import check_ledger
from helpers.scheduling import CLOSING, ENDLESS, PATIENCE, DeviceEngine, Recorder, Rig, prompt_of, text


def model_stats(rig: Rig):
    stats = rig.scheduler.speculation_stats()
    assert stats.draft_model is not None
    return stats.draft_model


@pytest.fixture(scope="module")
def plain() -> list[int]:
    answer = answer_of().answer
    assert len(answer) > 20
    return answer


# ── the text ──


@given(
    st.lists(st.integers(32, 126), min_size=1, max_size=300),
    st.sampled_from(["fake", "others"]),
    st.floats(0, 2),
    st.integers(0, 60),
    st.floats(0.05, 1),
    st.floats(0, 0.5),
    st.integers(0, 1 << 31),
)
@examples(25)
def test_no_prompt_or_setting_gives_another_text(prompt, weights, temperature, top_k, top_p, min_p, seed):
    sampling = Sampling(temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    spoken = answer_of(prompt, 24, draft=SmallEngine(weights=weights), sampling=sampling)
    assert spoken.answer == answer_of(prompt, max_new=24, sampling=sampling).answer


def test_what_is_found_without_a_model_comes_first(plain):
    """A long match costs nothing."""
    draft = SmallEngine()
    with Rig(draft=draft, corpus=ToldCorpus(knows(PROMPT + plain))) as rig:
        assert rig.run(PROMPT, max_new=LONG).answer == plain
        sources = rig.scheduler.speculation_stats().sources
    assert sources["corpus"].accepted_tokens > 2 * draft.evaluated_tokens - 2 * len(PROMPT)


def test_an_answer_whose_context_is_shortened_is_drafted_for_again():
    plain, drafted = (shortened_answer(draft) for draft in (None, SmallEngine()))
    assert plain == drafted
    assert len(plain) == 60


def shortened_answer(draft: Engine | None) -> list[int]:
    """What is said while the middle of the prompt leaves the context."""
    lead, old, kept, notice = text(50, seed=1), text(300, seed=2), text(60, seed=3), text(12, seed=4)
    prompt, lineage = [*lead, *old, *kept], Lineage(splice="abc")
    splice = Splice(np.array(prompt, np.int32), 50, 350, np.array(notice, np.int32), True)
    shorter = prompt_of([*lead, *notice, *kept], max_new=60, closing=(), splice=splice, lineage=lineage)

    def full() -> bool:
        room = shorter if sequence.sampled_count <= 20 else None
        threading.Thread(target=rig.scheduler.make_room, args=(sequence, room)).start()
        return True

    with Rig(draft=draft) as rig:
        recorder = Recorder()
        sequence = rig.sequence(
            prompt, recorder, sampling=ENDLESS, max_new=20, closing=(), on_full=full, lineage=lineage
        )
        rig.scheduler.submit(sequence)
        answer = recorder.answer
        if draft:
            assert model_stats(rig).reason == ""
            assert sequence.accepted_tokens > 0
    return answer


@pytest.mark.parametrize(("room", "least"), [({"context": 80}, 1), ({"cells": 75, "context": 4096}, 0)])
def test_where_its_context_or_its_room_ends_nothing_is_drafted_any_more(plain, room, least):
    with Rig(draft=SmallEngine(**room)) as rig:
        recorder = rig.run(PROMPT, max_new=LONG)
        assert recorder.answer == plain
        assert least <= recorder.ending.timings.draft_n < 15
        assert model_stats(rig).reason == ""


# ── catching up ──


def test_drafts_that_are_cut_short_and_right_are_gone_on_from(monkeypatch):
    """Only some of a draft may be evaluated, and the token that is sampled then may be the next of it."""
    monkeypatch.setattr(ModelDrafts, "_plan", lambda *_: _Plan(8, 0.0, 8.0))
    with Rig(draft=SmallEngine()) as rig:
        rig.scheduler._parts.speculation._seconds = lambda rows, depth, outputs: 1.0 if rows <= 4 else 100.0
        recorder = rig.run(PROMPT, max_new=LONG)
        assert model_stats(rig).reason == ""
    assert recorder.ending.timings.draft_n_accepted == recorder.ending.timings.draft_n > 0


def test_a_long_prompt_is_caught_up_with_in_slices():
    """No step of the target waits for more than a slice."""
    prompt = text(1500)
    draft, engine = RecordingEngine(cells=1 << 15, batch=128), RecordingEngine(cells=1 << 15)
    with Rig(engine=engine, draft=draft) as rig:
        recorder = rig.run(prompt, max_new=200, sampling=ENDLESS)
        assert recorder.answer == answer_of(prompt, max_new=200, sampling=ENDLESS).answer
    assert max(rows[2] for batch in draft.shapes for rows in batch) <= 128
    assert recorder.ending.timings.draft_n_accepted > 0
    first = next(i for i, batch in enumerate(draft.shapes) if batch[0][3])
    assert first >= 1500 // 128
    assert sum(rows[2] for batch in draft.shapes[:first] for rows in batch) >= 1500 - 32


def test_choices_of_one_request_evaluate_its_prompt_once():
    prompt, draft = text(600), SmallEngine()
    with Rig(draft=draft) as rig:
        running = [rig.start(prompt, max_new=80, sampling=ENDLESS) for _ in range(3)]
        assert len({tuple(each.answer) for each in running}) == 1
    assert draft.evaluated_tokens < 1200


# ── its state ──


def test_its_state_is_found_again_after_a_restart(tmp_path, plain):
    prompt = text(600)
    with Rig(tmp_path, draft=SmallEngine()) as rig:
        answer = rig.run(prompt, max_new=30, sampling=ENDLESS).answer
    draft = SmallEngine()
    with Rig(tmp_path, draft=draft) as rig:
        again = rig.run([*prompt, *answer, *CLOSING, *text(20, seed=8)], max_new=200, sampling=ENDLESS)
        assert again.ending.timings.draft_n_accepted > 0
        for store in rig.scheduler.stores:
            check_ledger(store)
    assert draft.evaluated_tokens < len(prompt)


def test_another_owner_does_not_find_it(tmp_path):
    prompt = text(600)
    with Rig(tmp_path, draft=SmallEngine()) as rig:
        rig.run(prompt, max_new=30, sampling=ENDLESS, namespace="ann")
        draft = rig.scheduler._draft._engine
        before = draft.evaluated_tokens
        rig.run(prompt, max_new=30, sampling=ENDLESS, namespace="bob")
        assert draft.evaluated_tokens - before >= 600


def test_forgetting_reaches_it():
    with Rig(draft=SmallEngine()) as rig:
        rig.run(text(600), max_new=30, sampling=ENDLESS, namespace=private_namespace("ann"))
        assert rig.scheduler._draft._slots.idle
        rig.scheduler.forget(of_user("ann")).result(PATIENCE)
        assert not rig.scheduler._draft._slots.idle
        for store in rig.scheduler.stores:
            store.catalogue.forget_user("ann")
            assert not store.catalogue.entries()


def test_what_is_not_to_be_kept_leaves_nothing():
    with Rig(draft=SmallEngine()) as rig:
        rig.run(text(300), max_new=30, sampling=ENDLESS, is_kept=False)
        assert not rig.scheduler._draft._slots.idle
        assert not rig.draft_store.catalogue.entries()


def test_rejected_tokens_are_never_stored():
    """Whatever is stored of it is a part of what was said."""
    prompt = text(250)
    with Rig(draft=SmallEngine(weights="others")) as rig:
        answer = rig.run(prompt, max_new=200, sampling=ENDLESS).answer
        written = [*prompt, *answer, *CLOSING]
        chunks = list(rig.draft_store._ledger.tree)
        assert chunks
        for chunk in chunks:
            assert chunk.tokens.tolist() == written[chunk.start : chunk.start + len(chunk.tokens)]


# ── when it fails ──

ASKED = ("evaluate", "logits", "trim", "export_kv", "import_kv", "copy_kv", "close")


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("name", ASKED)
def test_whatever_fails_in_it_harms_no_answer(tmp_path, name, error):
    prompt = text(300)
    with Rig(tmp_path, draft=SmallEngine(weights="others")) as rig:
        rig.run(prompt, max_new=10, sampling=ENDLESS)
    # The first three from the store, the others from what is hot: one takes it over, two copy.
    rounds = [[[*prompt, first + number] for first in (50, 60, 70)] for number in range(2)]
    expected = [[answer_of(p, max_new=40, sampling=ENDLESS).answer for p in prompts] for prompts in rounds]
    draft = SmallEngine(weights="others")
    faults = Faults(draft, methods(Engine) if name != "close" else [*methods(Engine), "close"])
    faults.fail(name, 1, error)
    with Rig(tmp_path, draft=draft) as rig:
        faults.is_armed = True
        for prompts, answers in zip(rounds, expected, strict=True):
            running = [rig.start(p, max_new=40, sampling=ENDLESS) for p in prompts]
            assert [each.answer for each in running] == answers
            rig.settle()
        stats = rig.scheduler.speculation_stats()
        assert stats.enabled
    assert faults.has_failed
    if name in ("evaluate", "logits"):
        assert "has failed" in stats.draft_model.reason


def test_a_model_that_is_never_right_is_soon_left_alone():
    """Where its steps cost something: only to find out whether it has become right."""
    engine, draft = FakeEngine(cells=1 << 15), SmallEngine(weights="others")
    with Rig(engine=engine, draft=draft) as rig:
        rig.scheduler._parts.speculation._seconds = lambda rows, depth, outputs: 0.01 * (1 + 0.1 * rows)
        rig.scheduler._draft._times.seconds = lambda rows, depth: 0.004
        recorder = rig.run(text(64), max_new=600, sampling=ENDLESS)
        assert recorder.ending.timings.draft_n < 40


class Drawing(DeviceEngine):
    """Counts the rows after which it may go on by itself, and the others. Its answers have no end."""

    def __init__(self) -> None:
        super().__init__(cells=1 << 15)
        self.may_go_on = Counter[bool]()

    def evaluate(self, batch):
        self.may_go_on.update(rows.goes_on > 0 for rows in batch if rows.outputs)
        return super().evaluate(batch)

    def likeliest(self, index, row=0):
        return int(self.logits(index, row)[: min(self.vocab.eog)].argmax())


def test_beside_one_that_is_never_right_steps_are_launched_ahead_as_without_it():
    engine, draft = Drawing(), SmallEngine(weights="others")
    with Rig(engine=engine, draft=draft) as rig:
        rig.scheduler._parts.speculation._seconds = lambda rows, depth, outputs: 0.01 * (1 + 0.1 * rows)
        rig.scheduler._draft._times.seconds = lambda rows, depth: 0.004
        rig.run(text(64), max_new=400)
        engine.may_go_on.clear()
        rig.run(text(64, seed=1), max_new=400)
    assert engine.may_go_on[True] > 5 * engine.may_go_on[False]


def test_one_that_becomes_right_is_used_again(monkeypatch):
    """By what its steps are said to take: a busy machine changes nothing."""
    ticks = count()
    for module in ("speculation", "draft_model"):
        monkeypatch.setattr(f"emberkeep.sched.{module}.perf_counter", lambda: 1e-6 * next(ticks))
    engine, draft = Drawing(), SmallEngine(weights="others")
    with Rig(engine=engine, draft=draft) as rig:
        rig.scheduler._parts.speculation._seconds = lambda rows, depth, outputs: 0.01 * (1 + 0.1 * rows)
        rig.scheduler._draft._times.seconds = lambda rows, depth: 0.004
        rig.run(text(64), max_new=400)
        draft._weights = engine._weights
        rig.run(text(64, seed=1), max_new=600)
        assert rig.run(text(64, seed=2), max_new=600).ending.timings.draft_n_accepted > 300


# ── in gaps ──


class Improving(SmallEngine):
    """Knows how many tokens it holds when it is to become quicker, and what else is asked of it then."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[int] = []
        self.rested = threading.Event()

    def rest(self):
        self.rested.set()

    can_improve = True

    def improve(self, is_wanted):
        self.held.append(self.stats()["pool"]["used_blocks"])
        return True


def test_in_gaps_it_becomes_quicker_with_nothing_in_it_and_later_gives_back_memory(monkeypatch, plain):
    monkeypatch.setattr("emberkeep.sched.scheduler.GAP_S", 0.01)
    monkeypatch.setattr("emberkeep.sched.scheduler.REST_S", 0.01)
    small = Improving()
    with Rig(draft=small) as rig:
        assert small.rested.wait(PATIENCE)
        small.rested.clear()
        assert rig.run(PROMPT, max_new=LONG).answer == plain
        assert small.rested.wait(PATIENCE)
    assert small.held == [0]
    assert small.is_closed
