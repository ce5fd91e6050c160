"""The official Anthropic client against `emberkeep serve` with the real default model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pydantic
import pytest

from helpers.server_process import STEADY, ServerProcess, serve

pytestmark = pytest.mark.slow

CACHED = {"type": "ephemeral"}
GREEDY: dict[str, Any] = {
    "model": "default",
    "max_tokens": 16,
    "messages": [{"role": "user", "content": "Name three animals that live in the sea."}],
    "extra_body": {"temperature": 0, "speculation": False},
}
RULES = " ".join(f"Rule {number}: answer in one short and friendly sentence." for number in range(20))


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serve(smollm2, tmp_path_factory.mktemp("data"), *STEADY) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def prompt_of(usage: Any) -> int:
    return int(usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens)


def test_a_streamed_message_is_the_message_in_pieces(client: anthropic.Anthropic) -> None:
    client.messages.create(**GREEDY)
    whole = client.messages.create(**GREEDY)
    with client.messages.stream(**GREEDY) as stream:
        pieces = list(stream.text_stream)
        message = stream.get_final_message()
    assert "".join(pieces) == text_of(message) == text_of(whole) != ""
    assert len(pieces) > 5
    assert (message.stop_reason, whole.stop_reason) == ("max_tokens", "max_tokens")
    assert message.usage.output_tokens == whole.usage.output_tokens == 16


def test_as_many_tokens_are_counted_as_are_used(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model="default", system=RULES, messages=GREEDY["messages"])
    used = client.messages.create(**{**GREEDY, "max_tokens": 1}, system=RULES).usage
    assert counted.input_tokens == prompt_of(used)


def test_what_stands_before_a_breakpoint_is_stored_and_read(client: anthropic.Anthropic) -> None:
    body = {
        **GREEDY,
        "max_tokens": 1,
        "system": [{"type": "text", "text": RULES + " Be kind.", "cache_control": CACHED}],
    }
    first = client.messages.create(**body).usage
    other = [{"role": "user", "content": "And three birds?"}]
    second = client.messages.create(**{**body, "messages": other}).usage
    assert first.cache_creation_input_tokens is not None and first.cache_creation_input_tokens > 0
    assert first.cache_creation is not None
    assert first.cache_creation.ephemeral_5m_input_tokens == first.cache_creation_input_tokens
    assert first.cache_read_input_tokens is not None and second.cache_read_input_tokens is not None
    stored = first.cache_read_input_tokens + first.cache_creation_input_tokens
    assert second.cache_read_input_tokens >= stored
    assert second.cache_creation_input_tokens == 0


def test_a_stream_begins_with_what_is_read(client: anthropic.Anthropic) -> None:
    client.messages.create(**GREEDY)
    with client.messages.stream(**GREEDY) as stream:
        start = next(event for event in stream if event.type == "message_start")
        last = stream.get_final_message().usage
    assert prompt_of(start.message.usage) == prompt_of(last)
    assert start.message.usage.cache_read_input_tokens == last.cache_read_input_tokens == prompt_of(last) - 1


def test_a_stop_sequence_ends_a_message_and_is_named(client: anthropic.Anthropic) -> None:
    client.messages.create(**GREEDY)
    full = text_of(client.messages.create(**GREEDY))
    word = full.split()[3]
    message = client.messages.create(**GREEDY, stop_sequences=["never", word])
    assert text_of(message) == full[: full.index(word)]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", word)


def test_an_answer_goes_on_where_the_client_began_it(client: anthropic.Anthropic) -> None:
    full = text_of(client.messages.create(**GREEDY))
    begun = " ".join(full.split(" ")[:4])
    messages = [*GREEDY["messages"], {"role": "assistant", "content": begun}]
    rest = text_of(client.messages.create(**{**GREEDY, "messages": messages}))
    assert (begun + rest).startswith(full[: len(begun) + 4])


def test_a_tool_is_called_as_its_schema_says_and_the_runner_runs_it(client: anthropic.Anthropic) -> None:
    asked: list[str] = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather in a city.

        Args:
            city: The city.
        """
        asked.append(city)
        return "Sunny, 21 degrees."

    runner = client.beta.messages.tool_runner(
        model="default",
        max_tokens=60,
        messages=[{"role": "user", "content": "What is the weather in Oslo?"}],
        tools=[get_weather],
        tool_choice={"type": "tool", "name": "get_weather"},
        extra_body={"temperature": 0},
        max_iterations=2,
    )
    first = next(iter(runner))
    call = first.content[-1]
    assert call.type == "tool_use" and call.name == "get_weather" and set(call.input) == {"city"}
    assert first.stop_reason == "tool_use"
    assert runner.generate_tool_call_response() is not None
    assert asked == [call.input["city"]]


def test_structured_outputs_fit_their_schema(client: anthropic.Anthropic) -> None:
    class Animal(pydantic.BaseModel):
        legs: int
        swims: bool

    asked = {**GREEDY, "max_tokens": 40, "messages": [{"role": "user", "content": "Describe a fish as JSON."}]}
    assert isinstance(client.messages.parse(**asked, output_format=Animal).parsed_output, Animal)


def test_an_agents_second_session_reuses_the_first_ones_beginning(client: anthropic.Anthropic) -> None:
    def ask(session: str, text: str) -> Any:
        user = json.dumps({"device_id": "d" * 64, "account_uuid": "", "session_id": session})
        system = [
            {"type": "text", "text": "You are a coding agent."},
            {"type": "text", "text": RULES, "cache_control": {**CACHED, "ttl": "1h"}},
        ]
        messages = [{"role": "user", "content": [{"type": "text", "text": text, "cache_control": CACHED}]}]
        body = {**GREEDY, "max_tokens": 1, "system": system, "messages": messages, "metadata": {"user_id": user}}
        return client.messages.create(**body).usage

    first = ask("one", "Rename the function.")
    second = ask("two", "Write a test for it.")
    assert first.cache_creation is not None and first.cache_creation.ephemeral_1h_input_tokens > 100
    assert second.cache_read_input_tokens >= first.cache_creation.ephemeral_1h_input_tokens


def test_what_is_wrong_is_said_in_its_errors(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="is not served here"):
        client.messages.create(**{**GREEDY, "model": "claude-none-1"})
    image = {"type": "image", "source": {"type": "url", "url": "https://example.com/x.png"}}
    with pytest.raises(anthropic.BadRequestError, match="reads text only"):
        client.messages.create(**{**GREEDY, "messages": [{"role": "user", "content": [image]}]})
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(**{**GREEDY, "max_tokens": -1})
