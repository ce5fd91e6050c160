"""Memory that is used again, and never while someone holds it."""

from __future__ import annotations

import gc
from threading import get_ident

import numpy as np

from emberkeep.config import total_ram
from emberkeep.engine.payload_memory import SLAB, PayloadMemory
from helpers.waiting import eventually


def address(piece: np.ndarray) -> int:
    return piece.ctypes.data


def test_pieces_of_a_slab_are_used_again_once_nobody_holds_them():
    memory, slab = PayloadMemory(1000), np.zeros(4000, np.uint8)
    memory.add(slab)
    pieces = [memory.take(1000) for _ in range(4)]
    inside = [p for p in pieces if address(slab) <= address(p) < address(slab) + len(slab)]
    assert len(inside) == 3  # each begins where memory is aligned, so a fourth does not fit
    assert len({address(p) for p in pieces}) == 4
    held, view = address(pieces[0]), memoryview(pieces[0])
    del pieces, inside
    gc.collect()
    assert held not in {address(p) for p in [memory.take(1000) for _ in range(2)]}  # a view of it is left
    view.release()
    gc.collect()
    assert held in {address(p) for p in [memory.take(1000) for _ in range(3)]}


def test_other_sizes_get_memory_of_their_own():
    memory = PayloadMemory(1000)
    memory.add(np.zeros(4096, np.uint8))
    assert len(memory.take(999)) == 999
    assert len(memory.take(5000)) == 5000


def test_a_thread_keeps_pieces_ready_until_it_is_closed():
    memory, made, begun = PayloadMemory(SLAB // 2), [], []

    def make(size: int) -> np.ndarray:
        made.append(size)
        return np.empty(size, np.uint8)  # not touched, so it takes no memory

    memory.start(make, begin=lambda: begun.append(get_ident()))
    assert begun and begun[0] != get_ident()
    assert eventually(lambda: len(memory._free) * memory.size >= memory._ahead or not memory._ahead)
    before = len(made)
    held = [memory.take(SLAB // 2) for _ in range(2 * before)]
    if before:
        assert eventually(lambda: len(made) > before)
    memory.close()
    held.clear()


def test_memory_that_cannot_be_had_is_done_without():
    def make(size: int) -> np.ndarray:
        raise MemoryError

    memory = PayloadMemory(1000)
    memory.start(make)
    assert len(memory.take(1000)) == 1000


def test_only_a_part_of_ram_is_prepared():
    assert PayloadMemory(1000)._ahead <= total_ram() // 16
