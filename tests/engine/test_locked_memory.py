"""Weights that are locked stay in RAM, and where that is not allowed they are used all the same."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from emberkeep.engine import locked_memory
from emberkeep.engine.llamacpp.model import LlamaModel, WeightsLoading
from emberkeep.engine.locked_memory import Range, added, lock_weights, lockable, private_memory

MIB = 1 << 20

only_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a process has locked")


_LOADS_LOCKED = """
import sys
from pathlib import Path
from emberkeep.engine.llamacpp.model import LlamaModel, WeightsLoading

def locked():
    return int(Path("/proc/self/status").read_text().partition("VmLck:")[2].split()[0]) << 10

model = LlamaModel(Path(sys.argv[1]), loading=WeightsLoading(locks=True))
print(locked())
model.close()
print(locked())
"""


def _locked() -> int:
    """Bytes of this process, as the kernel counts them."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmLck:")[2].split()[0]) << 10


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Range]]:
    """A system that lets only the first piece be locked, and the calls that it got."""
    calls: list[tuple[str, Range]] = []

    def call(function: str, memory: Range) -> None:
        calls.append((function, memory))
        if len(calls) == 2:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(locked_memory, "_call", call)
    return calls


@pytest.mark.parametrize(
    ("before", "after", "new"),
    [
        ([], [(0, 2 * MIB)], [(0, 2 * MIB)]),
        ([(0, 2 * MIB)], [(0, 2 * MIB)], []),
        ([(0, 2 * MIB)], [(0, 5 * MIB)], [(2 * MIB, 5 * MIB)]),
        ([(2 * MIB, 3 * MIB)], [(0, 5 * MIB)], [(0, 2 * MIB), (3 * MIB, 5 * MIB)]),
        ([(0, MIB), (9 * MIB, 10 * MIB)], [(4 * MIB, 6 * MIB)], [(4 * MIB, 6 * MIB)]),
        ([(3 * MIB, 9 * MIB)], [(0, 4 * MIB)], [(0, 3 * MIB)]),
        ([], [(0, MIB // 2)], []),
    ],
)
def test_what_was_added_is_what_was_not_there(before: list[Range], after: list[Range], new: list[Range]) -> None:
    assert added(before, after) == new


@only_linux
def test_new_memory_of_the_process_is_found_and_locked() -> None:
    before, locked = private_memory(), _locked()
    block = mmap.mmap(-1, 2 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    begin = np.frombuffer(block, np.uint8).ctypes.data
    new = added(before, private_memory())
    assert any(first <= begin and begin + 2 * MIB <= last for first, last in new)
    if (limit := lockable()) is not None and limit < locked + 2 * MIB:
        pytest.skip("this system does not let so much be locked")
    assert lock_weights([(begin + 1, begin + 2 * MIB - 1)]) == 2 * MIB
    assert _locked() == locked + 2 * MIB


def test_where_the_limit_is_too_low_nothing_is_locked_and_a_warning_says_so(
    refusing: list[tuple[str, Range]], caplog: pytest.LogCaptureFixture
) -> None:
    page = mmap.PAGESIZE
    assert lock_weights([(0, page), (2 * page, 4 * page)]) == 0
    both = (0, page), (2 * page, 4 * page)
    # The second may be locked half.
    assert refusing == [*(("mlock", each) for each in both), *(("munlock", each) for each in both)]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "`emberkeep doctor`" in record.getMessage()


@only_linux
@pytest.mark.slow
def test_the_weights_that_llamacpp_computes_with_are_locked(smollm2: Path) -> None:
    size = smollm2.stat().st_size
    if (limit := lockable()) is not None and limit < 2 * size:
        pytest.skip("this system does not let so much be locked")
    # In a process of its own: in this one, what others free meanwhile may make room for the weights.
    done = subprocess.run(
        [sys.executable, "-c", _LOADS_LOCKED, smollm2], capture_output=True, text=True, timeout=120
    )
    locked, later = map(int, done.stdout.split())
    assert size * 0.9 < locked < size * 1.6  # the table of tokens is there twice
    assert later < size // 4


@pytest.mark.slow
def test_a_model_whose_weights_cannot_be_locked_is_loaded(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(function: str, memory: Range) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(locked_memory, "_call", refuse)
    model = LlamaModel(smollm2, loading=WeightsLoading(locks=True))
    assert model.handle
    model.close()
    if sys.platform == "linux":
        assert "cannot be locked in RAM" in caplog.text
