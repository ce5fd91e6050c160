"""Gemini's provider: its real SDK against a server that speaks its wire format."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from emberkeep.backend.remote.base import RemoteAbout
from emberkeep.backend.remote.gemini import GeminiProvider, open_gemini
from emberkeep.errors import (
    EmberkeepError,
    InvalidField,
    RemoteDown,
    RemoteError,
    RemoteFull,
    RemoteRefused,
    RequestError,
)
from emberkeep.types.events import (
    Completed,
    Event,
    Finished,
    FinishReason,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    Usage,
)
from emberkeep.types.models import RemoteModel
from emberkeep.types.request import Image, JsonFormat, Message, Request, Sampling, Tool, ToolCall, ToolChoice
from helpers.vendors.driving import HELLO, about, ask_when_it_is_gone, asking, drive, events_of, leave_early
from helpers.vendors.gemini_server import KEY, MODEL, GeminiServer, blocked, camel, chunk, failed, last, said
from helpers.vendors.loopback import Reply, Stream

pytestmark = pytest.mark.slow

REMOTE = RemoteModel("gem", "gemini", MODEL, api_key_env="GEMINI_API_KEY")
WEATHER = Tool("weather", "Of a place.", {"type": "object", "properties": {"place": {"type": "string"}}})
SIGNATURE = base64.b64encode(b"signed").decode()
CALL = {"functionCall": {"id": "fc-1", "name": "weather", "args": {"place": "Lyon"}}}


def with_provider(
    server: GeminiServer, use: Callable[[GeminiProvider, GeminiServer], Awaitable[Any]], key: str = KEY
) -> Any:
    return drive(lambda: server, lambda url: GeminiProvider(replace(REMOTE, base_url=url), key), use)


def ask(server: GeminiServer, *requests: Request, key: str = KEY) -> list[Event]:
    """The events of the last of them."""
    return with_provider(server, asking(*requests), key)  # type: ignore[no-any-return]


def sent(request: Request) -> Any:
    server = GeminiServer()
    ask(server, request)
    return camel(server.asked[-1].body)


def error_of(*replies: Reply | Stream, key: str = KEY) -> EmberkeepError:
    with pytest.raises(EmberkeepError) as caught:
        ask(GeminiServer(*replies), HELLO, key=key)
    return caught.value


def followed(events: list[Event], *results: str) -> Request:
    """The next request of a client that has run the calls of an answer."""
    begun = [one for one in events if isinstance(one, ToolCallDelta)]
    calls = tuple(ToolCall(one.id or "", one.name or "", one.arguments) for one in begun)
    answers = [Message("tool", text, tool_call_id=call.id) for call, text in zip(calls, results, strict=True)]
    return replace(HELLO, messages=(*HELLO.messages, Message("assistant", tool_calls=calls), *answers))


def told_back(stream: Stream, *results: str) -> Any:
    """What is sent as history after an answer with calls."""
    server = GeminiServer(stream)

    async def use(provider: GeminiProvider, _: GeminiServer) -> None:
        events = await events_of(provider, HELLO)
        await events_of(provider, followed(events, *results))

    with_provider(server, use)
    return camel(server.asked[-1].body)["contents"]


def test_text_comes_in_pieces_and_ends_with_what_it_took() -> None:
    counts = {"cachedContentTokenCount": 4, "thoughtsTokenCount": 5}
    events = ask(GeminiServer(said("Hel", "lo!", **counts)), HELLO)
    assert events[:3] == [TextDelta(0, "Hel"), TextDelta(0, "lo!"), Finished(0, FinishReason.STOP)]
    assert isinstance(events[3], Completed)
    assert events[3].usage == Usage(10, 12, 4, 5)


def test_thoughts_are_reasoning() -> None:
    stream = Stream([chunk({"text": "Hm.", "thought": True}), chunk({"text": "Yes."}), last("MAX_TOKENS")])
    events = ask(GeminiServer(stream), HELLO)
    assert events[:3] == [ReasoningDelta(0, "Hm."), TextDelta(0, "Yes."), Finished(0, FinishReason.LENGTH)]


@pytest.mark.parametrize(
    ("wanted", "thinking"),
    [
        ({}, None),
        ({"enable_thinking": True}, {"includeThoughts": True}),
        ({"enable_thinking": False}, {"thinkingBudget": 0}),
    ],
)
def test_a_request_can_say_whether_to_think(wanted: dict[str, bool], thinking: Any) -> None:
    body = sent(replace(HELLO, template_args=wanted))
    assert body.get("generationConfig", {}).get("thinkingConfig") == thinking


def test_calls_keep_their_ids_and_get_one_where_there_is_none() -> None:
    nameless = {"functionCall": {"name": "now"}}
    events = ask(GeminiServer(Stream([chunk(CALL, nameless), last()])), HELLO)
    first, second = (one for one in events if isinstance(one, ToolCallDelta))
    assert (first.call_index, first.id, first.name) == (0, "fc-1", "weather")
    assert json.loads(first.arguments) == {"place": "Lyon"}
    assert second.call_index == 1 and second.id and second.arguments == "{}"
    assert events[-2] == Finished(0, FinishReason.TOOL_CALLS)


def test_only_one_call_comes_where_only_one_is_wanted() -> None:
    server = GeminiServer(Stream([chunk(CALL, CALL), last()]))
    events = ask(server, replace(HELLO, parallel_tool_calls=False))
    assert len([one for one in events if isinstance(one, ToolCallDelta)]) == 1


def test_signatures_go_back_with_their_calls() -> None:
    signed = {**CALL, "thoughtSignature": SIGNATURE}
    second = {"functionCall": {"id": "fc-2", "name": "weather", "args": {"place": "Nice"}}}
    contents = told_back(Stream([chunk(signed, second), last()]), "rain", "sun")
    assert [content["role"] for content in contents] == ["user", "model", "user"]
    assert contents[1]["parts"] == [signed, second]
    assert contents[2]["parts"] == [
        {"functionResponse": {"id": "fc-1", "name": "weather", "response": {"output": "rain"}}},
        {"functionResponse": {"id": "fc-2", "name": "weather", "response": {"output": "sun"}}},
    ]


def test_calls_that_were_made_elsewhere_are_told_as_text() -> None:
    called = Message("assistant", tool_calls=(ToolCall("call_1", "weather", '{"place": "Lyon"}'),))
    messages = (*HELLO.messages, called, Message("tool", "rain", tool_call_id="call_1"))
    contents = sent(Request(messages=messages))["contents"]
    assert [part["text"] for content in contents[1:] for part in content["parts"]] == [
        '[weather was called with {"place": "Lyon"}]',
        '[weather gave "rain"]',
    ]


def test_only_what_was_chosen_is_sent() -> None:
    assert set(sent(HELLO)) - {"generationConfig"} == {"contents"}
    chosen = Sampling(temperature=0, top_k=5, seed=3, min_p=0.2)
    body = sent(replace(HELLO, sampling=chosen, stop=("END",), max_tokens=9))
    expected = {"temperature": 0, "topK": 5, "seed": 3, "stopSequences": ["END"], "maxOutputTokens": 9}
    assert body["generationConfig"] == expected


def test_the_first_system_messages_are_the_system_and_later_ones_are_marked() -> None:
    messages = (
        Message("system", "Be kind."),
        Message("developer", "Be brief."),
        Message("user", "Hello?"),
        Message("system", "It is late."),
    )
    body = sent(Request(messages=messages))
    assert body["systemInstruction"]["parts"] == [{"text": "Be kind.\n\nBe brief."}]
    (turn,) = body["contents"]
    assert [part["text"] for part in turn["parts"]] == ["Hello?", "<system>\nIt is late.\n</system>"]


def test_images_are_sent_as_bytes_or_by_their_address() -> None:
    data = base64.b64encode(b"png").decode()
    images = (Image(f"data:image/png;base64,{data}"), Image("https://example.org/cat.webp?size=2"))
    (turn,) = sent(Request(messages=(Message("user", "What?", images=images),)))["contents"]
    assert turn["parts"][1:] == [
        {"inlineData": {"data": data, "mimeType": "image/png"}},
        {"fileData": {"fileUri": "https://example.org/cat.webp?size=2", "mimeType": "image/webp"}},
    ]


def test_an_image_that_is_none_is_the_fault_of_the_request() -> None:
    broken = Message("user", images=(Image("data:image/png;base64,%%%"),))
    with pytest.raises(InvalidField):
        sent(Request(messages=(broken,)))


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (ToolChoice(), {"mode": "AUTO"}),
        (ToolChoice("none"), {"mode": "NONE"}),
        (ToolChoice("required"), {"mode": "ANY"}),
        (ToolChoice("named", "weather"), {"mode": "ANY", "allowedFunctionNames": ["weather"]}),
    ],
)
def test_which_tools_may_be_called_is_said(choice: ToolChoice, expected: Any) -> None:
    body = sent(replace(HELLO, tools=(WEATHER,), tool_choice=choice))
    assert body["toolConfig"]["functionCallingConfig"] == expected
    declared = {"name": "weather", "description": "Of a place.", "parametersJsonSchema": WEATHER.parameters}
    assert body["tools"] == [{"functionDeclarations": [declared]}]


def test_a_schema_is_kept_to() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    made = sent(replace(HELLO, format=JsonFormat(schema)))["generationConfig"]
    assert made == {"responseMimeType": "application/json", "responseJsonSchema": schema}
    assert sent(replace(HELLO, format=JsonFormat()))["generationConfig"] == {
        "responseMimeType": "application/json"
    }


def test_a_service_that_has_too_much_to_do_says_when_to_come_back() -> None:
    delay = [{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "34.5s"}]
    error = error_of(failed(429, "RESOURCE_EXHAUSTED", "Quota exceeded.", delay))
    assert isinstance(error, RemoteDown) and error.retry_after == 34.5
    assert f"{MODEL} at 127.0.0.1" in str(error)


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (failed(503, "UNAVAILABLE", "The model is overloaded."), RemoteDown),
        (failed(403, "PERMISSION_DENIED", "Not yours."), RemoteRefused),
        (
            failed(400, "INVALID_ARGUMENT", "The input token count (9) exceeds the maximum number of tokens."),
            RemoteFull,
        ),
        (failed(400, "INVALID_ARGUMENT", "contents: nonsense"), RequestError),
        (failed(404, "NOT_FOUND", "models/x is not found"), RemoteError),
        (Reply("<html>Bad gateway</html>", 502), RemoteDown),
        (Stream([chunk({"text": "Hel"})]), RemoteDown),
        (Stream([chunk({"text": "Hel"})], end="broken"), RemoteDown),
        (Stream(["data: {not json\r\n\r\n"]), RemoteError),
        (Stream([chunk({"text": "x"}), 'data: {"error": {"code": 503, "message": "Busy"}}\r\n\r\n']), RemoteDown),
        (Stream([last("SAFETY")]), RequestError),
        (Stream([last("MALFORMED_FUNCTION_CALL")]), RemoteError),
        (blocked("PROHIBITED_CONTENT"), RequestError),
    ],
)
def test_what_goes_wrong_is_said_in_our_words(reply: Reply | Stream, expected: type[EmberkeepError]) -> None:
    error = error_of(reply)
    assert type(error) is expected
    assert MODEL in str(error) and "\n" not in str(error)


def test_a_request_is_sent_once_whatever_happens() -> None:
    server = GeminiServer(failed(500, "INTERNAL", "x"))
    with pytest.raises(RemoteDown):
        ask(server, HELLO)
    assert len(server.asked) == 1


def test_a_service_that_is_not_there_is_down() -> None:
    with pytest.raises(RemoteDown, match="cannot be reached"):
        with_provider(GeminiServer(), ask_when_it_is_gone)


def test_an_event_is_there_before_the_next_one_is_written_and_leaving_closes_the_connection() -> None:
    server = GeminiServer(Stream([chunk({"text": "Hel"})], end="never"))
    assert with_provider(server, leave_early) == TextDelta(0, "Hel")


def test_a_wrong_key_is_refused_and_shown_nowhere(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    wrong = "AIzaWrongcanary55"
    caplog.set_level(logging.DEBUG)
    error = error_of(key=wrong)
    assert isinstance(error, RemoteRefused)
    assert "GEMINI_API_KEY" in str(error)
    printed = capfd.readouterr()
    shown = [str(error), repr(error), str(error.__cause__), caplog.text, printed.out, printed.err]
    shown += [repr(GeminiProvider(REMOTE, wrong)), repr(vars(GeminiProvider(REMOTE, wrong)))]
    assert not [text for text in shown if "canary" in text]


def test_without_a_key_nothing_is_opened() -> None:
    with pytest.raises(RemoteRefused, match="GEMINI_API_KEY"):
        open_gemini(REMOTE, None)


def test_it_says_what_it_has() -> None:
    assert with_provider(GeminiServer(), about) == RemoteAbout((MODEL,), 1_048_576)
