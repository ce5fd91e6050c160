"""What the engine is measured with: a model as transformers itself runs it, and models with random weights.

Random weights of a given shape are made on the device: speed does not depend on what a model says.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, cast
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, Qwen2Config

from emberkeep.engine.fake import FakeVocab
from emberkeep.engine.hf.checkpoint import Checkpoint, place_layers
from emberkeep.engine.hf.device import choose_device, synchronize
from emberkeep.engine.hf.model_loader import HfModel, HfSource, load_model
from emberkeep.engine.hf.network import NAME
from emberkeep.engine.hf.quantize import Int4Linear, rounded_count, weights_bytes
from emberkeep.engine.hf.residency import Placing
from emberkeep.engine.hf.streaming import LayerStream
from emberkeep.engine.hf.vocab import HfVocab
from emberkeep.values import dataclass

Tokens = npt.NDArray[np.int32]

ATTENTION = "sdpa"
"""What transformers chooses by itself."""


class PlainModel:
    """Eager code, a cache that grows with every token. Belongs to one thread. Everything blocks."""

    def __init__(self, network: Any) -> None:
        self._network = network

    @classmethod
    def load(cls, source: HfSource, *, device: str, dtype: str) -> PlainModel:
        """Raises ModelBroken, EngineError."""
        return cls(load_model(source, device=device, dtype=dtype, attention=ATTENTION).network)

    @classmethod
    def random(cls, shape: Shape, device: str) -> PlainModel:
        """With the weights of `random_model`. Raises EngineError."""
        return cls(random_network(shape, choose_device(device), ATTENTION))

    @torch.no_grad()
    def generate(self, prompt: Tokens, count: int) -> list[int]:
        """`transformers.generate`, greedy, without anything from an earlier call: the tokens after the prompt."""
        ids = torch.from_numpy(prompt.astype(np.int64)).to(self._network.device)[None]
        output = self._network.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            pad_token_id=0,
        )
        return [int(token) for token in output[0, len(prompt) :]]

    @torch.no_grad()
    def step_seconds(self, prompts: Sequence[Tokens], steps: int) -> list[float]:
        """Evaluate prompts of equal length together; then the time of each of so many greedy decode steps."""
        ids = torch.from_numpy(np.stack(prompts).astype(np.int64)).to(self._network.device)
        cache, seconds = DynamicCache(config=self._network.config), []
        chosen = self._step(ids, cache)
        for _ in range(steps):
            synchronize(ids.device)
            begin = perf_counter()
            chosen = self._step(chosen[:, None], cache)
            chosen.tolist()  # who writes the answer wants to know
            seconds.append(perf_counter() - begin)
        return seconds

    def _step(self, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        output = self._network(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1].argmax(-1)


_HEAD_WIDTH = 128
_HEADS_PER_KV_HEAD = 8
_NEXT_TO_NOTHING = 1e-5


@dataclass(frozen=True, slots=True)
class Shape:
    """In the proportions of Qwen2.5: 36 layers of 2,048 are the one with three billion weights."""

    layers: int
    hidden: int
    context: int
    vocab: int = 151_936
    is_tied: bool = True
    """Whether the same weights are the first and the last of it."""

    @property
    def heads(self) -> int:
        return max(self.hidden // _HEAD_WIDTH, 2)

    def config(self) -> Any:
        return Qwen2Config(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.hidden * 43 // 8,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=max(self.heads // _HEADS_PER_KV_HEAD, 1),
            max_position_embeddings=self.context,
            tie_word_embeddings=self.is_tied,
        )


class SparseVocab(FakeVocab):
    """Nothing ends an answer, and most ids stand for no text."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.pieces += (b"",) * (size - len(self.pieces))
        self.size = size
        self.eog = frozenset()


def random_network(shape: Shape, device: torch.device, attention: str) -> Any:
    """A causal LM, equal for equal arguments: bfloat16 on an accelerator, float32 on a CPU."""
    torch.manual_seed(0)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    with torch.device(device):
        network = AutoModelForCausalLM.from_config(shape.config(), dtype=dtype, attn_implementation=attention)
    return network.eval().requires_grad_(False)


def random_model(shape: Shape, device: str) -> HfModel:
    """What an engine takes. Raises EngineError for a device that is not here."""
    target = choose_device(device)
    return _model(random_network(shape, target, NAME), shape, target)


def _model(network: Any, shape: Shape, target: torch.device, stream: LayerStream | None = None) -> HfModel:
    config = network.config
    width = 2 * config.num_key_value_heads * (config.hidden_size // config.num_attention_heads)
    return HfModel(
        network=network,
        vocab=cast(HfVocab, SparseVocab(shape.vocab)),
        chat_template=None,
        context_length=shape.context,
        architecture=config.model_type,
        parameters=sum(weight.numel() for weight in network.parameters()) + rounded_count(network),
        weights_bytes=weights_bytes(network),
        kv_bytes_per_token=shape.layers * width * network.dtype.itemsize,
        dtype=str(network.dtype).removeprefix("torch."),
        device=str(target),
        stream=stream,
    )


# ── weights in four bits ──

_GROUPS = (128, 64, 32)
"""Weights that share a scale: as many as the shape allows."""
_WEIGHT = 0.02
"""About how large a weight is."""


def random_int4_model(shape: Shape, device: str, placing: Placing, quiet_from: int | None = None) -> HfModel:
    """Weights of layers in four bits, placed as `placing` says: equal names have equal weights in all of them.

    Layers from `quiet_from` on add next to nothing. Blocks. Raises EngineError.
    """
    target = choose_device(device)
    dtype = torch.float32 if target.type == "cpu" else torch.bfloat16
    with init_empty_weights(include_buffers=False):
        network = AutoModelForCausalLM.from_config(shape.config(), dtype=dtype, attn_implementation=NAME)
    network.eval().requires_grad_(False)
    for layer in network.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, module in list(part.named_children()):
                if isinstance(module, nn.Linear):
                    setattr(part, name, _empty_int4(module, dtype))
    stream = place_layers(network, target, placing, RandomWeights(quiet_from))
    return _model(network, shape, target, stream)


def _empty_int4(module: nn.Linear, dtype: torch.dtype) -> Int4Linear:
    outputs, inputs = module.out_features, module.in_features
    codes = torch.empty((outputs, inputs // 2), dtype=torch.uint8, device="meta")
    groups = inputs // next(group for group in _GROUPS if inputs % group == 0)
    scales = torch.empty((groups, outputs), dtype=dtype, device="meta")
    zeros = torch.empty_like(scales)
    return Int4Linear(codes, scales, zeros, None if module.bias is None else module.bias.data)


class RandomWeights(Checkpoint):
    """In place of a checkpoint."""

    def __init__(self, quiet_from: int | None) -> None:
        self._quiet_from = quiet_from

    def fill(self, modules: Iterable[tuple[str, nn.Module]], converting: torch.device) -> None:
        for name, module in modules:
            random = torch.Generator(converting).manual_seed(crc32(name.encode()))
            for own, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is None or not tensor.is_meta:
                    continue
                made = _random_like(own, tensor, random)
                if own == "scales" and self._is_quiet(name):
                    made *= _NEXT_TO_NOTHING
                if own in module._parameters:
                    module._parameters[own] = nn.Parameter(made, requires_grad=False)
                else:
                    module._buffers[own] = made

    def tie(self, network: Any) -> None:
        network.tie_weights()

    def _is_quiet(self, name: str) -> bool:
        number = int(next((part for part in name.split(".") if part.isdigit()), -1))
        is_last = name.endswith(("o_proj", "down_proj"))
        return self._quiet_from is not None and number >= self._quiet_from and is_last


def _random_like(name: str, tensor: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    made = torch.empty_like(tensor, device=random.device)
    if name == "codes":
        return made.random_(0, 256, generator=random)
    if name in ("scales", "zeros"):
        return made.fill_(_WEIGHT / 4 if name == "scales" else 8)
    if tensor.ndim == 1:
        return made.fill_(float(name == "weight"))
    return made.normal_(0, _WEIGHT, generator=random)


@torch.no_grad()
def random_pair(shape: Shape, draft_layers: int, device: str, *, agrees: bool) -> tuple[HfModel, HfModel]:
    """A model and one of its first layers only, that drafts for it. They agree where the other layers of the first
    add next to nothing; else the second has other weights. Raises EngineError for a device that is not here."""
    model, draft = random_model(shape, device), random_model(replace(shape, layers=draft_layers), device)
    if agrees:
        for layer in model.network.model.layers[draft_layers:]:
            layer.self_attn.o_proj.weight.mul_(_NEXT_TO_NOTHING)
            layer.mlp.down_proj.weight.mul_(_NEXT_TO_NOTHING)
        draft.network.load_state_dict(model.network.state_dict(), strict=False)
    else:
        for weight in draft.network.parameters():
            weight.copy_(weight.flip(0).clone())
    return model, draft
