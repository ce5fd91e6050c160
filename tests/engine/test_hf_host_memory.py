"""RAM that a GPU copies from and to: pinned for as long as anything shows it."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from emberkeep.engine.hf.staging import HostMemory

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
