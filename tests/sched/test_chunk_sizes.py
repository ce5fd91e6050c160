"""Chunks of another size than the store was written with: state is found or evaluated, and never wrong."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from emberkeep.engine.base import KvUnit
from emberkeep.engine.fake import FakeEngine
from emberkeep.types.lineage import Lineage
from helpers.chance import examples
from helpers.kv_building import check_ledger, chunks_of
from helpers.scheduling import Rig, reference, text

PROMPT = text(700)
SIZES = [32, 100, 128, 500, 1024]


@examples(24)
@given(
    unit=st.sampled_from(KvUnit),
    runs=st.lists(
        st.tuples(st.sampled_from(SIZES), st.integers(0, 3), st.integers(1, 900), st.booleans()),
        min_size=2,
        max_size=6,
    ),
)
def test_no_history_of_sizes_gives_wrong_state(tmp_path_factory, unit, runs):
    """Each run opens the store with another size, for a prompt that parts from others anywhere."""
    folder = tmp_path_factory.mktemp("kv")
    for size, branch, shared, from_store in runs:
        prompt = [*PROMPT[:shared], *text(150, seed=100 + branch)]
        engine = FakeEngine(cells=1 << 15, kv_unit=unit)
        with Rig(folder, engine, chunk_tokens=size) as rig:
            answer = rig.run(prompt, from_store=from_store).answer
            assert answer == reference(prompt, engine=FakeEngine(cells=1 << 15, kv_unit=unit))
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
