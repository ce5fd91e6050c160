"""Models that are put into the models folder by hand."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from folder_builders import write_folder

from emberkeep.backend.base import ModelCard
from emberkeep.backend.model_pool import ModelPool, ModelSource
from emberkeep.backend.on_demand import OnDemandBackend
from emberkeep.config.settings import Config
from emberkeep.errors import ModelBroken, ModelError
from emberkeep.models import digest
from emberkeep.models.digest import model_digest, sha256_of
from emberkeep.models.library import ModelLibrary
from emberkeep.models.pull import pull
from emberkeep.runtime.parts import ModelParts
from emberkeep.runtime.served_models import ServedModels
from helpers.gguf_builders import split_llama, tiny_llama


@pytest.fixture
def root(library: ModelLibrary) -> Path:
    library.root.mkdir(parents=True)
    return library.root


def _ids(library: ModelLibrary) -> list[str]:
    return [model.id for model in library.list()]


def test_a_file_is_a_model_called_as_its_stem(library: ModelLibrary, root: Path) -> None:
    path = tiny_llama(root / "My-Model.Q8_0.gguf")
    (model,) = library.list()
    assert (model.id, model.path) == ("my-model.q8_0", path)
    assert (model.record.size, model.record.quantisation) == (path.stat().st_size, "F32")
    for name in ("my-model.q8_0", "My-Model.Q8_0", "My-Model.Q8_0.gguf"):
        assert library.resolve(name) == model


def test_the_digest_is_computed_when_it_is_needed(
    library: ModelLibrary, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_llama(root / "mine.gguf")
    with monkeypatch.context() as patched:
        patched.setattr(digest, "sha256_of", lambda *_: pytest.fail("the weights were read"))
        assert library.get("mine").record.sha256 == ""
    assert model_digest(path, library.digests) == sha256_of(path)
    assert library.get("mine").record.sha256 == sha256_of(path)


def test_parts_are_one_model_wherever_they_lie(library: ModelLibrary, root: Path) -> None:
    beside = split_llama(root / "big.gguf")
    (root / "Other").mkdir()
    inside = split_llama(root / "Other" / "else.gguf")
    big, other = library.list()
    assert (big.id, big.path, big.record.size) == ("big", beside[0], sum(f.stat().st_size for f in beside))
    assert (other.id, other.path) == ("other", inside[0])


def test_a_folder_of_safetensors_is_a_model(library: ModelLibrary, root: Path) -> None:
    folder = write_folder(root / "Tiny-1B")
    (model,) = library.list()
    assert (model.id, model.path, model.is_folder) == ("tiny-1b", folder, True)
    assert library.resolve("tiny-1b") == model


def test_what_is_half_copied_is_told_and_the_rest_is_listed(library: ModelLibrary, root: Path) -> None:
    whole = tiny_llama(root / "whole.gguf").read_bytes()
    (root / "half.gguf").write_bytes(whole[: len(whole) - 100])
    (root / "begun.gguf").write_bytes(b"GG")
    (root / "empty").mkdir()
    (root / "lacking").mkdir()
    (root / "lacking" / "config.json").write_text("{}")
    split_llama(root / "parts.gguf")[1].unlink()
    assert _ids(library) == ["whole"]
    told = " ".join(str(damage) for damage in library.damages())
    for name in ("half.gguf", "begun.gguf", "empty holds no model", "lacking holds no model", "lacks part 2 of 3"):
        assert name in told
    with pytest.raises(ModelBroken, match=r"half\.gguf is broken"):
        library.get("half")
    (root / "half.gguf").write_bytes(whole)
    assert _ids(library) == ["half", "whole"]


def test_other_files_are_no_models(library: ModelLibrary, root: Path) -> None:
    tiny_llama(root / "mmproj-F16.gguf")
    tiny_llama(root / ".hidden.gguf")
    (root / "README.md").write_text("hello")
    (root / "mine.gguf.part").write_bytes(b"GGUF")
    assert (_ids(library), list(library.damages())) == ([], [])


def test_a_folder_with_several_models_says_what_to_do(library: ModelLibrary, root: Path) -> None:
    (root / "both").mkdir()
    tiny_llama(root / "both" / "a.gguf")
    tiny_llama(root / "both" / "b.gguf")
    assert _ids(library) == []
    assert "holds several models (a.gguf, b.gguf)" in str(library.damages()[0])


def test_what_was_pulled_comes_first(library: ModelLibrary, root: Path, tmp_path: Path) -> None:
    pulled = pull(str(tiny_llama(tmp_path / "mine.gguf")), library)
    dropped = tiny_llama(root / "mine.gguf", seed=7)
    assert library.list() == [pulled]
    library.remove("mine")
    assert library.get("mine").path == dropped


def test_a_pull_does_not_take_the_name_of_a_dropped_model(
    library: ModelLibrary, root: Path, tmp_path: Path
) -> None:
    tiny_llama(root / "mine.gguf")
    with pytest.raises(ModelError, match="A model called mine is here already"):
        pull(str(tiny_llama(tmp_path / "mine.gguf")), library)
    assert pull(str(tmp_path / "mine.gguf"), library, name="other").id == "other"


def test_removing_takes_all_parts_and_nothing_else(library: ModelLibrary, root: Path) -> None:
    split_llama(root / "big.gguf")
    kept = [tiny_llama(root / name) for name in ("big.gguf", "bigger.gguf")]
    kept[0].unlink()
    write_folder(root / "tiny")
    for name in ("big", "tiny"):
        library.remove(name)
    assert sorted(path.name for path in root.iterdir()) == ["bigger.gguf"]


def test_removing_a_link_leaves_what_it_leads_to(library: ModelLibrary, root: Path, tmp_path: Path) -> None:
    file, folder = tiny_llama(tmp_path / "mine.gguf"), write_folder(tmp_path / "tiny")
    (root / "mine.gguf").symlink_to(file)
    (root / "tiny").symlink_to(folder)
    assert _ids(library) == ["mine", "tiny"]
    for name in ("mine", "tiny"):
        library.remove(name)
    assert file.is_file() and folder.is_dir()
    assert list(root.iterdir()) == []


def test_a_copy_of_it_knows_its_digest(library: ModelLibrary, root: Path) -> None:
    path = tiny_llama(root / "mine.gguf")
    copied = library.copy("mine", "other")
    assert copied.record.sha256 == sha256_of(path) == model_digest(copied.path, library.digests)


# ── commands and servers ──


def test_the_commands_list_show_and_remove_it(root: Path, models: Callable[..., Result]) -> None:
    path = tiny_llama(root / "Mine.gguf")
    (root / "half.gguf").write_bytes(path.read_bytes()[:-50])
    listed = models("list")
    assert listed.exit_code == 0
    assert listed.stdout.splitlines()[1].split()[:2] == ["mine", "F32"]
    assert "half.gguf is broken" in listed.stderr
    shown = json.loads(models("show", "mine", "--json").stdout)
    assert (shown["file"], shown["sha256"]) == (str(path), sha256_of(path))
    asked = models("remove", "mine", input="n\n")
    assert (asked.exit_code, f"Delete mine ({path})?" in asked.stderr) == (1, True)
    assert models("remove", "mine", input="y\n").exit_code == 0
    assert models("remove", "half", "--yes").exit_code == 0
    assert list(root.glob("*.gguf")) == []


def test_a_server_finds_it_while_it_runs(root: Path) -> None:
    config = Config(data_dir=root.parent)
    pool = ModelPool(lambda new, held: True)
    first = OnDemandBackend(ModelSource("first", ModelCard("first", 0, 0), lambda _: pytest.fail("loaded")), pool)
    served = ServedModels(config, ModelParts(config, stays=True), pool, first)
    assert list(served.list()) == []
    tiny_llama(root / "mine.gguf")
    assert [backend.name for backend in served.list()] == ["mine"]
    assert served.find("mine") is not None
    assert served.find("other") is None
    shutil.copy(root / "mine.gguf", root / "other.gguf")
    assert served.find("other") is not None


# ── what a user has put there is the user's ──


def test_no_pull_and_no_copy_replaces_a_folder(library: ModelLibrary, root: Path, tmp_path: Path) -> None:
    (root / "mine").mkdir()
    kept = [tiny_llama(root / "mine" / name) for name in ("a.gguf", "b.gguf")]
    tiny_llama(root / "other.gguf")
    with pytest.raises(ModelError, match="was put there by hand"):
        pull(str(tiny_llama(tmp_path / "new.gguf")), library, name="mine")
    with pytest.raises(ModelError, match="was put there by hand"):
        library.copy("other", "mine")
    assert sorted((root / "mine").iterdir()) == kept


def test_a_half_copied_folder_is_not_replaced_either(library: ModelLibrary, root: Path, tmp_path: Path) -> None:
    (root / "mine").mkdir()
    half = tiny_llama(root / "mine" / "mine.gguf")
    half.write_bytes(half.read_bytes()[:-100])
    with pytest.raises(ModelError, match="was put there by hand"):
        pull(str(tiny_llama(tmp_path / "new.gguf")), library, name="mine")
    assert half.exists()


def test_a_pipe_is_no_model_and_nobody_waits_for_it(library: ModelLibrary, root: Path) -> None:
    os.mkfifo(root / "pipe.gguf")
    tiny_llama(root / "other.gguf")
    assert _ids(library) == ["other"]


def test_a_file_is_found_by_its_name_beside_a_pulled_model_of_that_name(
    library: ModelLibrary, root: Path, tmp_path: Path
) -> None:
    pull(str(tiny_llama(tmp_path / "new.gguf")), library, name="twice")
    dropped = tiny_llama(root / "twice.gguf")
    assert library.resolve("twice.gguf").path == dropped
    assert library.resolve("twice").path == root / "twice" / "twice.gguf"
