"""Anthropic's official client, unmodified, against the server: messages, streams, tools, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pydantic
import pytest

from emberkeep.config.settings import Config
from emberkeep.errors import ContextExceeded, Overloaded, RateLimited
from emberkeep.types.events import (
    Accepted,
    Finished,
    FinishReason,
    Marked,
    Progress,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
)
from emberkeep.types.request import Message, Tool, ToolCall
from helpers.scripted_server import COMPLETED, Running, ScriptedBackend, Step, running, says

ASK: dict[str, Any] = {
    "model": "default",
    "max_tokens": 64,
    "messages": [{"role": "user", "content": "Hello"}],
}
TOOL = {"name": "get_weather", "description": "The weather.", "input_schema": {"type": "object"}}
STARTED = [Accepted(12), Progress(12, 8, 8, 0.1, Marked(10))]
ANSWERED: list[Step] = [*STARTED, *says("Hello", " world")]


def calls(*arguments: str) -> list[Step]:
    pieces = [ToolCallDelta(0, 0, None, None, piece) for piece in arguments]
    start = ToolCallDelta(0, 0, "call_1", "get_weather", "")
    return [TextDelta(0, "Let me see."), start, *pieces, Finished(0, FinishReason.TOOL_CALLS), COMPLETED]


@pytest.fixture(scope="module")
def claude(server: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


# ── at once ──


def test_a_message_is_answered(claude: anthropic.Anthropic, backend: ScriptedBackend) -> None:
    message = claude.messages.create(**ASK, system="Be kind.", stop_sequences=["END"], metadata={"user_id": "ann"})
    assert (message.role, message.type, message.model) == ("assistant", "message", "org/tiny")
    assert message.id.startswith("msg_")
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "Hello world"}]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message._request_id
    request = backend.last
    assert request.messages == (Message("system", "Be kind."), Message("user", "Hello"))
    assert (request.max_tokens, request.stop, request.user) == (64, ("END",), "ann")


def test_usage_tells_what_was_reused(claude: anthropic.Anthropic, backend: ScriptedBackend) -> None:
    usage = claude.messages.create(**ASK).usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (4, 8, 0)
    assert (usage.output_tokens, usage.service_tier) == (3, "standard")
    assert usage.output_tokens_details is not None and usage.output_tokens_details.thinking_tokens == 1


def test_what_is_ours_comes_beside_it(http: httpx.Client, backend: ScriptedBackend) -> None:
    told = http.post("/v1/messages", json=ASK).json()
    assert told["emberkeep"]["reused"] == {"hot": 1, "warm": 2, "cold": 5, "remote": 0}
    assert told["timings"]["cache_n"] == 8


def test_a_stop_sequence_is_named(claude: anthropic.Anthropic, backend: ScriptedBackend) -> None:
    backend.reset(TextDelta(0, "One"), Finished(0, FinishReason.STOP, "END"), COMPLETED)
    message = claude.messages.create(**ASK, stop_sequences=["END"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")


def test_tokens_are_counted(claude: anthropic.Anthropic, backend: ScriptedBackend) -> None:
    counted = claude.messages.count_tokens(model="default", messages=ASK["messages"], system="Be kind.")
    assert counted.input_tokens == len("Be kind.Hello")
    assert claude.beta.messages.count_tokens(model="default", messages=ASK["messages"]).input_tokens == 5


def test_models_are_listed_as_its_clients_expect(claude: anthropic.Anthropic, http: httpx.Client) -> None:
    (model,) = claude.models.list()
    assert (model.id, model.type, model.display_name, model.max_input_tokens) == (
        "org/tiny",
        "model",
        "org/tiny",
        4096,
    )
    assert model.created_at.year == 2023
    assert claude.models.retrieve("org/tiny").id == "org/tiny"
    assert http.get("/v1/models").json()["object"] == "list"


# ── streams ──


def test_a_stream_of_raw_events(claude: anthropic.Anthropic, backend: ScriptedBackend) -> None:
    backend.reset(*ANSWERED)
    events = list(claude.messages.create(**ASK, stream=True))
    assert [event.type for event in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start, last = events[0], events[-2]
    assert start.type == "message_start" and last.type == "message_delta"
    usage = start.message.usage
    assert (usage.input_tokens, usage.cache_creation_input_tokens, usage.cache_read_input_tokens) == (2, 2, 8)
    assert (last.usage.input_tokens, last.usage.output_tokens) == (4, 3)


def test_a_stream_is_text_and_a_message_in_the_end(claude: anthropic.Anthropic, backend: ScriptedBackend) -> None:
    with claude.messages.stream(**ASK) as stream:
        assert list(stream.text_stream) == ["Hello", " world"]
        message = stream.get_final_message()
    assert message.stop_reason == "end_turn" and message.usage.output_tokens == 3
    with claude.messages.stream(**ASK) as stream:
        assert stream.get_final_text() == "Hello world"


def test_thinking_comes_signed_and_goes_back(claude: anthropic.Anthropic, backend: ScriptedBackend) -> None:
    backend.reset(ReasoningDelta(0, "They "), ReasoningDelta(0, "greet."), *says("Hello"))
    with claude.messages.stream(**ASK, thinking={"type": "enabled", "budget_tokens": 1024}) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert {"thinking", "signature", "text"} <= set(kinds)
    thought, said = message.content
    assert thought.type == "thinking" and thought.thinking == "They greet." and thought.signature
    assert said.type == "text" and said.text == "Hello"
    again = [*ASK["messages"], message.to_param(), {"role": "user", "content": "And?"}]
    claude.messages.create(**{**ASK, "messages": again})
    assert backend.last.messages[1] == Message("assistant", "Hello", "They greet.")


def test_a_call_comes_in_pieces_and_its_result_goes_back(
    claude: anthropic.Anthropic, backend: ScriptedBackend
) -> None:
    backend.reset(*calls('{"city":', ' "Oslo"}'))
    with claude.messages.stream(**ASK, tools=[TOOL]) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        message = stream.get_final_message()
    assert pieces == ["", '{"city":', ' "Oslo"}']
    assert message.stop_reason == "tool_use"
    call = message.content[1]
    assert call.type == "tool_use" and (call.id, call.name, call.input) == (
        "call_1",
        "get_weather",
        {"city": "Oslo"},
    )
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "15 degrees"}
    again = [*ASK["messages"], message.to_param(), {"role": "user", "content": [result]}]
    claude.messages.create(**{**ASK, "messages": again}, tools=[TOOL], tool_choice={"type": "auto"})
    assert backend.last.messages[1:] == (
        Message("assistant", "Let me see.", tool_calls=(ToolCall("call_1", "get_weather", '{"city": "Oslo"}'),)),
        Message("tool", "15 degrees", tool_call_id="call_1", name="get_weather"),
    )
    assert backend.last.tools == (Tool("get_weather", "The weather.", {"type": "object"}),)


# ── what is made of it ──


def test_its_tool_runner_runs(claude: anthropic.Anthropic, backend: ScriptedBackend) -> None:
    asked: list[str] = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: Its name.
        """
        asked.append(city)
        backend.reset(*says("15 degrees."))
        return "15 degrees"

    backend.reset(*calls('{"city": "Oslo"}'))
    runner = claude.beta.messages.tool_runner(**ASK, tools=[get_weather])
    message = runner.until_done()
    assert asked == ["Oslo"]
    assert message.content[0].to_dict()["text"] == "15 degrees."
    assert [message.role for message in backend.last.messages] == ["user", "assistant", "tool"]
    assert backend.last.messages[-1] == Message("tool", "15 degrees", tool_call_id="call_1", name="get_weather")


def test_structured_outputs_are_parsed(claude: anthropic.Anthropic, backend: ScriptedBackend) -> None:
    class City(pydantic.BaseModel):
        name: str

    backend.reset(*says('{"name": "Oslo"}'))
    assert claude.messages.parse(**ASK, output_format=City).parsed_output == City(name="Oslo")
    assert backend.last.format is not None and "name" in json.dumps(backend.last.format.schema)  # type: ignore[union-attr]
    with claude.messages.stream(**ASK, output_format=City) as stream:
        assert stream.get_final_message().parsed_output == City(name="Oslo")


def test_what_a_coding_agent_sends_is_taken(http: httpx.Client, backend: ScriptedBackend) -> None:
    cached = {"type": "ephemeral"}
    user = json.dumps({"device_id": "d" * 64, "account_uuid": "", "session_id": "3c7f0d0e"})
    body = {
        **ASK,
        "max_tokens": 32000,
        "system": [
            {"type": "text", "text": "x-agent-billing: v=1;"},
            {"type": "text", "text": "You are a coding agent.", "cache_control": cached},
            {"type": "text", "text": "Long rules.", "cache_control": {**cached, "ttl": "1h"}},
        ],
        "tools": [{**TOOL, "eager_input_streaming": True}, {**TOOL, "name": "Bash", "cache_control": cached}],
        "metadata": {"user_id": user},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "medium"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "stream": True,
        "temperature": 1,
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219,oauth-2025-04-20"}
    answer = http.post("/v1/messages?beta=true", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.text.startswith("event: message_start\n")
    assert (backend.last.user, backend.last.cache_key) == (json.dumps({"device_id": "d" * 64}), "3c7f0d0e")
    assert len(backend.last.breakpoints) == 3


def test_its_threads_send_everything_again(claude: anthropic.Anthropic, backend: ScriptedBackend) -> None:
    thread = claude.beta.messages.thread(model="default", max_tokens=64)
    for text in ("Hello", "And?", "Well?"):
        thread.send({"role": "user", "content": text})
    assert [message.role for message in backend.last.messages] == ["user", "assistant"] * 2 + ["user"]
    assert len(backend.requests) == 3


# ── what goes wrong ──


@pytest.mark.parametrize(
    ("error", "expected", "status", "kind"),
    [
        (ContextExceeded(9000, 4096), anthropic.BadRequestError, 400, "invalid_request_error"),
        (RateLimited("Slow down.", 1.0), anthropic.RateLimitError, 429, "rate_limit_error"),
        (Overloaded("Later.", 1.0), anthropic.InternalServerError, 503, "overloaded_error"),
        (RuntimeError("oh"), anthropic.InternalServerError, 500, "api_error"),
    ],
)
def test_errors_are_those_that_its_client_knows(
    claude: anthropic.Anthropic, backend: ScriptedBackend, error: Any, expected: Any, status: int, kind: str
) -> None:
    backend.reset(error)
    for more in ({}, {"stream": True}):
        with pytest.raises(expected) as failed:
            claude.messages.create(**ASK, **more)
        assert failed.value.status_code == status
        assert (failed.value.type, failed.value.request_id is not None) == (kind, True)
        assert set(failed.value.body) == {"type", "error", "request_id"}


def test_agents_find_the_words_by_which_they_notice_a_full_context(
    claude: anthropic.Anthropic, backend: ScriptedBackend
) -> None:
    backend.reset(ContextExceeded(9000, 4096))
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: .*9000"):
        claude.messages.create(**ASK)


def test_an_error_in_the_middle_ends_the_stream(claude: anthropic.Anthropic, backend: ScriptedBackend) -> None:
    backend.reset(TextDelta(0, "Hel"), Overloaded("Later.", 1.0))
    with (
        pytest.raises(anthropic.APIStatusError, match="overloaded_error"),
        claude.messages.stream(**ASK) as stream,
    ):
        stream.until_done()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"model": "claude-opus-9"}, anthropic.NotFoundError),
        ({"messages": []}, anthropic.BadRequestError),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, anthropic.BadRequestError),
    ],
)
def test_bad_requests_are_refused(
    claude: anthropic.Anthropic, backend: ScriptedBackend, body: dict[str, Any], expected: Any
) -> None:
    with pytest.raises(expected):
        claude.messages.create(**{**ASK, **body})
    assert not backend.requests


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", 404, "not_found_error"),
        ("POST", "/v1/messages", 400, "invalid_request_error"),
    ],
)
def test_errors_of_the_server_itself_have_its_shape(
    http: httpx.Client, method: str, path: str, status: int, kind: str
) -> None:
    answer = http.request(method, path, content=b"no json" if method == "POST" else None)
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == kind
    assert answer.json()["request_id"] == answer.headers["request-id"]


def test_the_key_comes_in_either_header() -> None:
    with running(ScriptedBackend(), Config(api_key="secret")) as server:
        for given in ({"api_key": "secret"}, {"auth_token": "secret"}):
            with anthropic.Anthropic(base_url=server.url, max_retries=0, **given) as client:
                assert client.messages.create(**ASK).stop_reason == "end_turn"
        with (
            anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0) as client,
            pytest.raises(anthropic.AuthenticationError),
        ):
            client.messages.create(**ASK)
