"""Reuse never changes an answer, and nothing is evaluated twice. State in fewer bits is found only by those who
asked for it, and said to be approximate."""

from __future__ import annotations

import pytest

from emberkeep.engine.base import KvUnit
from emberkeep.engine.fake import FakeEngine
from emberkeep.kv.policy import CHUNK_TOKENS
from emberkeep.types.events import MissReason
from emberkeep.types.lineage import EXACT, Lineage, private_namespace
from helpers.kv_building import check_ledger, chunk_files, chunks_of
from helpers.scheduling import (
    CLOSING,
    GREEDY,
    PROMPT,
    SEEDED,
    Gate,
    Recorder,
    Rig,
    reference,
    text,
    unique_prefix_tokens,
)


def evaluated_by(rig: Rig, *args, **kwargs) -> int:
    before = rig.engine.evaluated_tokens
    rig.run(*args, **kwargs)
    return rig.engine.evaluated_tokens - before


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_repeated_prompt_gives_the_same_answer_without_evaluation(rig, sampling):
    first = rig.run(PROMPT, sampling=sampling)
    again = rig.run(PROMPT, sampling=sampling)
    fresh = rig.run(PROMPT, sampling=sampling, use_cache=False)
    assert first.answer == again.answer == fresh.answer == reference(PROMPT, sampling=sampling)
    assert again.lookup.reused_tokens == len(PROMPT) - 1
    assert again.lookup.reason is MissReason.NONE
    assert fresh.lookup.reused_tokens == 0
    assert fresh.lookup.reason is MissReason.DISABLED


def test_the_last_prompt_token_is_evaluated_to_start_an_answer_and_only_then(rig):
    rig.run(PROMPT, max_new=0)
    assert evaluated_by(rig, PROMPT, max_new=0) == 0
    assert evaluated_by(rig, PROMPT, max_new=1, closing=()) == 2  # it, and the answer


def test_every_turn_of_a_conversation_reuses_everything_before_it(rig):
    history, known = PROMPT, 0
    for turn in range(6):
        answer = rig.run(history)
        assert answer.answer == reference(history)
        assert answer.lookup.reused_tokens == known
        known = len(history) + len(answer.tokens) + len(CLOSING)
        history = [*history, *answer.tokens, *CLOSING, *text(40, seed=turn + 50)]
    assert rig.engine.evaluated_tokens == known


def test_a_next_turn_that_comes_at_once_waits_for_the_end_of_the_last(rig):
    following = Recorder()

    def go_on(first: Recorder) -> None:
        rig.start([*PROMPT, *first.tokens, *CLOSING, *text(40, seed=50)], following)

    first = rig.run(PROMPT, Recorder(then=go_on))
    assert following.lookup.reused_tokens == len(PROMPT) + len(first.tokens) + len(CLOSING)


@pytest.mark.parametrize("position", [0, 1, 127, 128, 129, 300, 698, 699])
def test_an_edited_prompt_reuses_exactly_what_comes_before_the_edit_in_the_engine_and_on_disk(tmp_path, position):
    edited = [*PROMPT[:position], PROMPT[position] - 1, *PROMPT[position + 1 :]]
    with Rig(tmp_path) as rig:
        rig.run(PROMPT)
        hot = rig.run(edited, is_kept=False)
    with Rig(tmp_path) as rig:
        cold = rig.run(edited)
    assert hot.answer == cold.answer == reference(edited)
    assert hot.lookup.reused_tokens == cold.lookup.reused_tokens == cold.lookup.cold_tokens == position


def test_a_divergence_says_where_and_what(tmp_path):
    with Rig(tmp_path) as rig:
        assert rig.run(PROMPT).lookup.reason is MissReason.NEW
        edited = [*PROMPT[:300], *map(ord, "something else entirely"), *PROMPT[340:]]
        lookup = rig.run(edited).lookup
    assert lookup.reason is MissReason.DIVERGED
    assert lookup.divergence.token_index == 300
    assert lookup.divergence.prompt_text == "something el"
    assert lookup.divergence.stored_text == bytes(PROMPT[300:312]).decode()


def test_sixteen_conversations_over_one_prefix_cost_its_evaluation_once(tmp_path):
    prefix = text(1500)
    prompts = [[*prefix, *text(220, seed=seed)] for seed in range(1, 17)]
    with Rig(tmp_path) as rig:
        recorders = [rig.start(prompt, max_new=20) for prompt in prompts]
        assert [r.answer for r in recorders] == [reference(prompt, max_new=20) for prompt in prompts]
        rig.settle()
        rig.store.flush()
        unique = unique_prefix_tokens(
            [*prompt, *r.tokens, *CLOSING] for prompt, r in zip(prompts, recorders, strict=True)
        )
        assert rig.engine.evaluated_tokens <= 1.02 * unique
        stored = sum(chunk.payload.nbytes for chunk in chunks_of(rig.store))
        assert stored <= 1.05 * unique * rig.engine.capabilities.kv_bytes_per_token


def test_what_the_engine_lacks_is_loaded_behind_what_it_has(tmp_path):
    """Another conversation left the first 200 tokens in the engine; the rest comes from the store, with all of the
    chunk that they end in."""
    with Rig(tmp_path, FakeEngine(sequences=1), parallel=1) as rig:
        rig.run(PROMPT)
        rig.run([*PROMPT[:200], *text(100, seed=1)])
        answer = rig.run(PROMPT)
        assert answer.answer == reference(PROMPT)
        assert (answer.lookup.hot_tokens, answer.lookup.warm_tokens) == (128, 571)
        assert rig.store.counters.damaged_chunks == 0


def test_a_prompt_takes_over_what_rests_and_copies_only_what_is_being_used(tmp_path, monkeypatch):
    """Beside an older answer to it, its cells would lie elsewhere and be added up in another order."""
    engine = FakeEngine()
    copied = []
    copy_kv = engine.copy_kv
    monkeypatch.setattr(engine, "copy_kv", lambda *which: (copied.append(which), copy_kv(*which)))
    with Rig(tmp_path, engine) as rig:
        first = rig.run(PROMPT)
        again = rig.run(PROMPT)
        assert again.answer == first.answer == reference(PROMPT)
        assert again.lookup.hot_tokens == len(PROMPT) - 1
        other = rig.run([*PROMPT[:200], *text(100, seed=1)])
        assert other.lookup.hot_tokens == 200
        assert not copied
        assert len(rig.scheduler._slots.idle) == 1
        gate = Gate(engine, holds=lambda step: step == 3)
        long = rig.start(PROMPT, max_new=40)
        gate.reached()
        beside = rig.start([*PROMPT, 50], max_new=4)
        gate.open()
        assert long.answer == reference(PROMPT, max_new=40)
        assert beside.answer == reference([*PROMPT, 50], max_new=4)
        assert copied


def test_a_restart_loses_nothing(tmp_path):
    with Rig(tmp_path) as rig:
        first = rig.run(PROMPT)
    follow_up = [*PROMPT, *first.tokens, *CLOSING, *text(30, seed=4)]
    with Rig(tmp_path) as rig:
        answer = rig.run(follow_up)
        assert answer.answer == reference(follow_up)
        assert answer.lookup.cold_tokens == len(PROMPT) + len(first.tokens) + len(CLOSING)
        assert rig.engine.evaluated_tokens == 30 + len(answer.tokens) + len(CLOSING)


def test_what_another_process_computed_is_reused(tmp_path):
    with Rig(tmp_path) as mine, Rig(tmp_path) as other:
        other.run(PROMPT)
        other.store.flush()
        mine.store.refresh()
        answer = mine.run(PROMPT)
        assert answer.answer == reference(PROMPT)
        assert answer.lookup.cold_tokens == len(PROMPT) - 1


def test_another_models_state_is_never_used(tmp_path):
    with Rig(tmp_path, FakeEngine(weights="one")) as rig:
        theirs = rig.run(PROMPT).answer
    with Rig(tmp_path, FakeEngine(weights="two")) as rig:
        answer = rig.run(PROMPT)
        assert answer.lookup.reused_tokens == 0
        assert answer.answer != theirs


def test_users_do_not_share_state_in_the_engine_or_the_store(rig):
    rig.run(PROMPT, namespace="alice")
    hot = rig.run(PROMPT, namespace="bob")
    rig.store.flush()
    assert hot.lookup.reused_tokens == 0
    assert rig.run(PROMPT, namespace="alice").lookup.reused_tokens == len(PROMPT) - 1


def test_a_burst_of_short_requests_does_not_throw_a_long_conversation_out(tmp_path):
    engine = FakeEngine(cells=4096, sequences=8)
    with Rig(tmp_path, engine) as rig:
        long = text(2000)
        answer = rig.run(long)
        recorders = [rig.start(text(60, seed=100 + number)) for number in range(40)]
        for recorder in recorders:
            recorder.wait()
        rig.settle()
        follow_up = [*long, *answer.tokens, *CLOSING, *text(20, seed=3)]
        again = rig.run(follow_up)
        assert again.answer == reference(follow_up)
        assert again.lookup.reused_tokens == len(follow_up) - 20


def test_full_engines_give_idle_sequences_up(tmp_path):
    engine = FakeEngine(cells=1000, context=1000, sequences=8)
    prompts = [text(400, seed=seed) for seed in range(5)]
    with Rig(tmp_path, engine) as rig:
        for prompt in [*prompts, *prompts]:
            assert rig.run(prompt).answer == reference(prompt)
        assert rig.scheduler.counters.failed == 0
        assert rig.scheduler.counters.reused_warm_tokens > 0


def test_a_state_too_large_to_import_now_is_evaluated(stored):
    with Rig(stored, FakeEngine(cells=720, context=720)) as rig:
        answer = rig.run(PROMPT, max_new=4, closing=())
        assert answer.answer == reference(PROMPT, max_new=4)


def test_without_ram_and_disk_for_the_state_answers_are_still_right():
    with Rig(None, warm=4000) as rig:
        for _ in range(2):
            assert rig.run(PROMPT).answer == reference(PROMPT)
        check_ledger(rig.store)


@pytest.mark.parametrize("index", [0, 2, 5])
def test_a_damaged_chunk_is_recomputed_and_counted(stored, index):
    with Rig(stored) as rig:
        match = rig.store.match(EXACT, rig.sequence(PROMPT).tokens)
        key = match.segments[index].chunk.key
        rig.store.release(match)
        (path,) = [path for path in chunk_files(stored) if path.stem == key.hex()]
        data = bytearray(path.read_bytes())
        data[-3] ^= 64
        path.write_bytes(data)
        answer = rig.run(PROMPT)
        assert answer.answer == reference(PROMPT)
        assert answer.lookup.reason is MissReason.CORRUPT
        assert answer.lookup.reused_tokens == 128 * index
        assert rig.store.counters.damaged_chunks == 1
        assert rig.run(PROMPT).lookup.reused_tokens == len(PROMPT) - 1


def test_a_chunk_that_vanishes_before_it_is_loaded_is_recomputed(stored):
    with Rig(stored) as rig:
        for path in chunk_files(stored):
            path.unlink()
        answer = rig.run(PROMPT)
        assert answer.answer == reference(PROMPT)
        assert answer.lookup.reason is MissReason.GONE


def test_state_the_engine_refuses_is_recomputed_and_counted(stored):
    with Rig(stored) as rig:
        match = rig.store.match(EXACT, rig.sequence(PROMPT).tokens)
        chunk = match.segments[1].chunk
        chunk.payload = memoryview(bytes(12 * 128))
        rig.store._ledger.ram.tally.bytes += len(chunk.payload)
        rig.store.release(match)
        answer = rig.run(PROMPT)
        assert answer.answer == reference(PROMPT)
        assert answer.lookup.reused_tokens == 128
        assert rig.store.counters.damaged_chunks == 1


def test_a_prompt_that_is_being_computed_is_waited_for(tmp_path):
    engine = FakeEngine()
    gate = Gate(engine)
    with Rig(tmp_path, engine) as rig:
        first = rig.start(PROMPT)
        gate.reached()
        second = rig.start(PROMPT)
        gate.open()
        assert first.answer == second.answer
        assert second.lookup.reused_tokens == len(PROMPT) - 1


def test_stored_tokens_of_no_known_vocabulary_do_not_stop_the_engine(tmp_path):
    with Rig(tmp_path) as rig:
        payload = memoryview(bytes(24))
        alien = rig.sequence([65, 2_000_000]).tokens
        rig.store.insert(rig.store.origin(EXACT), alien, payload, (), fork=False)
        prompt = [65, *text(20)]
        assert rig.run(prompt, Recorder()).answer == reference(prompt)


PACKED = {bits: Lineage(bits=bits) for bits in (8, 4)}

EXACT_BYTES = 12
"""What one token takes in the fake engine."""


@pytest.mark.parametrize("bits", [8, 4])
def test_full_chunks_are_packed_and_the_newest_tokens_are_not(rig, bits):
    rig.run(PROMPT, namespace=PACKED[bits])
    sizes = {len(chunk.tokens): len(chunk.payload) for chunk in chunks_of(rig.store)}
    (tail,) = sizes.keys() - {CHUNK_TOKENS}
    assert sizes[CHUNK_TOKENS] < CHUNK_TOKENS * EXACT_BYTES * bits / 16
    assert sizes[tail] == tail * EXACT_BYTES


def test_a_conversation_ends_up_packed_but_for_its_last_tail(rig):
    history = PROMPT
    for turn in range(5):
        answer = rig.run(history, namespace=PACKED[8])
        history = [*history, *answer.tokens, *CLOSING, *text(90, seed=turn)]
    rig.store.flush()  # only then tails that have grown are gone
    unpacked = [c for c in chunks_of(rig.store) if len(c.payload) == len(c.tokens) * EXACT_BYTES]
    assert len(unpacked) == 1
    assert len(unpacked[0].tokens) < CHUNK_TOKENS


@pytest.mark.parametrize("bits", [8, 4])
def test_what_comes_back_from_fewer_bits_is_approximate(rig, bits):
    first = rig.run(PROMPT, namespace=PACKED[bits])
    again = rig.run(PROMPT, namespace=PACKED[bits], from_store=True)
    assert (first.lookup.is_approximate, again.lookup.is_approximate) == (False, True)
    assert again.lookup.reused_tokens == len(PROMPT) - 1
    assert again.answer != first.answer == reference(PROMPT)


def test_what_goes_on_from_approximate_state_is_approximate(rig):
    rig.run(PROMPT, namespace=PACKED[8])
    loaded = rig.run(PROMPT, namespace=PACKED[8], from_store=True)
    hot = rig.run([*PROMPT, *loaded.tokens, *CLOSING, *text(30)], namespace=PACKED[8])
    assert hot.lookup.hot_tokens > len(PROMPT)
    assert hot.lookup.is_approximate


@pytest.mark.parametrize("from_store", [True, False])
def test_an_exact_sequence_never_sees_packed_state(rig, from_store):
    rig.run(PROMPT, namespace=PACKED[8])
    exact = rig.run(PROMPT, from_store=from_store)
    assert exact.lookup.reused_tokens == 0
    assert exact.answer == reference(PROMPT)
    assert not exact.lookup.is_approximate
    assert rig.run(PROMPT, from_store=True).answer == reference(PROMPT)


def test_an_exact_sequence_goes_on_from_what_is_exact_of_a_packed_conversation(rig):
    rig.run(PROMPT[:300], max_new=0)
    rig.run(PROMPT, namespace=PACKED[8])
    exact = rig.run(PROMPT, from_store=True)
    assert exact.lookup.reused_tokens == 300
    assert exact.answer == reference(PROMPT)


def test_a_sequence_in_fewer_bits_reuses_exact_state_and_stores_nothing_of_it_again(rig):
    rig.run(PROMPT)
    before = chunks_of(rig.store)
    packed = rig.run(PROMPT, namespace=PACKED[8], from_store=True)
    assert packed.lookup.reused_tokens == len(PROMPT) - 1
    assert not packed.lookup.is_approximate
    assert packed.answer == reference(PROMPT)
    assert chunks_of(rig.store) == before


def test_who_wants_other_bits_or_is_another_user_does_not_see_it(rig):
    mine, theirs = (Lineage(private_namespace(user), 8) for user in ("alice", "bob"))
    rig.run(PROMPT, namespace=mine)
    for other in (theirs, Lineage(mine.owner, 4)):
        assert rig.run(PROMPT, namespace=other).lookup.reused_tokens == 0
    assert rig.run(PROMPT, namespace=mine).lookup.reused_tokens == len(PROMPT) - 1


def test_packed_state_survives_a_restart(tmp_path):
    with Rig(tmp_path) as rig:
        rig.run(PROMPT, namespace=PACKED[8])
        loaded = rig.run(PROMPT, namespace=PACKED[8], from_store=True).answer
        rig.store.flush()
    with Rig(tmp_path) as rig:
        again = rig.run(PROMPT, namespace=PACKED[8])
        assert again.lookup.cold_tokens == len(PROMPT) - 1
        assert again.lookup.is_approximate
        assert again.answer == loaded
        assert rig.run(PROMPT).answer == reference(PROMPT)


def test_a_model_with_snapshots_packs_its_ranges(tmp_path):
    engine = FakeEngine(cells=1 << 15, kv_unit=KvUnit.BOTH)
    with Rig(tmp_path, engine) as rig:
        rig.run(PROMPT, namespace=PACKED[8], max_new=0)
        again = rig.run([*PROMPT, 40], namespace=PACKED[8], from_store=True)
        assert again.lookup.reused_tokens == len(PROMPT)
        assert again.lookup.is_approximate
        packed = [chunk for chunk in chunks_of(rig.store) if len(chunk.tokens) == CHUNK_TOKENS]
        assert packed and all(len(chunk.payload) < CHUNK_TOKENS * EXACT_BYTES / 2 for chunk in packed)
