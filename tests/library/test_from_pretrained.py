"""Models of the Hugging Face kind, from the one call to the answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from emberkeep import Emberkeep
from emberkeep.errors import EngineError
from helpers import tiny_gguf, tiny_hf
from helpers.model_file_server import ServedRepo, serving_repo

pytestmark = pytest.mark.slow

SYSTEM = {"role": "system", "content": "You answer in very few words, whatever it is that you are being asked."}
QUESTION = [SYSTEM, {"role": "user", "content": "Why is the sky blue?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_hf.write(tmp_path_factory.mktemp("models") / "tiny")


def settings(tmp_path: Path) -> dict[str, object]:
    return {"data_dir": tmp_path / "data", "parallel": 1, "device": "cpu", "ctx": 512}


def test_a_folder_answers_and_is_not_evaluated_twice(folder: Path, tmp_path: Path) -> None:
    with Emberkeep.from_pretrained(folder, **settings(tmp_path)) as llm:
        assert (llm.card.id, llm.card.context) == ("tiny", 512)
        assert llm.card.details["engine"] == "hf"
        first = llm.chat(QUESTION, max_tokens=8, temperature=0)
        again = llm.chat(QUESTION, max_tokens=8, temperature=0)
    assert first.usage.cached_tokens == 0
    assert again.usage.cached_tokens >= again.usage.prompt_tokens - 1
    assert again.tokens == first.tokens
    with Emberkeep.from_pretrained(folder, **settings(tmp_path)) as llm:
        after_restart = llm.chat(QUESTION, max_tokens=8, temperature=0)
    assert after_restart.lookup.cold_tokens >= after_restart.usage.prompt_tokens - 1
    assert after_restart.tokens == first.tokens


def test_a_folder_needs_no_word_about_its_engine(folder: Path, tmp_path: Path) -> None:
    with Emberkeep.load(str(folder), **settings(tmp_path)) as llm:
        assert llm.card.details["engine"] == "hf"


def test_what_another_folder_stored_is_not_found(folder: Path, tmp_path: Path) -> None:
    other = tiny_hf.write(tmp_path / "tiny", seed=1)
    for model in (folder, other):
        with Emberkeep.from_pretrained(model, **settings(tmp_path)) as llm:
            assert llm.chat(QUESTION, max_tokens=2).usage.cached_tokens == 0


def test_a_repository_of_the_hub_is_pulled_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    with serving_repo(ServedRepo("owner/tiny-chat", files)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        for _ in range(2):
            with Emberkeep.from_pretrained("owner/tiny-chat", **settings(tmp_path)) as llm:
                assert llm.card.id == "tiny-chat"
                assert llm.generate("once", max_tokens=2).usage.completion_tokens > 0
    assert sorted(hub.downloads) == sorted(files)


def test_a_gguf_file_runs_here_too_and_its_state_is_another(tmp_path: Path) -> None:
    model = tiny_gguf.dense(tmp_path / "dense.gguf", template=tiny_hf.TEMPLATE)
    for load, engine in ((Emberkeep.load, "llamacpp"), (Emberkeep.from_pretrained, "hf")):
        with load(str(model), **settings(tmp_path)) as llm:
            assert llm.card.details["engine"] == engine
            assert llm.chat(QUESTION, max_tokens=2).usage.cached_tokens == 0


def test_a_context_is_never_longer_than_the_model_has_positions(folder: Path, tmp_path: Path) -> None:
    with Emberkeep.from_pretrained(folder, **{**settings(tmp_path), "ctx": 100_000}) as llm:
        assert llm.card.context == tiny_hf.CONTEXT


def test_llamacpp_does_not_take_a_folder(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="tiny is a folder: choose --engine hf"):
        Emberkeep.load(str(folder), **{**settings(tmp_path), "engine": "llamacpp"})


@pytest.mark.parametrize("load", [Emberkeep.load, Emberkeep.from_pretrained])
def test_without_torch_there_is_one_clear_sentence(
    load, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emberkeep.engine.devices.find_spec", lambda name: None)
    with pytest.raises(EngineError) as caught:
        load(str(folder), **settings(tmp_path))
    assert str(caught.value) == (
        "The Hugging Face engine needs torch and transformers: pip install 'emberkeep[hf]'."
    )
