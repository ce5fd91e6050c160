"""Where compute threads run."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from emberkeep.engine.llamacpp.context import LlamaSettings
from emberkeep.engine.llamacpp.engine import LlamaEngine
from emberkeep.engine.llamacpp.model import LlamaModel
from emberkeep.engine.llamacpp.threads import available_cores, one_core_each
from emberkeep.sched.engine_thread import EngineThread
from helpers import tiny_gguf

pytestmark = [
    pytest.mark.serial,
    pytest.mark.skipif(
        sys.platform != "linux" or available_cores() < 2, reason="needs Linux and more than one core"
    ),
]


def open_and_look(model: Path, threads: int) -> dict[int, set[int]]:
    """The cores of every thread of an engine's team, by thread."""
    engine = opened(model, threads)
    try:
        return {task: os.sched_getaffinity(task) for task in team()}
    finally:
        engine.close()


def opened(model: Path, threads: int | None) -> LlamaEngine:
    with one_core_each():
        settings = LlamaSettings(context=256, cells=256, sequences=1, batch=64, threads=threads)
        return LlamaEngine(LlamaModel(model), settings, "digest")


def team() -> list[int]:
    name = f"engine-{threading.get_native_id()}"
    tasks = Path("/proc/self/task").iterdir()
    return [int(task.name) for task in tasks if (task / "comm").read_text().strip() == name]


@pytest.fixture
def thread():
    thread = EngineThread()
    yield thread
    thread.end()


def test_every_compute_thread_has_a_core_of_its_own(tmp_path, thread):
    model, everything = tiny_gguf.dense(tmp_path / "m.gguf"), os.sched_getaffinity(0)
    team = thread.submit(lambda: open_and_look(model, available_cores())).result()
    assert sorted(tuple(cores) for cores in team.values()) == [(core,) for core in sorted(everything)]
    assert os.sched_getaffinity(0) == everything


def test_a_second_engine_on_the_same_thread_has_as_many_cores_as_the_first(tmp_path, thread):
    """A draft model and its target, for instance."""
    model, everything = tiny_gguf.dense(tmp_path / "m.gguf"), os.sched_getaffinity(0)

    def look() -> tuple[list[int], list[bytes], list[set[int]]]:
        engines, counts, cores = [], [], []
        for _ in range(2):
            counts.append(available_cores())
            known = set(team())
            engines.append(opened(model, None))
            cores.append(set().union(*(os.sched_getaffinity(task) for task in {*team()} - known or team())))
        fingerprints = [engine.fingerprint for engine in engines]
        for engine in engines:
            engine.close()
        return counts, fingerprints, cores

    counts, fingerprints, cores = thread.submit(look).result()
    assert counts == [len(everything)] * 2
    assert fingerprints[0] == fingerprints[1]
    assert everything - {min(everything)} <= cores[1]


def test_fewer_threads_than_cores_go_where_the_kernel_puts_them(tmp_path, thread):
    model, everything = tiny_gguf.dense(tmp_path / "m.gguf"), os.sched_getaffinity(0)
    team = thread.submit(lambda: open_and_look(model, available_cores() - 1)).result()
    assert all(cores == everything for cores in team.values())
