"""Which experts of a mixture are chosen, seen through llama.cpp's evaluation callback.

llama.cpp asks the callback about every node of a graph, some thousand per step, and computes the graph in one
go where there is none. It takes a callback only when a context is opened. So a context that is not watched has
none, and watching begins with opening another one.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from emberkeep.engine.llamacpp.c_api import NodeCallback, Tensor
from emberkeep.engine.llamacpp.model import LlamaModel
from emberkeep.engine.llamacpp.shared_library import llama
from emberkeep.types.models import ExpertStats, LayerExperts

log = logging.getLogger("emberkeep.engine")
_CHOSEN = b"ffn_moe_topk-"
"""How llama.cpp names the node that holds the chosen experts, before the number of the layer."""
_Totals = npt.NDArray[np.int64]
"""Per expert how many tokens chose it, and after that the number of tokens."""


_NAME = Tensor.name.offset


class GraphExpertCounter:
    """See `ExpertTracking` for the contracts. `reopen` opens the engine's context anew, with this `callback`."""

    def __init__(self, experts: int, used: int | None, reopen: Callable[[], None]) -> None:
        self._experts = experts
        self._used = used
        self._reopen = reopen
        self._step: dict[int, _Totals] = {}
        self._totals: Mapping[int, _Totals] = {}
        self._on_node = NodeCallback(self._see)
        self.enabled = False

    @classmethod
    def of(cls, model: LlamaModel, reopen: Callable[[], None]) -> GraphExpertCounter | None:
        """None for a model without experts to choose from."""
        architecture = model.metadata("general.architecture")
        experts = int(model.metadata(f"{architecture}.expert_count") or 0)
        used = model.metadata(f"{architecture}.expert_used_count")  # a list of numbers is not among the metadata
        return cls(experts, int(used) if used else None, reopen) if experts > 1 else None

    @property
    def callback(self) -> Callable[..., bool] | None:
        """What a context is to be opened with; it must outlive the context."""
        return self._on_node if self.enabled else None

    def track(self, enabled: bool) -> None:
        if enabled != self.enabled:
            self.enabled = enabled
            self._reopen()

    def reset(self) -> None:
        self._totals = {}

    def stats(self) -> ExpertStats:
        layers = tuple(
            LayerExperts(layer, tokens, tuple(counts))
            for layer, (*counts, tokens) in sorted((n, total.tolist()) for n, total in self._totals.items())
        )
        return ExpertStats(self.enabled, self._experts, self._used, layers)

    def step_done(self) -> None:
        """Count what was seen since the last call. Cheap when that is nothing."""
        if self._step:
            # One assignment of a new mapping: readers need no lock, and see all layers after the same step.
            self._totals = {**self._totals, **{n: self._totals.get(n, 0) + seen for n, seen in self._step.items()}}
            self._step = {}

    def _see(self, address: int, is_question: bool, _user_data: object) -> bool:
        """Asked about every node before it is computed, and told about those that it answered True for."""
        if is_question:
            return ctypes.string_at(address + _NAME, len(_CHOSEN)) == _CHOSEN
        try:
            self._count(Tensor.from_address(address))
        except BaseException:
            log.exception("the experts of a step were not counted")
        return True  # anything else, an exception included, would leave the rest of the graph uncomputed

    def _count(self, tensor: Tensor) -> None:
        chosen = _read(tensor)
        if len(chosen):
            layer = int(tensor.name.removeprefix(_CHOSEN))
            seen = np.append(np.bincount(chosen.ravel(), minlength=self._experts), len(chosen))
            self._step[layer] = self._step.get(layer, 0) + seen


def _read(tensor: Tensor) -> npt.NDArray[np.int32]:
    """One row per token. The last layer has none in a step without logits."""
    used, tokens = tensor.ne[:2]
    if not tokens:
        return np.empty((0, used), np.int32)
    # A view of all experts, sorted: its rows are further apart than they are long.
    step, row = tensor.nb[:2]
    size = (tokens - 1) * row + used * step
    buffer = np.empty(size, np.uint8)
    llama().ggml_backend_tensor_get(ctypes.byref(tensor), buffer.ctypes.data_as(ctypes.c_void_p), 0, size)
    return np.ndarray((tokens, used), np.int32, buffer, strides=(row, step))
