"""What the engine is measured with: a model as transformers itself runs it, and models with random weights.

Random weights of a given shape are made on the device: speed does not depend on what a model says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, DynamicCache, Qwen2Config

from emberkeep.engine.fake import FakeVocab
from emberkeep.engine.hf.attention import NAME
from emberkeep.engine.hf.device import choose_device, synchronize
from emberkeep.engine.hf.model_loader import HfModel, HfSource, load_model
from emberkeep.engine.hf.vocab import HfVocab

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
            tie_word_embeddings=True,
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
    network = random_network(shape, target, NAME)
    config = network.config
    width = 2 * config.num_key_value_heads * (config.hidden_size // config.num_attention_heads)
    return HfModel(
        network=network,
        vocab=cast(HfVocab, SparseVocab(shape.vocab)),
        chat_template=None,
        context_length=shape.context,
        architecture=config.model_type,
        parameters=sum(weight.numel() for weight in network.parameters()),
        weights_bytes=sum(weight.numel() * weight.element_size() for weight in network.parameters()),
        kv_bytes_per_token=shape.layers * width * network.dtype.itemsize,
        dtype=str(network.dtype).removeprefix("torch."),
        device=str(target),
    )


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
