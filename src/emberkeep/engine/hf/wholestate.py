"""The state of a sequence as the model's own cache object has it, whole, as bytes.

    0   magic "EKWS", i32 position, u32 length of the description, u32 0
    16  description: JSON, one entry for each tensor and each number in the cache
        tensors, each at a multiple of 64 bytes

A cache is walked, not known: whatever tensors and numbers its layers hold are its state. Only a cache that has the
same places in it takes them back.
"""

from __future__ import annotations

import copy
import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from emberkeep.engine.base import Payload
from emberkeep.engine.hf.payload import as_tensor
from emberkeep.errors import EngineError

_HEAD = struct.Struct("<4siII")
_MAGIC = b"EKWS"
_ALIGN = 64
_MOST_DESCRIPTION = 4 << 20
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool)}
_BROKEN = "A stored snapshot does not have the shape of this model's state."


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A tensor or a number, and where it is held."""

    path: str
    holder: Any
    key: Any

    @property
    def value(self) -> Any:
        return getattr(self.holder, self.key) if self.is_attribute else self.holder[self.key]

    def set(self, value: Any) -> None:
        if self.is_attribute:
            setattr(self.holder, self.key, value)
        else:
            self.holder[self.key] = value

    @property
    def is_attribute(self) -> bool:
        return not isinstance(self.holder, dict | list)


def write(cache: Any, position: int) -> Payload:
    """A copy of everything that `cache` holds. Raises EngineError for a tensor of a kind that is not known."""
    entries, tensors, offset = [], [], 0
    for leaf in _leaves(cache):
        if not isinstance(leaf.value, torch.Tensor):
            entries.append([leaf.path, leaf.value])
            continue
        tensor = leaf.value.detach().to("cpu").contiguous()
        if str(tensor.dtype) not in _DTYPES:
            raise EngineError(f"This model's state holds {tensor.dtype}, which cannot be stored.")
        entries.append([leaf.path, str(tensor.dtype), list(tensor.shape), offset])
        tensors.append((tensor, offset))
        offset += _padded(tensor.numel() * tensor.element_size())
    description = json.dumps(entries).encode()
    begin = _padded(_HEAD.size + len(description))
    payload = np.zeros(begin + offset, np.uint8)
    payload[: _HEAD.size] = np.frombuffer(_HEAD.pack(_MAGIC, position, len(description), 0), np.uint8)
    payload[_HEAD.size : _HEAD.size + len(description)] = np.frombuffer(description, np.uint8)
    for tensor, place in tensors:
        size = tensor.numel() * tensor.element_size()
        payload[begin + place : begin + place + size] = tensor.flatten().view(torch.uint8).numpy()
    return memoryview(payload)


def read(payload: Payload, position: int, model_cache: Any, device: torch.device) -> Any:
    """A cache like `model_cache`, with the state of `payload`, which must be of `position`. Raises EngineError."""
    entries, begin = _describe(payload, position)
    cache = copy.deepcopy(model_cache)
    leaves = {leaf.path: leaf for leaf in _leaves(cache)}
    if set(entries) != set(leaves):
        raise EngineError(_BROKEN)
    data = as_tensor(payload, torch.uint8)
    for path, leaf in leaves.items():
        leaf.set(_value(entries[path], leaf.value, data, begin, device))
    return cache


def _value(entry: list[Any], like: Any, data: torch.Tensor, begin: int, device: torch.device) -> Any:
    if not isinstance(like, torch.Tensor):
        if len(entry) != 1 or not isinstance(entry[0], bool | int | float | None):
            raise EngineError(_BROKEN)
        return entry[0]
    try:
        name, shape, offset = entry
        dtype, size = _DTYPES[name], math.prod(shape)
        start, end = begin + offset, begin + offset + size * dtype.itemsize
        if dtype != like.dtype or len(shape) != like.ndim or not begin <= start <= end <= len(data):
            raise EngineError(_BROKEN)
        return data[start:end].clone().view(dtype).view(shape).to(device)
    except (ValueError, TypeError, KeyError, RuntimeError):
        raise EngineError(_BROKEN) from None


def _describe(payload: Payload, position: int) -> tuple[dict[str, list[Any]], int]:
    """Path to what is said about it, and where the tensors begin."""
    if len(payload) < _HEAD.size:
        raise EngineError(_BROKEN)
    magic, taken_at, length, rest = _HEAD.unpack_from(payload)
    if magic != _MAGIC or rest or length > min(_MOST_DESCRIPTION, len(payload) - _HEAD.size):
        raise EngineError(_BROKEN)
    if taken_at != position or position < 1:
        raise EngineError("A stored snapshot was taken at another position than its place.")
    try:
        entries = json.loads(bytes(payload[_HEAD.size : _HEAD.size + length]))
        return {str(path): about for path, *about in entries}, _padded(_HEAD.size + length)
    except (ValueError, TypeError, RecursionError):
        raise EngineError(_BROKEN) from None


def _leaves(cache: Any) -> Iterator[_Leaf]:
    for index, layer in enumerate(cache.layers):
        yield from _inside(layer, f"{index}")


def _inside(holder: Any, path: str) -> Iterator[_Leaf]:
    items = (
        holder
        if isinstance(holder, dict)
        else dict(enumerate(holder))
        if isinstance(holder, list)
        else vars(holder)
    )
    for key in sorted(items, key=str):
        value, place = items[key], f"{path}/{key}"
        if isinstance(value, torch.Tensor | bool | int | float) or value is None:
            yield _Leaf(place, holder, key)
        elif isinstance(value, dict | list):
            yield from _inside(value, place)


def _padded(size: int) -> int:
    return size + -size % _ALIGN
