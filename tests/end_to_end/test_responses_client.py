"""The official OpenAI client: responses and conversations of `emberkeep serve` with the real default model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from helpers.server_process import RULES, STEADY, ServerProcess, serve

pytestmark = pytest.mark.slow

GREEDY: dict[str, Any] = {
    "model": "default",
    "temperature": 0,
    "max_output_tokens": 12,
    "extra_body": {"speculation": False},
}
ASK = "Name three animals that live in the sea."
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serve(smollm2, tmp_path_factory.mktemp("data"), *STEADY) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def evaluated(response: Any) -> int:
    """Tokens of the prompt that were not there already."""
    return int(response.usage.input_tokens - response.usage.input_tokens_details.cached_tokens)


def test_a_streamed_response_is_the_response_in_pieces(client: openai.OpenAI) -> None:
    client.responses.create(input=ASK, **GREEDY)
    whole = client.responses.create(input=ASK, **GREEDY)
    assert whole.status == "incomplete" and whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    with client.responses.stream(input=ASK, **GREEDY) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text != ""
    assert len(deltas) > 3


def test_a_chain_goes_on_from_the_state_of_its_last_turn(client: openai.OpenAI) -> None:
    first = client.responses.create(input=ASK, instructions=RULES, **GREEDY)
    second = client.responses.create(input="Why?", instructions=RULES, previous_response_id=first.id, **GREEDY)
    assert evaluated(second) < 40
    counted = client.responses.input_tokens.count(
        model="default", input="Why?", instructions=RULES, previous_response_id=first.id
    )
    assert second.usage is not None and counted.input_tokens == second.usage.input_tokens
    items = [item.type for item in client.responses.input_items.list(second.id)]
    assert items == ["message", "message", "message"]
    assert client.responses.retrieve(second.id).output_text == second.output_text
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)


def test_a_conversation_goes_on_from_the_state_of_its_last_turn(client: openai.OpenAI) -> None:
    conversation = client.conversations.create(items=[{"type": "message", "role": "system", "content": RULES}])
    client.responses.create(input=ASK, conversation=conversation.id, **GREEDY)
    second = client.responses.create(input="Why?", conversation=conversation.id, **GREEDY)
    assert evaluated(second) < 40
    assert len(client.conversations.items.list(conversation.id).data) == 5
    assert client.conversations.delete(conversation.id).deleted


def test_a_history_that_the_client_keeps_goes_on_too(client: openai.OpenAI) -> None:
    system: Any = {"role": "system", "content": RULES}
    history = [system, {"role": "user", "content": ASK}]
    first = client.responses.create(input=history, store=False, **GREEDY)
    history += [item.to_dict() for item in first.output]
    second = client.responses.create(input=[*history, {"role": "user", "content": "Why?"}], store=False, **GREEDY)
    assert evaluated(second) < 40


def test_a_tool_is_called_as_its_schema_says(client: openai.OpenAI) -> None:
    asked: Any = GREEDY | {"max_output_tokens": 60}
    response = client.responses.create(input="Rain in Oslo?", tools=[WEATHER], tool_choice="required", **asked)
    [call] = [item for item in response.output if item.type == "function_call"]
    assert call.name == "get_weather" and json.loads(call.arguments)["city"] in ("Paris", "Oslo")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."}
    told = client.responses.create(
        input=[result], tools=[WEATHER], tool_choice="none", previous_response_id=response.id, **GREEDY
    )
    assert [item.type for item in told.output] == ["message"]


def test_an_answer_fits_its_schema(client: openai.OpenAI) -> None:
    class Animal(BaseModel):
        kind: Literal["whale", "shark"]
        is_large: bool

    asked: Any = GREEDY | {"max_output_tokens": 60}
    parsed = client.responses.parse(input="Describe a whale.", text_format=Animal, **asked).output_parsed
    assert isinstance(parsed, Animal)


def test_log_probabilities_are_told(client: openai.OpenAI) -> None:
    include: Any = ["message.output_text.logprobs"]
    response = client.responses.create(input=ASK, include=include, top_logprobs=2, **GREEDY)
    [message] = response.output
    assert message.type == "message" and message.content[0].type == "output_text"
    logprobs = message.content[0].logprobs
    assert logprobs and all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in logprobs)


def test_a_response_in_the_background_is_cancelled(client: openai.OpenAI) -> None:
    endless: Any = GREEDY | {"max_output_tokens": 4000}
    started = client.responses.create(input="Count to a million.", background=True, **endless)
    assert started.status == "queued"
    assert client.responses.retrieve(started.id).status == "in_progress"
    assert client.responses.cancel(started.id).status == "cancelled"


def test_a_prompt_that_is_too_long_is_refused_or_shortened(client: openai.OpenAI) -> None:
    turns: Any = [{"role": role, "content": "word " * 900} for role in ("user", "assistant") * 6]
    history = [*turns, {"role": "user", "content": "Hello?"}]
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(input=history, truncation="disabled", **GREEDY)
    assert refused.value.code == "context_length_exceeded"
    counted = client.responses.input_tokens.count(model="default", input=history)
    assert counted.input_tokens > 8192
