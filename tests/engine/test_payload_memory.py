"""Memory that is used again, and never while someone holds it."""

from __future__ import annotations

import gc

import numpy as np

from emberkeep.engine.payload_memory import PayloadMemory, slab_count


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


def test_only_a_part_of_ram_is_prepared():
    assert 0 <= slab_count() <= 16
