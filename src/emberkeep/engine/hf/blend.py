"""State from other positions: its keys are turned to where they are now, and the tokens that differ most are
evaluated again.

A key carries its position as a rotation, which can be changed. How a model rotates is found out, not assumed:
one token evaluated alone at position 0 and at another one differs in nothing but the rotation of its keys, in
every layer, because it attends to itself only. Whatever way of turning explains that difference is the layer's
way; where none explains it, this model's state stays where it is.

The first layers evaluate every token. There the keys and values that were computed now are compared with those
that were moved here; the tokens that differ most go on through the other layers, and so do the tokens of which
nothing was known. The rest keep what they came with.

    layer 0, 1      x x x x x x x x x x x x          x: evaluated
    layer 2, ...    x . . x . . x x . . . x          . : as it was moved here
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from emberkeep.engine.base import Blended, Outcome, Rows
from emberkeep.engine.hf.attention import Span
from emberkeep.engine.hf.network import Network, Step, probe
from emberkeep.engine.hf.pool import BlockTable, KvMemory
from emberkeep.types.models import AttentionTier
from emberkeep.values import dataclass

FULL_LAYERS = 2
"""In the first one keys and values do not depend on other tokens: only in the second can any differ."""


@dataclass(slots=True)
class BlendStep(Step):
    """A step over one sequence that goes on with fewer rows after the first layers."""

    known: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """Which rows have keys and values from elsewhere."""
    kept: int = 0
    """How many rows go on."""
    rows: torch.Tensor | None = None
    """Those that do, once they are chosen."""

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        if layer == FULL_LAYERS - 1:
            self.rows = self._most_deviating(layer, keys, values)
        # A class with slots is made anew, and a bare super() would mean the one before.
        super(BlendStep, self).store(layer, keys, values)  # noqa: UP008

    def _most_deviating(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The rows of which nothing was known and those that differ most, in order."""
        deviation = _distance(self.memory.keys[layer], keys, self.cells)
        deviation += _distance(self.memory.values[layer], values, self.cells)
        deviation[~self.known] = float("inf")
        return deviation.topk(self.kept).indices.sort().values


def _distance(stored: torch.Tensor, fresh: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
    """Per row, how far what is stored is from what it should be, relative to what is usual."""
    fresh = fresh.float().flatten(1)
    difference = (stored[cells].float().flatten(1) - fresh).square().sum(1)
    return difference / fresh.square().sum(1).mean().clamp_min(1e-12)


@dataclass(frozen=True, slots=True)
class _Narrow:
    """Before a layer: whatever it is given for every row is cut down to the chosen ones."""

    step: BlendStep
    count: int
    is_first: bool

    def __call__(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if self.is_first:
            assert self.step.rows is not None
            self.step.pick(self.step.rows)
        return self._cut(args), {name: self._cut(value) for name, value in kwargs.items()}

    def _cut(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.ndim >= 2 and value.shape[1] == self.count:
            return value.index_select(1, self.step.rows)
        if isinstance(value, tuple):
            return tuple(self._cut(part) for part in value)
        return value


def evaluate_blended(
    network: Network,
    memory: KvMemory,
    tier: AttentionTier,
    rows: Rows,
    table: BlockTable,
    known: npt.NDArray[np.bool_],
    ratio: float,
) -> tuple[torch.Tensor | None, Blended]:
    """Evaluate those of `rows` of which nothing is `known`, and the share `ratio` of the others that differs most.

    Logits are None where nothing was evaluated. What is known lies in the pool.
    """

    def tensor(array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(network.device, non_blocking=True)

    count, fresh = len(known), np.flatnonzero(~known)
    repaired = math.ceil(ratio * (count - len(fresh)))
    kept = len(fresh) + repaired
    if not kept:
        return None, Blended(Outcome.DONE)
    tokens, cells = tensor(rows.tokens.astype(np.int64)), tensor(table.cells(rows.start, table.length))
    whole, layers = [Span(0, count, table, rows.start)], len(memory.keys)
    wanted = tensor(np.array([kept - 1] if rows.outputs else [], np.int64))
    if not repaired:
        step, chosen = Step(memory, whole, cells, tier), tensor(fresh)
        positions = step.pick(chosen)
        logits = network.run(step, tokens[chosen], positions, wanted)
        return logits, Blended(Outcome.DONE, 0, kept * layers)
    blend = BlendStep(memory, whole, cells, tier, known=tensor(known), kept=kept)
    with _narrow_layers(network, blend, count):
        logits = network.run(blend, tokens, tensor(np.arange(rows.start, rows.start + count)), wanted)
    return logits, Blended(Outcome.DONE, repaired, count * FULL_LAYERS + kept * (layers - FULL_LAYERS))


@contextmanager
def _narrow_layers(network: Network, step: BlendStep, count: int) -> Iterator[None]:
    """Let the layers after the first ones see only the rows that `step` chooses; `count` rows came in."""
    hooks = [
        layer.register_forward_pre_hook(_Narrow(step, count, is_first=index == 0), with_kwargs=True)
        for index, layer in enumerate(network.layers[FULL_LAYERS:])
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


_PROBED_AT = (0, 11)
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Relative to the largest key."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """How one layer rotates its keys."""

    frequencies: torch.Tensor | None
    """Radians per position of every pair of channels; None: the layer's keys do not depend on the position."""
    interleaved: bool = False
    """Pairs are neighbours; else a channel of the first half goes with one of the second."""
    last: bool = False
    """The rotated channels are the last ones of a head; else the first."""

    def __call__(self, keys: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        """`[tokens, heads, width]` keys, each token turned by so many positions."""
        if self.frequencies is None:
            return keys
        count = 2 * len(self.frequencies)
        rest = keys.shape[-1] - count
        kept, turned = (
            (keys[..., :rest], keys[..., rest:]) if self.last else (keys[..., count:], keys[..., :count])
        )
        angles = (by.to(torch.float32)[:, None] * self.frequencies)[:, None]
        turned = _rotate(turned.float(), angles.cos(), angles.sin(), self.interleaved).to(keys.dtype)
        return torch.cat([kept, turned] if self.last else [turned, kept], dim=-1) if rest else turned


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def learn_rotations(network: Network) -> list[Rotation] | None:
    """One per layer, or None for a model whose keys cannot be moved."""
    token = torch.ones(1, dtype=torch.long, device=network.device)
    before, after = (probe(network, token, torch.full_like(token, at)).keys for at in _PROBED_AT)
    candidates = _candidates(network)
    rotations = [_explain(candidates, before[layer], after[layer]) for layer in range(len(before))]
    found = [rotation for rotation in rotations if rotation is not None]
    return found if len(found) == len(rotations) else None


def _candidates(network: Network) -> list[Rotation]:
    frequencies = [
        buffer.float()
        for name, buffer in network.model.named_buffers()
        if name.endswith("inv_freq") and buffer.ndim == 1
    ]
    ways = [Rotation(f, *way) for f in frequencies for way in product((False, True), (False, True))]
    return [Rotation(None), *ways]


def _explain(candidates: Sequence[Rotation], before: torch.Tensor, after: torch.Tensor) -> Rotation | None:
    by = torch.tensor([_PROBED_AT[1] - _PROBED_AT[0]], device=before.device)
    allowed = _TOLERANCE.get(before.dtype, 1e-2) * float(before.abs().max())
    for rotation in candidates:
        if rotation.frequencies is not None and 2 * len(rotation.frequencies) > before.shape[-1]:
            continue
        if float((rotation(before, by) - after).abs().max()) <= allowed:
            return rotation
    return None
