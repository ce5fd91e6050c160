from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from emberkeep.errors import ModelBroken, ModelError, ModelNotFound
from emberkeep.models import digest
from emberkeep.models.digest import weights_digest
from emberkeep.models.library import InstalledModel, ModelLibrary, ModelRecord, check_id, id_from, is_model_id
from emberkeep.models.parts import part_files
from emberkeep.models.spec import parse
from helpers.gguf_builders import split_llama, tiny_llama

RECORD = ModelRecord(source="here", sha256="ab" * 32, size=1, quantisation="F32", pulled_at=1_700_000_000)


def _install(library: ModelLibrary, id: str, record: ModelRecord = RECORD) -> InstalledModel:
    return library.install(id, tiny_llama(library.workspace(id) / "w.gguf"), record)


def _model_in(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return tiny_llama(folder / "w.gguf")


def test_an_empty_library_lists_nothing(library: ModelLibrary) -> None:
    assert list(library.list()) == []


def test_an_installed_model_is_listed_and_found(library: ModelLibrary) -> None:
    second, first = _install(library, "b-model"), _install(library, "a-model")
    assert list(library.list()) == [first, second]
    assert library.get("a-model") == first
    assert library.resolve("a-model") == first
    assert first.path.read_bytes()[:4] == b"GGUF"


def test_installing_again_replaces_the_model(library: ModelLibrary) -> None:
    _install(library, "m")
    newer = ModelRecord(source="there", sha256="cd" * 32, size=2, quantisation="F32", pulled_at=1_800_000_000)
    _install(library, "m", newer)
    assert library.get("m").record == newer
    assert len(library.list()) == 1


def test_only_the_owner_can_read_models(library: ModelLibrary, tmp_path: Path) -> None:
    path = _install(library, "m").path
    modes = [p.stat().st_mode & 0o777 for p in (path, path.with_name("model.json"), path.parent)]
    assert modes == [0o600, 0o600, 0o700]
    assert (tmp_path / "data" / "models").stat().st_mode & 0o777 == 0o700


def test_the_mode_of_a_linked_file_is_left_alone(library: ModelLibrary, tmp_path: Path) -> None:
    mine = tiny_llama(tmp_path / "mine.gguf")
    mine.chmod(0o644)
    link = library.workspace("m") / "w.gguf"
    link.hardlink_to(mine)
    library.install("m", link, RECORD)
    assert mine.stat().st_mode & 0o777 == 0o644


def test_the_digest_of_an_installed_model_is_known(library: ModelLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _install(library, "m")
    monkeypatch.setattr(digest, "sha256_of", lambda *_: "read again")
    assert weights_digest(model.path, library.digests) == RECORD.sha256


def test_an_unknown_name_says_how_to_get_it(library: ModelLibrary) -> None:
    with pytest.raises(ModelNotFound) as missing:
        library.get("qwen")
    assert str(missing.value) == (
        "No model called qwen; `emberkeep models list` shows what is here, "
        "`emberkeep models pull hf:owner/repo/file.gguf --name qwen` fetches one."
    )


@pytest.mark.parametrize("name", ["smollm2-135m", "qwen", "Not An Id"])
def test_what_an_unknown_name_proposes_to_pull_can_be_pulled(library: ModelLibrary, name: str) -> None:
    with pytest.raises(ModelNotFound) as missing:
        library.get(name)
    command = str(missing.value).split("`")[3]
    spec, *flags = command.removeprefix("emberkeep models pull ").split(" ")
    assert parse(spec)
    assert flags in ([], ["--name", name])
    assert all(is_model_id(flag) for flag in flags[1:])


def test_a_removed_model_is_gone_with_its_files(library: ModelLibrary, tmp_path: Path) -> None:
    _install(library, "m")
    library.remove("m")
    assert not library.holds("m")
    assert list((tmp_path / "data" / "models").rglob("*.gguf")) == []
    with pytest.raises(ModelNotFound):
        library.remove("m")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"source": 1, "unknown": 2}'])
def test_a_damaged_record_is_not_listed_and_can_be_removed(library: ModelLibrary, content: str) -> None:
    path = _install(library, "m").path
    path.with_name("model.json").write_text(content)
    assert list(library.list()) == []
    with pytest.raises(ModelBroken, match="emberkeep models remove m"):
        library.get("m")
    library.remove("m")
    assert not library.holds("m")


def test_a_model_whose_weights_are_gone_is_damaged(library: ModelLibrary) -> None:
    _install(library, "m").path.unlink()
    with pytest.raises(ModelBroken):
        library.get("m")


def test_a_path_works_without_pulling(library: ModelLibrary, tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "My Model.Q4_0.gguf")
    found = library.resolve(str(path))
    assert (found.id, found.path) == ("my-model.q4_0", path)


@pytest.mark.parametrize("name", ["smollm2-135m", "mine", "Mine"])
def test_a_name_means_no_folder_that_somebody_has_called_so(
    library: ModelLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = _model_in(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound, match=f"for the folder of this name write ./{name}"):
        library.resolve(name)
    assert library.resolve(f"./{name}").path.samefile(path)
    if name != "smollm2-135m":
        with pytest.raises(ModelNotFound, match=f"{name} cannot be pulled"):
            parse(name)


def test_what_is_installed_comes_before_what_lies_in_the_current_folder(
    library: ModelLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = _install(library, "repo", replace(RECORD, source="hf:owner/repo"))
    dropped = tiny_llama(library.get("repo").path.parents[1] / "mine.gguf")
    _model_in(tmp_path / "here" / "owner" / "repo")
    tiny_llama(tmp_path / "here" / "mine.gguf")
    monkeypatch.chdir(tmp_path / "here")
    assert library.resolve("owner/repo") == hub
    assert library.resolve("mine.gguf").path == dropped
    assert library.resolve("./mine.gguf").path.samefile(tmp_path / "here" / "mine.gguf")


def test_a_lasting_name_means_the_same_model_in_any_folder(
    library: ModelLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(library, "mine")
    for name in ("mine", "gone"):
        _model_in(tmp_path / name)
    tiny_llama(tmp_path / "file.gguf")
    monkeypatch.chdir(tmp_path)
    names = ("mine", "gone", "all", "no/where", "file.gguf", "./gone")
    assert [library.lasting_name(name) for name in names] == [
        *("mine", "gone", "all", "no/where"),
        *(str(tmp_path / name) for name in ("file.gguf", "gone")),
    ]


@pytest.mark.parametrize("name", ["none.gguf", "some/where", "/no/such/file.gguf"])
def test_a_path_to_nothing_is_not_found(library: ModelLibrary, name: str) -> None:
    with pytest.raises(ModelNotFound, match="There is no file at"):
        library.resolve(name)


@pytest.mark.parametrize("name", ["a" * 300, "b" * 5000 + ".gguf", "x\0y.gguf"])
def test_a_name_that_no_file_can_have_is_not_found(library: ModelLibrary, name: str) -> None:
    with pytest.raises(ModelNotFound):
        library.resolve(name)
    with pytest.raises(ModelNotFound):
        parse(name)


HOSTILE = ["..", ".", "", "../m", "a/b", "/etc/passwd", "a\\b", "a\0b", ".hidden", "A", "a b", "é", "a" * 129]
HOSTILE += ["m-00001-of-00002"]  # would be taken for a part of a split model


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_never_becomes_a_path(library: ModelLibrary, tmp_path: Path, name: str) -> None:
    weights = tiny_llama(tmp_path / "w.gguf")
    with pytest.raises(ModelNotFound):
        library.get(name)
    with pytest.raises(ModelNotFound):
        library.remove(name)
    with pytest.raises(ModelError, match="cannot be a model's name"):
        library.install(name, weights, RECORD)
    assert sorted(p.name for p in tmp_path.rglob("*.gguf")) == ["w.gguf"]


@pytest.mark.parametrize(
    "name",
    [
        *HOSTILE,
        "....gguf",
        "-_.GGUF",
        "模型.gguf",
        "x" * 300,
        "İ.gguf",
        "\ud800",
        "a" * 111 + "-00001-of-00002x",
        "a-00001-of-00002._-00001-of-00002.gguf",
    ],
)
def test_every_file_name_gives_a_valid_id(name: str) -> None:
    assert is_model_id(id_from(name))
    assert check_id(id_from(name)) == id_from(name)


def test_an_id_reads_like_its_file() -> None:
    assert id_from("Qwen2.5-Coder-1.5B-Instruct-Q4_K_M.GGUF") == "qwen2.5-coder-1.5b-instruct-q4_k_m"


def test_a_copy_shares_its_weights_and_outlives_the_original(library: ModelLibrary) -> None:
    model = _install(library, "m")
    copied = library.copy("m", "other")
    assert copied == library.get("other")
    assert copied.path.samefile(model.path) and copied.record == RECORD
    library.remove("m")
    assert copied.path.read_bytes()[:4] == b"GGUF"


def test_a_copy_of_a_split_model_has_all_its_parts(library: ModelLibrary) -> None:
    library.install("m", split_llama(library.workspace("m") / "w.gguf")[0], RECORD)
    copied = library.copy("m", "other")
    assert [part.name for part in part_files(copied.path)] == [f"other-{i:05}-of-00003.gguf" for i in (1, 2, 3)]


def test_a_copy_of_a_folder_is_a_folder(library: ModelLibrary) -> None:
    folder = library.workspace("m") / "w"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"x")
    library.install("m", folder, RECORD)
    copied = library.copy("m", "other")
    assert copied.is_folder and (copied.path / "model.safetensors").read_bytes() == b"x"


def test_a_copy_replaces_what_had_its_name_and_never_itself(library: ModelLibrary) -> None:
    _install(library, "other", replace(RECORD, source="there"))
    model = _install(library, "m")
    assert library.copy("m", "m") == model
    assert library.copy("m", "other").record == RECORD
    with pytest.raises(ModelNotFound):
        library.copy("none", "x")
