"""Memory that is used again, and never while someone holds it."""

from __future__ import annotations

import gc
import subprocess
import sys
from threading import get_ident

import numpy as np

from emberkeep.config.machine import total_ram
from emberkeep.engine.payload_memory import SLAB, PayloadMemory
from helpers.waiting import eventually


def address(piece: np.ndarray) -> int:
    return piece.ctypes.data


def test_pieces_of_a_slab_are_used_again_once_nobody_holds_them():
    memory = PayloadMemory(1000)
    slab = np.zeros(4 * memory.size - 1, np.uint8)
    memory.add(slab)
    pieces = [memory.take(1000) for _ in range(4)]
    inside = [p for p in pieces if address(slab) <= address(p) < address(slab) + len(slab)]
    assert len(inside) == 3
    assert len({address(p) for p in pieces}) == 4
    held, view = address(pieces[0]), memoryview(pieces[0])[10:20]
    del pieces, inside
    gc.collect()
    assert held not in {address(p) for p in [memory.take(1000) for _ in range(2)]}  # a view of it is left
    view.release()
    gc.collect()
    assert held in {address(p) for p in [memory.take(1000) for _ in range(3)]}


def test_a_file_has_room_for_its_head():
    memory = PayloadMemory(1000)
    memory.add(np.zeros(2 * memory.size, np.uint8))
    whole = memory.take_whole(1000 + 4096)
    assert whole is not None and len(whole) == memory.size >= 1000 + 8192 and len(whole) % 4096 == 0
    view, place = memoryview(whole)[:1500], address(whole)
    del whole
    gc.collect()
    other = memory.take_whole(1000)
    assert other is not None and address(other) != place
    assert memory.take_whole(1000) is None
    del view
    gc.collect()
    assert memory.take_whole(1000) is not None


def test_other_sizes_get_memory_of_their_own():
    memory = PayloadMemory(1000)
    memory.add(np.zeros(2 * memory.size, np.uint8))
    assert len(memory.take(999)) == 999
    assert len(memory.take(50_000)) == 50_000
    assert memory.take_whole(999) is memory.take_whole(50_000) is None


def test_a_thread_keeps_pieces_ready_until_it_is_closed():
    memory, made, begun = PayloadMemory(SLAB // 2 - 8192), [], []

    def make(size: int) -> np.ndarray:
        made.append(size)
        return np.empty(size, np.uint8)  # not touched, so it takes no memory

    memory.start(make, begin=lambda: begun.append(get_ident()))
    assert begun and begun[0] != get_ident()
    assert eventually(lambda: len(memory._free) * memory.size >= memory._ahead or not memory._ahead)
    before = len(made)
    held = [memory.take(SLAB // 2 - 8192) for _ in range(2 * before)]
    if before:
        assert eventually(lambda: len(made) > before)
    memory.close()
    held.clear()


HELD_AT_EXIT = """
import atexit
import numpy as np
from emberkeep.engine.payload_memory import PayloadMemory

memory = PayloadMemory(1000)
atexit.register(lambda: print(memory.take(1000).fill(7), held.min(), held.max()))  # comes after the finalizers
memory.add(np.zeros(memory.size, np.uint8))
held = memory.take(1000)
held.fill(1)
"""


def test_memory_that_is_held_when_the_program_ends_is_given_to_nobody():
    ran = subprocess.run([sys.executable, "-c", HELD_AT_EXIT], capture_output=True, text=True, check=True)
    assert ran.stdout == "None 1 1\n"


def test_memory_that_cannot_be_had_is_done_without():
    def make(size: int) -> np.ndarray:
        raise MemoryError

    memory = PayloadMemory(1000)
    memory.start(make)
    assert len(memory.take(1000)) == 1000


def test_only_a_part_of_ram_is_prepared():
    assert PayloadMemory(1000)._ahead <= total_ram() // 16
