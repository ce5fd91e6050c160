"""A deterministic engine without a model: it runs most tests, and anything that must not cost seconds.

Its "KV" is honest where it matters: the value at a position depends on every token before it, logits depend
on every value in the sequence, and payloads carry those values. What is not by range is one more value, which
depends on every token and travels only in snapshots. State that belongs to other tokens therefore gives other
answers, exactly as in a real model, and so does packed state: it carries the upper bits of the values only.
"""

from __future__ import annotations

import hashlib
import math
import re
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from emberkeep.engine.base import (
    DRAFT_ROWS,
    Blended,
    Capabilities,
    Exported,
    Footprint,
    KvUnit,
    Logits,
    Outcome,
    Payload,
    Piece,
    Rows,
    check_splice,
)
from emberkeep.errors import EngineError
from emberkeep.types.models import AttentionTier
from emberkeep.types.request import Json
from emberkeep.values import dataclass

_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_PAIRS = ("th", "he", "in", "er", "an", "re", "on", "at", "en", "st", " t", " a", " s", "e ", "s ", ". ")
_PIECES: tuple[bytes, ...] = (
    *(bytes([i]) for i in range(256)),
    *(pair.encode() for pair in _PAIRS),
    *(special.encode() for special in _SPECIALS),
)
_IDS = {piece: i for i, piece in enumerate(_PIECES)}
_SPLIT = re.compile(b"|".join(re.escape(s.encode()) for s in _SPECIALS))
_CELLS = np.dtype([("position", "<i4"), ("value", "<u8")])
_SNAPSHOT = struct.Struct("<4siQ")
_MAGIC = b"snap"
_PACKED = struct.Struct("<4siii")
_PACKED_MAGIC = b"pack"
_PACKED_VALUES = {8: "<u4", 4: "<u2"}
_END_BOOST = 12.0
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class FakeVocab:
    """Bytes, a few pairs of letters and ChatML's special tokens."""

    def __init__(self) -> None:
        self.pieces = _PIECES
        self.size = len(self.pieces)
        first = self.size - len(_SPECIALS)
        self.specials: Mapping[str, int] = {text: first + i for i, text in enumerate(_SPECIALS)}
        self.controls = frozenset(self.specials.values())
        self.eog = frozenset({self.specials["<|endoftext|>"], self.specials["<|im_end|>"]})
        self.bos: int | None = None
        self.eos: int | None = self.specials["<|im_end|>"]
        self.adds_bos = False
        self.splits_at_specials = True

    def tokenize(self, text: str, *, parse_special: bool = True) -> list[int]:
        data = text.encode("utf-8", "surrogatepass")
        ids: list[int] = []
        begin = 0
        for found in _SPLIT.finditer(data) if parse_special else ():
            ids += self._plain(data[begin : found.start()])
            ids.append(_IDS[found.group()])
            begin = found.end()
        return ids + self._plain(data[begin:])

    def _plain(self, data: bytes) -> list[int]:
        ids, offset = [], 0
        while offset < len(data):
            pair = _IDS.get(data[offset : offset + 2])
            ids.append(pair if pair is not None else data[offset])
            offset += 1 if pair is None else 2
        return ids


@dataclass(eq=False, slots=True)
class _Cell:
    """Compared by identity: sequences that share a prefix share its cells."""

    value: int


@dataclass(slots=True)
class _FakeState:
    """The state of one sequence. There are cells only for what is by range."""

    rest: int
    """What is not by range."""
    end: int = 0
    cells: list[_Cell] = field(default_factory=list)
    is_whole: bool = True
    """False between the import of ranges and that of the snapshot that belongs to them."""
    attended: list[int] = field(default_factory=list)
    """What attention makes of the first cell, of two, ..., as far as it was asked for."""


class FakeTiers:
    """Ways to compute attention, each of which gives values of its own. See `AttentionTiers`."""

    available: tuple[AttentionTier, ...] = (AttentionTier.FLASH, AttentionTier.PLAIN)

    def __init__(self) -> None:
        self.tier = self.available[0]

    def switch(self, tier: AttentionTier) -> None:
        self.tier = tier

    @property
    def number(self) -> int:
        return self.available.index(self.tier)


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
        kv_unit: KvUnit = KvUnit.RANGE,
        on_evaluate: Callable[[Sequence[Rows]], None] | None = None,
    ) -> None:
        self.vocab = FakeVocab()
        self.capabilities = Capabilities(
            kv_unit=kv_unit,
            can_shift=not kv_unit.has_snapshots,
            max_sequences=sequences,
            cells=cells,
            context=context,
            batch=batch,
            outputs=sequences + DRAFT_ROWS,
            kv_bytes_per_token=_CELLS.itemsize if kv_unit.has_ranges else 0,
            snapshot_bytes=_SNAPSHOT.size if kv_unit.has_snapshots else 0,
            can_blend=kv_unit is KvUnit.RANGE,
            packs=frozenset({16, *_PACKED_VALUES} if kv_unit.has_ranges else {16}),
            wide_rows=64,
        )
        self._name = f"fake engine, weights {weights}, by {kv_unit}"
        self.experts = None
        self.attention: FakeTiers | None = None
        """Set it before the first step."""
        self.footprint: Footprint | None = None
        self.on_evaluate = on_evaluate
        self.evaluated_tokens = 0
        self.is_closed = False
        self._weights = int.from_bytes(hashlib.sha256(weights.encode()).digest()[:8], "little")
        self._unit = kv_unit
        self._states: dict[int, _FakeState] = {}
        self._latest: list[tuple[int, int]] = []
        """Which sequence each of the latest rows extended, and where its first logits are."""

    @property
    def fingerprint(self) -> bytes:
        tier = f", attention {self.attention.number}" if self.attention else ""
        return hashlib.sha256((self._name + tier).encode()).digest()

    def evaluate(self, batch: Sequence[Rows]) -> Outcome:
        if self.on_evaluate:
            self.on_evaluate(batch)
        if self._lacks_room(sum(len(rows.tokens) for rows in batch)):
            return Outcome.NO_ROOM
        for rows in batch:
            state = self._state(rows.sequence)
            if rows.start != state.end or not state.is_whole:
                raise EngineError(f"Sequence {rows.sequence} cannot go on at {rows.start}.")
            self._append(state, rows.tokens.tolist())
            self.evaluated_tokens += len(rows.tokens)
        self._latest = [(rows.sequence, rows.start + len(rows.tokens) - rows.outputs + 1) for rows in batch]
        return Outcome.DONE

    def logits(self, index: int, row: int = 0) -> Logits:
        sequence, first = self._latest[index]
        latest = self._state(sequence)
        attended = latest.attended
        state = attended[-1] if attended else self._weights
        for cell in latest.cells[len(attended) :]:
            state = _mix(state, cell.value)
            attended.append(state)
        if self._unit.has_ranges:
            state = attended[first + row - 1]
        if self._unit.has_snapshots:
            state = _mix(state, latest.rest)
        logits = np.random.Generator(np.random.PCG64(state)).standard_normal(self.vocab.size).astype(np.float32)
        logits[:32] = logits[127:256] = -30.0  # only printable text
        logits[[self.vocab.specials["<|im_start|>"], self.vocab.specials["<|endoftext|>"]]] = -30.0
        if state % 24 == 0:
            logits[self.vocab.specials["<|im_end|>"]] += _END_BOOST
        return logits

    def likeliest(self, index: int, row: int = 0) -> int:
        return int(self.logits(index, row).argmax())

    draws = is_ahead = False
    meanwhile: Callable[[], None] = staticmethod(lambda: None)
    logprobs = went_on = None

    def export_kv(self, sequence: int, borders: Sequence[int], bits: int = 16) -> Exported:
        state = self._state(sequence)
        if borders[-1] > state.end:
            raise EngineError(f"Sequence {sequence} does not reach from {borders[0]} to {borders[-1]}.")
        tables = [
            _table(start, [cell.value for cell in state.cells[start:end]]) for start, end in pairwise(borders)
        ]
        return Exported([memoryview(table.tobytes()) if bits == 16 else _packed(table, bits) for table in tables])

    def export_snapshot(self, sequence: int) -> Payload:
        state = self._state(sequence)
        if not self._unit.has_snapshots or not state.is_whole or not state.end:
            raise EngineError(f"Sequence {sequence} has nothing that could be kept as a snapshot.")
        return memoryview(_SNAPSHOT.pack(_MAGIC, state.end, state.rest))

    def import_kv(
        self, sequence: int, start: int, end: int, payloads: Sequence[Payload], payload_start: int
    ) -> Outcome:
        state = self._state(sequence)
        values: list[int] = []
        for payload in payloads:
            values += self._values(payload, payload_start + len(values))
        payload_end = payload_start + len(values) if self._unit.has_ranges else end
        if not payload_start <= start < end <= payload_end:
            raise EngineError("A stored KV payload does not hold the positions asked for.")
        if state.end != start:
            raise EngineError(f"Sequence {sequence} does not end at {start}, so nothing can be appended there.")
        if self._lacks_room(len(values)):
            return Outcome.NO_ROOM
        state.cells += map(_Cell, values[start - payload_start : end - payload_start])
        state.end, state.is_whole = end, not self._unit.has_snapshots
        return Outcome.DONE

    def _values(self, payload: Payload, start: int) -> list[int]:
        """Those of the positions from `start` on. Raises EngineError for a payload of others."""
        is_packed = bytes(payload[: len(_PACKED_MAGIC)]) == _PACKED_MAGIC
        is_odd = not is_packed and len(payload) % _CELLS.itemsize
        if is_odd or (len(payload) and not self._unit.has_ranges):
            raise EngineError("A stored KV payload has another size than its chunk.")
        table = _unpacked(payload) if is_packed else np.frombuffer(payload, _CELLS)
        if not np.array_equal(table["position"], np.arange(start, start + len(table))):
            raise EngineError("A stored KV payload holds other positions than its chunk.")
        values: list[int] = table["value"].tolist()
        return values

    def payload_buffer(self, size: int) -> memoryview | None:
        return None

    def is_loading(self, sequence: int) -> bool:
        return False

    def import_snapshot(self, sequence: int, position: int, payload: Payload) -> Outcome:
        state = self._state(sequence)
        if not self._unit.has_snapshots or len(payload) != _SNAPSHOT.size:
            raise EngineError("A stored snapshot has another size than its model's state.")
        magic, taken_at, rest = _SNAPSHOT.unpack(payload)
        if magic != _MAGIC or taken_at != position or position < 1:
            raise EngineError("A stored snapshot was taken at another position than its place.")
        if state.end != position and (self._unit.has_ranges or state.end):
            raise EngineError(f"Sequence {sequence} ends at {state.end}, not where the snapshot was taken.")
        state.end, state.rest, state.is_whole = position, rest, True
        return Outcome.DONE

    def blend(self, rows: Rows, pieces: Sequence[Piece], ratio: float) -> Blended:
        """Moved cells keep the values that they had elsewhere, so answers differ from those of a fresh evaluation.

        Of each piece the first tokens are taken to be those that differ most.
        """
        if self.on_evaluate:
            self.on_evaluate([rows])
        state = self._state(rows.sequence)
        if not self.capabilities.can_blend or rows.start != state.end:
            raise EngineError(f"Nothing can be moved to {rows.start} in sequence {rows.sequence}.")
        kept: dict[int, int] = {}
        for piece in pieces:
            values = self._values(piece.payload, piece.payload_start)
            begin, length = piece.source - piece.payload_start, piece.end - piece.start
            if not 0 <= begin < begin + length <= len(values):
                raise EngineError("A stored KV payload does not hold the positions asked for.")
            again = math.ceil(ratio * length)
            kept |= dict(enumerate(values[begin + again : begin + length], piece.start + again))
        if self._lacks_room(len(rows.tokens)):
            return Blended(Outcome.NO_ROOM)
        for position, token in enumerate(rows.tokens.tolist(), rows.start):
            if position in kept:
                state.cells.append(_Cell(kept[position]))
                state.end += 1
            else:
                self._append(state, [token])
        evaluated = len(rows.tokens) - len(kept)
        self.evaluated_tokens += evaluated
        self._latest = [(rows.sequence, state.end)]
        return Blended(Outcome.DONE, sum(piece.end - piece.start for piece in pieces) - len(kept), evaluated)

    def copy_kv(self, source: int, target: int, end: int) -> None:
        state = self._state(source)
        assert not self._state(target).end
        if self._unit.has_snapshots and end != state.end:
            raise EngineError(f"This model's state can be shared only as a whole, and {end} is not where it ends.")
        self._states[target] = _FakeState(
            state.rest, min(end, state.end), state.cells[:end], state.is_whole, state.attended[:end]
        )

    def trim(self, sequence: int, start: int) -> None:
        state = self._state(sequence)
        if self._unit.has_snapshots and 0 < start < state.end:
            raise EngineError(f"This model's state cannot be cut back to {start} tokens.")
        if start == 0:
            self._states.pop(sequence)
        else:
            del state.cells[start:], state.attended[start:]
            state.end = min(state.end, start)

    def splice(self, sequence: int, start: int, end: int, insert: npt.NDArray[np.int32]) -> Outcome:
        """What follows keeps the values that it had, so answers differ from those of a fresh evaluation."""
        state = self._state(sequence)
        check_splice(self.capabilities, state.end, start, end, insert)
        if self.on_evaluate:
            self.on_evaluate([Rows(sequence, start, insert, outputs=0)])
        before = state.cells
        # A cell has one position: what moves is no longer shared.
        state.cells, moved = before[:start], [_Cell(cell.value) for cell in before[end:]]
        if self._lacks_room(len(insert) + len(moved)):
            state.cells = before
            return Outcome.NO_ROOM
        del state.attended[start:]
        self._append(state, insert.tolist())
        state.cells += moved
        state.end = len(state.cells)
        self.evaluated_tokens += len(insert)
        self._latest = []
        return Outcome.DONE

    def rest(self) -> None:
        pass

    can_improve = False

    def improve(self, is_wanted: Callable[[], bool]) -> bool:
        return True

    def step_seconds(self, rows: int, depth: int, outputs: int) -> float | None:
        return None

    def peak_bytes(self) -> int | None:
        return None

    def stats(self) -> dict[str, Json]:
        """Its pool has blocks of one token, which are never copied."""
        cells = Counter(id(cell) for state in list(self._states.values()) for cell in list(state.cells))
        return {
            "pool": {
                "block_tokens": 1,
                "blocks": self.capabilities.cells,
                "used_blocks": len(cells),
                "shared_blocks": sum(count > 1 for count in cells.values()),
                "references": cells.total(),
                "copied_blocks": 0,
            }
        }

    def close(self) -> None:
        self.is_closed = True

    def _state(self, sequence: int) -> _FakeState:
        return self._states.setdefault(sequence, _FakeState(self._weights))

    def _append(self, state: _FakeState, tokens: list[int]) -> None:
        if self.attention is not None:
            tokens = [token + self.vocab.size * self.attention.number for token in tokens]
        if self._unit.has_snapshots:
            for token in tokens:
                state.rest = _mix(state.rest + 1, token)
        if self._unit.has_ranges:
            value = state.cells[-1].value if state.cells else self._weights
            state.cells += [_Cell(value := _mix(value, token)) for token in tokens]
        state.end += len(tokens)

    def _lacks_room(self, more: int) -> bool:
        room = self.capabilities.cells - more
        if not self._unit.has_ranges or sum(len(state.cells) for state in self._states.values()) <= room:
            return False
        return len({id(cell) for state in self._states.values() for cell in state.cells}) > room


def _table(start: int, values: npt.ArrayLike) -> npt.NDArray[np.void]:
    values = np.asarray(values, np.uint64)
    table = np.empty(len(values), _CELLS)
    table["position"] = np.arange(start, start + len(values))
    table["value"] = values
    return table


def _packed(table: npt.NDArray[np.void], bits: int) -> Payload:
    values = table["value"] >> np.uint64(64 - 4 * bits)
    head = _PACKED.pack(_PACKED_MAGIC, bits, int(table["position"][0]), len(table))
    return memoryview(head + values.astype(_PACKED_VALUES[bits]).tobytes())


def _unpacked(payload: Payload) -> npt.NDArray[np.void]:
    """Raises EngineError."""
    try:
        _, bits, start, count = _PACKED.unpack_from(payload)
        values = np.frombuffer(payload[_PACKED.size :], _PACKED_VALUES[bits])
    except (struct.error, KeyError, ValueError):
        raise EngineError("A stored KV payload was packed in another way.") from None
    if len(values) != count:
        raise EngineError("A stored KV payload has another size than its chunk.")
    return _table(start, values.astype(np.uint64) << np.uint64(64 - 4 * bits))


def _mix(state: int, value: int) -> int:
    """One round of splitmix64: cheap, and every input bit reaches every output bit."""
    z = (state ^ (value * 0x9E3779B97F4A7C15)) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return z ^ (z >> 31)
