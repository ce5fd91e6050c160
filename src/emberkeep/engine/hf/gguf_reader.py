"""transformers reads GGUF files with the `gguf` package, and slowly: half a minute for a usual vocabulary.

It makes objects of every word and number of the vocabulary, twice, which are not needed here, and maps the names
of tensors anew for every module. Both are avoided for as long as a model is being loaded.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import numpy as np
from transformers import modeling_gguf_pytorch_utils as transformers_gguf

_ARRAY, _STRING = 9, 8
_KEPT_ARRAY = 1024
_ARRAY_HEAD = struct.Struct("<IQ")
_LENGTH = struct.Struct("<Q")
_NOTHING = np.zeros(1, np.uint8)


@contextmanager
def read_quickly(rest: Sequence[Path] = ()) -> Iterator[None]:
    """Until it ends, transformers loads GGUF files quickly and without a bar on stderr. One thread at a time.

    `rest`: the other parts of a split model, of which transformers reads the first and knows nothing.
    """
    with ExitStack() as replaced:
        replaced.enter_context(patch.object(gguf, "GGUFReader", partial(_read, rest)))
        replaced.enter_context(patch.object(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)))
        replaced.enter_context(patch.object(transformers_gguf, "tqdm", _without_bar))
        yield


def _read(rest: Sequence[Path], path: str) -> _GgufReader:
    reader = _GgufReader(path)
    for part in rest:
        reader.tensors.extend(_GgufReader(part).tensors)
    return reader


class _GgufReader(gguf.GGUFReader):
    """Long arrays have their length and no content."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        if raw_type == _ARRAY:
            kind, count = _ARRAY_HEAD.unpack_from(self.data, orig_offs)
            size = self._size_of(kind)
            if count > _KEPT_ARRAY and size is not None:
                types = [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType(kind)]
                begin = orig_offs + _ARRAY_HEAD.size
                return _ARRAY_HEAD.size + size(begin, count), [_NOTHING], [0] * count, types
        return super()._get_field_parts(orig_offs, raw_type)

    def _size_of(self, kind: int) -> Callable[[int, int], int] | None:
        """Bytes of so many elements from an offset on; None for what is better left to the library."""
        if self.byte_order != "I":
            return None
        if kind == _STRING:
            return self._strings_size
        scalar = self.gguf_scalar_to_np.get(gguf.GGUFValueType(kind))
        return None if scalar is None else lambda _, count: count * np.dtype(scalar).itemsize

    def _strings_size(self, begin: int, count: int) -> int:
        data, at = memoryview(self.data), begin
        for _ in range(count):
            at += _LENGTH.size + _LENGTH.unpack_from(data, at)[0]
        return at - begin


def _without_bar(items: Iterable[Any], **_: Any) -> Iterable[Any]:
    return items
