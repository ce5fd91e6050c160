"""RAM that a GPU copies from and to is pinned while anything shows it, and copies go on beside the steps."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from emberkeep.engine.hf.staging import HostMemory, SideStream

pytestmark = pytest.mark.slow


class Runtime:
    """CUDA's functions that pin, and what is pinned."""

    def __init__(self, result: int = 0) -> None:
        self.pinned: dict[int, int] = {}
        self._result = result

    def cudaHostRegister(self, place: int, size: int, flags: int) -> int:
        self.pinned[place] = size
        return self._result

    def cudaHostUnregister(self, place: int) -> int:
        del self.pinned[place]
        return 0


@pytest.fixture
def runtime(monkeypatch):
    made = Runtime()
    _use(made, monkeypatch)
    return made


def _use(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(result: int) -> None:
        if result:
            raise RuntimeError("CUDA error")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", check)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: check(1))  # where there is a GPU it asks that


@pytest.mark.parametrize(
    "shown", [torch.Tensor.numpy, lambda memory: memory[10:20], lambda memory: memory.view(4, -1)]
)
def test_memory_stays_pinned_while_anything_shows_it(runtime, shown):
    memory = HostMemory(is_pinned=True).allocate(4096)
    place, left = memory.data_ptr(), shown(memory)
    del memory
    gc.collect()
    assert runtime.pinned == {place: 4096}
    left[:] = 7
    del left
    gc.collect()
    assert not runtime.pinned


def test_memory_that_cannot_be_pinned_is_there_all_the_same(monkeypatch, caplog):
    _use(Runtime(result=2), monkeypatch)
    host = HostMemory(is_pinned=True)
    memory = host.allocate(4096)
    memory[:] = 3
    assert int(memory.sum()) == 3 * 4096
    assert not host.is_pinned
    assert "copies from RAM are slower" in caplog.text


def test_memory_that_need_not_be_pinned_is_not(runtime):
    memory = HostMemory(is_pinned=False).allocate(4096).numpy()
    assert not runtime.pinned
    np.copyto(memory, 1)


class RecordedCuda:
    """Streams and events that write down in which order they were told what."""

    def __init__(self, monkeypatch) -> None:
        self.calls: list[str] = []
        self.is_reached = False
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: RecordedStream(self, "side"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: RecordedStream(self, "steps"))
        monkeypatch.setattr(torch.cuda, "stream", self._inside)

    @contextmanager
    def _inside(self, stream):
        self.calls.append(f"on {stream.name}")
        yield
        self.calls.append("back")

    def query(self) -> bool:
        return self.is_reached

    def synchronize(self) -> None:
        self.calls.append("synchronize")


class RecordedStream:
    def __init__(self, cuda: RecordedCuda, name: str) -> None:
        self.name = name
        self._cuda = cuda

    def wait_stream(self, other: RecordedStream) -> None:
        self._cuda.calls.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event) -> None:
        self._cuda.calls.append(f"{self.name} waits for the event")

    def record_event(self) -> RecordedCuda:
        self._cuda.calls.append(f"event on {self.name}")
        return self._cuda


def test_a_side_stream_begins_after_the_steps_so_far_and_holds_memory_until_it_is_done(monkeypatch):
    """Also that of payloads which nothing asks for any more."""
    cuda, memory = RecordedCuda(monkeypatch), np.zeros(10, np.uint8)
    stream, gone = SideStream(torch.device("cuda")), weakref.ref(memory)
    mark = stream.run(lambda: cuda.calls.append("work"), held=memory)
    del memory
    assert cuda.calls == ["side waits for steps", "on side", "work", "back", "event on side"]
    stream.let_go()
    assert not mark.has_passed and gone() is not None
    mark.hold_back()
    mark.wait()
    assert cuda.calls[5:] == ["steps waits for the event", "synchronize"]
    cuda.is_reached = True
    stream.let_go()
    assert mark.has_passed and gone() is None


def test_work_that_fails_on_its_way_holds_back_the_steps(monkeypatch):
    cuda = RecordedCuda(monkeypatch)
    stream = SideStream(torch.device("cuda"))
    with pytest.raises(ZeroDivisionError):
        stream.run(lambda: 1 // 0, held=None)
    assert cuda.calls[-2:] == ["event on side", "steps waits for the event"]
    stream.close()
    assert cuda.calls[-1] == "synchronize"
