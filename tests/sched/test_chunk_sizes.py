"""Chunks of another size than the store was written with: state is found or evaluated, and never wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.engine.base import KvUnit
from emberkeep.engine.fake import FakeEngine
from emberkeep.types.request import Lineage
from helpers.chance import examples
from helpers.kv_building import check_ledger, chunks_of
from helpers.scheduling import CLOSING, Rig, reference, text

PROMPT = text(700)
SIZES = [32, 100, 128, 500, 1024]


def engine(unit: KvUnit) -> FakeEngine:
    return FakeEngine(cells=1 << 15, kv_unit=unit)


@pytest.mark.parametrize("size", SIZES)
def test_what_is_stored_has_the_chunks_that_were_asked_for(tmp_path, size):
    with Rig(tmp_path, chunk_tokens=size) as rig:
        rig.run(PROMPT, max_new=1)
        lengths = sorted(len(chunk.tokens) for chunk in chunks_of(rig.store))
        assert sum(lengths) == len(PROMPT) + len(CLOSING) + 1
        assert [length for length in lengths if length == size] == [size] * (sum(lengths) // size)
        assert len(lengths) == -(-sum(lengths) // size)


@pytest.mark.parametrize("unit", list(KvUnit))
@pytest.mark.parametrize("now", SIZES)
@pytest.mark.parametrize("before", SIZES)
def test_a_store_is_found_with_every_other_size(tmp_path, before, now, unit):
    with Rig(tmp_path, engine(unit), chunk_tokens=before) as rig:
        first = rig.run(PROMPT)
    history = [*PROMPT, *first.answer, *CLOSING]
    turn = [*history, *text(300, seed=1)]
    with Rig(tmp_path, engine(unit), chunk_tokens=now) as rig:
        second = rig.run(turn)
        assert second.lookup.cold_tokens == len(history)
        assert second.answer == reference(turn, engine=engine(unit))
        check_ledger(rig.store)
    last = [*turn, *second.answer, *CLOSING, *text(40, seed=2)]
    with Rig(tmp_path, engine(unit), chunk_tokens=before) as rig:
        third = rig.run(last)
        assert third.lookup.cold_tokens == len(last) - 40
        assert third.answer == reference(last, engine=engine(unit))
        check_ledger(rig.store)


@examples(12)
@given(
    runs=st.lists(
        st.tuples(st.sampled_from(SIZES), st.integers(0, 3), st.integers(1, 900), st.booleans()),
        min_size=2,
        max_size=6,
    )
)
def test_no_history_of_sizes_gives_wrong_state(tmp_path_factory, runs):
    """Each run opens the store with another size, for a prompt that parts from others anywhere."""
    folder = tmp_path_factory.mktemp("kv")
    for size, branch, shared, from_store in runs:
        prompt = [*PROMPT[:shared], *text(150, seed=100 + branch)]
        with Rig(folder, chunk_tokens=size) as rig:
            assert rig.run(prompt, from_store=from_store).answer == reference(prompt)
            check_ledger(rig.store)


def test_what_is_packed_is_not_packed_again(tmp_path):
    """Errors would add up."""
    packed = Lineage(bits=8)
    with Rig(tmp_path, chunk_tokens=64) as rig:
        rig.run(text(128), namespace=packed, max_new=0, closing=())
        stored = {chunk.key for chunk in chunks_of(rig.store)}
    with Rig(tmp_path, chunk_tokens=256) as rig:
        found = rig.run([*text(128), *text(400, seed=3)], namespace=packed, from_store=True)
        assert found.lookup.cold_tokens == 128
        rig.store.flush()
        chunks = {chunk.key: chunk for chunk in chunks_of(rig.store)}
        assert stored <= chunks.keys()
        later = [chunk for key, chunk in chunks.items() if key not in stored]
        assert min(chunk.start for chunk in later) == 128
