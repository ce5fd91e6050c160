from __future__ import annotations

from pathlib import Path

import pytest

from emberkeep.errors import InvalidField
from emberkeep.memory.memory import Memory
from helpers.remembering import PLENTY


def test_facts_are_set_read_listed_and_deleted(memory: Memory) -> None:
    memory.set_fact("", "town", "Graz")
    memory.set_fact("", "cat", "Tom")
    memory.set_fact("", "town", "Linz")
    assert [(fact.name, fact.value) for fact in memory.facts("")] == [("cat", "Tom"), ("town", "Linz")]
    town = memory.fact("", "town")
    assert town is not None and town.value == "Linz" and town.at > 0
    assert memory.delete_fact("", "town")
    assert not memory.delete_fact("", "town")
    assert memory.fact("", "town") is None


def test_facts_survive_a_restart(memory: Memory, path: Path) -> None:
    memory.set_fact("", "town", "Graz")
    memory.close()
    reopened = Memory(path, limit_bytes=PLENTY)
    assert [fact.value for fact in reopened.facts("")] == ["Graz"]
    reopened.close()


def test_a_clock_that_goes_back_does_not_keep_a_fact_from_changing(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.set_fact("", "town", "Graz")
    first = memory.store_answer("", "who?", "me")
    monkeypatch.setattr("time.time", lambda: 1.0)
    memory.set_fact("", "town", "Linz")
    second = memory.store_answer("", "who?", "you")
    assert [fact.value for fact in memory.facts("")] == ["Linz"]
    assert second != first and [one.assistant_text for one in memory.search("", "who")] == ["you"]


def test_facts_belong_to_one_owner(memory: Memory) -> None:
    memory.set_fact("a", "town", "Graz")
    assert memory.facts("b") == [] and memory.fact("b", "town") is None
    assert not memory.delete_fact("b", "town")
    assert memory.fact("a", "town")


@pytest.mark.parametrize(
    ("name", "value"),
    [("openai", "sk-proj-1234567890abcdefghij"), ("password", "hunter22"), ("ghp_" + "a1" * 18, "x")],
)
def test_a_secret_is_no_fact(memory: Memory, name: str, value: str) -> None:
    with pytest.raises(InvalidField, match="does not keep secrets"):
        memory.set_fact("", name, value)
    assert memory.facts("") == []


def test_the_same_question_again_replaces_the_answer(memory: Memory) -> None:
    memory.store_answer("", "When is lunch?", "At noon")
    memory.store_answer("", "When is lunch?", "At one")
    assert [one.assistant_text for one in memory.search("", "lunch")] == ["At one"]
    assert memory.stats("")["answers"] == 1
