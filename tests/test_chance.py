"""Tests do the same in every run, unless they are asked to look further."""

from __future__ import annotations

import pytest
from hypothesis import settings

from helpers.chance import examples, is_torture, seed, times


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EMBERKEEP_TEST_TORTURE", raising=False)


@pytest.fixture
def tortured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBERKEEP_TEST_TORTURE", "4")
    monkeypatch.setenv("EMBERKEEP_TEST_SEED", "1")


@pytest.mark.usefixtures("plain")
def test_counts_and_seeds_are_those_in_the_test() -> None:
    assert (times(30), seed(7), examples(20).max_examples) == (30, 7, 20)


@pytest.mark.usefixtures("tortured")
def test_torture_multiplies_counts() -> None:
    assert (times(30), examples(20).max_examples, examples().max_examples) == (120, 80, 400)


@pytest.mark.usefixtures("tortured")
def test_every_seed_follows_from_that_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    first = [seed(number) for number in range(5)]
    assert first == [seed(number) for number in range(5)]
    assert len({*first, *range(5)}) == 10
    monkeypatch.setenv("EMBERKEEP_TEST_SEED", "2")
    assert not {*first} & {seed(number) for number in range(5)}


def test_examples_are_the_same_everywhere_unless_it_is_torture() -> None:
    usual = settings()
    assert (usual.derandomize, usual.deadline, usual.max_examples) == (not is_torture(), None, times(100))
