"""A deterministic engine without a model: it runs most tests, and anything that must not cost seconds.

Its "KV" is honest where it matters: the value at a position depends on every token before it, logits depend
on every value in the sequence, and payloads carry those values. State that belongs to other tokens therefore
gives other answers, exactly as in a real model.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from emberkeep.engine.base import Capabilities, KvUnit, Logits, Outcome, Payload, Rows
from emberkeep.errors import EngineError

_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_PAIRS = ("th", "he", "in", "er", "an", "re", "on", "at", "en", "st", " t", " a", " s", "e ", "s ", ". ")
_CELL = struct.Struct("<iQ")
_END_BOOST = 12.0

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class FakeVocab:
    """Bytes, a few pairs of letters and ChatML's special tokens."""

    def __init__(self) -> None:
        self.pieces: tuple[bytes, ...] = (
            *(bytes([i]) for i in range(256)),
            *(pair.encode() for pair in _PAIRS),
            *(special.encode() for special in _SPECIALS),
        )
        self.size = len(self.pieces)
        first = self.size - len(_SPECIALS)
        self.specials: Mapping[str, int] = {text: first + i for i, text in enumerate(_SPECIALS)}
        self.controls = frozenset(self.specials.values())
        self.eog = frozenset({self.specials["<|endoftext|>"], self.specials["<|im_end|>"]})
        self.bos: int | None = None
        self.eos: int | None = self.specials["<|im_end|>"]
        self.adds_bos = False
        self.splits_at_specials = True
        self._ids = {piece: i for i, piece in enumerate(self.pieces)}
        self._split = re.compile(b"|".join(re.escape(s.encode()) for s in _SPECIALS))

    def tokenize(self, text: str, *, parse_special: bool = True) -> list[int]:
        data = text.encode("utf-8", "surrogatepass")
        ids: list[int] = []
        begin = 0
        for found in self._split.finditer(data) if parse_special else ():
            ids += self._plain(data[begin : found.start()])
            ids.append(self._ids[found.group()])
            begin = found.end()
        return ids + self._plain(data[begin:])

    def _plain(self, data: bytes) -> list[int]:
        ids, offset = [], 0
        while offset < len(data):
            pair = self._ids.get(data[offset : offset + 2])
            ids.append(pair if pair is not None else data[offset])
            offset += 1 if pair is None else 2
        return ids


@dataclass(eq=False, slots=True)
class _Cell:
    """Compared by identity: sequences that share a prefix share its cells."""

    value: int


class FakeEngine:
    """`on_evaluate` is called before every step, on the engine's thread: tests use it to pause or to fail."""

    def __init__(
        self,
        *,
        cells: int = 8192,
        context: int = 4096,
        sequences: int = 8,
        batch: int = 512,
        weights: str = "fake",
        on_evaluate: Callable[[Sequence[Rows]], None] | None = None,
    ) -> None:
        self.vocab = FakeVocab()
        self.capabilities = Capabilities(
            kv_unit=KvUnit.RANGE,
            can_shift=True,
            max_sequences=sequences,
            cells=cells,
            context=context,
            batch=batch,
            kv_bytes_per_token=_CELL.size,
        )
        self.fingerprint = hashlib.sha256(f"fake engine, weights {weights}".encode()).digest()
        self.on_evaluate = on_evaluate
        self.evaluated_tokens = 0
        self.is_closed = False
        self._weights = int.from_bytes(hashlib.sha256(weights.encode()).digest()[:8], "little")
        self._sequences: dict[int, list[_Cell]] = {}
        self._latest: list[int] = []

    def evaluate(self, batch: Sequence[Rows]) -> Outcome:
        if self.on_evaluate:
            self.on_evaluate(batch)
        if self._used_cells() + sum(len(rows.tokens) for rows in batch) > self.capabilities.cells:
            return Outcome.NO_ROOM
        for rows in batch:
            cells = self._cells(rows.sequence)
            if rows.start != len(cells):
                raise EngineError(f"sequence {rows.sequence} ends at {len(cells)}, not at {rows.start}")
            for token in rows.tokens:
                cells.append(_Cell(_mix(cells[-1].value if cells else self._weights, int(token))))
            self.evaluated_tokens += len(rows.tokens)
        self._latest = [rows.sequence for rows in batch]
        return Outcome.DONE

    def logits(self, index: int) -> Logits:
        state = self._weights
        for cell in self._cells(self._latest[index]):
            state = _mix(state, cell.value)
        logits = np.random.Generator(np.random.PCG64(state)).standard_normal(self.vocab.size).astype(np.float32)
        logits[:32] = logits[127:256] = -30.0  # only printable text
        logits[[self.vocab.specials["<|im_start|>"], self.vocab.specials["<|endoftext|>"]]] = -30.0
        if state % 24 == 0:
            logits[self.vocab.specials["<|im_end|>"]] += _END_BOOST
        return logits

    def export_kv(self, sequence: int, start: int, end: int) -> Payload:
        cells = self._cells(sequence)[start:end]
        if len(cells) != end - start:
            raise EngineError(f"sequence {sequence} does not reach from {start} to {end}")
        return memoryview(b"".join(_CELL.pack(start + i, cell.value) for i, cell in enumerate(cells)))

    def import_kv(self, sequence: int, start: int, end: int, payload: Payload, payload_start: int) -> Outcome:
        cells = self._cells(sequence)
        table = list(_CELL.iter_unpack(payload)) if len(payload) % _CELL.size == 0 else []
        if [position for position, _ in table] != list(range(payload_start, payload_start + len(table))):
            raise EngineError("A stored KV payload holds other positions than its chunk.")
        if not payload_start <= start < end <= payload_start + len(table):
            raise EngineError("A stored KV payload does not hold the positions asked for.")
        if len(cells) != start:
            raise EngineError(f"Sequence {sequence} does not end at {start}, so nothing can be appended there.")
        if self._used_cells() + len(table) > self.capabilities.cells:
            return Outcome.NO_ROOM
        cells += (_Cell(value) for _, value in table[start - payload_start : end - payload_start])
        return Outcome.DONE

    def copy_kv(self, source: int, target: int, end: int) -> None:
        assert not self._cells(target)
        self._sequences[target] = self._cells(source)[:end]

    def trim(self, sequence: int, start: int) -> None:
        del self._cells(sequence)[start:]

    def shift(self, sequence: int, start: int, end: int) -> None:
        del self._cells(sequence)[start:end]

    def close(self) -> None:
        self.is_closed = True

    def _cells(self, sequence: int) -> list[_Cell]:
        return self._sequences.setdefault(sequence, [])

    def _used_cells(self) -> int:
        return len({id(cell) for cells in self._sequences.values() for cell in cells})


def _mix(state: int, value: int) -> int:
    """One round of splitmix64: cheap, and every input bit reaches every output bit."""
    z = (state ^ (value * 0x9E3779B97F4A7C15)) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return z ^ (z >> 31)
