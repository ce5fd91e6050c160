"""A GGUF model in several files: found by any of them, read as one."""

from __future__ import annotations

import itertools
import os
import shutil
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from emberkeep.errors import ModelBroken, ModelNotFound
from emberkeep.models import digest, gguf
from emberkeep.models.digest import model_digest
from emberkeep.models.gguf import read_header
from emberkeep.models.library import ModelLibrary, id_at
from emberkeep.models.parts import MAX_PARTS, PartName, part_files, part_name
from emberkeep.models.profile import profile_of
from helpers.gguf_builders import PARTS, split_llama, tiny_llama


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    return split_llama(tmp_path / "Big.Q4_0.gguf")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "digests"


def _written(path: Path, entries: Sequence[tuple[str, str, int]], tensors: int = 0) -> Path:
    """A small file with these metadata entries, each by key, type and value."""
    writer = GGUFWriter(path, "llama")
    for key, kind, value in entries:
        getattr(writer, f"add_{kind}")(key, value)
    for number in range(tensors):
        writer.add_tensor(f"t{number}", np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _part(path: Path, number: int, count: int, all_tensors: int, tensors: int = 1) -> Path:
    numbers = [("split.no", "uint16", number), ("split.count", "uint16", count)]
    return _written(path, [*numbers, ("split.tensors.count", "int32", all_tensors)], tensors)


# ── names ──


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("m-00001-of-00003.gguf", PartName("m", 1, 3)),
        ("m-00001-of-00001.gguf", PartName("m", 1, 1)),
        ("a-00001-of-00002-00002-of-00003.gguf", PartName("a-00001-of-00002", 2, 3)),
        ("a\nb [x] é-00002-of-00002.gguf", PartName("a\nb [x] é", 2, 2)),
        ("m-00000-of-00003.gguf", None),
        ("m-00004-of-00003.gguf", None),
        ("m-1-of-3.gguf", None),
        ("m-٠٠٠٠١-of-٠٠٠٠٣.gguf", None),
        ("m-00001-of-00003.GGUF", None),
        ("-00001-of-00003.gguf", None),
        ("m.gguf", None),
    ],
)
def test_a_name_says_which_part_a_file_is(name: str, part: PartName | None) -> None:
    assert part_name(name) == part
    assert part is None or str(part) == name


# ── the header ──


def test_the_parts_are_read_as_one_model(files: list[Path], tmp_path: Path) -> None:
    whole = read_header(tiny_llama(tmp_path / "whole.gguf"))
    for file in files:
        header = read_header(file)
        assert [(t.name, t.shape, t.type) for t in header.tensors] == [
            (t.name, t.shape, t.type) for t in whole.tensors
        ]
        assert header.file_size == sum(part.stat().st_size for part in files)
        assert header.parts == PARTS
        assert whole.metadata.items() <= header.metadata.items()


def test_the_first_part_may_hold_no_tensors(tmp_path: Path) -> None:
    for number, tensors in enumerate((0, 1)):
        _part(tmp_path / f"m-0000{number + 1}-of-00002.gguf", number, 2, 1, tensors)
    assert [tensor.name for tensor in read_header(tmp_path / "m-00001-of-00002.gguf").tensors] == ["t0"]


@pytest.mark.parametrize(
    ("gone", "said"), [((1,), "part 2 of 3"), ((0,), "part 1 of 3"), ((0, 2), "parts 1, 3 of 3")]
)
def test_missing_parts_are_named(
    files: list[Path], library: ModelLibrary, cache: Path, gone: tuple[int, ...], said: str
) -> None:
    for number in gone:
        files[number].unlink()
    asked = [str(file) for file in files] + [str(files[0].parent)]
    uses: list[Callable[[str], object]] = [
        library.resolve,
        lambda path: read_header(Path(path)),
        lambda path: model_digest(Path(path), cache),
    ]
    for path, use in itertools.product(asked[:-1], uses):
        with pytest.raises(
            ModelBroken, match=rf"^Big\.Q4_0 in {files[0].parent} lacks {said}: put all parts into"
        ):
            use(path)
    with pytest.raises(ModelBroken, match=said):
        library.resolve(asked[-1])


def test_a_model_without_any_of_its_parts_is_not_found(
    files: list[Path], library: ModelLibrary, cache: Path
) -> None:
    for file in files:
        file.unlink()
    with pytest.raises(ModelNotFound, match="There is no file at"):
        library.resolve(str(files[1]))
    with pytest.raises(ModelNotFound, match="No such file"):
        read_header(files[1])
    with pytest.raises(ModelNotFound, match="No such file"):
        model_digest(files[1], cache)


def test_a_part_that_is_cut_off_says_so(files: list[Path]) -> None:
    os.truncate(files[2], files[2].stat().st_size - 100)
    with pytest.raises(ModelBroken, match=rf"{files[2].name} is broken: the file is \d+ bytes shorter"):
        read_header(files[0])


def test_swapped_parts_are_noticed(files: list[Path]) -> None:
    aside = files[1].with_name("aside")
    files[1].rename(aside)
    files[2].rename(files[1])
    aside.rename(files[2])
    with pytest.raises(
        ModelBroken, match=f"{files[1].name} says inside that it is part 3 of 3: its name is wrong"
    ):
        read_header(files[0])


def test_a_part_of_a_model_with_other_tensors_is_noticed(files: list[Path], tmp_path: Path) -> None:
    _part(files[2], 2, PARTS, 19, tensors=2)
    with pytest.raises(ModelBroken, match="do not belong to one model"):
        read_header(files[0])


def test_a_tensor_that_two_parts_hold_is_noticed(tmp_path: Path) -> None:
    for number in range(2):
        _part(tmp_path / f"m-0000{number + 1}-of-00002.gguf", number, 2, 2)
    with pytest.raises(ModelBroken, match="do not belong to one model"):
        read_header(tmp_path / "m-00001-of-00002.gguf")


def test_a_part_under_another_name_says_how_it_must_be_called(files: list[Path], library: ModelLibrary) -> None:
    odd = files[0].with_name("odd.gguf")
    files[0].rename(odd)
    with pytest.raises(ModelBroken, match=r"odd\.gguf is part 1 of 3 of a split model.*NAME-00001-of-00003\.gguf"):
        profile_of(library.resolve(str(odd)).path)


# ── hostile ones ──


def test_an_absurd_number_of_parts_is_refused_before_it_is_believed(tmp_path: Path, library: ModelLibrary) -> None:
    named = _part(tmp_path / "m-00001-of-65535.gguf", 0, 65535, 1)
    for use in (lambda: read_header(named), lambda: library.resolve(str(named)), lambda: part_files(named)):
        with pytest.raises(ModelBroken, match="claims to be one of 65535 parts"):
            use()
    plain = named.rename(tmp_path / "m.gguf")
    with pytest.raises(ModelBroken, match="part 1 of 65535"):
        read_header(plain)


def test_all_headers_together_end_at_the_cap(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    together = sum(gguf._read_file(file, gguf.MAX_HEADER).data_offset for file in files)
    monkeypatch.setattr(gguf, "MAX_HEADER", together - 64)
    with pytest.raises(ModelBroken, match=f"{files[-1].name} is broken: its header is larger"):
        read_header(files[0])


@pytest.mark.parametrize("key", ["split.no", "split.count"])
@pytest.mark.parametrize("kind", ["uint8", "uint32", "int16", "uint64", "bool"])
def test_numbers_of_parts_have_the_type_that_llama_cpp_insists_on(tmp_path: Path, key: str, kind: str) -> None:
    path = _written(tmp_path / "m.gguf", [(key, kind, 1)])
    with pytest.raises(ModelBroken, match=f"its {key} is not of the type u16"):
        read_header(path)


def test_the_number_of_parts_is_no_list(tmp_path: Path) -> None:
    entry = struct.pack("<Q", 11) + b"split.count" + struct.pack("<IIQHH", 9, 2, 2, 3, 3)
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry + bytes(64))
    with pytest.raises(ModelBroken, match=r"split\.count is not of the type u16"):
        read_header(path)


def test_what_is_no_file_is_no_part(files: list[Path]) -> None:
    files[1].unlink()
    os.mkfifo(files[1])
    with pytest.raises(ModelBroken, match="lacks part 2 of 3"):
        read_header(files[0])
    files[1].unlink()
    files[1].symlink_to(files[1])
    with pytest.raises(ModelBroken, match="lacks part 2 of 3"):
        read_header(files[0])


def test_only_some_of_many_missing_parts_are_named(tmp_path: Path) -> None:
    first = tmp_path / f"m-00001-of-{MAX_PARTS:05}.gguf"
    first.touch()
    with pytest.raises(ModelBroken) as lacking:
        part_files(first)
    assert "lacks parts 2, 3, 4, 5, 6, 7, 8, 9 and 1015 more of 1024" in str(lacking.value)


# ── paths ──


def test_any_part_and_the_folder_lead_to_the_first_part(files: list[Path], library: ModelLibrary) -> None:
    for path in [*files, files[0].parent]:
        found = library.resolve(str(path))
        assert (found.id, found.path) == ("big.q4_0", files[0])
        assert id_at(path) == "big.q4_0"


def test_a_folder_with_one_file_is_that_model(tmp_path: Path, library: ModelLibrary) -> None:
    path = tiny_llama(tmp_path / "only.gguf")
    (tmp_path / "mmproj-F16.gguf").touch()
    assert library.resolve(str(tmp_path)).path == path


def test_a_folder_with_several_models_lists_them(files: list[Path], library: ModelLibrary) -> None:
    tiny_llama(files[0].with_name("other.gguf"))
    with pytest.raises(
        ModelNotFound, match=r"several models \(Big.*-00001-of-00003\.gguf, other\.gguf\): give the path"
    ):
        library.resolve(str(files[0].parent))


def test_two_models_with_one_name_and_other_numbers_of_parts_do_not_mix(tmp_path: Path) -> None:
    three = split_llama(tmp_path / "m.gguf")
    two = tiny_llama(tmp_path / "m.gguf", tensors_per_part=10)
    assert part_files(two) == (two, two.with_name("m-00002-of-00002.gguf"))
    assert part_files(three[2]) == tuple(three)


def test_links_as_in_the_cache_of_the_hub_are_followed(
    files: list[Path], library: ModelLibrary, tmp_path: Path, cache: Path
) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    before = model_digest(files[0], cache)
    for number, file in enumerate(files):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(f"../blobs/{number}")
    found = library.resolve(str(snapshot / files[1].name))
    assert found.path == snapshot / files[0].name
    assert read_header(found.path).parts == PARTS
    assert model_digest(found.path, cache) == before


def test_links_that_lead_in_circles_lead_nowhere(tmp_path: Path, library: ModelLibrary) -> None:
    (tmp_path / "a.gguf").symlink_to("b.gguf")
    (tmp_path / "b.gguf").symlink_to("a.gguf")
    with pytest.raises(ModelNotFound):
        library.resolve(str(tmp_path / "a.gguf"))


# ── the digest ──


def _reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    original = digest.sha256_of
    monkeypatch.setattr(digest, "sha256_of", lambda path, *rest: seen.append(path.name) or original(path, *rest))
    return seen


def test_every_part_leads_to_the_same_digest_and_is_read_once(
    files: list[Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = _reads(monkeypatch)
    assert len({model_digest(file, cache) for file in files}) == 1
    assert reads == [file.name for file in files]


@pytest.mark.parametrize("number", range(PARTS))
def test_a_changed_part_is_another_digest_and_only_it_is_read_again(
    files: list[Path], cache: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    before = model_digest(files[0], cache)
    data = bytearray(files[number].read_bytes())
    data[-1] ^= 1
    files[number].write_bytes(data)
    reads = _reads(monkeypatch)
    assert model_digest(files[0], cache) != before
    assert reads == [files[number].name]


def test_a_part_of_another_model_is_another_digest(files: list[Path], cache: Path, tmp_path: Path) -> None:
    mine = model_digest(files[0], cache)
    (tmp_path / "other").mkdir()
    others = split_llama(tmp_path / "other" / files[0].name.replace("-00001-of-00003", ""), seed=1)
    theirs = model_digest(others[0], cache)
    seen = {mine, theirs}
    for number in range(PARTS):
        mixed = tmp_path / f"mixed-{number}"
        mixed.mkdir()
        for at, (own, foreign) in enumerate(zip(files, others, strict=True)):
            shutil.copy(foreign if at == number else own, mixed / own.name)
        read_header(mixed / files[0].name)  # nothing in their headers tells them apart
        seen.add(model_digest(mixed / files[0].name, cache))
    assert len(seen) == 2 + PARTS


def test_the_name_of_the_parts_is_no_part_of_the_digest(files: list[Path], cache: Path, tmp_path: Path) -> None:
    before = model_digest(files[0], cache)
    (tmp_path / "moved").mkdir()
    for number, file in enumerate(files, 1):
        file.rename(tmp_path / "moved" / str(PartName("other", number, PARTS)))
    assert model_digest(tmp_path / "moved" / str(PartName("other", 1, PARTS)), cache) == before
