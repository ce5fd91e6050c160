from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from emberkeep.memory import vectors
from emberkeep.memory.memory import Memory
from emberkeep.memory.vectors import Floats, find_embedder
from helpers.remembering import PLENTY, raw_bytes, turn

MEANINGS = {"dog": 0, "canine": 0, "car": 1, "automobile": 1, "tea": 2, "beverage": 2}


def embed(texts: Sequence[str]) -> Floats:
    """Synonyms lie in the same direction; what has none of these words has no direction."""
    rows = np.zeros((len(texts), 64), np.float32)
    for row, text in zip(rows, texts, strict=True):
        for word in text.lower().split():
            if word in MEANINGS:
                row[MEANINGS[word] :: 3] += 1
        row /= max(np.linalg.norm(row), 1e-9)
    return rows


@pytest.fixture
def meaning(path: Path) -> Memory:
    return Memory(path, limit_bytes=PLENTY, embed=embed)


TURNS = [turn("my dog barks"), turn("the red car", conversation="other"), turn("a cup of tea")]


def found(memory: Memory, query: str, conversation: str | None = None) -> list[str]:
    return [one.user_text for one in memory.search("", query, conversation=conversation)]


def test_what_means_the_same_is_found_without_a_common_word(meaning: Memory) -> None:
    meaning.archive("", TURNS)
    assert found(meaning, "canine") == ["my dog barks"]
    (one,) = meaning.search("", "automobile")
    assert 0 < one.score <= 1 and one.highlight == "the red car"
    assert found(meaning, "nothing of the kind") == []


def test_the_same_word_comes_before_the_same_meaning(meaning: Memory) -> None:
    meaning.archive("", [*TURNS, turn("canine teeth")])
    assert found(meaning, "canine") == ["canine teeth", "my dog barks"]


def test_only_the_conversation_and_the_owner_are_looked_at(meaning: Memory) -> None:
    meaning.archive("", TURNS)
    meaning.archive("another user", [turn("their canine")])
    assert found(meaning, "automobile", "talk") == []
    assert found(meaning, "automobile", "other") == ["the red car"]
    assert found(meaning, "canine") == ["my dog barks"]
    assert meaning.search("no user", "canine") == []


def test_known_turns_can_be_left_out(meaning: Memory) -> None:
    meaning.archive("", TURNS)
    (one,) = meaning.search("", "canine")
    assert meaning.search("", "canine", exclude={one.id}) == []


def test_turns_that_were_archived_without_vectors_get_them_when_they_are_searched(
    memory: Memory, path: Path
) -> None:
    memory.archive("", TURNS)
    memory.store_answer("", "what to drink", "tea")
    assert found(memory, "beverage") == []
    opened = Memory(path, limit_bytes=PLENTY, embed=embed)
    assert set(found(opened, "beverage")) == {"a cup of tea", "what to drink"}
    memory.archive("", [turn("another dog")])
    assert set(found(opened, "canine")) == {"my dog barks", "another dog"}
    opened.close()


def test_what_others_write_is_found_at_once_and_what_they_forget_is_not(meaning: Memory, path: Path) -> None:
    meaning.archive("", TURNS)
    assert found(meaning, "canine") == ["my dog barks"]
    other = Memory(path, limit_bytes=PLENTY, embed=embed)
    other.archive("", [turn("a new dog")])
    assert set(found(meaning, "canine")) == {"my dog barks", "a new dog"}
    other.forget("")
    assert found(meaning, "canine") == []
    other.close()


def test_forgetting_takes_the_vectors_too(meaning: Memory, path: Path) -> None:
    meaning.archive("", TURNS)
    assert found(meaning, "canine") == ["my dog barks"]
    (vector,) = np.rint(embed(["my dog barks"]) * 127).astype(np.int8)
    assert vector.tobytes() in raw_bytes(path)
    meaning.forget("", "talk")
    assert vector.tobytes() not in raw_bytes(path)
    assert found(meaning, "automobile") == ["the red car"]


def test_of_very_many_only_the_newest_are_compared(meaning: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "_NEWEST", 10)
    monkeypatch.setattr(vectors, "_NEAREST", 4)
    meaning.archive("", [turn("my dog barks"), *(turn(f"tea {i}") for i in range(9)), turn("the red car")])
    assert found(meaning, "canine") == []
    assert found(meaning, "automobile") == ["the red car"]
    meaning.archive("", [turn(f"car {i}") for i in range(10)])
    assert found(meaning, "beverage") == []
    assert len(found(meaning, "automobile")) == 4


def test_vectors_of_another_embedder_do_no_harm(meaning: Memory, path: Path) -> None:
    meaning.archive("", TURNS)
    assert found(meaning, "canine") == ["my dog barks"]
    other = Memory(path, limit_bytes=PLENTY, embed=lambda texts: embed(texts)[:, :40])
    assert found(other, "canine") == [] and found(other, "dog") == ["my dog barks"]
    other.archive("", [turn("his dog")])
    assert found(other, "canine") == ["his dog"] and found(meaning, "canine") == ["my dog barks"]
    other.close()


def test_nothing_is_embedded_before_something_is_searched(path: Path) -> None:
    embedded: list[str] = []
    opened = Memory(path, limit_bytes=PLENTY, embed=lambda texts: embed(embedded.extend(texts) or texts))
    opened.archive("", TURNS)
    opened.store_answer("", "what to drink", "tea")
    assert not embedded
    opened.search("", "canine")
    assert len(embedded) == 5
    opened.close()


def test_without_the_extra_words_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emberkeep.memory.vectors.find_spec", lambda _: None)
    assert find_embedder() is None


@pytest.mark.slow
@pytest.mark.skipif(find_spec("wordllama") is None, reason="needs the extra embeddings")
def test_real_vectors_know_that_a_dog_is_a_canine_companion(path: Path) -> None:
    memory = Memory(path, limit_bytes=PLENTY, embed=find_embedder())
    memory.archive(
        "", [turn("My dog is called Rex", "Nice name"), turn("I bought a car"), turn("I like tea"), turn("")]
    )
    assert found(memory, "canine companion") == ["My dog is called Rex"]
    assert found(memory, "automobile") == ["I bought a car"]
    memory.close()
