"""What was learned is found again by whoever asks about the same things, and by nobody else."""

from __future__ import annotations

from pathlib import Path

import pytest

from emberkeep.engine.facts import Facts


def test_a_fact_is_found_by_the_next_one_who_asks(tmp_path: Path) -> None:
    Facts(tmp_path, "weights", 4).remember("times", b"fast")
    assert Facts(tmp_path, "weights", 4).read("times") == b"fast"


@pytest.mark.parametrize("about", [("weights", 5), ("others", 4), ("weights",), ("weights", 4, "more")])
def test_another_subject_finds_nothing(tmp_path: Path, about: tuple[object, ...]) -> None:
    Facts(tmp_path, "weights", 4).remember("times", b"fast")
    assert Facts(tmp_path, *about).read("times") is None


def test_what_is_forgotten_is_learned_anew(tmp_path: Path) -> None:
    facts = Facts(tmp_path, "weights")
    facts.remember("times", b"fast")
    facts.forget("times")
    facts.forget("times")
    assert facts.read("times") is None


def test_a_damaged_file_says_nothing(tmp_path: Path) -> None:
    facts = Facts(tmp_path, "weights")
    facts.remember_json("times", [1, 2])
    (file,) = tmp_path.iterdir()
    for damaged in (b"", file.read_bytes()[:-1], file.read_bytes() + b" "):
        file.write_bytes(damaged)
        assert facts.read_json("times", list) is None


@pytest.mark.parametrize("error", [ValueError, KeyError, TypeError])
def test_what_another_version_has_written_says_nothing(tmp_path: Path, error: type[Exception]) -> None:
    def parse(data: object) -> object:
        raise error

    facts = Facts(tmp_path, "weights")
    facts.remember_json("times", [1, 2])
    assert facts.read_json("times", parse) is None
    facts.remember("times", b"no json")
    assert facts.read_json("times", list) is None


def test_a_folder_that_cannot_be_written_costs_nothing_but_the_memory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    facts = Facts(tmp_path / "file" / "facts", "weights")
    facts.remember("times", b"fast")
    assert facts.read("times") is None


def test_without_a_folder_nothing_is_remembered() -> None:
    facts = Facts(None, "weights")
    facts.remember("times", b"fast")
    facts.forget("times")
    assert facts.read("times") is None
