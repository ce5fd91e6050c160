from __future__ import annotations

from pathlib import Path

import pytest

from emberkeep.errors import ModelNotFound
from emberkeep.models.spec import (
    DEFAULT_SOURCE,
    HubFile,
    HubQuantisation,
    HubRepo,
    LocalFile,
    LocalFolder,
    UrlFile,
    parse,
    spec_of_ollama,
    spec_of_quantisation,
)


def test_the_default_model_comes_from_its_wheel() -> None:
    assert parse("smollm2-135m") == ("smollm2-135m", DEFAULT_SOURCE)


@pytest.mark.parametrize(
    ("spec", "id", "source"),
    [
        ("hf:o/r/M.Q4_0.gguf", "m.q4_0", HubFile("o/r", "M.Q4_0.gguf")),
        ("hf:o/r/sub/dir/m.gguf@v1.0", "m", HubFile("o/r", "sub/dir/m.gguf", "v1.0")),
        ("hf:o/r/m.gguf@refs/pr/7", "m", HubFile("o/r", "m.gguf", "refs/pr/7")),
        ("hf:Owner/Tiny-1B", "tiny-1b", HubRepo("Owner/Tiny-1B")),
        ("hf:o/r@v1.0", "r", HubRepo("o/r", "v1.0")),
        ("hf:o/Big-GGUF:Q4_K_M", "big-q4_k_m", HubQuantisation("o/Big-GGUF", "Q4_K_M")),
        ("hf:o/r:UD-Q4_K_XL@v1.0", "r-ud-q4_k_xl", HubQuantisation("o/r", "UD-Q4_K_XL", "v1.0")),
    ],
)
def test_what_is_on_the_hub(spec: str, id: str, source: HubFile | HubRepo | HubQuantisation) -> None:
    assert parse(spec) == (id, source)
    assert source.label == spec


def test_an_address() -> None:
    assert parse("https://h/a%20b/My%20M.gguf?x=1") == ("my-m", UrlFile("https://h/a%20b/My%20M.gguf?x=1"))


def test_the_label_of_an_address_has_no_secrets() -> None:
    assert UrlFile("https://me:pass@h:8/m.gguf?token=s3cret#f").label == "https://h:8/m.gguf"


def test_a_local_file(tmp_path: Path) -> None:
    path = tmp_path / "Mine.gguf"
    path.touch()
    assert parse(str(path)) == ("mine", LocalFile(path))


def test_a_local_folder(tmp_path: Path) -> None:
    folder = tmp_path / "Mine"
    folder.mkdir()
    (folder / "config.json").touch()
    (folder / "model.safetensors").touch()
    assert parse(str(folder)) == ("mine", LocalFolder(folder))


@pytest.mark.parametrize("spec", ["/no/file.gguf", "file.gguf", "~/file", "owner/repo/file.gguf"])
def test_a_file_that_is_not_there_is_called_missing(spec: str) -> None:
    with pytest.raises(ModelNotFound, match=f"There is no file at {spec}: give .*hf:owner/repo/file"):
        parse(spec)


@pytest.mark.parametrize("spec", ["qwen", "hf:o", "hf:o/m.gguf", "hf:o/r/model.bin", "hf:o/r/../../m.gguf", ""])
def test_anything_else_is_explained(spec: str) -> None:
    with pytest.raises(ModelNotFound, match=f"^{spec} cannot be pulled: give .*hf:owner/repo/file"):
        parse(spec)


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("hf.co/owner/repo-GGUF:Q8_0", "hf:owner/repo-GGUF:Q8_0"),
        ("hf.co/owner/repo-GGUF", "hf:owner/repo-GGUF:Q4_K_M"),
        ("hf.co/owner/repo-GGUF:latest", "hf:owner/repo-GGUF:Q4_K_M"),
        ("https://huggingface.co/owner/repo", "hf:owner/repo"),
        ("hf.co/owner/repo:model-Q4_0.gguf", "hf:owner/repo/model-Q4_0.gguf"),
        ("hf:owner/repo/file.gguf", "hf:owner/repo/file.gguf"),
        ("smollm2:135m", "smollm2-135m"),
        ("smollm2-135m:latest", "smollm2-135m"),
    ],
)
def test_names_as_users_of_ollama_write_them(name: str, spec: str) -> None:
    assert spec_of_ollama(name) == spec


@pytest.mark.parametrize(
    ("repo", "spec"),
    [
        ("owner/repo-GGUF", "hf:owner/repo-GGUF:Q4_K_M"),
        ("hf:owner/repo-GGUF", "hf:owner/repo-GGUF:Q4_K_M"),
        ("owner/repo@v1.0", "hf:owner/repo:Q4_K_M@v1.0"),
        ("https://huggingface.co/owner/repo", "hf:owner/repo:Q4_K_M"),
    ],
)
def test_a_repository_and_a_quantisation_apart(repo: str, spec: str) -> None:
    assert spec_of_quantisation(repo, "q4_k_m") == spec
    assert parse(spec)


@pytest.mark.parametrize(
    "repo", ["smollm2-135m", "hf:o/r:Q8_0", "hf:o/r/m.gguf", "/a/b/c.gguf", "./c.gguf", "http://h/m.gguf"]
)
def test_a_quantisation_of_what_is_no_repository_is_refused(repo: str) -> None:
    with pytest.raises(ModelNotFound, match="--quant Q4_K_M does not go with"):
        spec_of_quantisation(repo, "Q4_K_M")
