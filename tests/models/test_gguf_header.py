from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest
from gguf import GGUFReader, GGUFWriter

from emberkeep.errors import ModelBroken, ModelNotFound
from emberkeep.models import gguf
from emberkeep.models.gguf import SkippedArray, read_header
from helpers.chance import seed, times
from helpers.gguf_builders import LAYERS, VOCAB, tiny_llama, write_mutated


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path / "tiny.gguf", weights="Q4_1")


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _header(*, metadata: bytes = b"", entries: int = 0, tensors: bytes = b"", tensor_count: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensor_count, entries) + metadata + tensors + bytes(64)


def _refusal(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(ModelBroken) as refused:
        read_header(path)
    return str(refused.value)


def test_metadata_and_tensors_agree_with_the_reference_reader(model: Path) -> None:
    header, reference = read_header(model), GGUFReader(model)
    assert header.version == 3
    assert header.metadata["general.architecture"] == "llama"
    assert header.metadata["llama.block_count"] == LAYERS
    assert header.metadata["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
    assert len(header.metadata["tokenizer.ggml.tokens"]) == VOCAB
    assert [(t.name, t.type.name, t.size, header.data_offset + t.offset) for t in header.tensors] == [
        (t.name, t.tensor_type.name, t.n_bytes, t.data_offset) for t in reference.tensors
    ]


def test_long_arrays_are_skipped_and_what_follows_them_is_read(tmp_path: Path) -> None:
    path = tmp_path / "long.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_array("texts", ["word"] * 5000)
    writer.add_array("numbers", list(range(5000)))
    writer.add_array("few", [1, 2, 3])
    writer.add_string("after", "here")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.write_bytes(path.read_bytes() + bytes(32))
    metadata = read_header(path).metadata
    assert metadata["texts"] == SkippedArray(5000)
    assert metadata["numbers"] == SkippedArray(5000)
    assert metadata["few"] == (1, 2, 3)
    assert metadata["after"] == "here"


def test_a_truncated_download_says_how_much_is_missing(model: Path) -> None:
    data = model.read_bytes()
    end = read_header(model).file_size
    assert "is 100 bytes shorter than its header says" in _refusal(model, data[: end - 100])


def test_a_file_cut_anywhere_in_its_header_is_refused(model: Path) -> None:
    data = model.read_bytes()
    for length in range(0, read_header(model).data_offset, 97):
        assert _refusal(model, data[:length]).endswith(".")


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="No such file"):
        read_header(tmp_path / "none.gguf")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"PK\x03\x04" + bytes(100), "is not a GGUF file"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(64), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "GGUF version 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**40, 0), "tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**40), "metadata entries"),
        (_header(metadata=struct.pack("<Q", 2**62), entries=1), "bytes in a string"),
        (_header(metadata=_string(b"k") + struct.pack("<IQ", 8, 2**50), entries=1), "bytes in a string"),
        (_header(metadata=_string(b"k") + struct.pack("<IIQ", 9, 4, 2**60), entries=1), "array elements"),
        (_header(metadata=_string(b"k") + struct.pack("<IIQ", 9, 4, 2**25), entries=1), "larger than"),
        (_header(metadata=_string(b"k") + struct.pack("<IIQ", 9, 8, 2**25), entries=1), "ends inside"),
        (_header(metadata=_string(b"k") + struct.pack("<IIQ", 9, 9, 1), entries=1), "unknown type 9"),
        (_header(metadata=_string(b"k") + struct.pack("<I", 77), entries=1), "unknown type 77"),
        (_header(metadata=(_string(b"k") + struct.pack("<IB", 0, 1)) * 2, entries=2), "appears twice"),
        (
            _header(metadata=_string(b"general.alignment") + struct.pack("<II", 4, 0), entries=1),
            "power of two",
        ),
        (_header(tensors=_string(b"t") + struct.pack("<I", 900), tensor_count=1), "900 dimensions"),
        (_header(tensors=_string(b"t") + struct.pack("<IQIQ", 1, 32, 99, 0), tensor_count=1), "format 99"),
        (_header(tensors=_string(b"t") + struct.pack("<IQIQ", 1, 32, 0, 7), tensor_count=1), "not aligned"),
        (_header(tensors=_string(b"t") + struct.pack("<IQIQ", 1, 33, 3, 0), tensor_count=1), "not aligned"),
        (
            _header(tensors=(_string(b"t") + struct.pack("<IQIQ", 1, 1, 0, 0)) * 2, tensor_count=2),
            "the same name",
        ),
        (
            _header(tensors=_string(b"t") + struct.pack("<IQQQQIQ", 4, *[2**63] * 4, 0, 0), tensor_count=1),
            "shorter",
        ),
    ],
)
def test_a_hostile_claim_is_refused_before_it_is_believed(tmp_path: Path, content: bytes, reason: str) -> None:
    assert reason in _refusal(tmp_path / "hostile.gguf", content)


def test_a_header_made_of_endless_strings_ends_at_the_cap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "MAX_HEADER", 1 << 16)
    strings = _header(metadata=_string(b"k") + struct.pack("<IIQ", 9, 8, 1 << 15), entries=1)
    path = tmp_path / "sparse.gguf"
    assert "larger than" in _refusal(path, strings + bytes(1 << 20))


def test_flipped_bytes_give_a_header_or_a_refusal(model: Path) -> None:
    header = read_header(model)
    data = model.read_bytes()[: header.data_offset]
    chance = random.Random(seed(7))
    outcomes = {"read": 0, "refused": 0}
    for _ in range(times(500)):
        mutated = bytearray(data)
        for _ in range(chance.randint(1, 4)):
            mutated[chance.randrange(len(data))] = chance.randrange(256)
        write_mutated(model, mutated, header.file_size)
        try:
            read_header(model)
            outcomes["read"] += 1
        except ModelBroken:
            outcomes["refused"] += 1
    assert min(outcomes.values()) > times(50)
