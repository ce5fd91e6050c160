"""State in fewer bits: smaller, found only by those who asked for it, and said to be approximate."""

from __future__ import annotations

from pathlib import Path

import pytest

from emberkeep.engine.base import KvUnit
from emberkeep.engine.fake import FakeEngine
from emberkeep.kv.policy import CHUNK_TOKENS
from emberkeep.types.lineage import Lineage, Repair, private_namespace
from helpers.kv_building import check_ledger, chunks_of
from helpers.scheduling import CLOSING, PROMPT, Rig, reference, text

PACKED = {bits: Lineage(bits=bits) for bits in (8, 4)}
EXACT_BYTES = 12
"""What one token takes in the fake engine."""


@pytest.fixture
def rig(tmp_path: Path):
    with Rig(tmp_path) as rig:
        yield rig
        check_ledger(rig.store)


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


def test_bits_do_not_see_each_other(rig):
    rig.run(PROMPT, namespace=PACKED[8])
    assert rig.run(PROMPT, namespace=PACKED[4]).lookup.reused_tokens == 0


def test_users_do_not_see_each_others_packed_state(rig):
    mine, theirs = (Lineage(private_namespace(user), 8) for user in ("alice", "bob"))
    rig.run(PROMPT, namespace=mine)
    assert rig.run(PROMPT, namespace=theirs).lookup.reused_tokens == 0
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


def test_a_lineage_says_in_how_many_bits_it_is_stored():
    owners = "", "*", private_namespace("8", "4")
    assert [Lineage.parse(str(Lineage(owner))).bits for owner in owners] == [16, 16, 16]
    assert Lineage.parse(str(Lineage(private_namespace("4"), 8, Repair.NONE))).bits == 8
