from __future__ import annotations

from pathlib import Path

import pytest

from emberkeep.engine.llamacpp.model import requantize
from emberkeep.errors import EngineError
from emberkeep.models.gguf import read_header
from emberkeep.models.profile import profile
from emberkeep.models.pull import requantize_apart
from helpers.gguf_builders import tiny_llama


def test_weights_change_their_format_and_keep_their_shapes(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "slow.gguf", weights="Q5_1")
    requantize(source, tmp_path / "fast.gguf", "Q8_0")
    before, after = read_header(source), read_header(tmp_path / "fast.gguf")
    assert profile(after).quantisation == "Q8_0"
    assert {t.name: t.shape for t in after.tensors} == {t.name: t.shape for t in before.tensors}


def test_equal_inputs_give_equal_bytes(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "slow.gguf", weights="Q4_1")
    for name in ("a", "b"):
        requantize(source, tmp_path / name, "Q8_0")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no weight format Q99"):
        requantize(tiny_llama(tmp_path / "m.gguf"), tmp_path / "out.gguf", "Q99")


def test_a_failure_in_the_other_process_is_passed_on_and_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF nonsense")
    with pytest.raises(EngineError, match=r"could not write m\.gguf as Q8_0"):
        requantize_apart(tmp_path / "m.gguf", tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()
