"""What a layer of the usual make consists of.

That is a norm, attention with rotated queries and keys, a residual; a norm, a gated feed-forward part, a residual.
That a layer is such a one is not taken from its name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN

from emberkeep.engine.hf.attention import AttentionOptions

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_FEED_FORWARD = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_SILU = (nn.SiLU, type(ACT2FN["silu"]))


def is_usual(layer: nn.Module, options: AttentionOptions) -> bool:
    """Whether it has these parts and no others. Whether it computes the same is to be found out."""
    if _names(layer) != _LAYER or options.softcap is not None or options.sinks is not None:
        return False
    attention, feed_forward = layer.self_attn, layer.mlp
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [getattr(attention, name) for name in sorted(_HEAD_NORMS) if hasattr(attention, name)]
    return (
        _names(attention) in (_ATTENTION, _ATTENTION | _HEAD_NORMS)
        and _names(feed_forward) == _FEED_FORWARD
        and isinstance(feed_forward.act_fn, _SILU)
        and all(hasattr(norm, "variance_epsilon") and norm.weight.ndim == 1 for norm in norms)
        and attention.k_proj.out_features == attention.v_proj.out_features
    )


def linear_parts(layer: Any) -> list[nn.Module]:
    """Those of a usual layer."""
    attention, feed_forward = layer.self_attn, layer.mlp
    of_attention = [getattr(attention, name) for name in sorted(_ATTENTION)]
    return [*of_attention, feed_forward.gate_proj, feed_forward.up_proj, feed_forward.down_proj]


def norm_of(module: Any) -> tuple[torch.Tensor, float]:
    """Its weight, and what is added to the square before the root."""
    return module.weight, module.variance_epsilon


def _names(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}
