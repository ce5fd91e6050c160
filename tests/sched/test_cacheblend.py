"""Passages at other positions are reused, for requests that ask for it; other requests are not affected."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain, permutations
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from emberkeep.engine.base import Blended, KvUnit, Outcome
from emberkeep.engine.fake import FakeEngine
from emberkeep.errors import EngineError, StepFailed
from emberkeep.types.events import MissReason
from emberkeep.types.lineage import EXACT, Approximation, Lineage, Repair
from helpers.chance import examples
from helpers.kv_building import check_ledger, chunk_files, chunks_of
from helpers.scheduling import CLOSING, Gate, Recorder, Rig, no_pins, reference, text

LEAD = text(50, seed=1)
A, B, C = text(200, seed=2), text(260, seed=3), text(180, seed=4)
ASK = text(30, seed=5)
STORED = [*LEAD, *A, *B, *C, *ASK]
SHUFFLED = [*LEAD, *C, *A, *B, *ASK]
MOVED = len(A) + len(B) + len(C)


def how(repair: Repair = Repair.NONE, namespace: str = "", **more) -> dict:
    """What makes a sequence approximate."""
    return {
        "approximate": Approximation(repair, **more),
        "lineage": Lineage(namespace, repair=repair),
    }


@pytest.fixture
def rig(tmp_path: Path):
    with Rig(tmp_path) as rig:
        yield rig
        rig.settle()
        assert no_pins(rig)
        check_ledger(rig.store)


# ── what is reused ──


def test_passages_in_another_order_are_moved_and_the_rest_is_evaluated(rig):
    rig.run(STORED)
    before = rig.engine.evaluated_tokens
    answer = rig.run(SHUFFLED, **how(), max_new=1, closing=())
    lookup = answer.lookup
    assert (lookup.hot_tokens, lookup.moved_tokens, lookup.repaired_tokens) == (len(LEAD), MOVED, 0)
    assert lookup.is_approximate
    assert rig.engine.evaluated_tokens - before == len(ASK) + len(answer.answer)


@pytest.mark.parametrize(
    ("repair", "moved", "least", "most"),
    [
        ({"repair": Repair.NONE}, MOVED, 0, 0),
        # Its share is rounded up in every piece and slice.
        ({"repair": Repair.CACHEBLEND, "ratio": 0.15}, MOVED, 0.15 * MOVED, 0.25 * MOVED),
        ({"repair": Repair.CACHEBLEND, "ratio": 1.0}, MOVED, MOVED, MOVED),
        # A and B were neighbours and still are: there is no seam between them.
        ({"repair": Repair.SELECTIVE, "boundary": 16, "side": "both"}, MOVED - 2 * 2 * 16, 0, 0),
    ],
)
def test_a_repair_evaluates_its_share_again(rig, repair, moved, least, most):
    rig.run(STORED)
    answer = rig.run(SHUFFLED, **how(**repair))
    assert answer.lookup.moved_tokens == moved
    assert least <= answer.lookup.repaired_tokens <= most
    assert (answer.answer == reference(SHUFFLED)) == (most == MOVED)  # state of other places gives other answers
    stats = rig.scheduler.stats()
    assert (stats["moved_tokens"], stats["repaired_tokens"]) == (moved, answer.lookup.repaired_tokens)
    assert stats["approximate_jobs"] == 1


def test_slices_that_divide_pieces_give_the_same_state():
    answers = []
    for prefill_slice in (32, 100, 256):
        with Rig(None, prefill_slice=prefill_slice) as rig:
            rig.run(STORED)
            answers.append(rig.run(SHUFFLED, **how()).answer)
    assert answers[0] == answers[1] == answers[2]


def test_what_is_on_disk_is_moved_after_a_restart(tmp_path):
    with Rig(tmp_path) as rig:
        rig.run(STORED)
        warm = rig.run(SHUFFLED, **how(), is_kept=False).answer
    with Rig(tmp_path) as rig:
        cold = rig.run(SHUFFLED, **how())
        assert cold.answer == warm
        assert (cold.lookup.cold_tokens, cold.lookup.moved_tokens) == (len(LEAD), MOVED)


def test_a_prefix_that_is_only_to_be_ready_is_moved_whole(rig):
    rig.run(STORED)
    lookup = rig.run(SHUFFLED[: -len(ASK)], **how(), max_new=0).lookup
    assert lookup.moved_tokens == MOVED
    assert lookup.reason is MissReason.NONE


def test_progress_counts_what_was_moved(rig):
    rig.run(STORED)
    reports = rig.run(SHUFFLED, **how(), want_progress=True).reports
    assert reports[-1].cached == len(LEAD) + MOVED
    assert [r.processed for r in reports] == sorted(r.processed for r in reports)


# ── what stays exact ──


def test_where_nothing_is_found_everything_is_and_stays_exact(rig):
    rig.run(STORED)
    other = [*LEAD, *text(400, seed=20)]
    answer = rig.run(other, **how())
    assert answer.answer == reference(other)
    assert not answer.lookup.is_approximate
    assert rig.run(other).lookup.reused_tokens == len(other) - 1
    assert lineages(rig) == {EXACT}


def test_an_engine_that_cannot_move_state_evaluates(tmp_path):
    with Rig(tmp_path, FakeEngine(cells=1 << 15, kv_unit=KvUnit.BOTH)) as rig:
        rig.run(STORED)
        answer = rig.run(SHUFFLED, **how())
        expected = reference(SHUFFLED, engine=FakeEngine(cells=1 << 15, kv_unit=KvUnit.BOTH))
        assert answer.answer == expected
        assert answer.lookup.moved_tokens == 0


@pytest.mark.parametrize("ask", [SHUFFLED, SHUFFLED[:300], [*SHUFFLED, *text(50, seed=9)]])
def test_exact_requests_are_answered_as_if_there_were_no_approximate_ones(rig, ask):
    rig.run(STORED)
    rig.run(SHUFFLED, **how())
    exact = rig.run(ask)
    assert exact.answer == reference(ask)
    assert exact.lookup.reused_tokens == len(LEAD)
    assert not exact.lookup.is_approximate


def test_what_comes_before_the_first_moved_token_is_stored_as_exact(tmp_path):
    asked = [*text(100, seed=30), *A, *ASK]
    with Rig(tmp_path) as rig:
        rig.run(STORED)
        assert rig.run(asked, **how()).lookup.moved_tokens == len(A)
        exact = rig.run(asked)
        assert exact.lookup.reused_tokens == 100
        assert exact.answer == reference(asked)
    with Rig(tmp_path) as rig:
        again = rig.run([*asked[:100], *ASK])
        assert again.lookup.reused_tokens >= 100


def test_the_ids_of_an_answer_from_moved_state_are_not_used_for_an_exact_request(rig):
    rig.run(STORED)
    answer = rig.run(SHUFFLED, **how())
    history = [*SHUFFLED, *answer.tokens, *CLOSING]
    assert rig.run(history).lookup.reused_tokens == len(LEAD)


# ── what is kept ──


def test_the_next_turn_goes_on_from_the_approximate_state(rig):
    rig.run(STORED)
    history, known, moved = SHUFFLED, len(LEAD), MOVED
    for turn in range(3):
        answer = rig.run(history, **how())
        assert (answer.lookup.reused_tokens, answer.lookup.moved_tokens) == (known, moved)
        assert answer.lookup.is_approximate
        moved, known = 0, len(history) + len(answer.tokens) + len(CLOSING)
        history = [*history, *answer.tokens, *CLOSING, *text(40, seed=60 + turn)]


def test_the_next_turn_goes_on_after_a_restart_with_the_same_answer(tmp_path):
    with Rig(tmp_path) as rig:
        rig.run(STORED)
        first = rig.run(SHUFFLED, **how())
        following = [*SHUFFLED, *first.tokens, *CLOSING, *text(40, seed=60)]
        hot = rig.run(following, **how(), is_kept=False).answer
    with Rig(tmp_path) as rig:
        again = rig.run(following, **how())
        assert again.answer == hot
        assert again.lookup.cold_tokens == len(following) - 40


def test_strategies_and_users_do_not_see_each_others_state(rig):
    rig.run(STORED)
    rig.run(SHUFFLED, **how(Repair.NONE))
    other = rig.run(SHUFFLED, **how(Repair.SELECTIVE))
    assert other.lookup.reused_tokens == len(LEAD)
    assert other.lookup.moved_tokens > 0
    theirs = rig.run(SHUFFLED, **how(namespace="bob"))
    assert theirs.answer == reference(SHUFFLED)
    assert theirs.lookup.cached_tokens == 0


def test_moved_state_is_not_moved_again(rig):
    rig.run(STORED)
    rig.run(SHUFFLED, **how())
    third = [*LEAD, *ASK, *B, *C]
    lookup = rig.run(third, **how()).lookup
    assert lookup.moved_tokens == len(B) + len(C) - 1  # each from where it was computed, the last token alone
    assert sources_are_exact(rig)


def test_a_cancelled_blend_keeps_what_it_has_as_approximate(tmp_path):
    engine = FakeEngine(cells=1 << 15)
    with Rig(tmp_path, engine, prefill_slice=128) as rig:
        rig.run(STORED)
        # A slice has been blended.
        rig.cancel_at(Gate(engine, lambda step: step == 1), SHUFFLED, **how(Repair.CACHEBLEND))
        assert no_pins(rig)
        again = rig.run(SHUFFLED, **how(Repair.CACHEBLEND)).lookup
        assert again.reused_tokens > len(LEAD)
        assert again.is_approximate
        assert rig.run(SHUFFLED).answer == reference(SHUFFLED)


# ── what goes wrong ──


@pytest.mark.parametrize("reason", [MissReason.CORRUPT, MissReason.GONE])
def test_a_piece_that_is_damaged_or_vanishes_is_evaluated(tmp_path, reason):
    with Rig(tmp_path) as rig:
        rig.run(STORED)
    with Rig(tmp_path) as rig:
        for path in chunk_files(tmp_path):
            if reason is MissReason.GONE:
                path.unlink()
            else:
                path.write_bytes(path.read_bytes()[:-5])
        answer = rig.run(SHUFFLED, **how())
        assert answer.answer == reference(SHUFFLED)
        assert answer.lookup.reason is reason
        assert not answer.lookup.is_approximate
        assert (rig.store.counters.damaged_chunks > 0) == (reason is MissReason.CORRUPT)
        assert no_pins(rig)


def test_a_step_that_fails_says_nothing_about_the_pieces(tmp_path):
    class Exhausted(FakeEngine):
        def blend(self, rows, pieces, ratio):
            raise StepFailed("no memory")

    with Rig(tmp_path, Exhausted()) as rig:
        rig.run(STORED)
        failed = rig.run(SHUFFLED, **how())
        assert isinstance(failed.error, StepFailed)
        assert rig.store.counters.damaged_chunks == 0
        assert no_pins(rig)
        assert rig.run(STORED).lookup.reused_tokens == len(STORED) - 1


def test_bytes_that_the_engine_refuses_are_evaluated_and_the_rest_is_moved(tmp_path):
    with Rig(tmp_path) as rig:
        rig.run(STORED)
        bad = next(chunk for chunk in chunks_of(rig.store) if chunk.start == 256)
        bad.payload = memoryview(bytes(len(bad.payload)))
        lookup = rig.run(SHUFFLED, **how()).lookup
        before_it = 256 - len(LEAD) - len(A)
        assert lookup.moved_tokens == len(C) + len(A) + before_it  # what was stored after it went with it
        assert lookup.reason is MissReason.CORRUPT
        assert rig.store.counters.damaged_chunks == 1
        assert no_pins(rig)
        assert rig.run(SHUFFLED).answer == reference(SHUFFLED)


def test_a_full_engine_makes_room_for_a_blend(tmp_path):
    engine = FakeEngine(cells=900, context=900)
    with Rig(tmp_path, engine) as rig:
        rig.run(STORED)
        rig.run(text(100, seed=40))
        assert rig.run(SHUFFLED, **how()).lookup.moved_tokens == MOVED


def test_without_any_room_the_request_fails_and_the_next_one_does_not(tmp_path):
    class Full(FakeEngine):
        def blend(self, rows, pieces, ratio):
            return Blended(Outcome.NO_ROOM)

    with Rig(tmp_path, Full(cells=1 << 15)) as rig:
        rig.run(STORED)
        failed = rig.start(SHUFFLED, **how()).wait()
        assert isinstance(failed.error, EngineError)
        assert rig.run(SHUFFLED).answer == reference(SHUFFLED)
        assert no_pins(rig)


# ── any history ──


@dataclass
class Talk:
    namespace: str
    repair: Repair
    history: list[int] = field(default_factory=list)


actions = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask, and exactly at once", "go on", "cancel", "restart"]),
        st.integers(0, 3),
        st.integers(0, 5),
    ),
    min_size=2,
    max_size=8,
)
QUOTES = [*permutations((A[:100], B[:90], C[20:120]), 3)]


@examples(8, HealthCheck.function_scoped_fixture)
@given(actions, st.sampled_from([900, 1 << 15]), st.sampled_from([3_000, 1 << 30]), st.integers(1, 4))
def test_exact_answers_are_exact_whatever_approximate_requests_do(
    quick_disk, tmp_path_factory, history, cells, warm, parallel
):
    folder = tmp_path_factory.mktemp("kv")

    def new_rig() -> Rig:
        engine = FakeEngine(cells=cells, context=900, sequences=2 * parallel)
        return Rig(folder, engine, parallel=parallel, prefill_slice=64, warm=warm)

    rig = new_rig()
    talks = [Talk(user, repair) for user in ("alice", "bob") for repair in (Repair.NONE, Repair.CACHEBLEND)]
    asked: list[tuple[str, list[int]]] = []
    exact: list[tuple[Recorder, list[int]]] = []
    try:
        rig.run(STORED, namespace="alice")
        for number, (action, who, which) in enumerate(history):
            talk = talks[who]
            if action == "restart":
                rig.close()
                rig = new_rig()
                continue
            before, ask = (talk.history, text(20, seed=number)) if action == "go on" else (LEAD, ASK)
            prompt = [*before, *chain(*QUOTES[which]), *ask][-640:]
            asked.append((talk.namespace, prompt))
            recorder = Recorder()
            sequence = rig.sequence(prompt, recorder, **how(talk.repair, talk.namespace))
            rig.scheduler.submit(sequence)
            if action == "cancel":
                rig.scheduler.cancel(sequence)
                continue
            if action == "ask, and exactly at once":
                exact.append((rig.start(prompt, namespace=talk.namespace), prompt))
                exact[-1][0].wait()
            recorder.wait()
            talk.history = [*prompt, *recorder.tokens, *CLOSING]
        exact += [(rig.run(prompt, namespace=namespace), prompt) for namespace, prompt in asked]
        for answer, prompt in exact:
            assert answer.answer == reference(prompt)
            assert not answer.lookup.is_approximate
        rig.settle()
        assert no_pins(rig)
        assert sources_are_exact(rig)
        check_ledger(rig.store)
    finally:
        rig.close()


def lineages(rig: Rig) -> set[Lineage]:
    return {chunk.lineage for chunk in chunks_of(rig.store)}


def sources_are_exact(rig: Rig) -> bool:
    """No exact chunk stands below an approximate one."""
    return all(chunk.parent.lineage.is_exact for chunk in chunks_of(rig.store) if chunk.lineage.is_exact)
