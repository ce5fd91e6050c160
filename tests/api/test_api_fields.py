"""What every API takes besides its own fields, and what none of them ignores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from emberkeep.api.anthropic_messages import MessagesBody
from emberkeep.api.body import validate
from emberkeep.api.ollama_body import GenerateBody, OllamaChatBody
from emberkeep.api.openai_chat import ChatBody
from emberkeep.api.openai_completions import CompletionBody
from emberkeep.api.responses_body import ResponseBody
from emberkeep.errors import InvalidField
from emberkeep.types.request import AnswerFormat, ChoiceFormat, GrammarFormat, JsonFormat, Recall, Request

HELLO = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object"}
Door = Callable[..., Request]


def chat(**fields: Any) -> Request:
    return validate(ChatBody, {"messages": HELLO, **fields}).to_request()


def completion(**fields: Any) -> Request:
    return validate(CompletionBody, {"prompt": "Hi", **fields}).to_requests()[0]


def message(**fields: Any) -> Request:
    return validate(MessagesBody, {"messages": HELLO, "max_tokens": 1, **fields}).to_request()


def response(**fields: Any) -> Request:
    body = validate(ResponseBody, {"input": "Hi", **fields})
    return body.to_request(body.to_items())


def ollama_chat(**fields: Any) -> Request:
    return validate(OllamaChatBody, {"messages": HELLO, **fields}).to_request()


def ollama_chat_options(**fields: Any) -> Request:
    return ollama_chat(options=fields)


def ollama_generate_options(**fields: Any) -> Request:
    return validate(GenerateBody, {"prompt": "Hi", "options": fields}).to_request()


@pytest.mark.parametrize(
    "door", [chat, completion, message, response, ollama_chat_options, ollama_generate_options]
)
def test_what_is_drawn_and_reused_is_said_in_the_same_words(door: Door) -> None:
    prediction = {"type": "content", "content": "Hello"}
    asked = door(
        top_k=7,
        stop=["END"],
        cache_prompt=False,
        id_slot=1,
        kv_bits=8,
        approximate=False,
        speculation=False,
        prediction=prediction,
    )
    assert (asked.sampling.top_k, asked.stop, asked.prediction) == (7, ("END",), "Hello")
    assert (asked.use_cache, asked.slot, asked.kv_bits) == (False, 1, 8)
    assert (asked.approximate, asked.speculation) == (False, False)
    usual = door(id_slot=-1)
    assert (usual.use_cache, usual.slot, usual.kv_bits, usual.approximate) == (True, None, None, None)


@pytest.mark.parametrize("door", [chat, message, response, ollama_chat])
def test_what_becomes_of_a_long_conversation_is_said_in_the_same_words(door: Door) -> None:
    asked = door(evict=False, recall="off")
    assert (asked.evict, asked.recall) == (False, Recall.OFF)
    assert (door().evict, door().recall) == (None, None)


def test_an_apis_own_word_for_it_comes_first() -> None:
    assert response(truncation="auto", evict=False).evict is True
    assert ollama_chat(truncate=False, evict=True).evict is False


@pytest.mark.parametrize("door", [chat, completion, message, response])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"grammar": 'root ::= "a"'}, GrammarFormat('root ::= "a"', param="grammar")),
        ({"json_schema": SCHEMA}, JsonFormat(SCHEMA, param="json_schema")),
        ({"guided_choice": ["a", "b"]}, ChoiceFormat(("a", "b"), param="guided_choice")),
        ({"response_format": {"type": "json_object"}}, JsonFormat()),
    ],
)
def test_what_an_answer_must_look_like_is_ignored_nowhere(
    door: Door, fields: dict[str, Any], expected: AnswerFormat
) -> None:
    assert door(**fields).format == expected


@pytest.mark.parametrize(
    ("door", "own"),
    [
        (message, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
        (response, {"text": {"format": {"type": "json_object"}}}),
    ],
)
def test_an_answer_looks_like_one_thing(door: Door, own: dict[str, Any]) -> None:
    assert door(**own).format is not None
    with pytest.raises(InvalidField, match="grammar: goes without"):
        door(**own, grammar='root ::= "a"')


def test_an_answer_that_was_begun_has_no_other_form() -> None:
    begun = [*HELLO, {"role": "assistant", "content": "He"}]
    assert message(messages=begun).continues
    with pytest.raises(InvalidField, match="grammar: goes without a last message"):
        message(messages=begun, grammar='root ::= "a"')
