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

from emberkeep.engine.hf.layer_kernels import HeadNorms, add_norm, rms_norm, rotate_and_store, silu_gate
from emberkeep.engine.hf.network import AttentionOptions
from emberkeep.engine.hf.pool import KvMemory
from emberkeep.engine.hf.product_kernels import (
    FEW_INT4_ROWS,
    FEW_ROWS,
    ProductParts,
    dequantise,
    int4_product,
    product,
)
from emberkeep.engine.hf.quantize import Int4Linear, has_kernels

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
    normed: torch.Tensor | None

    def attend_pool(self, query: torch.Tensor, options: AttentionOptions) -> torch.Tensor: ...


class FusedLayer:
    """Shares the layer's weights, which from then on are parts of larger ones.

    The norm that the next layer begins with comes with the residual that this one ends with: `step.normed`.
    """

    def __init__(self, layer: Any, index: int, options: AttentionOptions, following: Any | None) -> None:
        """Only for a layer that `is_usual`, and for a layer `following` it that is so too."""
        attention, feed_forward = layer.self_attn, layer.mlp
        self._index, self._options = index, options
        self._first_norm = _norm(layer.input_layernorm)
        self._second_norm = _norm(layer.post_attention_layernorm)
        self._next_norm = _norm(following.input_layernorm) if following is not None else None
        self._head_norms: HeadNorms | None = None
        if hasattr(attention, "q_norm"):
            self._head_norms = HeadNorms(
                attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.variance_epsilon
            )
        self._heads = Product([attention.q_proj, attention.k_proj, attention.v_proj])
        self._gates = Product([feed_forward.gate_proj, feed_forward.up_proj])
        self._mixed, self._down = Product([attention.o_proj]), Product([feed_forward.down_proj])

    def __call__(
        self, hidden_states: torch.Tensor, *_: Any, past_key_values: Any, position_embeddings: Any, **__: Any
    ) -> torch.Tensor:
        """As the layer's own `forward`, of a batch of one. Changes `hidden_states`."""
        step: PooledStep = past_key_values.step
        step.layer = self._index
        keys, values = step.memory.keys[self._index], step.memory.values[self._index]
        rotation = position_embeddings[0][0], position_embeddings[1][0]
        residual = hidden_states[0]
        normed = rms_norm(residual, *self._first_norm) if step.normed is None else step.normed
        heads = self._heads(normed)
        query = rotate_and_store(heads, rotation, self._head_norms, step.cells, keys, values)
        mixed = step.attend_pool(query.transpose(0, 1)[None], self._options).flatten(1)
        normed = self._mixed.add_to(residual, mixed, self._second_norm)
        opened = silu_gate(self._gates(normed), residual.dtype)
        step.normed = self._down.add_to(residual, opened, self._next_norm)
        return hidden_states


class Product:
    """With the weights of some linear parts, which become views of one weight. The kind of kernel that computes it
    depends on the number of rows."""

    def __init__(self, parts: Sequence[nn.Linear] | Sequence[Int4Linear]) -> None:
        self._bias = _join_bias(parts)
        self._codes: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        if isinstance(parts[0], Int4Linear):
            self._codes = _join_codes([each for each in parts if isinstance(each, Int4Linear)])
        else:
            self._weight = _join_weights([each for each in parts if isinstance(each, nn.Linear)])

    def __call__(self, x: torch.Tensor) -> ProductParts:
        if self._codes is not None and len(x) <= FEW_INT4_ROWS:
            return int4_product(x, *self._codes, self._bias)
        if self._codes is None and len(x) <= FEW_ROWS:
            return product(x, self._weight, self._bias)
        return ProductParts(linear(x, self._whole(), self._bias)[None])

    def add_to(
        self, residual: torch.Tensor, x: torch.Tensor, norm: tuple[torch.Tensor, float] | None
    ) -> torch.Tensor | None:
        """Changes `residual`. Its norm, if one is wanted."""
        few = FEW_ROWS if self._codes is None else FEW_INT4_ROWS
        if norm is not None and (len(x) <= few or self._bias is not None):
            return add_norm(residual, self(x), *norm)
        if self._bias is not None:
            residual.add_(linear(x, self._whole(), self._bias))
        else:
            residual.addmm_(x, self._whole().t())
        return None if norm is None else rms_norm(residual, *norm)

    def _whole(self) -> torch.Tensor:
        return self._weight if self._codes is None else dequantise(*self._codes)


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
        and _are_alike(products)
        and all(hasattr(norm, "variance_epsilon") and norm.weight.ndim == 1 for norm in norms)
        and attention.k_proj.out_features == attention.v_proj.out_features
    )


def fuse(layers: Sequence[nn.Module], options: Sequence[AttentionOptions]) -> list[FusedLayer] | None:
    """None unless all of them are usual; whether they compute the same is for `agree` to say."""
    if not layers or not all(is_usual(layer, each) for layer, each in zip(layers, options, strict=True)):
        return None
    following = [*layers[1:], None]
    return [
        FusedLayer(layer, index, each, after)
        for index, (layer, each, after) in enumerate(zip(layers, options, following, strict=True))
    ]


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
    for own, (hidden, named, result) in zip(fused, seen, strict=True):
        step: PooledStep = named["past_key_values"].step
        step.normed = None  # each begins with what it was given
        if not isinstance(result, torch.Tensor) or not _is_close(hidden, result, own(hidden.clone(), **named)):
            return False
    return True


def _is_close(before: torch.Tensor, result: torch.Tensor, own: torch.Tensor) -> bool:
    added, own_added = result.double() - before.double(), own.double() - before.double()
    return bool((own_added - added).norm() <= _CLOSE.get(result.dtype, 0.0) * added.norm().clamp_min(1e-9))


def _names(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _silu_class() -> type:
    from transformers.activations import ACT2CLS

    found = ACT2CLS["silu"]
    return found if isinstance(found, type) else nn.SiLU


def _are_alike(products: Sequence[nn.Module]) -> bool:
    """Whether one kernel can compute several of them."""
    if all(isinstance(each, Int4Linear) for each in products):
        groups = {(each.codes.device, each.group) for each in products if isinstance(each, Int4Linear)}
        return all(has_kernels(*each) for each in groups)
    return all(type(each) is nn.Linear for each in products)


def _norm(module: Any) -> tuple[torch.Tensor, float]:
    return module.weight, module.variance_epsilon


def _join_weights(products: Sequence[nn.Linear]) -> torch.Tensor:
    if len(products) == 1:
        return products[0].weight.data
    weight, begin = torch.cat([each.weight.data for each in products]), 0
    for each in products:
        each.weight.data = weight[begin : begin + each.out_features]
        begin += each.out_features
    return weight


def _join_codes(products: Sequence[Int4Linear]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    codes, begin = torch.cat([each.codes for each in products]), 0
    scales, zeros = (torch.cat([getattr(each, name) for each in products], dim=1) for name in ("scales", "zeros"))
    for each in products:
        end = begin + each.out_features
        each.codes, each.scales, each.zeros = codes[begin:end], scales[:, begin:end], zeros[:, begin:end]
        begin = end
    return codes, scales, zeros


def _join_bias(products: Sequence[nn.Linear] | Sequence[Int4Linear]) -> torch.Tensor | None:
    if all(each.bias is None for each in products):
        return None
    bias, begin = torch.cat([_bias(each) for each in products]), 0
    for each in products:
        if each.bias is not None:
            each.bias.data = bias[begin : begin + each.out_features]
        begin += each.out_features
    return bias


def _bias(product: nn.Linear | Int4Linear) -> torch.Tensor:
    if product.bias is not None:
        return product.bias.data
    weight = product.scales if isinstance(product, Int4Linear) else product.weight
    return weight.new_zeros(product.out_features)
