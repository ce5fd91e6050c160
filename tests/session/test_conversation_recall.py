"""What has left comes back where it is asked for: right before the question, and stays there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from emberkeep.errors import MemoryFailed
from emberkeep.types.request import Message, Recall
from helpers.conversing import Answer, Client, Harbour, ScriptedEngine, line

CONTEXT = 1280
RECALL_TOKENS = CONTEXT // 8


@pytest.fixture
def harbour(tmp_path: Path) -> Iterator[Harbour]:
    with Harbour(tmp_path, ScriptedEngine(context=CONTEXT)) as harbour:
        yield harbour


def told_a_secret(harbour: Harbour, secret: str = "My boat is called Zephyr.", **fields: object) -> Client:
    """A conversation in which something was said that has left."""
    client = Client(harbour, **fields)
    client.say(secret)
    client.talk_until_full()
    return client


def question(answer: Answer) -> str:
    """The last message of the user as the model sees it."""
    return answer.prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]


def test_the_best_of_what_left_stands_right_before_the_question(harbour):
    client = told_a_secret(harbour)
    answer = client.say("What is my boat called?")
    quote, _, asked = question(answer).partition("]\n\n")
    assert asked == "What is my boat called?"
    assert quote.startswith("[Earlier in this conversation:\n")
    assert "My boat is called Zephyr." in quote
    assert answer.completed.fit.recalled >= 1
    assert answer.prompt.count("Zephyr") == 1


def test_it_stays_within_its_tokens(harbour):
    client = told_a_secret(harbour)
    answer = client.say("What is my boat called?")
    quote = question(answer).removesuffix("What is my boat called?")
    assert (
        0 < len(harbour.backend.tokenizer.tokenize(quote, add_special=False, parse_special=False)) <= RECALL_TOKENS
    )


def test_of_a_turn_that_is_too_long_the_passage_comes_back(harbour):
    long = "oak " * 40 + "My **boat** is called Zephyr, 2**10. " + "elm " * 40
    client = told_a_secret(harbour, long)
    answer = client.say("What is my boat called?")
    assert "My **boat** is called Zephyr, 2**10." in question(answer)
    assert long not in answer.prompt


def test_it_stays_where_it_is_on_later_turns(harbour):
    client = told_a_secret(harbour)
    before = client.say("What is my boat called?")
    for text in ("Thanks.", "What else?"):
        answer = client.say(text)
        assert answer.prompt.startswith(before.prompt)
        assert answer.lookup.reused_tokens > 0.7 * answer.completed.usage.prompt_tokens
        before = answer


def test_what_is_there_already_is_not_quoted_twice(harbour):
    client = told_a_secret(harbour)
    client.say("What is my boat called?")
    again = client.say("What is my boat called, please?")
    assert again.prompt.count("My boat is called Zephyr.") == 1


def test_it_is_quoted_again_once_the_quote_has_left(harbour):
    client = told_a_secret(harbour)
    client.say("What is my boat called?")
    while "Zephyr" in client.say(line(len(client.messages))).prompt:
        pass
    assert "Zephyr" in question(client.say("What is my boat called?"))


def test_a_regenerated_answer_sees_the_same(harbour):
    client = told_a_secret(harbour)
    first = client.say("What is my boat called?")
    client.messages.pop()
    assert client.go_on().prompt == first.prompt


def test_it_comes_back_on_the_very_turn_on_which_other_things_leave(harbour):
    client = Client(harbour)
    client.say("My boat is called Zephyr.")
    for number in range(40):
        client.say(line(number))
        answer = client.say("What is my boat called?")
        if answer.evictions:
            break
        client.messages[-2:] = []
    assert "Zephyr" in question(answer)
    assert answer.lookup.moved_tokens > 0
    again = client.say("Thanks.")
    assert again.prompt.startswith(answer.prompt)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"conversation_id": "one"}, {"conversation_id": "two"}),
        ({"user": "ann", "conversation_id": "talk"}, {"user": "bob", "conversation_id": "talk"}),
    ],
    ids=["conversation", "user"],
)
def test_only_of_this(harbour, one, two):
    told_a_secret(harbour, **one)
    other = Client(harbour, **two)
    assert other.talk_until_full().evictions[0].archived
    assert "Zephyr" not in other.say("What is my boat called?").prompt


def test_not_of_another_conversation_that_began_with_the_same_words(harbour):
    harbour.engine.will_say("Hm.")
    one = told_a_secret(harbour, "Hello.")
    one.say("My boat is called Zephyr.")
    one.talk_until_full()
    harbour.engine.will_say("Ah.")
    two = told_a_secret(harbour, "Hello.")
    assert "Zephyr" in one.say("What is my boat called?").prompt
    assert "Zephyr" not in two.say("What is my boat called?").prompt


def test_nothing_comes_back_where_nothing_matches(harbour):
    client = told_a_secret(harbour)
    answer = client.say("Quelle heure est-il?")
    assert question(answer) == "Quelle heure est-il?"
    assert answer.completed.fit.recalled == 0


def test_nothing_comes_back_while_nothing_has_left(harbour):
    client = Client(harbour)
    client.say("My boat is called Zephyr.")
    assert question(client.say("What is my boat called?")) == "What is my boat called?"


@pytest.mark.parametrize("recall", [Recall.OFF, Recall.TOOL])
def test_nothing_comes_back_by_itself_where_that_is_not_wanted(harbour, recall):
    client = told_a_secret(harbour)
    answer = client.say("What is my boat called?", recall=recall)
    assert "Zephyr" not in answer.prompt


def test_in_the_middle_of_the_turn_of_an_agent_nothing_is_put_in(harbour):
    client = told_a_secret(harbour)
    client.say("What is my boat called?")
    client.messages.append(Message("assistant", "It is called Zephyr."))
    assert question(client.go_on()).endswith("What is my boat called?")


def test_what_comes_back_never_makes_a_prompt_too_long(harbour):
    """A question that fills nearly all of the context has no room for quotes."""
    client = told_a_secret(harbour)
    for words in range(20, 300, 35):
        text = line(words, words) + " What is my boat called?"
        if len(harbour.backend.tokenizer.tokenize(text, add_special=False, parse_special=False)) > CONTEXT - 200:
            break
        answer = client.say(text)
        client.messages[-2:] = []
        assert answer.completed.usage.prompt_tokens < CONTEXT
        assert question(answer).endswith(text)
    assert words > 90


def test_a_memory_that_cannot_be_read_is_no_reason_to_fail(harbour, monkeypatch):
    client = told_a_secret(harbour)

    def refuse(*args: object, **more: object) -> list[object]:
        raise MemoryFailed("No.")

    monkeypatch.setattr(harbour.memory, "search", refuse)
    assert question(client.say("What is my boat called?")) == "What is my boat called?"


def test_what_was_said_in_a_branch_that_was_left_does_not_come_back(harbour):
    client = told_a_secret(harbour, "My boat is called Zephyr.", conversation_id="b")
    edited = Client(harbour, conversation_id="b")
    edited.messages = [Message("user", "My boat is called Argo."), *client.messages[1:]]
    answer = edited.say("What is my boat called?")
    assert "Argo" in question(answer)
    assert "Zephyr" not in answer.prompt
