"""Which models embed or rank, as their files say, and that a pull brings those files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from folder_builders import model_files, write_folder

from emberkeep.errors import ModelBroken
from emberkeep.models.digest import model_digest
from emberkeep.models.gguf import GgufHeader, Value
from emberkeep.models.library import ModelLibrary
from emberkeep.models.profile import EmbeddingProfile, embedding_folder, embedding_gguf
from emberkeep.models.pull import pull
from emberkeep.types.request import Json, Pooling
from helpers.model_file_server import ServedRepo, serving_repo

TRANSFORMER = {"path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
DENSE = {"path": "2_Dense", "type": "sentence_transformers.models.Dense"}
NORMALIZE = {"path": "3_Normalize", "type": "sentence_transformers.models.Normalize"}
MODULES = [TRANSFORMER, POOLING, DENSE, NORMALIZE]


def module_files(modules: Json = MODULES, mode: str = "pooling_mode_cls_token") -> dict[str, bytes]:
    return {
        "modules.json": json.dumps(modules).encode(),
        "1_Pooling/config.json": json.dumps({"word_embedding_dimension": 8, mode: True}).encode(),
        "2_Dense/config.json": b'{"in_features": 8, "out_features": 4}',
        "2_Dense/model.safetensors": b"weights",
        "sentence_bert_config.json": b'{"max_seq_length": 200}',
    }


def put(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def header(**metadata: Value) -> GgufHeader:
    named = {f"bert.{key}": value for key, value in metadata.items()}
    return GgufHeader(3, {"general.architecture": "bert", **named}, (), 0, 0)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"pooling_type": 1}, EmbeddingProfile(Pooling.MEAN)),
        ({"pooling_type": 2}, EmbeddingProfile(Pooling.CLS)),
        ({"pooling_type": 3}, EmbeddingProfile(Pooling.LAST)),
        ({"pooling_type": 4}, EmbeddingProfile(Pooling.RANK)),
        ({"attention.causal": False}, EmbeddingProfile(Pooling.MEAN)),
        ({"pooling_type": 0, "attention.causal": True}, None),
        ({}, None),
    ],
)
def test_a_gguf_file_says_how_it_pools(metadata: dict[str, Value], expected: EmbeddingProfile | None) -> None:
    assert embedding_gguf(header(**metadata)) == expected


def test_a_folder_of_sentence_transformers_is_read_module_by_module(tmp_path: Path) -> None:
    folder = put(write_folder(tmp_path / "bge", architectures=["BertModel"]), module_files())
    assert embedding_folder(folder) == EmbeddingProfile(Pooling.CLS, 200, (folder / "2_Dense",))


@pytest.mark.parametrize(
    ("architectures", "pooling"),
    [
        (["BertForSequenceClassification"], Pooling.RANK),
        (["BertModel"], Pooling.MEAN),
        (["BertForMaskedLM"], Pooling.MEAN),
        (["LlamaForCausalLM"], None),
        (["Gemma3ForConditionalGeneration"], None),
        (None, None),
    ],
)
def test_without_modules_the_architecture_tells(
    tmp_path: Path, architectures: list[str] | None, pooling: Pooling | None
) -> None:
    found = embedding_folder(write_folder(tmp_path / "model", architectures=architectures))
    assert (found.pooling if found else None) is pooling


@pytest.mark.parametrize(
    ("modules", "mode", "said"),
    [
        (MODULES, "pooling_mode_max_tokens", "has pooling_mode_max_tokens, and mean, cls and last are known"),
        ([TRANSFORMER, {"path": "1_LSTM", "type": "x.LSTM"}], "", "has LSTM, which is not known here"),
        ([TRANSFORMER], "", "has 0 poolings, which is not known here"),
        ([TRANSFORMER, {**POOLING, "path": "../other"}], "", "names '../other', which is not in it"),
        ({"not": "a list"}, "", "does not hold a list of JSON objects"),
    ],
)
def test_what_is_not_known_here_is_refused(tmp_path: Path, modules: Json, mode: str, said: str) -> None:
    folder = put(write_folder(tmp_path / "model"), module_files(modules, mode))
    with pytest.raises(ModelBroken, match=said):
        embedding_folder(folder)


# ── pulled ──


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[ServedRepo]:
    files = {**model_files(architectures=["BertModel"]), **module_files()}
    with serving_repo(ServedRepo("Owner/Embed", files)) as repo:
        monkeypatch.setenv("HF_ENDPOINT", repo.url)
        yield repo


def files_of(folder: Path) -> dict[str, bytes]:
    found = (file for file in folder.rglob("*") if file.is_file())
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in found}


@pytest.mark.slow
def test_a_pull_from_the_hub_brings_the_modules_in_their_folders(hub: ServedRepo, library: ModelLibrary) -> None:
    hub.files["onnx/config.json"] = hub.files["1_Pooling/deeper/config.json"] = b"{}"
    model = pull("hf:Owner/Embed", library)
    assert files_of(model.path) == {**model_files(architectures=["BertModel"]), **module_files()}
    assert model.record.sha256 == model_digest(model.path, library.digests)
    assert {file.stat().st_mode & 0o77 for file in model.path.rglob("*")} == {0}
    assert embedding_folder(model.path) == EmbeddingProfile(Pooling.CLS, 200, (model.path / "2_Dense",))


def test_so_does_one_of_a_folder_that_is_here(library: ModelLibrary, tmp_path: Path) -> None:
    folder = put(write_folder(tmp_path / "embed"), module_files())
    model = pull(str(folder), library)
    assert files_of(model.path) == files_of(folder)
    assert model.record.sha256 == model_digest(folder, library.digests)


def test_another_pooling_is_another_digest(library: ModelLibrary, tmp_path: Path) -> None:
    one = put(write_folder(tmp_path / "one"), module_files())
    other = put(write_folder(tmp_path / "other"), module_files(mode="pooling_mode_mean_tokens"))
    assert model_digest(one, library.digests) != model_digest(other, library.digests)
