"""Layers of the usual make, computed in fewer steps than transformers takes.

Usual is: a norm, attention with rotated queries and keys, a residual; a norm, a gated feed-forward part, a
residual. Products that read the same input become one, and so does what stands between products. That a layer is
such a one is not taken from its name: it must have these parts and no others, and must compute the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.functional import linear

from emberkeep.engine.hf.attention import AttentionOptions
from emberkeep.engine.hf.layer_kernels import HeadNorms, rms_norm, rotate_and_store, silu_gate
from emberkeep.engine.hf.pool import KvMemory

Forward = Callable[..., torch.Tensor]

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_FEED_FORWARD = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_CLOSE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""How far results may differ that are rounded in other places, as a share of what a layer adds."""


class PooledStep(Protocol):
    """A step whose keys and values lie in the pool."""

    memory: KvMemory
    cells: torch.Tensor
    layer: int

    def attend_pool(self, query: torch.Tensor, options: AttentionOptions) -> torch.Tensor: ...


class FusedLayer:
    """Shares the layer's weights, which from then on are parts of larger ones."""

    def __init__(self, layer: Any, index: int, options: AttentionOptions) -> None:
        """Only for a layer that `is_usual`."""
        attention, feed_forward = layer.self_attn, layer.mlp
        self._index, self._options = index, options
        self._norms = [
            (norm.weight, norm.variance_epsilon)
            for norm in (layer.input_layernorm, layer.post_attention_layernorm)
        ]
        self._head_norms: HeadNorms | None = None
        if hasattr(attention, "q_norm"):
            self._head_norms = HeadNorms(
                attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.variance_epsilon
            )
        self._heads = _join([attention.q_proj, attention.k_proj, attention.v_proj])
        self._gates = _join([feed_forward.gate_proj, feed_forward.up_proj])
        self._mixed, self._down = attention.o_proj, feed_forward.down_proj

    def __call__(
        self, hidden_states: torch.Tensor, *_: Any, past_key_values: Any, position_embeddings: Any, **__: Any
    ) -> torch.Tensor:
        """As the layer's own `forward`, of a batch of one. Changes `hidden_states`."""
        step: PooledStep = past_key_values.step
        step.layer = self._index
        keys, values = step.memory.keys[self._index], step.memory.values[self._index]
        rotation = position_embeddings[0][0], position_embeddings[1][0]
        residual = hidden_states[0]
        product = linear(rms_norm(residual, *self._norms[0]), *self._heads)
        query = rotate_and_store(product, rotation, self._head_norms, step.cells, keys, values)
        mixed = step.attend_pool(query.transpose(0, 1)[None], self._options).flatten(1)
        residual = _add_product(residual, mixed, self._mixed)
        gates = linear(rms_norm(residual, *self._norms[1]), *self._gates)
        return _add_product(residual, silu_gate(gates), self._down)[None]


def is_usual(layer: nn.Module, options: AttentionOptions) -> bool:
    """Whether it has the parts that `FusedLayer` knows, and no others."""
    if _names(layer) != _LAYER or options.softcap is not None or options.sinks is not None:
        return False
    attention, feed_forward = layer.self_attn, layer.mlp
    products = [*(getattr(attention, name, None) for name in sorted(_ATTENTION))]
    products += [getattr(feed_forward, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [getattr(attention, name) for name in sorted(_HEAD_NORMS) if hasattr(attention, name)]
    return (
        _names(attention) in (_ATTENTION, _ATTENTION | _HEAD_NORMS)
        and _names(feed_forward) == _FEED_FORWARD
        and isinstance(getattr(feed_forward, "act_fn", None), nn.SiLU | _silu_class())
        and all(type(product) is nn.Linear for product in products)
        and all(hasattr(norm, "variance_epsilon") and norm.weight.ndim == 1 for norm in norms)
        and attention.k_proj.out_features == attention.v_proj.out_features
    )


def fuse(layers: Sequence[nn.Module], options: Sequence[AttentionOptions]) -> list[FusedLayer] | None:
    """None unless all of them are usual; whether they compute the same is for `agree` to say."""
    if not layers or not all(is_usual(layer, each) for layer, each in zip(layers, options, strict=True)):
        return None
    return [FusedLayer(layer, i, each) for i, (layer, each) in enumerate(zip(layers, options, strict=True))]


def agree(layers: Sequence[nn.Module], fused: Sequence[FusedLayer], run: Callable[[], object]) -> bool:
    """Whether every layer computes the same in both ways of what it is given when the model is `run`."""
    seen: list[tuple[torch.Tensor, dict[str, Any], torch.Tensor]] = []

    def keep(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any], result: Any) -> None:
        hidden = given[0] if given else named["hidden_states"]
        seen.append((hidden, {k: v for k, v in named.items() if k != "hidden_states"}, result))

    hooks = [layer.register_forward_hook(keep, with_kwargs=True) for layer in layers]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    if len(seen) != len(fused):
        return False
    return all(
        isinstance(result, torch.Tensor) and _is_close(hidden, result, own(hidden.clone(), **named))
        for own, (hidden, named, result) in zip(fused, seen, strict=True)
    )


def _is_close(before: torch.Tensor, result: torch.Tensor, own: torch.Tensor) -> bool:
    added, own_added = result.double() - before.double(), own.double() - before.double()
    return bool((own_added - added).norm() <= _CLOSE.get(result.dtype, 0.0) * added.norm().clamp_min(1e-9))


def _names(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _silu_class() -> type:
    from transformers.activations import ACT2CLS

    found = ACT2CLS["silu"]
    return found if isinstance(found, type) else nn.SiLU


def _join(products: Sequence[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One weight and one bias for all of them, of which theirs become views."""
    weight = torch.cat([each.weight.data for each in products])
    bias = None
    if any(each.bias is not None for each in products):
        bias = torch.cat([_bias(each) for each in products])
    begin = 0
    for each in products:
        end = begin + each.out_features
        each.weight.data = weight[begin:end]
        if each.bias is not None and bias is not None:
            each.bias.data = bias[begin:end]
        begin = end
    return weight, bias


def _bias(product: nn.Linear) -> torch.Tensor:
    return product.weight.new_zeros(product.out_features) if product.bias is None else product.bias.data


def _add_product(residual: torch.Tensor, x: torch.Tensor, product: nn.Linear) -> torch.Tensor:
    """Changes `residual`."""
    if product.bias is not None:
        return residual.add_(linear(x, product.weight, product.bias))
    return residual.addmm_(x, product.weight.t())
