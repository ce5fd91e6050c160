"""The map of cells agrees with one that writes down who has which."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from emberkeep.engine.llamacpp.cell_map import CellMap
from helpers.chance import examples

sequences = st.integers(0, 4)


class Naive(RuleBasedStateMachine):
    """Every cell is an object of its own, and a sequence is a list of them."""

    def __init__(self) -> None:
        super().__init__()
        self.map = CellMap()
        self.held: dict[int, list[object]] = {}

    @rule(sequence=sequences, count=st.integers(0, 9))
    def grow(self, sequence: int, count: int) -> None:
        cells = self.held.setdefault(sequence, [])
        self.map.grow(sequence, len(cells) + count)
        cells.extend(object() for _ in range(count))

    @rule(sequence=sequences, share=st.floats(0, 1))
    def trim(self, sequence: int, share: float) -> None:
        cells = self.held.setdefault(sequence, [])
        start = round(share * len(cells))
        self.map.trim(sequence, start)
        del cells[start:]

    @rule(source=sequences, taker=sequences, share=st.floats(0, 1))
    @precondition(lambda self: any(self.held.values()))
    def share(self, source: int, taker: int, share: float) -> None:
        if source == taker or self.held.get(taker):
            return
        end = round(share * len(self.held.get(source, [])))
        self.map.share(source, taker, end)
        self.held[taker] = self.held.get(source, [])[:end]

    @rule(sequence=sequences, is_whole=st.booleans())
    def note(self, sequence: int, is_whole: bool) -> None:
        self.map[sequence].is_whole = is_whole
        assert self.map.is_whole == all(self.map[each].is_whole for each in range(5))

    @invariant()
    def lengths_agree(self) -> None:
        assert {n: self.map[n].end for n in self.held} == {n: len(cells) for n, cells in self.held.items()}

    @invariant()
    def each_cell_in_use_is_counted_once(self) -> None:
        assert self.map.used == len({cell for cells in self.held.values() for cell in cells})

    @invariant()
    def branches_put_everything_back_once(self) -> None:
        """In their order: what is shared is there already, and every cell is moved once."""
        moved: dict[int, list[object]] = {}
        seen: set[object] = set()
        for sequence, other, start in self.map.branches():
            cells = self.held[sequence]
            assert sequence not in moved
            assert (other is None) == (start == 0)
            if other is not None:
                assert moved[other][:start] == cells[:start]
            assert seen.isdisjoint(cells[start:])
            seen.update(cells[start:])
            moved[sequence] = cells
        assert moved == {n: cells for n, cells in self.held.items() if cells}

    @invariant()
    def nothing_is_shared_in_an_unshared_map(self) -> None:
        unshared = self.map.unshared()
        lengths = {n: len(cells) for n, cells in self.held.items() if cells}
        assert unshared.used == sum(lengths.values())
        assert {sequence: unshared[sequence].end for sequence in lengths} == lengths
        assert all(other is None for _, other, _ in unshared.branches())
        assert [unshared[n].is_whole for n in lengths] == [self.map[n].is_whole for n in lengths]

    @rule(sequence=sequences, start=st.integers(0, 20), length=st.integers(0, 20))
    def count_unshared(self, sequence: int, start: int, length: int) -> None:
        others = {cell for other, cells in self.held.items() if other != sequence for cell in cells}
        own = self.held.get(sequence, [])[start : start + length]
        assert self.map.count_unshared(sequence, start, start + length) == sum(cell not in others for cell in own)


Naive.TestCase.settings = examples(30)
TestCells = Naive.TestCase
