"""Models of a given shape with random weights, made on the device: speed does not depend on what they say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from emberkeep.engine.fake import FakeVocab
from emberkeep.engine.hf.attention import NAME
from emberkeep.engine.hf.device import chosen_device
from emberkeep.engine.hf.loading import HfModel
from emberkeep.engine.hf.vocab import HfVocab

_HEAD_WIDTH = 128
_HEADS_PER_KV_HEAD = 8


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
    place = chosen_device(device)
    network = random_network(shape, place, NAME)
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
        device=str(place),
    )
