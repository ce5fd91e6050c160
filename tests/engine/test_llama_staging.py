"""State in long ranges, as it leaves and enters a GPU: here through plain memory, and in small stages."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event, get_native_id

import numpy as np
import pytest

from emberkeep.engine.base import KvUnit, Outcome, Rows
from emberkeep.engine.llamacpp import staging
from emberkeep.engine.llamacpp.mixed_cells import read_mixed
from emberkeep.engine.llamacpp.shared_library import llama
from emberkeep.engine.llamacpp.staging import PinnedBuffer, Staging
from emberkeep.errors import EngineError
from helpers.engines import KINDS, TOKENS, evaluate

END = 600
BORDERS = (*range(0, END, 64), END)
OTHER_CELLS_FIRST = 90


@pytest.fixture(params=[True, False], ids=["flash", "no flash"])
def flash(request) -> bool:
    return request.param


@pytest.fixture(params=[1, 3, 100], ids=["a chunk each", "three chunks", "all at once"])
def stage(request) -> int:
    """How many chunks a stage holds."""
    return request.param


def staged(engine, chunks: int):
    layout = engine._context.layout
    engine._transfer.stage(Staging(None, layout.range_bytes(64), layout.range_bytes(64 * chunks) + 1))
    return engine


def ranged(kinds):
    return [kind for kind in kinds if kind != "recurrent"]


@pytest.mark.parametrize("kind", ranged(KINDS))
def test_what_leaves_in_stages_is_what_leaves_chunk_by_chunk(open_engine, kind, stage):
    engine = open_engine(kind)
    evaluate(engine, 0, 0, END)
    expected = [bytes(payload) for payload in engine.export_kv(0, BORDERS).payloads()]
    assert [bytes(payload) for payload in staged(engine, stage).export_kv(0, BORDERS).payloads()] == expected


@pytest.mark.parametrize("kind", ranged(KINDS))
def test_what_enters_in_stages_is_what_enters_chunk_by_chunk(open_engine, kind, stage):
    source, plain, target = open_engine(kind), open_engine(kind), staged(open_engine(kind), stage)
    evaluate(source, 0, 0, END)
    payloads = source.export_kv(0, BORDERS).payloads()
    for engine in (plain, target):
        assert engine.import_kv(0, 0, END, payloads, 0) is Outcome.DONE
        if engine.capabilities.kv_unit is KvUnit.BOTH:
            assert engine.import_snapshot(0, END, source.export_snapshot(0)) is Outcome.DONE
    assert np.array_equal(evaluate(target, 0, END, END + 8), evaluate(plain, 0, END, END + 8))


def test_rows_that_lie_out_of_order_leave_in_order(open_engine, stage):
    engine, tidy = open_engine(), open_engine()
    evaluate(engine, 1, 0, OTHER_CELLS_FIRST)
    evaluate(engine, 0, 0, 64)
    engine.trim(1, 0)  # the next ones lie in front
    evaluate(tidy, 0, 0, END)
    payloads = tidy.export_kv(0, BORDERS).payloads()
    assert engine.import_kv(0, 64, END, payloads[1:], 64) is Outcome.DONE
    again = staged(engine, stage).export_kv(0, BORDERS).payloads()
    assert [bytes(payload) for payload in again[1:]] == [bytes(payload) for payload in payloads[1:]]


def side_by_side(engine, begins: dict[int, int], count: int) -> None:
    """Sequences whose answers are written together, a token each in every step."""
    for step in range(count):
        tokens = {s: np.array([TOKENS[(7 * s + begin + step) % 500]], np.int32) for s, begin in begins.items()}
        engine.evaluate([Rows(s, begin + step, tokens[s], outputs=0) for s, begin in begins.items()])


@pytest.mark.parametrize("bits", [16, 8])
def test_rows_that_lie_between_those_of_others_leave_with_few_reads(open_engine, monkeypatch, bits):
    engine = open_engine()
    evaluate(engine, 1, 0, 50)
    evaluate(engine, 2, 0, 50)
    engine.copy_kv(2, 3, 50)  # cells that two have
    evaluate(engine, 0, 0, 20)
    side_by_side(engine, {0: 20, 1: 50, 2: 50, 3: 50}, 90)
    engine.trim(3, 120)  # holes
    side_by_side(engine, {0: 110, 1: 140, 2: 140}, 30)
    cuts = {0: (10, 70, 140), 1: (50, 114, 170), 2: (60, 160), 3: (50, 120)}
    expected = {s: [bytes(one) for one in engine.export_kv(s, cut, bits).payloads()] for s, cut in cuts.items()}
    evaluate(engine, 4, 0, 90)
    engine.trim(1, 0)
    evaluate(engine, 1, 0, 100)  # in the holes
    cuts |= {1: (0, 64, 100), 4: (0, 64, 90)}
    expected[1], expected[4] = (
        [bytes(one) for one in engine.export_kv(s, cuts[s], bits).payloads()] for s in (1, 4)
    )
    rows = []

    def read(*given):
        state, own = read_mixed(*given)
        rows.append((given[2], own is not None))
        return state, own

    monkeypatch.setattr(staging, "read_mixed", read)
    staged(engine, 100)
    for sequence, cut in cuts.items():
        found = [bytes(one) for one in engine.export_kv(sequence, cut, bits).payloads()]
        assert found == expected[sequence]
    assert rows == [(0, True), (1, True), (2, True), (3, True), (4, False)], "what lies together needs no others"


@pytest.mark.parametrize("by", [1, 255])
def test_a_library_that_does_not_tell_whose_cells_are_has_them_read_run_by_run(
    open_engine, monkeypatch, caplog, by
):
    engine = open_engine()
    side_by_side(engine, {0: 0, 1: 0}, 80)
    expected = [bytes(one) for one in engine.export_kv(1, (0, 64, 80)).payloads()]
    told = llama().llama_state_get_data

    def otherwise(context, data, size):
        told(context, data, size)
        words = np.ctypeslib.as_array(data, (size,))
        words[size // 2 : size // 2 + 24] += by

    monkeypatch.setattr(llama(), "llama_state_get_data", otherwise)
    staged(engine, 100)
    for _ in range(2):
        assert [bytes(one) for one in engine.export_kv(1, (0, 64, 80)).payloads()] == expected
    assert caplog.text.count("run by run") == 1


def test_a_part_of_the_first_and_of_the_last_is_enough(open_engine, stage):
    source, target = open_engine(), staged(open_engine(), stage)
    evaluate(source, 0, 0, END)
    payloads = source.export_kv(0, BORDERS).payloads()
    evaluate(target, 0, 0, 70)
    assert target.import_kv(0, 70, 590, payloads[1:], 64) is Outcome.DONE
    whole = b"".join(bytes(p) for p in target.export_kv(0, (128, 192, 256)).payloads())
    assert whole == b"".join(bytes(p) for p in payloads[2:4])
    source.trim(0, 590)
    evaluate(target, 0, 590, 600)


def test_one_bad_payload_refuses_all_and_changes_nothing(open_engine, stage):
    source, target = open_engine(), staged(open_engine(), stage)
    evaluate(source, 0, 0, END)
    payloads = source.export_kv(0, BORDERS).payloads()
    with pytest.raises(EngineError):
        target.import_kv(0, 0, END, [*payloads[:4], payloads[5], *payloads[5:]], 0)
    assert target.import_kv(0, 0, END, payloads, 0) is Outcome.DONE


def test_without_room_for_all_there_is_none_of_it(open_engine, stage):
    source, target = open_engine(), staged(open_engine(cells=512), stage)
    evaluate(source, 0, 0, END)
    payloads = source.export_kv(0, BORDERS).payloads()
    evaluate(target, 1, 0, 40)
    assert target.import_kv(0, 0, END, payloads, 0) is Outcome.NO_ROOM
    assert target.import_kv(0, 0, 448, payloads[:7], 0) is Outcome.DONE
    assert np.array_equal(evaluate(target, 1, 40, 48), _alone(open_engine))


def _alone(open_engine) -> np.ndarray:
    engine = open_engine(cells=512)
    evaluate(engine, 1, 0, 40)
    return evaluate(engine, 1, 40, 48)


def test_memory_of_a_device_without_any_of_its_own_is_plain():
    cpu = llama().ggml_backend_dev_by_type(0)
    buffer = PinnedBuffer(cpu, 4096)
    buffer.memory[:] = 7
    assert buffer.memory.sum() == 7 * 4096
    buffer.close()
    buffer.close()
    assert not len(buffer.memory)


# ── while it is cut out ──


class HeldThreads:
    """Threads that begin nothing before they are let go."""

    def __init__(self, engine) -> None:
        self._threads = engine._transfer._staging._threads
        self._held: list = []
        engine._transfer._staging._threads = self

    def submit(self, do, work):
        begin = Event()
        self._held.append(begin)

        def run():
            assert begin.wait(60)
            return do(work)

        return self._threads.submit(run)

    def let_go(self) -> None:
        for begin in self._held:
            begin.set()

    def shutdown(self) -> None:
        self.let_go()
        self._threads.shutdown()


def replaced(engine) -> None:
    """Other state lies where the exported one lay."""
    engine.trim(0, 0)
    evaluate(engine, 0, 0, END, TOKENS[::-1].copy())


def gone_on(engine) -> None:
    evaluate(engine, 0, END, END + 30)


def spliced(engine) -> None:
    assert engine.splice(0, 20, 200, TOKENS[:4]) is Outcome.DONE


@pytest.mark.parametrize("meanwhile", [replaced, gone_on, spliced])
@pytest.mark.parametrize("bits", [16, 8])
def test_what_is_cut_out_late_is_what_was_there(open_engine, meanwhile, bits):
    engine = open_engine()
    evaluate(engine, 0, 0, END)
    expected = [bytes(payload) for payload in engine.export_kv(0, BORDERS, bits).payloads()]
    threads = HeldThreads(staged(engine, 3))
    export = engine.export_kv(0, BORDERS, bits)
    assert not export.is_done
    meanwhile(engine)
    threads.let_go()
    assert [bytes(payload) for payload in export.payloads()] == expected
    assert export.is_done


def test_a_stage_is_used_again_only_when_it_was_cut_up(open_engine):
    """What is exported here takes as many stages as there are."""
    engine = staged(open_engine(cells=2048), 3)
    evaluate(engine, 0, 0, END)
    evaluate(engine, 1, 0, END, TOKENS[::-1].copy())
    expected = [[bytes(p) for p in engine.export_kv(s, BORDERS).payloads()] for s in (0, 1)]
    threads = HeldThreads(engine)
    first = engine.export_kv(0, BORDERS)
    with ThreadPoolExecutor(1) as other:
        following = other.submit(engine.export_kv, 1, BORDERS)
        assert not wait([following], timeout=0.2).done
        threads.let_go()
        second = following.result()
        threads.let_go()
    assert [[bytes(p) for p in export.payloads()] for export in (first, second)] == expected


def test_what_is_not_asked_for_does_no_harm(open_engine):
    engine = staged(open_engine(), 3)
    evaluate(engine, 0, 0, END)
    expected = [bytes(payload) for payload in engine.export_kv(0, BORDERS).payloads()]
    for _ in range(20):
        engine.export_kv(0, BORDERS)
    assert [bytes(payload) for payload in engine.export_kv(0, BORDERS).payloads()] == expected
    left = engine.export_kv(0, BORDERS)
    engine.close()
    assert [bytes(payload) for payload in left.payloads()] == expected


@pytest.mark.skipif(sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_threads_run_on_any_core_although_the_engine_has_one_of_its_own():
    def look() -> tuple[set[int], str]:
        name = Path(f"/proc/self/task/{get_native_id()}/comm").read_text().strip()
        return os.sched_getaffinity(0), name

    everything = os.sched_getaffinity(0)
    with ThreadPoolExecutor(1) as engine_thread:
        staging = engine_thread.submit(Staging, None, 64, 64).result()
        engine_thread.submit(os.sched_setaffinity, 0, {min(everything)}).result()
        cores, name = engine_thread.submit(lambda: staging._threads.submit(look).result()).result()
        staging.close()
    assert (cores, name) == (everything, "staging")
