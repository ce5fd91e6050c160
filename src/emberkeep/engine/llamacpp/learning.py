"""What an engine has to know of its model's state before it can take a step: how the state lies, with either kind
of attention, and whether it can be moved to other positions.

It is tried out in small contexts, and remembered. A memory that is wrong all the same is noticed when the first
state is exported, whose every skeleton byte is compared with the layout (`LlamaEngine.export_kv`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from emberkeep.engine.facts import Facts
from emberkeep.engine.llamacpp.context import LlamaSettings, open_context, probe_layout
from emberkeep.engine.llamacpp.kv_state import Attention, LayerTensor, Layout, Recurrent
from emberkeep.engine.llamacpp.model import LlamaModel
from emberkeep.engine.llamacpp.reposition import can_reposition
from emberkeep.engine.llamacpp.shared_library import buffers_that_go, llama
from emberkeep.engine.llamacpp.transpose import counterpart
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
