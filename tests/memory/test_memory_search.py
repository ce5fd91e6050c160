from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from emberkeep.memory.memory import Memory
from emberkeep.text import encodable
from emberkeep.types.memory import MemoryKind, Recollection, ToolUse
from helpers.chance import examples
from helpers.remembering import turn


def texts(found: list[Recollection]) -> list[str]:
    return [one.user_text for one in found]


def test_a_question_finds_the_turn_that_answers_it(memory: Memory) -> None:
    memory.archive("", [turn("My dog is called Rex"), turn("I like tea"), turn("The capital of France is Paris")])
    assert texts(memory.search("", "What is the name of my dog?")) == ["My dog is called Rex"]
    assert texts(memory.search("", "capital of France", max_results=1)) == ["The capital of France is Paris"]


def test_word_forms_and_accents_do_not_matter(memory: Memory) -> None:
    memory.archive("", [turn("We were hiking in the Pyrénées")])
    assert memory.search("", "hikes pyrenees")


def test_scripts_without_spaces_are_found_by_their_parts(memory: Memory) -> None:
    memory.archive("", [turn("私の犬の名前はポチです"), turn("我喜欢喝绿茶")])
    assert texts(memory.search("", "犬の名前は何ですか")) == ["私の犬の名前はポチです"]
    (found,) = memory.search("", "绿茶")
    assert found.highlight == "我喜欢喝**绿茶**"


def test_what_tools_said_is_found(memory: Memory) -> None:
    memory.archive("", [turn("look it up", "done", tool_uses=(ToolUse("lookup", "{}", "the serial is QX77"),))])
    assert texts(memory.search("", "serial qx77")) == ["look it up"]


def test_scores_fall_from_the_best_to_the_last_and_stay_between_0_and_1(memory: Memory) -> None:
    memory.archive(
        "", [turn("red apple pie"), turn("red apple"), turn("a red car and a long story"), turn("blue")]
    )
    scores = [one.score for one in memory.search("", "red apple pie")]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)
    assert all(0 < score <= 1 for score in scores)


def test_what_the_user_said_counts_more_than_what_was_answered(memory: Memory) -> None:
    memory.archive("", [turn("what then", "the zebra"), turn("the zebra", "what then")])
    assert texts(memory.search("", "zebra")) == ["the zebra", "what then"]


def test_the_newer_of_two_equal_turns_comes_first(memory: Memory) -> None:
    memory.archive("", [turn("my phone is blue", days_ago=1), turn("my phone is green", days_ago=90)])
    assert texts(memory.search("", "phone")) == ["my phone is blue", "my phone is green"]


def test_an_old_exact_answer_stays_before_a_vague_new_one(memory: Memory) -> None:
    memory.archive("", [turn("the wifi code of the cabin is 4711", days_ago=900)])
    memory.archive("", [turn(f"we talked about the cabin, part {i}") for i in range(30)])
    assert texts(memory.search("", "wifi code of the cabin"))[0] == "the wifi code of the cabin is 4711"


def test_an_old_turn_is_found_among_many_newer_ones_with_each_of_its_words(memory: Memory) -> None:
    memory.archive("", [turn("the green bicycle stands in the cellar")])
    memory.archive("", [turn(f"green leaves {i}") for i in range(600)])
    memory.archive("", [turn(f"a bicycle on the road {i}") for i in range(600)])
    assert texts(memory.search("", "green bicycle"))[0] == "the green bicycle stands in the cellar"


def test_the_highlight_is_the_passage_with_the_words(memory: Memory) -> None:
    memory.archive("", [turn("before " * 60 + "the golden key is under the mat " + "after " * 60)])
    (found,) = memory.search("", "golden key")
    assert "the **golden** **key** is under the mat" in found.highlight
    assert found.highlight.startswith("…") and found.highlight.endswith("…")
    assert len(found.highlight) < 200


def test_stop_words_count_only_when_there_is_nothing_else(memory: Memory) -> None:
    memory.archive("", [turn("to be or not to be"), turn("what is the weather")])
    assert texts(memory.search("", "what is the weather")) == ["what is the weather"]
    assert texts(memory.search("", "to be or not to be"))[0] == "to be or not to be"


def test_a_conversation_can_be_searched_alone(memory: Memory) -> None:
    memory.archive("", [turn("apples here", conversation="a"), turn("apples there", conversation="b")])
    assert texts(memory.search("", "apples", conversation="b")) == ["apples there"]
    assert memory.search("", "apples", conversation="unknown") == []


def test_turns_that_are_known_already_can_be_left_out(memory: Memory) -> None:
    memory.archive("", [turn("first apple"), turn("second apple")])
    best = memory.search("", "apple")[0]
    assert [one.id for one in memory.search("", "apple", exclude=[best.id])] == [
        one.id for one in memory.search("", "apple")[1:]
    ]


def test_stored_answers_are_found_with_the_turns(memory: Memory) -> None:
    memory.archive("", [turn("when do we have lunch?", "I do not know")])
    id_ = memory.store_answer("", "When is lunch?", "At noon, in the garden")
    found = {one.kind: one for one in memory.search("", "lunch")}
    assert found.keys() == {MemoryKind.TURN, MemoryKind.ANSWER}
    answer = found[MemoryKind.ANSWER]
    assert (answer.id, answer.assistant_text, answer.conversation) == (id_, "At noon, in the garden", "")


def test_a_very_long_turn_does_not_hide_what_is_at_its_end(memory: Memory) -> None:
    memory.archive("", [turn("word " * 100_000 + "albatross"), turn("short")])
    assert len(memory.search("", "albatross")) == 1


@pytest.mark.parametrize("count", [0, -1])
def test_no_results_are_wanted_and_none_come(memory: Memory, count: int) -> None:
    memory.archive("", [turn("apple")])
    assert memory.search("", "apple", max_results=count) == []


@pytest.mark.parametrize(
    "query", ["", " ", '"', '" OR *', "NEAR(a b)", "terms:x", "a AND", "-x", "^x", "(", "{a}:b", "*"]
)
def test_the_syntax_of_the_index_is_nothing_special(memory: Memory, query: str) -> None:
    memory.archive("", [turn("one near two and three or four")])
    memory.search("", query)
    memory.search("no user", query)


@given(st.text())
@examples(100, HealthCheck.function_scoped_fixture)
def test_any_text_is_a_question(memory: Memory, query: str) -> None:
    memory.archive("", [turn("something")])
    assert all(0 <= one.score <= 1 for one in memory.search("", query))


@given(st.text())
@examples(100, HealthCheck.function_scoped_fixture)
def test_a_turn_is_found_by_its_own_text(memory: Memory, text: str) -> None:
    said = turn(f"{text} quokka")
    memory.archive("", [said])
    assert encodable(said.user_text) in texts(memory.search("", said.user_text, max_results=200))
