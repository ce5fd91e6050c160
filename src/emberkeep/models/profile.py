"""What a model is, read from its metadata alone: nothing here knows a model family by name."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeGuard

from emberkeep.errors import ModelBroken
from emberkeep.models.gguf import GgufHeader, SkippedArray

F16_BYTES = 2
MAX_LAYERS = 4096
RECURRENT_KEYS = ("ssm.state_size", "ssm.conv_kernel", "wkv.head_size", "shortconv.l_cache", "kda.head_dim")
"""Architectures with a state that is overwritten by every token declare at least one of these."""


class ModelKind(StrEnum):
    """The one trait that shapes the KV state most; a model with several has the first that is listed here."""

    RECURRENT = "recurrent"  # no attention: one state per sequence
    HYBRID = "hybrid"  # attention in some layers, recurrent state in others
    MLA = "mla"  # attention over a compressed latent
    SLIDING_WINDOW = "sliding_window"  # some layers forget tokens outside a window
    MOE = "moe"  # plain attention, routed feed-forward
    DENSE = "dense"


@dataclass(frozen=True, slots=True)
class ModelProfile:
    architecture: str
    name: str
    kind: ModelKind
    parameters: int
    quantisation: str
    """The weight format that holds most of the bytes."""
    size: int
    """Bytes of its files, as their headers account for them."""
    context_length: int
    layers: int
    kv_heads: tuple[int, ...]
    """Per layer; 0 where a layer keeps no attention state."""
    key_length: int
    value_length: int
    kv_bytes_per_token: int
    """At 16 bits per value, over all layers."""
    vocab_size: int
    chat_template: str | None
    sliding_window: int | None
    expert_count: int
    short_rope_context: int | None
    """Where a model has RoPE factors for short and for long contexts: the longest short one."""


def profile(header: GgufHeader) -> ModelProfile:
    """Pure. Raises ModelBroken when the metadata does not describe a language model."""
    return _Metadata(header).profile()


class _Metadata:
    """Typed access to one header's metadata, with the architecture's prefix filled in."""

    def __init__(self, header: GgufHeader) -> None:
        self._header = header
        self._values = header.metadata
        self.architecture = self._text("general.architecture")
        if self._text("general.type") == "adapter":
            raise ModelBroken(
                "The file is an adapter and no model: give it with --lora beside the model it is for."
            )
        if not self.architecture:
            raise ModelBroken("The file does not name its architecture; pull a complete GGUF model instead.")

    def profile(self) -> ModelProfile:
        keys, values = self._head_lengths()
        kv_heads = self._kv_heads()
        return ModelProfile(
            architecture=self.architecture,
            name=self._text("general.name") or self.architecture,
            kind=self._kind(kv_heads),
            parameters=sum(t.elements for t in self._header.tensors),
            quantisation=self._quantisation(),
            size=self._header.file_size,
            context_length=self._required("context_length"),
            layers=len(kv_heads),
            kv_heads=kv_heads,
            key_length=keys,
            value_length=values,
            kv_bytes_per_token=sum(kv_heads) * (keys + self._stored_value_length(values)) * F16_BYTES,
            vocab_size=self._vocab_size(),
            chat_template=self._text("tokenizer.chat_template") or None,
            sliding_window=self._int("attention.sliding_window") or None,
            expert_count=self._int("expert_count") or 0,
            short_rope_context=self._short_rope_context(),
        )

    def _kind(self, kv_heads: tuple[int, ...]) -> ModelKind:
        attends = any(kv_heads)
        if any(self._int(key) for key in RECURRENT_KEYS):
            return ModelKind.HYBRID if attends else ModelKind.RECURRENT
        if self._int("attention.kv_lora_rank"):
            return ModelKind.MLA
        if self._int("attention.sliding_window"):
            return ModelKind.SLIDING_WINDOW
        return ModelKind.MOE if self._int("expert_count") else ModelKind.DENSE

    def _kv_heads(self) -> tuple[int, ...]:
        layers = self._layers()
        heads = self._per_layer("attention.head_count_kv", layers) or self._query_heads(layers)
        attends_every = self._int("full_attention_interval") or 1
        # The last layers of some models read the state of earlier ones instead of keeping their own.
        own = layers - (self._int("attention.shared_kv_layers") or 0)
        return tuple(n if layer < own and (layer + 1) % attends_every == 0 else 0 for layer, n in enumerate(heads))

    def _layers(self) -> int:
        layers = self._required("block_count")
        if layers > MAX_LAYERS:
            raise ModelBroken(f"The file claims {layers} layers; pull it again.")
        return layers

    def _query_heads(self, layers: int) -> tuple[int, ...]:
        return self._per_layer("attention.head_count", layers) or (0,) * layers

    def _head_lengths(self) -> tuple[int, int]:
        heads = max(self._query_heads(self._layers()), default=0)
        shared = self._required("embedding_length") // heads if heads else 0
        keys, values = self._int("attention.key_length"), self._int("attention.value_length")
        return (shared if keys is None else keys), (shared if values is None else values)

    def _stored_value_length(self, values: int) -> int:
        # With a latent in the K cache, V is a view of it and takes no room.
        latent = self._int("attention.key_length_mla") and self._int("attention.value_length_mla")
        return 0 if latent else values

    def _short_rope_context(self) -> int | None:
        if not any("rope_factors_long" in tensor.name for tensor in self._header.tensors):
            return None
        return self._int("rope.scaling.original_context_length") or self._required("context_length")

    def _quantisation(self) -> str:
        sizes: Counter[str] = Counter()
        for tensor in self._header.tensors:
            sizes[tensor.type.name] += tensor.size
        if not sizes:
            raise ModelBroken("The file holds no weights; pull a complete GGUF model instead.")
        return sizes.most_common(1)[0][0]

    def _vocab_size(self) -> int:
        tokens = self._values.get("tokenizer.ggml.tokens")
        if isinstance(tokens, SkippedArray):
            return tokens.length
        return len(tokens) if isinstance(tokens, tuple) else self._int("vocab_size") or 0

    def _text(self, key: str) -> str:
        value = self._values.get(key)
        return value if isinstance(value, str) else ""

    def _required(self, key: str) -> int:
        value = self._int(key)
        if value is None:
            raise ModelBroken(
                f"The file has no {self.architecture}.{key}, so it is not a language model that can be run; "
                "pull the model's main GGUF file instead."
            )
        return value

    def _int(self, key: str) -> int | None:
        """The value of `<architecture>.<key>`; None where it is missing or not a whole number."""
        value = self._values.get(f"{self.architecture}.{key}")
        return value if _is_count(value) else None

    def _per_layer(self, key: str, layers: int) -> tuple[int, ...] | None:
        """One number per layer, whether the file writes one for all or a list."""
        value = self._values.get(f"{self.architecture}.{key}")
        if isinstance(value, tuple):
            counts = tuple(v for v in value if _is_count(v))
            return counts if len(counts) == layers else None
        return (value,) * layers if _is_count(value) else None


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and value >= 0
