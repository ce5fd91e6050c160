"""Split models from everywhere that a single file can come from."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result

from emberkeep.errors import DownloadFailed, ModelBroken, ModelError
from emberkeep.models import digest
from emberkeep.models import hub as url_source
from emberkeep.models.digest import model_digest
from emberkeep.models.library import InstalledModel, ModelLibrary
from emberkeep.models.profile import profile_of
from emberkeep.models.pull import pull
from emberkeep.models.spec import HubFile, LocalFile, UrlFile, parse
from helpers.gguf_builders import PARTS, split_llama, tiny_llama
from helpers.model_file_server import ServedFile, ServedRepo, Watching, serving_folder, serving_repo

pytestmark = pytest.mark.slow

REPO = "owner/Big-GGUF"


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "mine"
    folder.mkdir()
    return split_llama(folder / "Big-Q8_0.gguf")


@pytest.fixture
def contents(files: list[Path]) -> list[bytes]:
    return [file.read_bytes() for file in files]


def _kept(model: InstalledModel) -> list[bytes]:
    return [file.read_bytes() for file in sorted(model.path.parent.glob("*.gguf"))]


def _files_in(library: ModelLibrary) -> list[Path]:
    return [path for path in library.root.rglob("*") if path.is_file() and ".digests" not in path.parts]


# ── what a user writes ──


@pytest.mark.parametrize("number", [1, 2, 3])
def test_every_part_names_the_same_source(files: list[Path], number: int) -> None:
    name = f"B%20ig-0000{number}-of-00003.gguf"
    assert parse(f"https://h/a/{name}?k=1") == ("b-ig", UrlFile("https://h/a/B%20ig-00001-of-00003.gguf?k=1"))
    source = HubFile("o/r", "Q8_0/m-00001-of-00003.gguf", "v1")
    assert parse(f"hf:o/r/Q8_0/m-0000{number}-of-00003.gguf@v1") == ("m", source)
    assert parse(str(files[number - 1])) == ("big-q8_0", LocalFile(files[0]))
    assert parse(str(files[0].parent)) == ("big-q8_0", LocalFile(files[0]))


# ── local files ──


def test_local_parts_are_kept_together_and_stay_where_they_are(
    library: ModelLibrary, files: list[Path], contents: list[bytes]
) -> None:
    model = pull(str(files[1]), library)
    assert model == library.get("big-q8_0")
    assert model.path.name == "big-q8_0-00001-of-00003.gguf"
    assert _kept(model) == contents
    assert [file.read_bytes() for file in files] == contents
    assert model.record.size == sum(map(len, contents))
    assert model.record.sha256 == model_digest(files[0], library.digests)
    assert profile_of(model.path).size == model.record.size
    assert len(_files_in(library)) == PARTS + 1


def test_parts_that_cannot_be_linked_are_copied_with_one_progress(
    library: ModelLibrary, files: list[Path], contents: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    watching = Watching()
    assert _kept(pull(str(files[0]), library, reporter=watching)) == contents
    assert [step for step, _, _ in watching.seen][:PARTS] == [f"Copying {file.name}" for file in files]
    done = [(done, total) for step, done, total in watching.seen if step == "Checking"]
    assert done == sorted(done)
    assert done[-1] == (sum(map(len, contents)), sum(map(len, contents)))


def test_links_of_the_hubs_cache_are_pulled_as_files(
    library: ModelLibrary, files: list[Path], contents: list[bytes], tmp_path: Path
) -> None:
    for number, file in enumerate(files):
        file.rename(tmp_path / f"blob-{number}")
        file.symlink_to(tmp_path / f"blob-{number}")
    model = pull(str(files[2]), library)
    assert _kept(model) == contents
    assert not any(path.is_symlink() for path in model.path.parent.iterdir())


def test_a_slow_format_is_requantised_into_one_file(library: ModelLibrary, tmp_path: Path) -> None:
    slow = split_llama(tmp_path / "slow.gguf", weights="Q4_1")
    model = pull(str(slow[0]), library, optimize=True)
    assert (model.record.quantisation, model.record.optimized_from) == ("Q8_0", "Q4_1")
    assert [path.name for path in model.path.parent.glob("*.gguf")] == ["slow.gguf"]
    assert model_digest(model.path, library.digests) == model.record.sha256 == digest.sha256_of(model.path)


# ── in the library ──


def test_a_model_that_lost_parts_says_which_and_is_mended_by_pulling_it(
    library: ModelLibrary, files: list[Path], contents: list[bytes]
) -> None:
    model = pull(str(files[0]), library)
    for number in (0, 2):
        sorted(model.path.parent.glob("*.gguf"))[-1 if number else 0].unlink()
    said = "The folder of big-q8_0 lacks parts 1, 3 of 3; `emberkeep models remove big-q8_0` and pull it again."
    with pytest.raises(ModelBroken) as lacking:
        library.resolve("big-q8_0")
    assert str(lacking.value) == said
    assert list(library.list()) == []
    assert [str(damage) for damage in library.damages()] == [said]
    assert _kept(pull(str(files[0]), library)) == contents
    assert list(library.damages()) == []


# ── the hub ──


@pytest.fixture
def hub(contents: list[bytes], files: list[Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[ServedRepo]:
    parts = {f"Q8_0/{file.name}": content for file, content in zip(files, contents, strict=True)}
    others = {
        "Big-Q4_K_M.gguf": b"not asked for",
        "Big-IQ8_0.gguf": b"not asked for",
        "mmproj-Q8_0.gguf": b"not asked for",
        "README.md": b"Q8_0",
    }
    with serving_repo(ServedRepo(REPO, {**others, **parts})) as repo:
        monkeypatch.setenv("HF_ENDPOINT", repo.url)
        yield repo


@pytest.mark.parametrize(
    "spec",
    [f"hf:{REPO}/Q8_0/Big-Q8_0-0000{number}-of-00003.gguf" for number in (1, 2, 3)] + [f"hf:{REPO}:q8_0"],
)
def test_a_part_or_a_quantisation_brings_all_parts(
    hub: ServedRepo, library: ModelLibrary, contents: list[bytes], spec: str
) -> None:
    model = pull(spec, library)
    assert (model.id, _kept(model)) == ("big-q8_0", contents)
    assert sorted(hub.downloads) == sorted(name for name in hub.files if name.startswith("Q8_0/"))
    hub.downloads.clear()
    assert pull(spec, library) == model
    assert hub.downloads == []


def test_the_command_takes_a_repository_and_a_quantisation(
    hub: ServedRepo, contents: list[bytes], library: ModelLibrary, models: Callable[..., Result]
) -> None:
    # Only the folder says which quantisation it is.
    for name in [name for name in hub.files if name.startswith("Q8_0/")]:
        hub.files[name.replace("Big-Q8_0", "Big")] = hub.files.pop(name)
    pulled = models("pull", REPO, "--quant", "q8_0")
    assert pulled.exit_code == 0, pulled.output
    model = library.get("big-q8_0")
    assert (_kept(model), model.record.source) == (contents, f"hf:{REPO}:Q8_0")
    wrong = models("pull", REPO, "--quant", "Q2_K").exception
    assert str(wrong).startswith(
        f"There is no Q2_K in hf:{REPO}, which has Big-IQ8_0.gguf, Big-Q4_K_M.gguf, Q8_0/"
    )


def test_a_quantisation_may_be_one_file(hub: ServedRepo, library: ModelLibrary, tmp_path: Path) -> None:
    hub.files["Big-Q4_K_M.gguf"] = tiny_llama(tmp_path / "one.gguf").read_bytes()
    model = pull(f"hf:{REPO}:Q4_K_M", library)
    assert (model.id, model.path.name) == ("big-q4_k_m", "big-q4_k_m.gguf")
    assert model.record.source == f"hf:{REPO}:Q4_K_M"


def test_an_interrupted_pull_fetches_only_what_is_missing(
    hub: ServedRepo, library: ModelLibrary, contents: list[bytes]
) -> None:
    last = "Q8_0/Big-Q8_0-00003-of-00003.gguf"
    hub.refused.add(last)
    with pytest.raises(DownloadFailed, match="pull again to resume"):
        pull(f"hf:{REPO}:Q8_0", library)
    assert list(library.list()) == []
    hub.refused.clear()
    before = set(hub.downloads)
    hub.downloads.clear()
    assert _kept(pull(f"hf:{REPO}:Q8_0", library)) == contents
    assert last in hub.downloads
    assert before.isdisjoint(hub.downloads)


def test_parts_that_the_hub_lacks_are_named_before_anything_is_fetched(
    hub: ServedRepo, library: ModelLibrary
) -> None:
    del hub.files["Q8_0/Big-Q8_0-00002-of-00003.gguf"]
    for spec in (f"hf:{REPO}:Q8_0", f"hf:{REPO}/Q8_0/Big-Q8_0-00001-of-00003.gguf"):
        with pytest.raises(DownloadFailed) as lacking:
            pull(spec, library)
        assert str(lacking.value) == (
            f"hf:{REPO} lacks part 2 of 3 of Q8_0/Big-Q8_0-00001-of-00003.gguf: "
            "check the name and the revision, or choose another quantisation."
        )
    assert hub.downloads == []


def test_a_quantisation_that_is_not_there_lists_what_is(hub: ServedRepo, library: ModelLibrary) -> None:
    with pytest.raises(ModelError) as lacking:
        pull(f"hf:{REPO}:Q4_K", library)
    assert str(lacking.value) == (
        f"There is no Q4_K in hf:{REPO}, which has Big-IQ8_0.gguf, Big-Q4_K_M.gguf, "
        "Q8_0/Big-Q8_0-00001-of-00003.gguf: choose another."
    )


def test_a_quantisation_that_several_have_asks_for_the_file(hub: ServedRepo, library: ModelLibrary) -> None:
    hub.files["Other-Q8_0.gguf"] = b"another model"
    with pytest.raises(ModelError, match=r"could be any of Other-Q8_0\.gguf, Q8_0/Big.*: name the file"):
        pull(f"hf:{REPO}:Q8_0", library)


@pytest.mark.parametrize(
    "name", ["../../escaped-Q2_K.gguf", "/tmp/escaped-Q2_K.gguf", "a/../../escaped-Q2_K.gguf"]
)
def test_a_hub_cannot_put_files_elsewhere(hub: ServedRepo, library: ModelLibrary, name: str) -> None:
    hub.files[name] = b"GGUF"
    with pytest.raises(ModelError, match="There is no Q2_K"):
        pull(f"hf:{REPO}:Q2_K", library)
    assert _files_in(library) in ([], [path for path in _files_in(library) if path.name == "lock"])


def test_names_that_look_like_patterns_are_names(
    hub: ServedRepo, library: ModelLibrary, contents: list[bytes]
) -> None:
    for number, content in enumerate(contents, 1):
        hub.files[f"odd [x]*-Q6_K-0000{number}-of-00003.gguf"] = content
    assert _kept(pull(f"hf:{REPO}:Q6_K", library)) == contents


# ── addresses ──


@pytest.fixture
def served(files: list[Path], contents: list[bytes], monkeypatch: pytest.MonkeyPatch) -> dict[str, ServedFile]:
    monkeypatch.setattr(url_source, "PAUSE_S", 0.0)
    return {file.name: ServedFile(content) for file, content in zip(files, contents, strict=True)}


@pytest.fixture
def folder_url(served: dict[str, ServedFile]) -> Iterator[str]:
    with serving_folder(served) as url:
        yield url


@pytest.mark.parametrize("number", [1, 3])
def test_parts_are_fetched_from_beside_each_other(
    folder_url: str, library: ModelLibrary, contents: list[bytes], number: int
) -> None:
    watching = Watching()
    model = pull(f"{folder_url}/Big-Q8_0-0000{number}-of-00003.gguf?key=s3cret", library, reporter=watching)
    assert _kept(model) == contents
    assert model.record.source == f"{folder_url}/Big-Q8_0-00001-of-00003.gguf"
    for place, content in enumerate(contents, 1):
        assert (f"Downloading part {place} of 3", len(content), len(content)) in watching.seen


def test_an_interrupted_download_goes_on_where_it_stopped(
    served: dict[str, ServedFile], folder_url: str, library: ModelLibrary, contents: list[bytes]
) -> None:
    spec = f"{folder_url}/Big-Q8_0-00001-of-00003.gguf"
    with pytest.raises(KeyboardInterrupt):
        pull(spec, library, reporter=Watching(stop_in="Downloading part 2 of 3"))
    assert list(library.list()) == []
    first, second, third = served.values()
    second.cuts = [1000]
    for file in served.values():
        file.ranges.clear()
    assert _kept(pull(spec, library)) == contents
    assert first.ranges == [f"bytes={len(contents[0])}-"]
    assert second.ranges[0] is not None
    assert third.ranges == [None]


def test_a_part_that_changed_since_is_fetched_again(
    served: dict[str, ServedFile], folder_url: str, library: ModelLibrary, contents: list[bytes], tmp_path: Path
) -> None:
    spec = f"{folder_url}/Big-Q8_0-00001-of-00003.gguf"
    with pytest.raises(KeyboardInterrupt):
        pull(spec, library, reporter=Watching(stop_in="Downloading part 2 of 3"))
    newer = [file.read_bytes() for file in split_llama(tmp_path / "newer.gguf", seed=1)]
    for file, content in zip(served.values(), newer, strict=True):
        file.content, file.etag = content, '"v2"'
    assert _kept(pull(spec, library)) == newer


def test_a_part_that_the_server_lacks_is_named_and_what_came_before_is_kept(
    served: dict[str, ServedFile], folder_url: str, library: ModelLibrary, contents: list[bytes]
) -> None:
    spec, second = f"{folder_url}/Big-Q8_0-00001-of-00003.gguf?key=s3cret", "Big-Q8_0-00002-of-00003.gguf"
    lacking = served.pop(second)
    with pytest.raises(DownloadFailed, match=rf"{second} answered 404 Not Found; check the address"):
        pull(spec, library)
    served[second] = lacking
    served["Big-Q8_0-00001-of-00003.gguf"].ranges.clear()
    assert _kept(pull(spec, library)) == contents
    assert served["Big-Q8_0-00001-of-00003.gguf"].ranges == [f"bytes={len(contents[0])}-"]


def test_an_address_with_absurdly_many_parts_is_not_requested(library: ModelLibrary) -> None:
    with pytest.raises(ModelBroken, match="claims to be one of 99999 parts"):
        pull("http://127.0.0.1:1/m-00001-of-99999.gguf", library)


def test_parts_of_two_models_are_not_installed(
    served: dict[str, ServedFile], folder_url: str, library: ModelLibrary, tmp_path: Path
) -> None:
    served["Big-Q8_0-00003-of-00003.gguf"].content = tiny_llama(tmp_path / "whole.gguf").read_bytes()
    with pytest.raises(ModelBroken, match=r"big-q8_0-00003-of-00003\.gguf says inside that it is part 1 of 1"):
        pull(f"{folder_url}/Big-Q8_0-00001-of-00003.gguf", library)
    assert _files_in(library) == []


# ── commands ──


def test_the_commands_see_one_model_with_its_whole_size(
    files: list[Path], library: ModelLibrary, models: Callable[..., Result]
) -> None:
    pulled = models("pull", str(files[1]), "--name", "big")
    assert pulled.exit_code == 0, pulled.output
    (row,) = models("list").stdout.splitlines()[1:]
    assert row.split()[0] == "big"
    (entry,) = json.loads(models("list", "--json").stdout)
    whole = sum(file.stat().st_size for file in files)
    assert (entry["size"], entry["parts"]) == (whole, PARTS)
    for model in ("big", str(files[2])):
        shown = models("show", model).stdout
        assert "in 3 parts)" in shown
        assert entry["sha256"] in shown
    assert models("remove", "big", "--yes").exit_code == 0
    assert list(library.root.rglob("*.gguf")) == []
