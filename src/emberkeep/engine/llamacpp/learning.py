"""What an engine has to know of its model's state before it can take a step: how the state lies, with either
kind of attention, and whether it can be moved to other positions. llama.cpp says that it can move the keys of
all models, also of those whose keys it then rotates or scales wrongly.

It is tried out in small contexts, and remembered. A memory that is wrong all the same is noticed when the first
state is exported, whose every skeleton byte is compared with the layout (`LlamaEngine.export_kv`).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from emberkeep.engine.base import KvUnit, Rows
from emberkeep.engine.facts import Facts
from emberkeep.engine.llamacpp.c_api import TYPES, Handle
from emberkeep.engine.llamacpp.context import PARTIAL, BatchBuffer, LlamaSettings, open_context, read_state
from emberkeep.engine.llamacpp.kv_layout import (
    EMPTY,
    HEAD_BYTES,
    PAIR,
    RECURRENT_HEAD,
    TENSOR,
    TRANSPOSED,
    Attention,
    Bytes,
    LayerTensor,
    Layout,
    Recurrent,
    counterpart,
)
from emberkeep.engine.llamacpp.model import LlamaModel
from emberkeep.engine.llamacpp.shared_library import buffers_that_go, llama
from emberkeep.errors import EngineError
from emberkeep.types.request import Json
from emberkeep.values import dataclass

_FORMAT = 1
_FEW = 256
"""Cells of a context that is there to learn from."""


@dataclass(frozen=True, slots=True)
class Learned:
    layout: Layout | None
    """None: one that this version does not know."""
    other: Layout | None
    """With the other kind of attention; None where that is not wanted, or state lies there as it should not."""
    can_shift: bool
    """Whether llama.cpp moves state to other positions rightly."""

    def json(self) -> dict[str, Json]:
        layouts = {"layout": _layout_json(self.layout), "other": _layout_json(self.other)}
        return {"format": _FORMAT, "can_shift": self.can_shift, **layouts}

    @classmethod
    def from_json(cls, data: Any) -> Learned:
        """Raises ValueError, KeyError or TypeError for what another version has written."""
        if data["format"] != _FORMAT:
            raise ValueError("This was written by another version.")
        return cls(_layout(data["layout"]), _layout(data["other"]), data["can_shift"] is True)


class StateFacts:
    """What is remembered of one model's state, with these settings."""

    def __init__(self, facts: Facts | None, model: LlamaModel, settings: LlamaSettings, *, both: bool) -> None:
        """`both`: the other kind of attention is wanted, too. Without `facts` nothing is remembered."""
        self._facts = facts
        self._model = model
        self._settings = settings
        self._both = both

    def learned(self) -> Learned:
        """Evaluates a few tokens where it is not remembered. Raises EngineError."""
        known = self._recall(both=self._both)
        if known is None:
            known = self._recall(both=False) or _learn(self._model, self._settings)
            if self._both:
                known = _with_other(known, self._model, self._settings)
            if self._facts is not None:
                self._facts.remember_json(self._what(both=self._both), known.json())
        return known

    def forget(self) -> None:
        if self._facts is not None:
            for both in (False, True):
                self._facts.forget(self._what(both=both))

    def _recall(self, *, both: bool) -> Learned | None:
        return self._facts.read_json(self._what(both=both), Learned.from_json) if self._facts is not None else None

    def _what(self, *, both: bool) -> str:
        settings, adapters = self._settings, [adapter.digest for adapter in self._model.adapters]
        return repr(("state", settings.kv_type, settings.flash, both, self._model.placement, adapters))


def _learn(model: LlamaModel, settings: LlamaSettings) -> Learned:
    layout = _try_layout(model, settings)
    with buffers_that_go():
        can_shift = layout is not None and can_reposition(model, layout, settings)
    return Learned(layout, None, can_shift)


def _with_other(known: Learned, model: LlamaModel, settings: LlamaSettings) -> Learned:
    """And how state lies with the other kind of attention."""
    wanted = counterpart(known.layout) if known.layout is not None else None
    other = _try_layout(model, replace(settings, flash=not settings.flash)) if wanted is not None else None
    return replace(known, other=other if other == wanted else None)


def _try_layout(model: LlamaModel, settings: LlamaSettings) -> Layout | None:
    cells = min(_FEW, settings.cells)
    small = replace(settings, cells=cells, context=cells, batch=min(cells, settings.batch))
    with buffers_that_go():
        context = open_context(model, small, None)
        try:
            return probe_layout(context, model)
        finally:
            llama().llama_free(context)


# ── layouts as JSON ──


def _layout_json(layout: Layout | None) -> Json:
    if layout is None:
        return None
    recurrent = layout.recurrent
    return {
        "head": layout.head.hex(),
        "ranges": [_part_json(part) for part in layout.ranges],
        "windows": [_part_json(part) for part in layout.windows],
        "window": layout.window,
        "recurrent": [recurrent.layers, [list(tensor) for tensor in recurrent.tensors]] if recurrent else None,
        "nothing": layout.nothing.hex(),
    }


def _part_json(part: Attention) -> Json:
    tensors: list[Json] = [[each.kind, each.row_bytes, each.number_bytes] for each in part.tensors]
    return [part.cell_bytes, part.layers, tensors, part.is_transposed, part.extra.hex()]


def _layout(data: Mapping[str, Any] | None) -> Layout | None:
    if data is None:
        return None
    recurrent = data["recurrent"]
    return Layout(
        head=bytes.fromhex(data["head"]),
        ranges=tuple(_part(part) for part in data["ranges"]),
        windows=tuple(_part(part) for part in data["windows"]),
        window=int(data["window"]),
        recurrent=Recurrent(recurrent[0], tuple((kind, row) for kind, row in recurrent[1])) if recurrent else None,
        nothing=bytes.fromhex(data["nothing"]),
    )


def _part(data: Sequence[Any]) -> Attention:
    cell_bytes, layers, tensors, is_transposed, extra = data
    return Attention(
        cell_bytes, layers, tuple(LayerTensor(*tensor) for tensor in tensors), is_transposed, bytes.fromhex(extra)
    )


# ── the layout of its state ──

_UNKNOWN = "llama.cpp exported a state in a layout this version does not know."
_FIRST = 0
"""llama.cpp's sequence."""
_PROBE = 2
"""Tokens of the sequence that a layout is learned from."""
_CELL_BYTES = (12, 24)
_NUMBER_BYTES = (2, 4)
_VARIANTS = tuple(product((True, False), (0, 8)))
"""Whether a part has values, and how many bytes stand between its head and its tensors."""


@dataclass(frozen=True, slots=True)
class Exports:
    """Two exports of one sequence: all of it, and what llama.cpp cannot take apart by range."""

    whole: Bytes
    partial: Bytes

    @classmethod
    def read(cls, context: Handle) -> Exports:
        return cls(read_state(context, _FIRST), read_state(context, _FIRST, PARTIAL))


def learn_layout(empty: Exports, probe: Exports, window: int) -> Layout:
    """The layout of a context, from exports of a sequence without tokens and of one with `_PROBE` of them.

    Raises EngineError when it is none that this version knows.
    """
    attention, recurrent = _inventory(empty.whole)
    windows, partial_recurrent = _inventory(empty.partial)
    if recurrent != partial_recurrent:
        raise EngineError(_UNKNOWN)
    if len(empty.whole) == len(empty.partial) and not recurrent:
        windows = 0  # what has only ranges is never partial
    has_rest = windows or recurrent
    rest = probe.partial[HEAD_BYTES:] if has_rest else probe.partial[:0]
    layout = Layout(
        head=bytes(empty.whole[:HEAD_BYTES]),
        ranges=_read_parts(probe.whole[HEAD_BYTES : len(probe.whole) - len(rest)], attention - windows),
        windows=_read_parts(rest[: len(rest) - (recurrent.size if recurrent else 0)], windows),
        window=window,
        recurrent=recurrent,
        nothing=bytes(empty.partial[HEAD_BYTES:]) if has_rest else b"",
    )
    _check_layout(layout, probe)
    return layout


def probe_layout(context: Handle, model: LlamaModel) -> Layout | None:
    """Evaluate a few tokens in an empty context, and read the layout off what llama.cpp exports for them.

    None for one that this version does not know. Raises EngineError.
    """
    memory = llama().llama_get_memory(context)
    buffer = BatchBuffer(_PROBE)
    empty = Exports.read(context)
    probe = model.vocab.bos if model.vocab.bos is not None else 0
    buffer.decode(context, Rows(_FIRST - 1, 0, np.full(_PROBE, probe, np.int32), outputs=0))
    exports = Exports.read(context)
    # A step with logits touches what the first real one would otherwise have to wait for.
    buffer.decode(context, Rows(_FIRST - 1, _PROBE, np.full(1, probe, np.int32), outputs=1))
    llama().llama_memory_clear(memory, True)
    try:
        return learn_layout(empty, exports, llama().llama_model_n_swa(model.handle))
    except EngineError:
        return None


def _check_layout(layout: Layout, probe: Exports) -> None:
    if not layout.ranges and not layout.unit.has_snapshots:
        raise EngineError(_UNKNOWN)
    for payload in layout.split(probe.whole, (0, _PROBE)) if layout.ranges else ():
        layout.check_range(payload, 0)
    if layout.unit.has_snapshots:
        layout.check_snapshot(memoryview(probe.partial), _PROBE)


def _inventory(empty: Bytes) -> tuple[int, Recurrent | None]:
    """How many attention parts a state without cells has, and its recurrent part. Raises EngineError."""
    count, rest = 0, empty[HEAD_BYTES:]
    while bytes(rest[: len(EMPTY)]) == EMPTY:
        count, rest = count + 1, rest[len(EMPTY) :]
    if not len(rest):
        return count, None
    head, tensors = rest[: RECURRENT_HEAD.size], rest[RECURRENT_HEAD.size :]
    if len(head) < RECURRENT_HEAD.size or len(tensors) % TENSOR.size:
        raise EngineError(_UNKNOWN)
    cells, transposed, layers = RECURRENT_HEAD.unpack(head)
    if cells or transposed:
        raise EngineError(_UNKNOWN)
    return count, Recurrent(layers, tuple(TENSOR.iter_unpack(tensors)))


def _read_parts(state: Bytes, count: int) -> tuple[Attention, ...]:
    """The `count` parts that `state` consists of, from first to last byte. Raises EngineError."""
    if count == 0 and len(state) == 0:
        return ()
    for has_values, extra in _VARIANTS if count else ():
        with suppress(EngineError, struct.error, OverflowError):
            part = _read_part(state, has_values, extra)
            if part.size(_PROBE) <= len(state):
                return part, *_read_parts(state[part.size(_PROBE) :], count - 1)
    raise EngineError(_UNKNOWN)


def _read_part(state: Bytes, has_values: bool, extra: int) -> Attention:
    """What `state` begins with, as a part of `_PROBE` cells at positions 0 ... Raises EngineError, struct.error or
    OverflowError where it cannot be one."""
    positions = np.arange(_PROBE, dtype="<i4").tobytes()
    if bytes(state[: PAIR.size]) != PAIR.pack(1, _PROBE):
        raise EngineError(_UNKNOWN)
    for cell_bytes in _CELL_BYTES:
        table = state[PAIR.size :][: _PROBE * cell_bytes]
        if len(table) == _PROBE * cell_bytes and table.reshape(_PROBE, -1)[:, :4].tobytes() == positions:
            break
    else:
        raise EngineError(_UNKNOWN)
    begin = PAIR.size + _PROBE * cell_bytes
    transposed, layers = PAIR.unpack_from(state, begin)
    if transposed > 1:
        raise EngineError(_UNKNOWN)
    begin, offset = begin + PAIR.size, begin + PAIR.size + extra
    tensors: list[LayerTensor] = []
    while len(tensors) < layers * (1 + has_values):
        tensors.append(_read_tensor(state, offset, is_transposed=bool(transposed) and len(tensors) >= layers))
        offset += tensors[-1].size(_PROBE)
    return Attention(cell_bytes, layers, tuple(tensors), bool(transposed), bytes(state[begin : begin + extra]))


def _read_tensor(state: Bytes, offset: int, *, is_transposed: bool) -> LayerTensor:
    """Raises struct.error."""
    if not is_transposed:
        return LayerTensor(*TENSOR.unpack_from(state, offset))
    kind, number_bytes, width = TRANSPOSED.unpack_from(state, offset)
    if number_bytes not in _NUMBER_BYTES:
        raise struct.error
    return LayerTensor(kind, number_bytes * width, number_bytes)


# ── whether it can be moved ──

_CELLS = 256
_MIXED = 64
"""Heads of multiples of it are mixed."""
_FRESH, _MOVED, _BYSTANDER = range(3)
_FROM, _TO = 90, 2
_TOLERANCE = {"f16": 0.02, "q8_0": 0.05, "q4_0": 0.4}
"""Shares of a key's largest number: rotating in 16 bits costs a tenth of that, quantising three times the rest."""
_SCALE_TOLERANCE = 0.1
"""All keys together may be larger or smaller by this share: there the errors of quantising cancel out."""


def can_reposition(model: LlamaModel, layout: Layout, live: LlamaSettings) -> bool:
    """Tried out in a small context, with a token that stands alone: it sees nothing but itself wherever it is.

    Moved, its keys must be those that the model computes at the new position, and no other sequence's may change.
    """
    if layout.unit is not KvUnit.RANGE or not _survives_trial(model, live.kv_type):
        return False
    settings = replace(live, context=_CELLS, cells=_CELLS, sequences=2, batch=8)
    context = open_context(model, settings, None)
    memory = llama().llama_get_memory(context)
    try:
        if not llama().llama_memory_can_shift(memory):
            return False
        _evaluate(context, _MOVED, _FROM)
        _evaluate(context, _BYSTANDER, _TO)
        before = read_state(context, _BYSTANDER)
        llama().llama_memory_seq_add(memory, _MOVED, -1, -1, _TO - _FROM)
        _evaluate(context, _FRESH, _TO)
        fresh, moved, bystander = (read_state(context, sequence) for sequence in range(3))
    finally:
        llama().llama_free(context)
    return np.array_equal(bystander, before) and _are_close(
        _keys(layout, moved), _keys(layout, fresh), _TOLERANCE[live.kv_type]
    )


def _survives_trial(model: LlamaModel, kv_type: str) -> bool:
    """Whether llama.cpp survives it.

    Its graph for quantised keys is right only where whole heads are rotated and where it has mixed the numbers
    of each head before it quantised them; otherwise it ends the process, and so may a GPU that cannot compute it.
    """
    is_mixed = not os.environ.get("LLAMA_ATTN_ROT_DISABLE")
    return kv_type == "f16" or (is_mixed and not model.offloads and _rotates_whole_heads(model))


def _rotates_whole_heads(model: LlamaModel) -> bool:
    def number(key: str) -> int:
        text = model.hyperparameter(key) or ""
        return int(text) if text.isdigit() else 0

    heads = max(number("attention.head_count"), 1)
    width = number("attention.key_length") or number("embedding_length") // heads
    return width % _MIXED == 0 and number("rope.dimension_count") in (0, width)


def _evaluate(context: Handle, sequence: int, position: int) -> None:
    BatchBuffer(1).decode(context, Rows(sequence - 1, position, np.zeros(1, np.int32), outputs=0))


def _keys(layout: Layout, state: Bytes) -> list[Numbers]:
    """The keys of each layer, in the state of a single token."""
    runs = ((run, rows) for run, rows in layout.rows(state, 1) if run.is_key)
    return [dequantize(row.view(np.uint8), run.tensor.kind) for run, rows in runs for row in rows[:, 0]]


def _are_close(moved: Sequence[Numbers], fresh: Sequence[Numbers], tolerance: float) -> bool:
    layers = zip(moved, fresh, strict=True)
    if not all(np.abs(there - here).max() < tolerance * np.abs(here).max() for there, here in layers):
        return False
    there, here = np.concatenate(moved), np.concatenate(fresh)
    return bool(abs(there @ here / (here @ here) - 1) < _SCALE_TOLERANCE)


Numbers = npt.NDArray[np.float32]
BLOCK = 32
"""Numbers that share a scale in quantised types."""


def dequantize(row: Bytes, kind: int) -> Numbers:
    """Raises EngineError for a type that live state never has."""
    if kind == TYPES["f16"]:
        return row.view(np.float16).astype(np.float32)
    if kind == TYPES["q8_0"]:
        scales, rest = _blocks(row, BLOCK)
        return (rest.view(np.int8) * scales).ravel()
    if kind == TYPES["q4_0"]:
        scales, rest = _blocks(row, BLOCK // 2)
        numbers = np.concatenate([rest & 15, rest >> 4], axis=1).astype(np.float32) - 8
        return (numbers * scales).ravel()
    raise EngineError(f"State of ggml's type {kind} cannot be read.")


def _blocks(row: Bytes, size: int) -> tuple[Numbers, Bytes]:
    """The scale of each block, and the `size` bytes behind it."""
    blocks = row.reshape(-1, 2 + size)
    return blocks[:, :2].copy().view(np.float16).astype(np.float32), np.ascontiguousarray(blocks[:, 2:])
