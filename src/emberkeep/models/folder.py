"""A model as a folder: config.json, safetensors, a tokenizer. Read without torch, and without trusting it.

A safetensors file begins with the length of its header and the header: JSON with type and shape of every tensor.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from emberkeep.errors import ModelBroken, ModelNotFound
from emberkeep.models.gguf import read_header
from emberkeep.models.profile import F16_BYTES, MAX_LAYERS, ModelKind, ModelProfile, profile
from emberkeep.types import Json

CONFIG = "config.json"
WEIGHTS = "*.safetensors"
SHAPING = (WEIGHTS, "*.safetensors.index.json", CONFIG, "tokenizer*.json", "tokenizer.model")
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
)
"""What a model needs besides its weights. No scripts, no pickles."""

_MAX_JSON = 64 << 20
_MAX_HEADER = 100 << 20
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_RECURRENT = frozenset({"linear_attention", "mamba", "recurrent", "conv"})


def is_model_folder(path: Path) -> bool:
    """Whether it holds a model that can be loaded without running code."""
    return (path / CONFIG).is_file() and any(path.glob(WEIGHTS))


def profile_of(path: Path) -> ModelProfile:
    """What the model at `path` is, a folder or a GGUF file. Blocks. Raises ModelNotFound, ModelBroken."""
    return _folder_profile(path) if path.is_dir() else profile(read_header(path))


def folder_files(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """Those that match, by name."""
    found = {file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}
    return sorted(found, key=lambda file: file.name)


def _folder_profile(folder: Path) -> ModelProfile:
    whole = _read_json(folder / CONFIG)
    inner = whole.get("text_config")
    config = {**whole, **inner} if isinstance(inner, dict) else whole
    layers = _count(config, "num_hidden_layers", "n_layer")
    if layers > MAX_LAYERS:
        raise ModelBroken(f"{folder.name} claims {layers} layers; pull it again.")
    heads = _count(config, "num_attention_heads", "n_head")
    kv_heads = _count(config, "num_key_value_heads") or heads
    width = _count(config, "head_dim") or _count(config, "hidden_size", "n_embd") // max(heads, 1)
    weights = folder_files(folder, (WEIGHTS,))
    sizes = [_tensors(file) for file in weights]
    return ModelProfile(
        architecture=str(config.get("model_type", "unknown")),
        name=folder.name,
        kind=_kind(config),
        parameters=sum(sum(counts.values()) for counts in sizes),
        quantisation=sum(sizes, Counter()).most_common(1)[0][0],
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
    try:
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except (OSError, ValueError):
        pass
    path = folder / "tokenizer_config.json"
    template = _read_json(path).get("chat_template") if path.is_file() else None
    return template if isinstance(template, str) else None


def _tensors(file: Path) -> Counter[str]:
    """How many numbers of each type a safetensors file holds."""
    try:
        with file.open("rb") as opened:
            header = _header(opened)
        counts: Counter[str] = Counter()
        for name, tensor in header.items():
            if name != "__metadata__":
                counts[str(tensor["dtype"])] += math.prod(map(int, tensor["shape"]))
    except OSError as error:
        raise ModelNotFound(f"Cannot read {file}: {error.strerror}.") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelBroken(f"{file.name} is not a complete safetensors file; pull the model again.") from error
    if not counts:
        raise ModelBroken(f"{file.name} holds no weights; pull the model again.")
    return counts


def _header(file: BinaryIO) -> Json:
    """Raises ValueError for what cannot be one."""
    length = int.from_bytes(file.read(8), "little")
    data = file.read(length) if length <= _MAX_HEADER else b""
    if len(data) < length or not data:
        raise ValueError("the header is cut off")
    return json.loads(data)


def _read_json(path: Path) -> dict[str, Json]:
    try:
        if path.stat().st_size > _MAX_JSON:
            raise ValueError("it is too large")
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelNotFound(f"Cannot read {path}: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ModelBroken(f"{path} is not valid JSON ({error}); pull the model again.") from error
    if not isinstance(content, dict):
        raise ModelBroken(f"{path} does not hold one JSON object; pull the model again.")
    return content


def _count(config: Mapping[str, Json], *names: str) -> int:
    """The first of these that is a whole number; 0 where none is."""
    values = (config.get(name) for name in names)
    return next((value for value in values if type(value) is int and value > 0), 0)
