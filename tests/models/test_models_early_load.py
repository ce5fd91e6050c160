"""A start checks, tries out and loads before anybody asks for it what llama.cpp alone loads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from emberkeep.config.settings import Config
from emberkeep.engine.llamacpp import model, trial
from emberkeep.engine.llamacpp.shared_library import candidates
from emberkeep.engine.llamacpp.trial import choose_known_library
from emberkeep.errors import EmberkeepError
from emberkeep.models.digest import known_digest
from emberkeep.models.early_load import loaded_early
from emberkeep.models.library import ModelLibrary
from helpers import tiny_gguf


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(data_dir=tmp_path, model=str(tiny_gguf.dense(tmp_path / "mine.gguf", seed=4711)))


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> dict[Path, model.Prove]:
    """How it is found out whether they work, for each file of which a load was begun."""
    proving: dict[Path, model.Prove] = {}
    monkeypatch.setattr(model, "begin", lambda path, versions, prove: proving.update({path: prove}))
    return proving


@pytest.fixture
def no_verdicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "cache_folder", lambda: tmp_path / "cache")


def test_a_load_is_begun(config: Config, begun: dict[Path, model.Prove]) -> None:
    with loaded_early(config):
        assert list(begun) == [Path(config.model or "")]


@pytest.mark.parametrize(
    "change",
    [
        {"engine": "hf"},
        {"mlock": True},
        {"speculation": "other"},
        {"backend": "openai"},
        {"model": "absent"},
        {"model": "./absent.gguf"},
    ],
)
def test_another_one_is_not(config: Config, begun: dict[Path, model.Prove], change: dict[str, object]) -> None:
    with loaded_early(replace(config, **change)):
        assert not begun


@pytest.mark.slow
@pytest.mark.usefixtures("no_verdicts")
def test_the_first_start_tries_the_library_while_it_reads_the_weights_and_the_second_tries_nothing(
    config: Config, begun: dict[Path, model.Prove], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, told = Path(config.model or ""), list[str]()
    with loaded_early(config):
        digest, works = begun[path](lambda step, done, total: told.append(step))
    assert digest == known_digest(path, ModelLibrary(config.data_dir / "models").digests)
    assert digest is not None and works and choose_known_library("auto", digest)
    trying, *checking, going_on = told  # the child runs while it checks, and then goes on
    assert trying == going_on == "Trying out mine, once"
    assert set(checking) == {"Checking mine"}
    assert trial.survives_without_flash(path, digest)
    monkeypatch.setattr(trial, "_try_all", lambda *_: pytest.fail("it was tried again"))
    told.clear()
    with loaded_early(config):
        assert begun[path](lambda step, done, total: told.append(step)) == (digest, True)
    assert told == []


@pytest.mark.slow
@pytest.mark.usefixtures("no_verdicts")
def test_weights_of_another_folder_that_work_are_not_tried_again(
    config: Config, begun: dict[Path, model.Prove], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(config.model or "")
    with loaded_early(config):
        digest, _ = begun[path](lambda *_: None)
    monkeypatch.setattr(trial, "_try_all", lambda *_: pytest.fail("it was tried again"))
    with loaded_early(replace(config, data_dir=tmp_path / "another")):
        assert begun[path](lambda *_: None) == (digest, True)


@pytest.mark.usefixtures("no_verdicts")
def test_what_ends_the_trial_is_not_loaded(
    config: Config, begun: dict[Path, model.Prove], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "_try_all", lambda *_: (["library"], "was ended by SIGSEGV"))
    path = Path(config.model or "")
    with loaded_early(config):
        digest, works = begun[path](lambda *_: None)
    assert digest and not works
    assert trial._works(trial._verdict(None, candidates("auto")[0]))


@pytest.mark.usefixtures("no_verdicts")
def test_of_weights_that_are_replaced_meanwhile_nothing_is_remembered(
    config: Config, begun: dict[Path, model.Prove], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, told = Path(config.model or ""), list[str]()

    def try_all(seconds, library, model, ways, about):
        told.append(about())
        tiny_gguf.dense(tmp_path / "other.gguf", seed=4712).replace(path)
        return list(ways), None

    monkeypatch.setattr(trial, "_try_all", try_all)
    with loaded_early(config):
        assert begun[path](lambda *_: None) == (told[0], False)
    assert not (tmp_path / "cache").exists()


def test_neither_is_a_model_that_embeds_which_is_tried_otherwise(
    config: Config, begun: dict[Path, model.Prove], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emberkeep.models.early_load.embedding_gguf", lambda header: object())
    monkeypatch.setattr("emberkeep.engine.llamacpp.trial.try_together", lambda *_: pytest.fail("it was tried"))
    with loaded_early(config):
        assert begun[Path(config.model or "")](lambda *_: None) == (None, False)


def test_a_start_that_fails_waits_for_it(
    config: Config, begun: dict[Path, model.Prove], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[bool] = []
    monkeypatch.setattr(model, "wait", lambda: waited.append(True))
    with pytest.raises(EmberkeepError), loaded_early(config):
        raise EmberkeepError("injected")
    assert waited == [True]
