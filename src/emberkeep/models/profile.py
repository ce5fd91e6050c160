"""What a model is, read from its metadata alone: nothing here knows a model family by name.

A model is a GGUF file, or a folder with config.json, safetensors and a tokenizer. Both are read without torch, and
without trusting them. A safetensors file begins with the length of its header and the header: JSON with type and
shape of every tensor.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO, TypeGuard

from emberkeep.errors import ModelBroken, ModelNotFound
from emberkeep.models.gguf import GgufHeader, SkippedArray, read_header
from emberkeep.types.request import Json, Pooling
from emberkeep.values import dataclass

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
    """The weight format of most bytes (GGUF) or numbers (folder)."""
    size: int
    """Bytes: GGUF by its headers, a folder by its files."""
    context_length: int
    layers: int
    kv_heads: tuple[int, ...]
    """Per layer; in GGUF 0 where a layer keeps no attention state."""
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


# ── folders ──
CONFIG = "config.json"
MODULE_LIST = "modules.json"
LENGTHS = "sentence_bert_config.json"
WEIGHTS = "*.safetensors"
MODULES = (MODULE_LIST, "[0-9]_*/config.json", "[0-9]_*/model.safetensors")
"""Files in which sentence-transformers says what becomes of the states of tokens."""
SHAPING_FILES = (WEIGHTS, "*.safetensors.index.json", CONFIG, "tokenizer*.json", "tokenizer.model", *MODULES)
"""The files that shape what a model computes."""
BESIDE_WEIGHTS = (
    "*.safetensors.index.json",
    CONFIG,
    "generation_config.json",
    "tokenizer*.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "*.jinja",
    LENGTHS,
    *MODULES,
)
"""What a model needs besides its weights. No scripts, no pickles."""
_MAX_JSON = 64 << 20
_MAX_HEADER = 100 << 20
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_RECURRENT = frozenset({"linear_attention", "mamba", "recurrent", "conv"})


def is_model_folder(path: Path) -> bool:
    """Whether it holds a model that can be loaded without running code."""
    return (path / CONFIG).is_file() and bool(folder_files(path, (WEIGHTS,)))


def profile_of(path: Path) -> ModelProfile:
    """What the model at `path` is, a folder or a GGUF file. Blocks. Raises ModelNotFound, ModelBroken."""
    return _folder_profile(path) if path.is_dir() else profile(read_header(path))


def folder_files(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """Matching files, sorted by path in the folder."""
    found = {file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}
    return sorted(found, key=lambda file: file.relative_to(folder).as_posix())


def _folder_profile(folder: Path) -> ModelProfile:
    whole = read_json(folder / CONFIG)
    inner = whole.get("text_config")
    config = {**whole, **inner} if isinstance(inner, dict) else whole
    layers = _count(config, "num_hidden_layers", "n_layer")
    if layers > MAX_LAYERS:
        raise ModelBroken(f"{folder.name} claims {layers} layers; pull it again.")
    heads = _count(config, "num_attention_heads", "n_head")
    kv_heads = _count(config, "num_key_value_heads") or heads
    width = _count(config, "head_dim") or _count(config, "hidden_size", "n_embd") // max(heads, 1)
    weights = folder_files(folder, (WEIGHTS,))
    counts: Counter[str] = sum(map(_numbers_by_type, weights), Counter())
    if not counts:
        raise ModelBroken(f"{folder.name} holds no weights; pull the model again.")
    return ModelProfile(
        architecture=str(config.get("model_type", "unknown")),
        name=folder.name,
        kind=_kind(config),
        parameters=counts.total(),
        quantisation=counts.most_common(1)[0][0],
        size=sum(file.stat().st_size for file in weights),
        context_length=_count(config, "max_position_embeddings", "n_positions"),
        layers=layers,
        kv_heads=(kv_heads,) * layers,
        key_length=width,
        value_length=width,
        kv_bytes_per_token=2 * layers * kv_heads * width * F16_BYTES,
        vocab_size=_count(config, "vocab_size"),
        chat_template=_chat_template(folder),
        sliding_window=_sliding_window(config),
        expert_count=_count(config, *_EXPERTS),
        short_rope_context=None,
    )


def _kind(config: Mapping[str, Json]) -> ModelKind:
    if _RECURRENT & set(config.get("layer_types") or ()):
        return ModelKind.HYBRID
    if _count(config, "kv_lora_rank"):
        return ModelKind.MLA
    if _sliding_window(config):
        return ModelKind.SLIDING_WINDOW
    return ModelKind.MOE if _count(config, *_EXPERTS) else ModelKind.DENSE


def _sliding_window(config: Mapping[str, Json]) -> int | None:
    # Some files give the size of a window that no layer has.
    kinds = config.get("layer_types")
    has_one = config.get("use_sliding_window", True) and (kinds is None or "sliding_attention" in kinds)
    return (_count(config, "sliding_window") or None) if has_one else None


def _chat_template(folder: Path) -> str | None:
    with suppress(OSError, ValueError):
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    path = folder / "tokenizer_config.json"
    template = read_json(path).get("chat_template") if path.is_file() else None
    return template if isinstance(template, str) else None


def _numbers_by_type(file: Path) -> Counter[str]:
    """How many numbers of each type a safetensors file holds."""
    counts: Counter[str] = Counter()
    for kind, shape in read_tensor_shapes(file).values():
        counts[kind] += math.prod(shape)
    return counts


def read_tensor_shapes(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The type and the shape of each tensor in a safetensors file. Raises ModelNotFound, ModelBroken."""
    try:
        with file.open("rb") as opened:
            header = _header(opened)
        shapes = {
            str(name): (str(tensor["dtype"]), tuple(map(int, tensor["shape"])))
            for name, tensor in header.items()
            if name != "__metadata__"
        }
    except OSError as error:
        raise ModelNotFound(f"Cannot read {file}: {error.strerror}.") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelBroken(f"{file.name} is not a complete safetensors file; pull the model again.") from error
    if not shapes:
        raise ModelBroken(f"{file.name} holds no weights; pull the model again.")
    return shapes


def _header(file: BinaryIO) -> Json:
    """Raises ValueError if there is none."""
    length = int.from_bytes(file.read(8), "little")
    data = file.read(length) if length <= _MAX_HEADER else b""
    if len(data) < length or not data:
        raise ValueError("the header is cut off")
    return json.loads(data)


def read_json(path: Path) -> dict[str, Json]:
    """Raises ModelNotFound, ModelBroken."""
    content = _parse_json(path)
    if not isinstance(content, dict):
        raise ModelBroken(f"{path} does not hold one JSON object; pull the model again.")
    return content


def _parse_json(path: Path) -> Json:
    try:
        if path.stat().st_size > _MAX_JSON:
            raise ValueError("it is too large")
        return json.loads(path.read_bytes())
    except OSError as error:
        raise ModelNotFound(f"Cannot read {path}: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ModelBroken(f"{path} is not valid JSON ({error}); pull the model again.") from error


def _count(config: Mapping[str, Json], *names: str) -> int:
    """The first of these that is a whole number; 0 where none is."""
    values = (config.get(name) for name in names)
    return next((value for value in values if type(value) is int and value > 0), 0)


# ── how a model embeds or ranks instead of writing ──

_GGUF_POOLING = {1: Pooling.MEAN, 2: Pooling.CLS, 3: Pooling.LAST, 4: Pooling.RANK}
_MODES = {
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_cls_token": Pooling.CLS,
    "pooling_mode_lasttoken": Pooling.LAST,
}
_PLAIN = ("Model", "ForMaskedLM")
"""Names of architectures without a writing head end so."""
_RANKS = "ForSequenceClassification"


@dataclass(frozen=True, slots=True)
class EmbeddingProfile:
    pooling: Pooling
    context: int | None = None
    """Longest input, where the files name one that is shorter than the model's positions."""
    dense: tuple[Path, ...] = ()
    """Folders of layers that follow the pooling."""


def embedding_profile(model: Path) -> EmbeddingProfile | None:
    """How it embeds or ranks; None if it writes. Blocks. Raises ModelNotFound, ModelBroken."""
    return embedding_folder(model) if model.is_dir() else embedding_gguf(read_header(model))


def embedding_gguf(header: GgufHeader) -> EmbeddingProfile | None:
    """How it embeds or ranks; None if it writes."""
    architecture = str(header.metadata.get("general.architecture"))
    pooling = header.metadata.get(f"{architecture}.pooling_type")
    if isinstance(pooling, int) and pooling in _GGUF_POOLING:
        return EmbeddingProfile(_GGUF_POOLING[pooling])
    looks_ahead = header.metadata.get(f"{architecture}.attention.causal") is False
    return EmbeddingProfile(Pooling.MEAN) if looks_ahead else None


def embedding_folder(folder: Path) -> EmbeddingProfile | None:
    """How it embeds or ranks; None if it writes. Raises ModelNotFound, ModelBroken."""
    config = read_json(folder / CONFIG)
    if (folder / MODULE_LIST).is_file():
        pooling, dense = _embedding_modules(folder)
        return EmbeddingProfile(pooling, _max_length(folder), dense)
    architectures = [str(name) for name in config.get("architectures") or ()]
    if any(name.endswith(_RANKS) for name in architectures):
        return EmbeddingProfile(Pooling.RANK)
    if architectures and all(name.endswith(_PLAIN) for name in architectures):
        return EmbeddingProfile(Pooling.MEAN, _max_length(folder))
    return None


def _embedding_modules(folder: Path) -> tuple[Pooling, tuple[Path, ...]]:
    """What sentence-transformers does with the states of the tokens."""
    listed = _parse_json(folder / MODULE_LIST)
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise ModelBroken(f"{folder / MODULE_LIST} does not hold a list of JSON objects; pull the model again.")
    kinds = [(str(each.get("type")).rpartition(".")[2], str(each.get("path", ""))) for each in listed]
    unknown = [kind for kind, _ in kinds if kind not in ("Transformer", "Pooling", "Dense", "Normalize")]
    poolings = [_pooling(_subfolder(folder, path)) for kind, path in kinds if kind == "Pooling"]
    if unknown or len(poolings) != 1:
        what = unknown[0] if unknown else f"{len(poolings)} poolings"
        raise ModelBroken(f"{folder.name} has {what}, which is not known here: choose another embedding model.")
    return poolings[0], tuple(_subfolder(folder, path) for kind, path in kinds if kind == "Dense")


def _subfolder(folder: Path, name: str) -> Path:
    """Raises ModelBroken for a name that leads out of the folder."""
    if not name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise ModelBroken(f"{folder.name}/{MODULE_LIST} names {name!r}, which is not in it: pull the model again.")
    return folder / name


def _pooling(folder: Path) -> Pooling:
    config = read_json(folder / CONFIG)
    modes = [mode for mode, is_on in config.items() if mode.startswith("pooling_mode_") and is_on is True]
    if len(modes) != 1 or modes[0] not in _MODES:
        named = ", ".join(modes) or "no way of pooling"
        raise ModelBroken(
            f"{folder.parent.name} has {named}, and mean, cls and last are known: choose another model."
        )
    return _MODES[modes[0]]


def _max_length(folder: Path) -> int | None:
    path = folder / LENGTHS
    return (_count(read_json(path), "max_seq_length") or None) if path.is_file() else None
