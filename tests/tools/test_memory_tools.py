"""Memory, as a model uses it: what it stores is found again by the same user and by no other."""

from __future__ import annotations

import asyncio
import json

import pytest

from emberkeep.memory.memory import Memory
from emberkeep.session.recall import SEARCH
from emberkeep.tools.memory_tools import memory_tools
from emberkeep.types.lineage import private_namespace
from emberkeep.types.request import Json
from helpers.remembering import turn
from helpers.tool_calls import box_of, refused, told

ALICE, BOB = private_namespace("alice"), private_namespace("bob")


def done(memory: Memory, name: str, owner: str = ALICE, /, **arguments: Json) -> str:
    return asyncio.run(told(box_of(*memory_tools(memory)), name, owner=owner, **arguments))


def failed(memory: Memory, name: str, owner: str = ALICE, /, **arguments: Json) -> str:
    return asyncio.run(refused(box_of(*memory_tools(memory)), name, owner=owner, **arguments))


def test_facts_are_set_read_listed_and_deleted(memory: Memory) -> None:
    assert done(memory, "set_fact", name=" home ", value="Lyon") == "home is set."
    done(memory, "set_fact", name="home", value="Lorient")
    done(memory, "set_fact", name="boat", value="Marigold")
    assert done(memory, "get_fact", name="home") == "Lorient"
    assert json.loads(done(memory, "list_facts")) == {"boat": "Marigold", "home": "Lorient"}
    assert done(memory, "delete_fact", name="home") == "home is deleted."
    assert json.loads(done(memory, "list_facts")) == {"boat": "Marigold"}


def test_a_fact_that_is_not_there_is_answered_with_the_nearest(memory: Memory) -> None:
    assert failed(memory, "get_fact", name="home") == (
        "Error: There is no fact 'home': list_facts shows what is known."
    )
    done(memory, "set_fact", name="Home town", value="Lyon")
    assert failed(memory, "get_fact", name="hometown").endswith("did you mean Home town?")
    assert failed(memory, "delete_fact", name="home town").endswith("did you mean Home town?")


def test_an_answer_that_was_remembered_is_found(memory: Memory) -> None:
    done(memory, "remember", question="What is the boat called?", answer="Marigold")
    done(memory, "remember", question="What is the boat called?", answer="Ida")
    found = done(memory, "search_memory", query="boat")
    assert "assistant: Ida" in found and "Marigold" not in found


def test_what_has_left_a_context_is_found(memory: Memory) -> None:
    memory.archive(ALICE, [turn("Where does the boat lie?", "In Lorient.")])
    assert "In Lorient." in done(memory, "search_memory", query="where is the boat", max_results=1)
    assert done(memory, "search_memory", query="zeppelin") == "Nothing was found: try other words."


def test_results_have_scores_from_0_to_1_that_fall_with_their_order(memory: Memory) -> None:
    said = ["The boat is called Marigold.", "I bought paint for the boat.", "Marigold grows in the garden."]
    memory.archive(ALICE, [turn(text, f"Noted, number {i}.") for i, text in enumerate(said)])
    found = done(memory, "search_memory", query="boat called Marigold", max_results=10)
    lines = found.splitlines()
    scores = [float(line.removeprefix("score ")) for line in lines if line.startswith("score ")]
    assert len(scores) == len(said)
    assert scores == sorted(scores, reverse=True)
    assert 1 >= scores[0] > scores[-1] > 0
    assert lines[0].startswith("score ") and lines[1].endswith(said[0])


def test_a_sentence_with_all_that_was_asked_scores_far_more_than_one_with_a_word_of_it(memory: Memory) -> None:
    memory.archive(ALICE, [turn("The boat is called Marigold.", "Noted.")])
    whole, part = (
        float(done(memory, "search_memory", query=query).split()[1])
        for query in ("boat called Marigold", "when was a boat built in Norway or Denmark")
    )
    assert whole > 0.5 > 2 * part


def test_no_user_sees_or_changes_what_is_anothers(memory: Memory) -> None:
    done(memory, "set_fact", name="home", value="Lyon")
    done(memory, "remember", question="What is the boat called?", answer="Marigold")
    for owner in (BOB, "", private_namespace("alice", "salt")):
        assert done(memory, "list_facts", owner) == "{}"
        assert "There is no fact" in failed(memory, "get_fact", owner, name="home")
        assert "There is no fact" in failed(memory, "delete_fact", owner, name="home")
        assert "Nothing was found" in done(memory, "search_memory", owner, query="boat")
    assert done(memory, "get_fact", name="home") == "Lyon"


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("set_fact", {"name": "", "value": "x"}),
        ("set_fact", {"name": "x", "value": "  "}),
        ("set_fact", {"name": "x" * 257, "value": "x"}),
        ("set_fact", {"name": "x", "value": "x" * 65_537}),
        ("remember", {"question": "x", "answer": ""}),
    ],
)
def test_what_is_empty_or_endless_is_refused(memory: Memory, tool: str, arguments: dict[str, Json]) -> None:
    assert "must have 1 to" in failed(memory, tool, **arguments)


def test_a_secret_is_not_remembered(memory: Memory) -> None:
    assert "does not keep secrets" in failed(memory, "set_fact", name="password", value="hunter22")
    assert done(memory, "list_facts") == "{}"


def test_memory_that_cannot_be_used_is_one_sentence(memory: Memory) -> None:
    memory.close()
    assert failed(memory, "list_facts").startswith("Error: ")
    assert "could not be searched" in done(memory, "search_memory", query="boat")


def test_the_search_is_the_same_tool_that_recall_gives(memory: Memory) -> None:
    functions = {function.name: function for function in memory_tools(memory)}
    assert functions["search_memory"].definition is SEARCH
    assert [name for name, function in functions.items() if function.is_dangerous] == ["delete_fact"]
    assert {function.group for function in functions.values()} == {"memory"}
