"""Blocks that sequences share: whatever they do, each one reads what it wrote."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from emberkeep.engine.hf.pool import BLOCK, BlockPool, BlockTable, Copy, KvMemory, LayerShape, StreamShape
from helpers.chance import examples

pytestmark = pytest.mark.slow

BLOCKS = 9


def filled(pool: BlockPool, length: int) -> BlockTable:
    table = BlockTable()
    assert pool.grow(table, length) == []
    return table


def small_memory(pool: BlockPool) -> KvMemory:
    one = StreamShape(1, 1)
    return KvMemory([LayerShape(one, one)], pool.total_cells, torch.float32, torch.device("cpu"))


class Sharing(RuleBasedStateMachine):
    """A pool with a real memory, beside what every sequence should find in it."""

    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS * BLOCK)
        self.memory = small_memory(self.pool)
        self.expected: dict[int, tuple[BlockTable, list[int]]] = {}
        self.written = 0

    def remember(self, table: BlockTable, content: list[int]) -> BlockTable:
        self.expected[id(table)] = table, content
        return table

    def content(self, table: BlockTable) -> list[int]:
        return self.expected[id(table)][1]

    @rule(target=tables)
    def begin(self) -> BlockTable:
        return self.remember(BlockTable(), [])

    @rule(table=tables, count=st.integers(1, 80))
    def write(self, table: BlockTable, count: int) -> None:
        before, needed = (list(table.blocks), table.length), self.pool.count_needed(table, table.length + count)
        free = self.pool.free
        copies = self.pool.grow(table, table.length + count)
        assert (copies is None) == (needed > free)
        if copies is None:
            assert (list(table.blocks), table.length) == before
            return
        assert self.pool.free == free - needed
        self.memory.copy(copies)
        self.put(table, before[1], range(self.written, self.written + count))
        self.written += count

    @rule(table=tables, start=st.integers(0, 200), count=st.integers(1, 80))
    def rewrite(self, table: BlockTable, start: int, count: int) -> None:
        """What follows `start` gives way to something else, as in a splice."""
        start = min(start, table.length)
        before, free = (list(table.blocks), table.length), self.pool.free
        copies = self.pool.regrow(table, start, start + count)
        if copies is None:
            assert (list(table.blocks), table.length, self.pool.free) == (*before, free)
            return
        self.memory.copy(copies)
        del self.content(table)[start:]
        self.put(table, start, range(self.written, self.written + count))
        self.written += count

    @rule(target=tables, source=tables, end=st.integers(0, 200))
    def share(self, source: BlockTable, end: int) -> BlockTable:
        end, free = min(end, source.length), self.pool.free
        shared = self.pool.share(source, end)
        assert self.pool.free == free
        return self.remember(shared, self.content(source)[:end])

    @rule(table=tables, length=st.integers(0, 200))
    def trim(self, table: BlockTable, length: int) -> None:
        self.pool.trim(table, length)
        del self.content(table)[length:]

    @rule(table=consumes(tables))
    def end(self, table: BlockTable) -> None:
        self.pool.trim(table, 0)
        del self.expected[id(table)]

    def put(self, table: BlockTable, start: int, values: range) -> None:
        if values:
            cells = torch.from_numpy(table.cells(start, start + len(values)))
            self.memory.keys[0][cells] = torch.tensor(values, dtype=torch.float32).view(-1, 1, 1)
            self.content(table).extend(values)

    @invariant()
    def every_sequence_reads_what_it_wrote(self) -> None:
        memory = self.memory.keys[0].numpy().ravel()
        for table, content in self.expected.values():
            assert table.length == len(content)
            cells = table.cells(0, table.length)
            assert memory[cells].tolist() == content
            if content and (begin := table.run(0, table.length)) is not None:
                assert cells.tolist() == list(range(begin, begin + len(content)))

    @invariant()
    def blocks_are_counted_right(self) -> None:
        users = np.bincount(
            [block for table, _ in self.expected.values() for block in table.blocks], minlength=BLOCKS + 1
        )
        assert users[0] == 0
        stats = self.pool.stats()
        assert stats["used_blocks"] == np.count_nonzero(users)
        assert stats["shared_blocks"] == np.count_nonzero(users > 1)
        assert stats["references"] == users.sum()
        assert self.pool.free == BLOCKS - stats["used_blocks"]
        assert all(len(t.blocks) == -(-t.length // BLOCK) for t, _ in self.expected.values())

    def teardown(self) -> None:
        for table, _ in self.expected.values():
            self.pool.trim(table, 0)
        assert self.pool.free == BLOCKS


Sharing.TestCase.settings = examples(40, stateful_step_count=30)
TestSharing = Sharing.TestCase


def test_only_the_block_that_is_written_to_is_copied():
    pool = BlockPool(8 * BLOCK)
    source = filled(pool, 2 * BLOCK + 5)
    branch = pool.share(source, 2 * BLOCK + 3)
    (copy,) = pool.grow(branch, 2 * BLOCK + 4) or ()
    assert copy == Copy(source.blocks[2], branch.blocks[2])
    assert branch.blocks[:2] == source.blocks[:2]
    assert (pool.stats()["used_blocks"], pool.stats()["copied_blocks"]) == (4, 1)


def test_sequences_that_grow_in_turn_lie_together():
    """So that attention reads them without gathering."""
    pool = BlockPool(32 * BLOCK)
    one, other = filled(pool, 2 * BLOCK), filled(pool, 2 * BLOCK)
    for length in range(2 * BLOCK + 1, 6 * BLOCK):
        pool.grow(one, length)
        pool.grow(other, length)
    assert one.run(0, one.length) is not None
    assert other.run(0, other.length) is not None


@pytest.mark.parametrize("free", [0, 1])
def test_what_is_shared_does_not_make_room(free):
    pool = BlockPool((3 + free) * BLOCK)
    source = filled(pool, 3 * BLOCK)
    branch = pool.share(source, 3 * BLOCK)
    assert pool.regrow(branch, BLOCK, 3 * BLOCK) is None
    assert branch == source
    assert pool.stats()["shared_blocks"] == 3


def test_what_is_cut_off_makes_room():
    pool = BlockPool(3 * BLOCK)
    table = filled(pool, 3 * BLOCK)
    assert pool.regrow(table, 5, 3 * BLOCK) == []
    assert pool.regrow(table, 5, 3 * BLOCK + 1) is None
    assert table.length == 3 * BLOCK
