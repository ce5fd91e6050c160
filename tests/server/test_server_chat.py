"""Chat completions, as OpenAI's own client sees them and as they are on the wire."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from emberkeep.errors import (
    ContextExceeded,
    DeadlineExceeded,
    EngineError,
    InvalidField,
    Overloaded,
    RateLimited,
    TemplateFailed,
)
from emberkeep.types.events import (
    Divergence,
    Finished,
    FinishReason,
    Progress,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
)
from emberkeep.types.request import JsonFormat, Message, Tool, ToolCall, ToolChoice
from helpers.scripted_server import COMPLETED, ScriptedBackend, says

HELLO: Any = [{"role": "user", "content": "hi"}]
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "Look outside", "parameters": {"type": "object"}},
}
CALLS = [
    ToolCallDelta(0, 0, "call_1", "weather", '{"city":'),
    ToolCallDelta(0, 0, None, None, ' "Oslo"}'),
    ToolCallDelta(0, 1, "call_2", "weather", "{}"),
    Finished(0, FinishReason.TOOL_CALLS),
    COMPLETED,
]


def ask(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/v1/chat/completions", json={"messages": HELLO, **fields})


def events(response: httpx.Response) -> list[tuple[str, str]]:
    """(event name, data) of a whole stream."""
    blocks = [block.split("\n") for block in response.text.split("\n\n") if block]
    return [
        (block[0].removeprefix("event: ") if len(block) == 2 else "", block[-1].removeprefix("data: "))
        for block in blocks
    ]


def test_an_answer_has_openais_shape(backend: ScriptedBackend, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="default", messages=HELLO)
    assert answer.object == "chat.completion"
    assert answer.model == "org/tiny"
    assert answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "Hello world"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        12,
        3,
        15,
    )
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 8
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 1
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens == 0
    assert answer.usage.completion_tokens_details.rejected_prediction_tokens == 0


def test_an_answer_tells_timings_and_what_was_reused(backend: ScriptedBackend, http: httpx.Client) -> None:
    body = ask(http, conversation_id="c1").json()
    assert body["timings"] == {
        "cache_n": 8,
        "prompt_n": 4,
        "prompt_ms": 20.0,
        "prompt_per_second": 200.0,
        "predicted_n": 3,
        "predicted_ms": 30.0,
        "predicted_per_second": 100.0,
    }
    assert body["emberkeep"] == {
        "reused": {"hot": 1, "warm": 2, "cold": 5, "remote": 0},
        "moved_tokens": 0,
        "repaired_tokens": 0,
        "approximate": False,
        "load_ms": 0.5,
        "reason": "none",
        "divergence": None,
        "sources": [],
        "ttft_ms": 21.0,
        "queue_ms": 1.0,
        "saved_ms": 0.0,
        "plan": None,
        "truncated_tokens": 0,
        "truncated_messages": 0,
        "conversation_id": "c1",
    }


DRAFTED = replace(
    COMPLETED,
    usage=replace(COMPLETED.usage, accepted_prediction_tokens=2, rejected_prediction_tokens=5),
    timings=replace(COMPLETED.timings, draft_n=7, draft_n_accepted=2),
)
PREDICTION: Any = {"type": "content", "content": "Hello world"}


def test_drafts_are_told_where_there_were_some(backend: ScriptedBackend, http: httpx.Client) -> None:
    backend.reset(TextDelta(0, "Hello"), Finished(0, FinishReason.STOP), DRAFTED)
    timings = ask(http).json()["timings"]
    assert (timings["draft_n"], timings["draft_n_accepted"]) == (7, 2)


@pytest.mark.parametrize("stream", [False, True])
def test_openais_client_sends_a_prediction_and_reads_what_came_of_it(
    backend: ScriptedBackend, client: openai.OpenAI, stream: bool
) -> None:
    backend.reset(TextDelta(0, "Hello"), Finished(0, FinishReason.STOP), DRAFTED)
    asked: dict[str, Any] = {"model": "default", "messages": HELLO, "prediction": PREDICTION}
    if stream:
        *_, last = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        usage = last.usage
    else:
        usage = client.chat.completions.create(**asked, extra_body={"speculation": False}).usage
        assert backend.last.speculation is False
    assert backend.last.prediction == "Hello world"
    assert usage is not None and usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.accepted_prediction_tokens == 2
    assert usage.completion_tokens_details.rejected_prediction_tokens == 5


def test_a_text_completion_may_be_predicted_too(backend: ScriptedBackend, http: httpx.Client) -> None:
    body = {"prompt": "Once", "prediction": PREDICTION, "speculation": True}
    assert http.post("/v1/completions", json=body).status_code == 200
    assert (backend.last.prediction, backend.last.speculation) == ("Hello world", True)


@pytest.mark.parametrize(("where", "told"), [("message 2 (user)", "message 2 (user)"), ("", None)])
def test_a_divergence_is_told(backend: ScriptedBackend, http: httpx.Client, where: str, told: str | None) -> None:
    lookup = replace(COMPLETED.lookup, divergence=Divergence(7, "stored", "asked", where))
    backend.reset(Finished(0, FinishReason.STOP), replace(COMPLETED, lookup=lookup))
    divergence = ask(http).json()["emberkeep"]["divergence"]
    assert divergence == {"token_index": 7, "stored_text": "stored", "prompt_text": "asked", "where": told}


def test_a_plain_client_loop_reads_a_stream_to_its_end(backend: ScriptedBackend, client: openai.OpenAI) -> None:
    """The loop of every tutorial: it looks at `choices[0]` of every chunk."""
    text, finish = "", None
    for chunk in client.chat.completions.create(model="default", messages=HELLO, stream=True):
        text += chunk.choices[0].delta.content or ""
        finish = chunk.choices[0].finish_reason or finish
    assert (text, finish) == ("Hello world", "stop")


def test_the_clients_stream_helper_assembles_the_answer(backend: ScriptedBackend, client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True}
    with client.chat.completions.stream(model="default", messages=HELLO, stream_options=options) as stream:
        answer = stream.get_final_completion()
    assert answer.choices[0].message.content == "Hello world"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == 15


def test_the_first_chunk_carries_the_role_and_the_first_text(backend: ScriptedBackend, http: httpx.Client) -> None:
    name, data = events(ask(http, stream=True))[0]
    assert name == ""
    assert json.loads(data)["choices"][0]["delta"] == {"role": "assistant", "content": "Hello"}


def test_a_stream_ends_with_our_detail_then_usage_then_done(backend: ScriptedBackend, http: httpx.Client) -> None:
    response = ask(http, stream=True, stream_options={"include_usage": True}, conversation_id="c1")
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, detail, usage, done = events(response)
    assert done == ("", "[DONE]")
    assert json.loads(usage[1])["choices"] == []
    assert json.loads(usage[1])["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}
    assert detail[0] == "emberkeep"
    assert json.loads(detail[1])["emberkeep"]["reused"] == {"hot": 1, "warm": 2, "cold": 5, "remote": 0}
    assert json.loads(detail[1])["emberkeep"]["conversation_id"] == "c1"
    assert json.loads(detail[1])["timings"]["cache_n"] == 8
    assert all(json.loads(data)["usage"] is None for _, data in chunks)
    assert json.loads(chunks[-1][1])["choices"][0]["finish_reason"] == "stop"


def test_without_include_usage_no_chunk_speaks_of_usage(backend: ScriptedBackend, http: httpx.Client) -> None:
    assert '"usage"' not in ask(http, stream=True).text


@pytest.mark.parametrize("text", ['quote " and \\ and \n', "émoji 🙂", "a\u2028b", "\x00\x1f", "data: [DONE]"])
def test_any_text_survives_the_stream(backend: ScriptedBackend, client: openai.OpenAI, text: str) -> None:
    backend.reset(*says(text, text))
    chunks = client.chat.completions.create(model="default", messages=HELLO, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text * 2


def test_several_choices_keep_their_own_text(backend: ScriptedBackend, client: openai.OpenAI) -> None:
    backend.reset(
        TextDelta(1, "b"),
        TextDelta(0, "a"),
        TextDelta(1, "B"),
        Finished(1, FinishReason.LENGTH),
        Finished(0, FinishReason.STOP),
        COMPLETED,
    )
    answer = client.chat.completions.create(model="default", messages=HELLO, n=2)
    assert [choice.message.content for choice in answer.choices] == ["a", "bB"]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "length"]
    texts = ["", ""]
    roles: list[list[str]] = [[], []]
    for chunk in client.chat.completions.create(model="default", messages=HELLO, n=2, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        roles[choice.index] += [choice.delta.role] if choice.delta.role else []
    assert texts == ["a", "bB"]
    assert roles == [["assistant"], ["assistant"]]


def test_nothing_to_say_is_still_a_message(backend: ScriptedBackend, client: openai.OpenAI) -> None:
    backend.reset(Finished(0, FinishReason.LENGTH), COMPLETED)
    answer = client.chat.completions.create(model="default", messages=HELLO, max_tokens=0)
    assert answer.choices[0].message.content == ""
    assert backend.last.max_tokens == 0
    chunk = next(iter(client.chat.completions.create(model="default", messages=HELLO, stream=True)))
    assert (chunk.choices[0].delta.role, chunk.choices[0].delta.content) == ("assistant", "")
    assert chunk.choices[0].finish_reason == "length"


def test_reasoning_is_beside_the_content(backend: ScriptedBackend, http: httpx.Client) -> None:
    backend.reset(ReasoningDelta(0, "hm"), ReasoningDelta(0, "m"), *says("yes"))
    message = ask(http).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "yes", "reasoning_content": "hmm"}
    deltas = [json.loads(data)["choices"][0]["delta"] for _, data in events(ask(http, stream=True))[:3]]
    assert deltas == [
        {"role": "assistant", "content": None, "reasoning_content": "hm"},
        {"reasoning_content": "m"},
        {"content": "yes"},
    ]


def test_tool_calls_come_whole(backend: ScriptedBackend, client: openai.OpenAI) -> None:
    backend.reset(*CALLS)
    answer = client.chat.completions.create(model="default", messages=HELLO, tools=[WEATHER])
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert message.content is None
    calls: Any = message.tool_calls
    assert [(call.id, call.function.name, call.function.arguments) for call in calls] == [
        ("call_1", "weather", '{"city": "Oslo"}'),
        ("call_2", "weather", "{}"),
    ]


def test_tool_calls_come_in_pieces(backend: ScriptedBackend, client: openai.OpenAI) -> None:
    backend.reset(*CALLS)
    with client.chat.completions.stream(model="default", messages=HELLO, tools=[WEATHER]) as stream:
        message = stream.get_final_completion().choices[0].message
    assert [(call.id, call.function.arguments) for call in message.tool_calls or ()] == [
        ("call_1", '{"city": "Oslo"}'),
        ("call_2", "{}"),
    ]


def test_messages_tools_and_choice_reach_the_backend(backend: ScriptedBackend, client: openai.OpenAI) -> None:
    call: Any = {"id": "x", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages: Any = [
        {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "q", "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "x", "content": "sunny"},
    ]
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    client.chat.completions.create(
        model="default", messages=messages, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False
    )
    assert backend.last.messages == (
        Message("system", "a\nb"),
        Message("user", "q", name="ann"),
        Message("assistant", "", reasoning="hm", tool_calls=(ToolCall("x", "weather", "{}"),)),
        Message("tool", "sunny", tool_call_id="x"),
    )
    assert backend.last.tools == (Tool("weather", "Look outside", {"type": "object"}),)
    assert backend.last.tool_choice == ToolChoice("named", "weather")
    assert backend.last.parallel_tool_calls is False


def test_response_formats_reach_the_backend(backend: ScriptedBackend, client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    formats: Any = [
        ({"type": "text"}, None),
        ({"type": "json_object"}, JsonFormat()),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}, JsonFormat(schema)),
    ]
    for given, expected in formats:
        client.chat.completions.create(model="default", messages=HELLO, response_format=given)
        assert backend.last.format == expected


def test_logprobs(backend: ScriptedBackend, client: openai.OpenAI) -> None:
    other = TokenLogprob(6, b"\xff", float("-inf"))
    token = TokenLogprob(5, "é".encode(), -0.25, top=(other,))
    backend.reset(TextDelta(0, "é", logprobs=(token,)), Finished(0, FinishReason.STOP), COMPLETED)
    answer = client.chat.completions.create(model="default", messages=HELLO, logprobs=True, top_logprobs=1)
    assert backend.last.top_logprobs == 1
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    entry = logprobs.content[0]
    assert (entry.token, entry.logprob, entry.bytes) == ("é", -0.25, [0xC3, 0xA9])
    assert entry.top_logprobs[0].bytes == [0xFF]
    assert entry.top_logprobs[0].logprob == -9999.0
    chunks = client.chat.completions.create(model="default", messages=HELLO, logprobs=True, stream=True)
    first = next(iter(chunks)).choices[0]
    assert first.delta.content == "é"
    assert first.logprobs is not None


def test_progress_chunks_come_while_the_prompt_is_evaluated(backend: ScriptedBackend, http: httpx.Client) -> None:
    backend.reset(Progress(100, 40, 60, 1.5), *says("x"))
    frames = events(ask(http, stream=True, return_progress=True))
    assert backend.last.want_progress
    first = json.loads(frames[0][1])
    assert first["prompt_progress"] == {"total": 100, "cache": 40, "processed": 60, "time_ms": 1.5}


FAILURES = [
    (InvalidField("tools", "no."), 400, "invalid_request_error", "tools", None),
    (TemplateFailed("The template refused."), 400, "invalid_request_error", None, None),
    (ContextExceeded(9000, 4096), 400, "invalid_request_error", "messages", "context_length_exceeded"),
    (Overloaded("Full.", 2.2), 503, "overloaded", None, "overloaded"),
    (RateLimited("Too many.", 2.2), 429, "rate_limit_error", None, "rate_limit_exceeded"),
    (DeadlineExceeded("Too late."), 504, "deadline", None, "deadline_exceeded"),
    (EngineError("The engine broke."), 500, "server_error", None, None),
    (ZeroDivisionError("secret detail"), 500, "server_error", None, None),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "status", "kind", "param", "code"), FAILURES)
def test_an_error_before_the_first_event_has_its_status(
    backend: ScriptedBackend,
    http: httpx.Client,
    error: Exception,
    status: int,
    kind: str,
    param: str | None,
    code: str | None,
    stream: bool,
) -> None:
    backend.reset(error)
    response = ask(http, stream=stream)
    assert response.status_code == status
    body = response.json()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert (body["type"], body["param"], body["code"]) == (kind, param, code)
    assert "secret" not in response.text


@pytest.mark.parametrize("error", [Overloaded("Full.", 2.2), RateLimited("Too many.", 2.2)])
def test_who_must_wait_is_told_when_to_come_back(
    backend: ScriptedBackend, http: httpx.Client, error: Exception
) -> None:
    backend.reset(error)
    assert ask(http).headers["retry-after"] == "3"


@pytest.mark.parametrize(
    ("error", "kind"), [(DeadlineExceeded("Too late."), "deadline"), (KeyError("secret"), "server_error")]
)
def test_an_error_inside_a_stream_is_its_last_event(
    backend: ScriptedBackend, http: httpx.Client, error: Exception, kind: str
) -> None:
    backend.reset(TextDelta(0, "Hel"), error)
    frames = events(ask(http, stream=True))
    assert json.loads(frames[0][1])["choices"][0]["delta"]["content"] == "Hel"
    assert json.loads(frames[-1][1])["error"]["type"] == kind
    assert "secret" not in frames[-1][1]
    assert all(data != "[DONE]" for _, data in frames)


def test_a_backend_that_forgets_its_last_event_is_an_error(backend: ScriptedBackend, http: httpx.Client) -> None:
    backend.reset(TextDelta(0, "Hel"))
    assert ask(http).status_code == 500


@pytest.mark.parametrize("name", [None, "", "default", "org/tiny"])
def test_these_names_mean_the_served_model(backend: ScriptedBackend, http: httpx.Client, name: str | None) -> None:
    assert ask(http, model=name).status_code == 200


def test_another_model_is_not_found(backend: ScriptedBackend, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-9", messages=HELLO)
    assert caught.value.code == "model_not_found"
    assert backend.requests == []
