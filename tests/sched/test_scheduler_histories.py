"""Whatever happens in whatever order, every answer is that of an engine that has seen nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.engine.base import KvUnit
from emberkeep.engine.fake import FakeEngine
from emberkeep.types.lineage import Lineage
from helpers.chance import examples
from helpers.kv_building import check_ledger, chunks_of
from helpers.scheduling import CLOSING, PROMPT, LateEngine, Recorder, Rig, reference, text

pytestmark = pytest.mark.usefixtures("quick_disk")

SHARED = text(140)


@dataclass
class Talk:
    namespace: str
    history: list[int] = field(default_factory=lambda: list(SHARED))


actions = st.lists(
    st.one_of(
        st.tuples(st.just("say"), st.integers(0, 3), st.integers(1, 180)),
        st.tuples(st.just("say at once"), st.integers(0, 3), st.integers(1, 180)),
        st.tuples(st.just("edit"), st.integers(0, 3), st.integers(0, 600)),
        st.tuples(st.just("cancel"), st.integers(0, 3), st.integers(1, 400)),
        st.tuples(st.just("stop"), st.integers(0, 3), st.integers(0, 6)),
        st.tuples(st.just("uncached"), st.integers(0, 3), st.integers(1, 50)),
        st.tuples(st.just("restart"), st.just(0), st.just(0)),
    ),
    min_size=2,
    max_size=10,
)


@examples(30)
@given(
    actions,
    st.sampled_from([FakeEngine, LateEngine]),
    st.sampled_from([700, 1 << 15]),
    st.sampled_from([3_000, 1 << 30]),
    st.integers(1, 4),
)
def test_any_history_gives_the_answers_of_a_fresh_engine(tmp_path_factory, history, kind, cells, warm, parallel):
    folder = tmp_path_factory.mktemp("kv")

    def new_rig() -> Rig:
        engine = kind(cells=max(cells, 700), sequences=2 * parallel)
        return Rig(folder, engine, parallel=parallel, prefill_slice=64, warm=warm)

    rig = new_rig()
    talks = [Talk("alice"), Talk("alice"), Talk("bob"), Talk("")]
    checks: list[tuple[Recorder, list[int], int | None]] = []
    try:
        for number, (action, who, size) in enumerate(history):
            talk = talks[who]
            if action == "restart":
                _check(rig, checks)
                rig.close()
                rig = new_rig()
                continue
            if action == "edit":
                position = size % len(talk.history)
                talk.history[position] = 32 + (talk.history[position] + 1) % 90
                continue
            prompt = (talk.history + text(size, seed=number))[-(640):]
            recorder = Recorder(_stopping(action, size))
            sequence = rig.sequence(prompt, recorder, namespace=talk.namespace, use_cache=action != "uncached")
            rig.scheduler.submit(sequence)
            if action == "cancel":
                rig.scheduler.cancel(sequence)
                continue
            checks.append((recorder, prompt, size if action == "stop" else None))
            if action != "say at once":
                recorder.wait()
                talk.history = [*prompt, *recorder.tokens, *CLOSING]
        _check(rig, checks)
        check_ledger(rig.store)
    finally:
        rig.close()


def _stopping(action: str, size: int):
    if action != "stop":
        return lambda tokens: None
    return lambda tokens: size if len(tokens) == 6 else None


def _check(rig: Rig, checks: list[tuple[Recorder, list[int], int | None]]) -> None:
    for recorder, prompt, stopped in checks:
        expected = reference(prompt)
        assert recorder.answer == (expected if stopped is None else expected[:6])
    checks.clear()
    rig.settle()


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
