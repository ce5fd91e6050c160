"""Reads the header of a GGUF file: metadata and the list of tensors, never the weights.

    magic  version  tensor count  metadata count
    metadata:  key, value type, value              (x metadata count)
    tensors:   name, dims, weight format, offset   (x tensor count)
    padding to the alignment
    tensor data

A split model has its metadata in the first file, and in every file tensors; `read_header` puts them together.

Files come from strangers, so every count and length is checked before it is used: time and memory are
bounded by `MAX_HEADER`, whatever the files of a model say.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from emberkeep.errors import ModelBroken, ModelNotFound
from emberkeep.files import FileVersion
from emberkeep.models.parts import name_parts, part_files
from emberkeep.values import dataclass

MAX_HEADER = 64 << 20
MAX_METADATA = 1 << 16
MAX_TENSORS = 1 << 16
MAX_KEY = 1 << 16
MAX_STRING = 4 << 20
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20
SPLIT_NO, SPLIT_COUNT, SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"
KEPT_ARRAY = 1024
"""Longer arrays (vocabulary, merges) are skipped: only their length is kept."""
CHARSMAP = "tokenizer.ggml.precompiled_charsmap"
"""The one array of bytes that is kept, however long it is."""


@dataclass(frozen=True, slots=True)
class SkippedArray:
    length: int


Scalar = int | float | bool | str
Value = Scalar | bytes | tuple[Scalar, ...] | SkippedArray


@dataclass(frozen=True, slots=True)
class TensorInfo:
    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int
    """Where its bytes begin, counted from the `data_offset` of its own file."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        return self.elements // self.type.block * self.type.block_bytes


@dataclass(frozen=True, slots=True)
class GgufHeader:
    version: int
    metadata: Mapping[str, Value]
    tensors: tuple[TensorInfo, ...]
    """A split model has those of all its parts."""
    data_offset: int
    """Where the weights begin; in the first part of a split model."""
    file_size: int
    """The fewest bytes that files with this header have."""

    @property
    def parts(self) -> int:
        """How many files the model has, as its metadata says."""
        return self._number(SPLIT_COUNT) or 1

    @property
    def part(self) -> int:
        """Which of them this is, from 1 on."""
        return (self._number(SPLIT_NO) or 0) + 1

    def _number(self, key: str) -> int | None:
        value = self.metadata.get(key)
        return value if type(value) is int else None


def read_header(path: Path) -> GgufHeader:
    """The header of the model at `path`, or of the one it is a part of; its tensors all lie inside its files.

    Blocks for one pass over the header. Raises ModelNotFound when a file cannot be read and ModelBroken
    when they are not one complete GGUF model.
    """
    files = part_files(path)
    try:
        return _read_header(tuple(files), tuple(FileVersion.of(file) for file in files))
    except OSError as error:
        raise ModelNotFound(f"Cannot read {path}: {error.strerror}.") from error


@lru_cache(maxsize=4)
def _read_header(files: Sequence[Path], _versions: Sequence[FileVersion]) -> GgufHeader:
    """The header of files of these versions. A model that is opened asks several times."""
    headers: list[GgufHeader] = []
    for number, file in enumerate(files, 1):
        header = _read_file(file, MAX_HEADER - sum(before.data_offset for before in headers))
        _require_part(header, file.name, number, len(files))
        headers.append(header)
    return headers[0] if len(headers) == 1 else _join(headers, files)


def _read_file(path: Path, most: int) -> GgufHeader:
    """The header of one file, which has at most so many bytes."""
    try:
        with path.open("rb") as file:
            header = _HeaderReader(file, path.name, most).header()
            missing = header.file_size - os.fstat(file.fileno()).st_size
    except OSError as error:
        raise ModelNotFound(f"Cannot read {path}: {error.strerror}.") from error
    if missing > 0:
        raise ModelBroken(
            f"{path.name} is broken: the file is {missing} bytes shorter than its header says; pull it again."
        )
    return header


def _require_part(header: GgufHeader, name: str, number: int, count: int) -> None:
    if (header.part, header.parts) == (number, count) or (header.parts == count == 1):
        return
    if count == 1:
        raise ModelBroken(
            f"{name} is {name_parts([header.part], header.parts)} of a split model, which are found by their "
            f"names: name them NAME-00001-of-{header.parts:05}.gguf and so on."
        )
    raise ModelBroken(
        f"{name} says inside that it is {name_parts([header.part], header.parts)}: "
        "its name is wrong or it belongs to another model; pull the model again."
    )


def _join(headers: Sequence[GgufHeader], files: Sequence[Path]) -> GgufHeader:
    first, name = headers[0], files[0].name
    tensors = tuple(tensor for header in headers for tensor in header.tensors)
    if first.metadata.get(SPLIT_TENSORS) != len(tensors) or len({t.name for t in tensors}) != len(tensors):
        raise ModelBroken(f"The parts of {name} do not belong to one model; pull the model again.")
    return replace(first, tensors=tensors, file_size=sum(header.file_size for header in headers))


_STRING, _ARRAY = 8, 9
_BYTE_KINDS = (0, 1)
_SCALARS = {
    number: (name, struct.Struct(f"<{code}"))
    for number, name, code in (
        (0, "u8", "B"),
        (1, "i8", "b"),
        (2, "u16", "H"),
        (3, "i16", "h"),
        (4, "u32", "I"),
        (5, "i32", "i"),
        (6, "f32", "f"),
        (7, "bool", "?"),
        (10, "u64", "Q"),
        (11, "i64", "q"),
        (12, "f64", "d"),
    )
}
_READ_AT_ONCE = 1 << 20
_KINDS = {SPLIT_NO: 2, SPLIT_COUNT: 2, "adapter.lora.alpha": 6}
"""llama.cpp ends the process when another part than the first, or an adapter, has them as another type."""
_U32 = _SCALARS[4][1]
_U64 = _SCALARS[10][1]


class _HeaderReader:
    """A cursor over the header that knows how much it has consumed."""

    def __init__(self, file: BinaryIO, name: str, most: int) -> None:
        self._file = file
        self._name = name
        self._most = most
        self._position = 0

    def header(self) -> GgufHeader:
        version = self._version()
        tensor_count = self._count(MAX_TENSORS, "tensors")
        metadata = self._metadata(self._count(MAX_METADATA, "metadata entries"))
        alignment = self._alignment(metadata)
        tensors = tuple(self._tensor(alignment) for _ in range(tensor_count))
        if len({t.name for t in tensors}) != tensor_count:
            raise self._broken("two tensors have the same name")
        data_offset = -(-self._position // alignment) * alignment
        end = max((tensor.offset + tensor.size for tensor in tensors), default=0)
        return GgufHeader(version, metadata, tensors, data_offset, data_offset + end)

    def _version(self) -> int:
        if self._take(4) != b"GGUF":
            raise ModelBroken(
                f"{self._name} is not a GGUF file; give one, or a folder with config.json and safetensors."
            )
        version = self._u32()
        if version in (2, 3):
            return version
        if int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3):
            raise ModelBroken(
                f"{self._name} is a big-endian GGUF file; get the little-endian file of the same model."
            )
        raise ModelBroken(
            f"{self._name} has GGUF version {version} and versions 2 and 3 are known; get a newer file."
        )

    def _metadata(self, count: int) -> dict[str, Value]:
        metadata: dict[str, Value] = {}
        for _ in range(count):
            key = self._string(MAX_KEY)
            if key in metadata:
                raise self._broken(f"the metadata key {key[:64]!r} appears twice")
            kind = self._kind(key)
            metadata[key] = self._bytes() if (key, kind) == (CHARSMAP, _ARRAY) else self._value(kind)
        return metadata

    def _kind(self, key: str) -> int:
        kind = self._u32()
        wanted = _KINDS.get(key, kind)
        if kind != wanted:
            raise self._broken(f"its {key} is not of the type {_SCALARS[wanted][0]}")
        return kind

    def _value(self, kind: int) -> Value:
        return self._array() if kind == _ARRAY else self._scalar(kind)

    def _scalar(self, kind: int) -> Scalar:
        if kind == _STRING:
            return self._string(MAX_STRING)
        scalar: Scalar
        (scalar,) = self._layout(kind).unpack(self._take(self._layout(kind).size))
        return scalar

    def _array(self) -> Value:
        # An array of arrays fails in `_layout`, as it does in llama.cpp: no file has them.
        kind = self._u32()
        length = self._count(MAX_HEADER, "array elements")
        if length <= KEPT_ARRAY:
            return tuple(self._scalar(kind) for _ in range(length))
        if kind != _STRING:
            self._skip(length * self._layout(kind).size)
            return SkippedArray(length)
        self._skip_strings(length)
        return SkippedArray(length)

    def _bytes(self) -> bytes:
        kind = self._u32()
        if kind not in _BYTE_KINDS:
            raise self._broken(f"its {CHARSMAP} does not consist of bytes")
        return self._take(self._count(MAX_HEADER, "array elements"))

    def _skip_strings(self, count: int) -> None:
        # Vocabularies have hundreds of thousands of entries: this loop is most of the time of a read.
        read, seek, unpack_from = self._file.read, self._file.seek, _U64.unpack_from
        begin = start = self._file.tell()
        most = begin + self._most - self._position
        buffer, at = b"", 0
        for _ in range(count):
            if at + 8 > len(buffer):
                start += at
                seek(start)
                buffer, at = read(_READ_AT_ONCE), 0
                if len(buffer) < 8:
                    raise self._ended()
            at += 8 + unpack_from(buffer, at)[0]
            if start + at > most:
                break
        self._consume(start + at - begin)
        seek(start + at)

    def _tensor(self, alignment: int) -> TensorInfo:
        name = self._string(MAX_KEY)
        dimensions = self._u32()
        if dimensions > MAX_DIMENSIONS:
            raise self._broken(f"the tensor {name[:64]!r} has {dimensions} dimensions")
        shape = tuple(self._u64() for _ in range(dimensions))
        number, offset = self._u32(), self._u64()
        if number not in TENSOR_TYPES:
            raise self._broken(f"the tensor {name[:64]!r} has the unknown weight format {number}")
        tensor = TensorInfo(name, shape, TENSOR_TYPES[number], offset)
        if offset % alignment or (shape[0] if shape else 1) % tensor.type.block:
            raise self._broken(f"the tensor {name[:64]!r} is not aligned")
        return tensor

    def _alignment(self, metadata: Mapping[str, Value]) -> int:
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is int and 0 < alignment <= MAX_ALIGNMENT and alignment.bit_count() == 1:
            return alignment
        raise self._broken("its alignment is not a power of two")

    def _layout(self, kind: int) -> struct.Struct:
        if kind not in _SCALARS:
            raise self._broken(f"it has a metadata value of the unknown type {kind}")
        return _SCALARS[kind][1]

    def _count(self, most: int, what: str) -> int:
        count = self._u64()
        if count > most:
            raise self._broken(f"it claims {count} {what}")
        return count

    def _string(self, most: int) -> str:
        return self._take(self._count(most, "bytes in a string")).decode("utf-8", "replace")

    def _u32(self) -> int:
        value: int
        (value,) = _U32.unpack(self._take(4))
        return value

    def _u64(self) -> int:
        value: int
        (value,) = _U64.unpack(self._take(8))
        return value

    def _take(self, count: int) -> bytes:
        self._consume(count)
        data = self._file.read(count)
        if len(data) < count:
            raise self._ended()
        return data

    def _skip(self, count: int) -> None:
        """Go past `count` bytes; if the file ends before them, the next `_take` or the size check says so."""
        self._consume(count)
        self._file.seek(count, os.SEEK_CUR)

    def _consume(self, count: int) -> None:
        self._position += count
        if self._position > self._most:
            raise self._broken(f"its header is larger than {MAX_HEADER >> 20} MiB")

    def _ended(self) -> ModelBroken:
        return self._broken("the file ends inside its header")

    def _broken(self, what: str) -> ModelBroken:
        return ModelBroken(f"{self._name} is broken: {what}; pull it again.")


# ── weight formats, and how many bytes each takes ──


@dataclass(frozen=True, slots=True)
class TensorType:
    name: str
    block: int
    """Weights per block; a tensor's rows are whole blocks."""
    block_bytes: int


TENSOR_TYPES: dict[int, TensorType] = {
    number: TensorType(name, block, size)
    for number, name, block, size in (
        (0, "F32", 1, 4),
        (1, "F16", 1, 2),
        (2, "Q4_0", 32, 18),
        (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34),
        (9, "Q8_1", 32, 36),
        (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (15, "Q8_K", 256, 292),
        (16, "IQ2_XXS", 256, 66),
        (17, "IQ2_XS", 256, 74),
        (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18),
        (21, "IQ3_S", 256, 110),
        (22, "IQ2_S", 256, 82),
        (23, "IQ4_XS", 256, 136),
        (24, "I8", 1, 1),
        (25, "I16", 1, 2),
        (26, "I32", 1, 4),
        (27, "I64", 1, 8),
        (28, "F64", 1, 8),
        (29, "IQ1_M", 256, 56),
        (30, "BF16", 1, 2),
        (34, "TQ1_0", 256, 54),
        (35, "TQ2_0", 256, 66),
        (39, "MXFP4", 32, 17),
        (40, "NVFP4", 64, 36),
        (41, "Q1_0", 128, 18),
        (42, "Q2_0", 64, 18),
    )
}
