"""Layers of the usual make on a CPU, in fewer operations than transformers takes.

Products that read the same input are one, and the large ones write into memory that is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import silu

from emberkeep.engine.hf.attention import AttentionOptions
from emberkeep.engine.hf.panels import PanelProduct
from emberkeep.engine.hf.usual_layers import is_usual, norm_of


class CpuLayer:
    """Shares the layer's weights."""

    def __init__(self, layer: Any, index: int, options: AttentionOptions, angles: Angles, is_last: bool) -> None:
        """Only for a layer that `is_usual`."""
        attention, feed_forward = layer.self_attn, layer.mlp
        self._index, self._options, self._angles, self._is_last = index, options, angles, is_last
        self._first_norm, self._second_norm = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        self._head_norms: list[_Norm] = []
        if hasattr(attention, "q_norm"):
            self._head_norms = [_Norm(attention.q_norm), _Norm(attention.k_norm)]
        self._heads = PanelProduct([attention.q_proj, attention.k_proj, attention.v_proj])
        self._mixed = PanelProduct([attention.o_proj])
        self._gates = PanelProduct([feed_forward.gate_proj, feed_forward.up_proj])
        self._down = PanelProduct([feed_forward.down_proj])

    def __call__(
        self, hidden_states: torch.Tensor, *_: Any, past_key_values: Any, position_embeddings: Any, **__: Any
    ) -> torch.Tensor:
        """As the layer's own `forward`, of a batch of one. Changes `hidden_states`. The last layer leaves rows of
        which no logits are wanted as they are."""
        step, wanted, residual = past_key_values.step, past_key_values.wanted, hidden_states[0]
        scratch = step.memory.scratch
        query = self._store_heads(step, self._heads(self._first_norm(residual), scratch), position_embeddings)
        if self._is_last and not len(wanted):
            return hidden_states
        mixed = step.attend(query.transpose(0, 1)[None], self._options).flatten(1)
        whole, is_cut = residual, self._is_last and len(wanted) < len(residual)
        if is_cut:
            residual, mixed = residual[wanted], mixed[wanted]
        self._mixed.add_to(residual, mixed, scratch)
        gate, up = self._gates(self._second_norm(residual), scratch).chunk(2)
        opened = silu(gate, inplace=True).mul_(up)
        self._down.add_to(residual, opened.transpose(0, 1).flatten(1), scratch)
        if is_cut:
            whole[wanted] = residual
        return hidden_states

    def _store_heads(
        self, step: Any, product: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Give the rotated queries, `[rows, heads, width]`. Keys, rotated, and values go into their cells."""
        _, count, width = step.memory.keys[self._index].shape
        heads = product.transpose(0, 1).reshape(product.shape[1], -1, width)
        turned, values = heads[:, :-count], heads[:, -count:]
        if self._head_norms:
            parts = turned[:, :-count], turned[:, -count:]
            turned = torch.cat([norm(part) for norm, part in zip(self._head_norms, parts, strict=True)], 1)
        turned = _rotate(turned, self._angles.read(*rotation))
        step.store(self._index, turned[:, -count:], values)
        return turned[:, :-count]


def cpu_layers(layers: Sequence[nn.Module], options: Sequence[AttentionOptions]) -> list[CpuLayer] | None:
    """None unless all of them are usual and in float32; whether they compute the same is for `agree` to say."""
    if not layers or not all(is_usual(layer, each) for layer, each in zip(layers, options, strict=True)):
        return None
    if any(weight.dtype != torch.float32 for layer in layers for weight in layer.parameters()):
        return None  # norms would round more than the model's own
    angles, last = Angles(), len(layers) - 1
    return [
        CpuLayer(layer, index, each, angles, index == last)
        for index, (layer, each) in enumerate(zip(layers, options, strict=True))
    ]


class _Norm:
    """A norm in four operations: the root of the sum of squares and of what the model adds is a hypotenuse."""

    def __init__(self, module: Any) -> None:
        weight, eps = norm_of(module)
        self._weight = weight * len(weight) ** 0.5
        self._least = weight.new_tensor((eps * len(weight)) ** 0.5)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self._weight).div_(torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(self._least))


class Angles:
    """Cosines and sines of a step's positions, `[rows, 1, 2, half]`, where the first sines are negative: made once
    for all layers that are given the same."""

    def __init__(self) -> None:
        self._given: torch.Tensor | None = None

    def read(self, cos: torch.Tensor, sin: torch.Tensor) -> Angles:
        """From what transformers gives layers: `[1, rows, width]`. Changes and gives itself."""
        if self._given is not cos:
            self._given, self.width = cos, cos.shape[-1]
            self.cos, self.sin = (part[0].reshape(-1, 1, 2, self.width // 2) for part in (cos, sin))
            self.sin = torch.cat([-self.sin[:, :, :1], self.sin[:, :, 1:]], 2)
        return self


def _rotate(x: torch.Tensor, angles: Angles) -> torch.Tensor:
    """Turn the first channels of `[rows, heads, width]`, as many as there are angles for."""
    if angles.width < x.shape[2]:
        return torch.cat([_rotate(x[..., : angles.width], angles), x[..., angles.width :]], -1)
    halves = x.unflatten(2, (2, -1))
    return torch.addcmul(halves * angles.cos, halves.flip(2), angles.sin).flatten(2)
