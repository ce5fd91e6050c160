from __future__ import annotations

from pathlib import Path

import pytest

from emberkeep.config.settings import DEFAULT_MODEL, Config
from emberkeep.errors import EngineError, ModelNotFound
from emberkeep.library.installation import ensure_model


@pytest.fixture
def pulled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was pulled; nothing is really fetched."""
    specs: list[str] = []
    monkeypatch.setattr("emberkeep.models.pull.pull", lambda spec, library, *, reporter: specs.append(spec))
    return specs


def test_the_default_model_is_pulled_when_it_is_missing(tmp_path: Path, pulled: list[str]) -> None:
    ensure_model(Config(data_dir=tmp_path))
    assert pulled == [DEFAULT_MODEL]


def test_another_missing_model_is_an_error_that_says_how_to_get_it(tmp_path: Path, pulled: list[str]) -> None:
    with pytest.raises(ModelNotFound, match=r"emberkeep models pull .* --name other"):
        ensure_model(Config(data_dir=tmp_path, model="other"))
    assert pulled == []


def test_a_repository_is_pulled_for_the_hugging_face_engine_only(tmp_path: Path, pulled: list[str]) -> None:
    ensure_model(Config(data_dir=tmp_path, model="owner/name", engine="hf"))
    assert pulled == ["hf:owner/name"]
    with pytest.raises(ModelNotFound, match="There is no file at owner/name"):
        ensure_model(Config(data_dir=tmp_path, model="owner/name"))


def test_nothing_is_pulled_for_an_engine_that_is_not_installed(
    tmp_path: Path, pulled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emberkeep.engine.devices.find_spec", lambda name: None)
    with pytest.raises(EngineError, match=r"needs torch and transformers: pip install 'emberkeep\[hf\]'"):
        ensure_model(Config(data_dir=tmp_path, engine="hf"))
    assert pulled == []


def test_a_file_is_taken_as_it_is(tmp_path: Path, pulled: list[str]) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    ensure_model(Config(data_dir=tmp_path, model=str(tmp_path / "m.gguf")))
    assert pulled == []
