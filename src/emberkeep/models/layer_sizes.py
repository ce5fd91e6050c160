"""How large the layers of a model are, told by the headers of its files: nothing of its weights is read."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from emberkeep.engine.hf.residency import FEED_FORWARD, LayerBytes, is_rounded, rounded_bytes
from emberkeep.models.profile import CONFIG, WEIGHTS, folder_files, profile_of, read_json, read_tensor_shapes
from emberkeep.types.models import Quantization
from emberkeep.values import dataclass

_NUMBERED = re.compile(r"(?P<above>.+?)\.(?P<number>\d+)\.(?P<part>[^.]+)\.")
_WITH_FRACTION = ("F64", "F32", "F16", "BF16")
_BYTES = {"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2}
"""Bytes of numbers that stay as they are; others have one."""
_BY_NAME = {"float32": 4, "bfloat16": 2, "float16": 2}
_PACKED_ZEROS, _PER_WORD = ".qzeros", 8
"""AWQ's zero points, eight in a word, become numbers with a fraction."""
_EXPERTS = ".experts."


@dataclass(frozen=True, slots=True)
class LayerSizes:
    layers: tuple[LayerBytes, ...]
    rest: int
    """Bytes of what is no layer."""
    context: int
    """Tokens that the model was trained for."""
    kv_bytes_per_token: int

    @property
    def all(self) -> int:
        return self.rest + sum(layer.all for layer in self.layers)


def layer_sizes(folder: Path, dtype: str, rounding: Quantization = Quantization.NONE) -> LayerSizes:
    """In bytes, where numbers with a fraction become `dtype` (`auto`: the model's own), and matrices of layers are
    rounded. Raises ModelNotFound, ModelBroken."""
    width = _BY_NAME.get(_own_dtype(folder) if dtype == "auto" else dtype, 2)
    profile = profile_of(folder)
    count = profile.layers
    sizes: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])
    rest = 0
    for file in folder_files(folder, (WEIGHTS,)):
        for name, (kind, shape) in read_tensor_shapes(file).items():
            found, size = _NUMBERED.match(name), _bytes(name, kind, math.prod(shape), width)
            if found is not None and kind in _WITH_FRACTION and _is_linear(name, shape):
                outputs, inputs = shape
                size = rounded_bytes(rounding, outputs, inputs, width)
            if found is None:
                rest += size
            elif int(found["number"]) < count:  # some models have more, which only train them
                sizes[int(found["number"])][found["part"] in FEED_FORWARD] += size
    layers = tuple(LayerBytes(*sizes[number]) for number in range(count))
    return LayerSizes(layers, rest, profile.context_length, profile.kv_bytes_per_token)


def _own_dtype(folder: Path) -> str:
    config = read_json(folder / CONFIG)
    inner = config.get("text_config")
    both = (config, inner if isinstance(inner, dict) else {})
    said = (each.get(key) for each in both for key in ("dtype", "torch_dtype"))
    return next((name for name in said if isinstance(name, str)), "bfloat16")


def _is_linear(name: str, shape: Sequence[int]) -> bool:
    """Experts are put together into one tensor, which keeps its bits."""
    return len(shape) == 2 and name.endswith(".weight") and _EXPERTS not in name and is_rounded(*shape)


def _bytes(name: str, kind: str, numbers: int, width: int) -> int:
    if name.endswith(_PACKED_ZEROS):
        return numbers * _PER_WORD * width
    return numbers * (width if kind in _WITH_FRACTION else _BYTES.get(kind, 1))
