"""Keys that move: a key carries its position as a rotation, which can be changed.

How a model rotates is found out, not assumed: one token evaluated alone at position 0 and at another one differs
in nothing but the rotation of its keys, in every layer, because it attends to itself only. Whatever way of turning
explains that difference is the layer's way; where none explains it, this model's state stays where it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch

from emberkeep.engine.hf.network import Network, probe
from emberkeep.values import dataclass

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
    before, after = (
        probe(network, torch.ones(1, dtype=torch.long, device=network.device), _position(network, at)).keys
        for at in _PROBED_AT
    )
    candidates = _candidates(network)
    rotations = [_explain(candidates, before[layer], after[layer]) for layer in range(len(before))]
    found = [rotation for rotation in rotations if rotation is not None]
    return found if len(found) == len(rotations) else None


def _position(network: Network, at: int) -> torch.Tensor:
    return torch.tensor([at], device=network.device)


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
