from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result
from folder_builders import KV_BYTES_PER_TOKEN, PARAMETERS, model_files, safetensors, write_folder

from emberkeep.errors import DownloadFailed, ModelBroken, ModelError, ModelNotFound
from emberkeep.models.digest import model_digest
from emberkeep.models.library import ModelLibrary
from emberkeep.models.profile import ModelKind, profile_of
from emberkeep.models.pull import pull
from helpers.model_file_server import ServedRepo, serving_repo

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "Tiny-1B")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[ServedRepo]:
    with serving_repo(ServedRepo("Owner/Tiny-1B", model_files())) as repo:
        monkeypatch.setenv("HF_ENDPOINT", repo.url)
        yield repo


# ── a folder as it is ──


def test_a_folder_is_a_model_by_its_path(library: ModelLibrary, folder: Path) -> None:
    found = library.resolve(str(folder))
    assert (found.id, found.path, found.is_folder) == ("tiny-1b", folder, True)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_folder_without_what_makes_a_model_is_none(library: ModelLibrary, folder: Path, missing: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(ModelNotFound):
        library.resolve(str(folder))


def test_what_a_folder_holds_is_read_without_loading_it(folder: Path) -> None:
    found = profile_of(folder)
    assert (found.architecture, found.kind, found.layers) == ("llama", ModelKind.DENSE, 2)
    assert (found.parameters, found.quantisation) == (PARAMETERS, "BF16")
    assert (found.context_length, found.vocab_size) == (256, 100)
    assert found.kv_bytes_per_token == KV_BYTES_PER_TOKEN
    assert found.chat_template == "{{ messages }}"


def test_a_template_in_a_file_of_its_own_comes_first(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("its own")
    assert profile_of(folder).chat_template == "its own"


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"num_local_experts": 8}, ModelKind.MOE),
        ({"sliding_window": 8}, ModelKind.SLIDING_WINDOW),
        ({"sliding_window": 8, "use_sliding_window": False}, ModelKind.DENSE),
        ({"sliding_window": 8, "layer_types": ["full_attention"] * 2}, ModelKind.DENSE),
        ({"kv_lora_rank": 4}, ModelKind.MLA),
        ({"layer_types": ["linear_attention", "full_attention"]}, ModelKind.HYBRID),
    ],
)
def test_kinds_are_read_from_the_configuration(tmp_path: Path, config: dict[str, object], kind: ModelKind) -> None:
    assert profile_of(write_folder(tmp_path / "m", **config)).kind is kind


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", b"{"),
        ("config.json", b"[]"),
        ("config.json", b"[" * 100_000),
        ("config.json", b'{"num_hidden_layers": 1000000000}'),
        ("model.safetensors", b""),
        ("model.safetensors", safetensors()[:20]),
        ("model.safetensors", (1 << 60).to_bytes(8, "little") + b"{}"),
        ("model.safetensors", (2).to_bytes(8, "little") + b"{}"),
        ("model.safetensors", (2).to_bytes(8, "little") + b"[]"),
        ("model.safetensors", (9).to_bytes(8, "little") + b'{"a": 17}'),
        ("model.safetensors", safetensors({"a": ("F32", [0])})),
    ],
)
def test_hostile_files_are_broken_models(folder: Path, file: str, content: bytes) -> None:
    (folder / file).write_bytes(content)
    with pytest.raises(ModelBroken, match="pull"):
        profile_of(folder)


def test_the_digest_is_over_everything_that_shapes_the_result(folder: Path, tmp_path: Path) -> None:
    before = model_digest(folder, tmp_path / "digests")
    (folder / "README.md").write_text("nothing that matters")
    assert model_digest(folder, tmp_path / "digests") == before
    seen = {before}
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        with (folder / name).open("ab") as file:
            file.write(b" ")
        seen.add(model_digest(folder, tmp_path / "digests"))
    (folder / "model.safetensors").rename(folder / "model-2.safetensors")
    seen.add(model_digest(folder, tmp_path / "digests"))
    assert len(seen) == 5


# ── pulled ──


def test_a_local_folder_is_kept_and_stays_where_it_is(library: ModelLibrary, folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "script.py").write_text("raise SystemExit")
    model = pull(str(folder), library)
    assert (model.id, model.record.source, model.record.quantisation) == ("tiny-1b", str(folder), "BF16")
    assert {file.name for file in model.path.iterdir()} == set(model_files())
    assert (folder / "config.json").is_file()
    assert library.resolve("tiny-1b") == library.get("tiny-1b") == model


def test_a_folder_of_links_is_kept_as_files(library: ModelLibrary, folder: Path, tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    folder.rename(blobs)
    folder.mkdir()
    for blob in blobs.iterdir():
        (folder / blob.name).symlink_to(blob)
    model = pull(str(folder), library)
    assert not any(file.is_symlink() for file in model.path.iterdir())


def test_a_hub_repository_is_downloaded_and_installed(hub: ServedRepo, library: ModelLibrary) -> None:
    model = pull("hf:Owner/Tiny-1B", library)
    assert (model.id, model.record.source) == ("tiny-1b", "hf:Owner/Tiny-1B")
    assert {file.name: file.read_bytes() for file in model.path.iterdir()} == hub.files
    assert model.record.size == sum(map(len, hub.files.values()))
    assert model.record.sha256 == model_digest(model.path, library.digests)
    assert {file.stat().st_mode & 0o777 for file in model.path.iterdir()} == {0o600}
    assert library.resolve("Owner/Tiny-1B") == library.resolve("tiny-1b") == model


def test_the_digests_of_a_pulled_repository_are_known(
    hub: ServedRepo, library: ModelLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = pull("hf:Owner/Tiny-1B", library)
    monkeypatch.setattr("emberkeep.models.digest.sha256_of", lambda *_: pytest.fail("it was read again"))
    assert model_digest(model.path, library.digests) == model.record.sha256


def test_only_what_runs_the_model_is_downloaded(hub: ServedRepo, library: ModelLibrary) -> None:
    wanted = set(hub.files) | {"model.safetensors.index.json", "chat_template.jinja"}
    for name in (*wanted - set(hub.files), "pytorch_model.bin", "consolidated.safetensors", "modeling_tiny.py"):
        hub.files[name] = b"{}"
    hub.files["original/model.safetensors"] = b"the same again"
    hub.files["README.md"] = b"words"
    pull("hf:Owner/Tiny-1B", library)
    assert set(hub.downloads) == wanted


def test_weights_that_are_not_what_the_hub_promised_leave_nothing(hub: ServedRepo, library: ModelLibrary) -> None:
    hub.promised["model.safetensors"] = "0" * 64
    with pytest.raises(ModelBroken, match=r"hf:Owner/Tiny-1B/model.safetensors .*SHA-256"):
        pull("hf:Owner/Tiny-1B", library)
    assert list(library.list()) == []


def test_a_repository_without_safetensors_says_what_else_to_do(hub: ServedRepo, library: ModelLibrary) -> None:
    hub.files = {"config.json": b"{}", "pytorch_model.bin": b"a pickle", "tiny.gguf": b"GGUF"}
    with pytest.raises(ModelError, match=r"holds no model .*hf:Owner/Tiny-1B/file.gguf"):
        pull("hf:Owner/Tiny-1B", library)
    assert hub.downloads == []


def test_offline_is_one_sentence(library: ModelLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DownloadFailed, match="hf:Owner/Tiny-1B cannot be pulled while HF_HUB_OFFLINE is set"):
        pull("hf:Owner/Tiny-1B", library)


def test_a_repository_that_is_not_here_can_be_pulled(library: ModelLibrary) -> None:
    with pytest.raises(ModelNotFound, match="`emberkeep models pull hf:Owner/Tiny-1B` fetches it"):
        library.resolve("Owner/Tiny-1B")


def test_a_folder_that_lost_its_weights_is_damaged(library: ModelLibrary, folder: Path) -> None:
    model = pull(str(folder), library)
    (model.path / "model.safetensors").unlink()
    with pytest.raises(ModelBroken, match="damaged"):
        library.resolve("tiny-1b")
    assert list(library.list()) == []


# ── as commands ──


def test_a_folder_is_listed_shown_and_removed(
    library: ModelLibrary, folder: Path, models: Callable[..., Result]
) -> None:
    def run(*arguments: str) -> str:
        result = models(*arguments)
        assert result.exit_code == 0, result.output
        return result.stdout

    run("pull", str(folder), "--name", "mine")
    (row,) = run("list").splitlines()[1:]
    assert row.split()[:2] == ["mine", "BF16"]
    shown = dict(line.split(maxsplit=1) for line in run("show", "mine").splitlines())
    assert shown["architecture"].startswith("llama, 2 layers")
    assert shown["sha256"].strip() == model_digest(library.get("mine").path, library.digests)
    facts = json.loads(run("show", "mine", "--json"))
    assert (facts["profile"]["kind"], facts["file"]) == ("dense", os.fspath(library.get("mine").path))
    run("remove", "mine", "--yes")
    assert not library.holds("mine")


def test_a_folder_without_a_model_is_called_that(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="holds no model"):
        ModelLibrary(tmp_path / "models").resolve(str(tmp_path))
