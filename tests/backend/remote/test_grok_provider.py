"""Grok's provider: xAI's real SDK against a gRPC server with its own servicers."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from grpc import StatusCode
from xai_sdk.proto import chat_pb2

from emberkeep.backend.remote.base import RemoteAbout
from emberkeep.backend.remote.grok import GrokProvider, open_grok
from emberkeep.errors import (
    ConfigError,
    EmberkeepError,
    RemoteDown,
    RemoteError,
    RemoteFull,
    RemoteRefused,
    RequestError,
)
from emberkeep.types.events import Event, FinishReason, ReasoningDelta, TextDelta, ToolCallDelta, Usage
from emberkeep.types.models import RemoteModel
from emberkeep.types.request import Image, JsonFormat, Message, Request, Sampling, Tool, ToolCall, ToolChoice
from helpers.events import end_of
from helpers.vendors.driving import (
    CALLED,
    HELLO,
    RAIN,
    about,
    ask_when_it_is_gone,
    asking,
    drive,
    events_of,
    leave_early,
    sending,
)
from helpers.vendors.grok_server import HANG, KEY, MODEL, GrokServer, Step, call, chunk, ended, failed

WEATHER = Tool("weather", "Of a place.", {"properties": {"place": {"type": "string"}}})


def with_provider(
    use: Callable[[GrokProvider, GrokServer], Awaitable[Any]],
    *scripts: Sequence[Step],
    key: str = KEY,
    model: str = MODEL,
) -> Any:
    def open_at(url: str) -> GrokProvider:
        return GrokProvider(RemoteModel("grok", "grok", model, url, "XAI_API_KEY", max_tokens=64), key)

    return drive(lambda: GrokServer(*scripts), open_at, use)


def ask(request: Request, *scripts: Sequence[Step], **settings: Any) -> list[Event]:
    return with_provider(asking(request), *scripts, **settings)  # type: ignore[no-any-return]


def sent(request: Request, **settings: Any) -> Any:
    """The message that reaches the server."""
    return with_provider(sending(request), **settings)


def test_thoughts_and_text_come_in_pieces_and_end_with_the_usage() -> None:
    last = ended(completion_tokens=5, reasoning_tokens=20, cached_prompt_text_tokens=8)

    events = ask(HELLO, [chunk(reasoning_content="Hm."), chunk(content="Good"), chunk(content=" day"), last])

    assert events[:3] == [ReasoningDelta(0, "Hm."), TextDelta(0, "Good"), TextDelta(0, " day")]
    finished, completed = end_of(events)
    assert finished.reason is FinishReason.STOP
    assert completed.usage == Usage(10, 25, 8, 20)
    assert end_of(ask(HELLO, [ended("REASON_MAX_LEN")]))[0].reason is FinishReason.LENGTH


def test_an_event_is_there_before_the_next_one_is_written_and_leaving_cancels_the_call() -> None:
    assert with_provider(leave_early, [chunk(content="Wait"), HANG]) == TextDelta(0, "Wait")


def test_calls_are_passed_on_even_if_their_arguments_are_no_json_and_xais_own_are_not() -> None:
    calls = [
        call("w1", "web_search", "{}", "WEB_SEARCH_TOOL"),
        call("c1", "weather", "{oops"),
        call("c2", "clock", ""),
    ]

    events = ask(HELLO, [chunk(tool_calls=calls), ended("REASON_TOOL_CALLS")])

    assert events[:2] == [ToolCallDelta(0, 0, "c1", "weather", "{oops"), ToolCallDelta(0, 1, "c2", "clock", "{}")]
    assert end_of(events)[0].reason is FinishReason.TOOL_CALLS


def test_history_with_tools_goes_out_in_xais_form() -> None:
    odd = Message("assistant", "Once more.", tool_calls=(ToolCall("c0", "weather", "{oops"),))
    messages = (Message("system", "Be brief."), odd, Message("user", "Rain?", name="ann"), CALLED, RAIN)

    asked = sent(Request(messages=messages, tools=(WEATHER,), parallel_tool_calls=False))

    roles = [chat_pb2.MessageRole.Name(message.role) for message in asked.messages]
    assert roles == ["ROLE_SYSTEM", "ROLE_ASSISTANT", "ROLE_USER", "ROLE_ASSISTANT", "ROLE_TOOL"]
    assert [message.content[0].text for message in asked.messages] == [
        "Be brief.",
        "Once more.",
        "Rain?",
        "",
        "rain",
    ]
    assert asked.messages[2].name == "ann"
    assert asked.messages[3].tool_calls[0] == call("c1", "weather", '{"place": "Lyon"}')
    assert asked.messages[3].reasoning_content == "Lyon, then."
    assert asked.messages[4].tool_call_id == "c1"
    assert asked.tools[0].function.name == "weather"
    assert json.loads(asked.tools[0].function.parameters)["properties"] == {"place": {"type": "string"}}
    assert asked.tool_choice.mode == chat_pb2.TOOL_MODE_AUTO
    assert asked.HasField("parallel_tool_calls") and asked.parallel_tool_calls is False


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (ToolChoice("none"), chat_pb2.ToolChoice(mode=chat_pb2.TOOL_MODE_NONE)),
        (ToolChoice("required"), chat_pb2.ToolChoice(mode=chat_pb2.TOOL_MODE_REQUIRED)),
        (ToolChoice("named", "weather"), chat_pb2.ToolChoice(function_name="weather")),
    ],
)
def test_the_choice_of_tools_is_passed_on(choice: ToolChoice, expected: Any) -> None:
    assert sent(Request(messages=HELLO.messages, tools=(WEATHER,), tool_choice=choice)).tool_choice == expected


def test_encrypted_thoughts_come_back_with_their_call() -> None:
    first = [
        chunk(encrypted_content="opa"),
        chunk(encrypted_content="que", tool_calls=[call("c1", "weather", "{}")]),
    ]

    async def use(provider: GrokProvider, server: GrokServer) -> Any:
        await events_of(provider, Request(messages=HELLO.messages, tools=(WEATHER,)))
        await events_of(provider, Request(messages=(Message("user", "Rain?"), CALLED, RAIN), tools=(WEATHER,)))
        return server.asked

    before, after = with_provider(use, [*first, ended("REASON_TOOL_CALLS")])

    assert before.use_encrypted_content
    assert after.messages[1].encrypted_content == "opaque"


def test_images_follow_the_text_whatever_their_address() -> None:
    images = (Image("data:image/png;base64,AAAA"), Image("https://example.org/cat.png"))

    content = sent(Request(messages=(Message("user", "Which is it?", images=images),))).messages[0].content

    assert content[0].text == "Which is it?"
    assert [part.image_url.image_url for part in content[1:]] == [image.url for image in images]


def test_only_what_the_user_chose_is_sent() -> None:
    plain = sent(HELLO)
    fields = {descriptor.name for descriptor, _ in plain.ListFields()}
    assert fields == {"messages", "model", "max_tokens"} and plain.max_tokens == 64

    schema = {"type": "object"}
    full = sent(
        Request(
            messages=HELLO.messages,
            sampling=Sampling(temperature=0.5, top_k=1, seed=2**40 + 7),
            max_tokens=9,
            stop=("END",),
            user="ann",
            format=JsonFormat(schema),
        )
    )

    assert (full.temperature, full.seed, full.max_tokens, list(full.stop)) == (0.5, 7, 9, ["END"])
    assert full.response_format.format_type == chat_pb2.FORMAT_TYPE_JSON_SCHEMA
    assert json.loads(full.response_format.schema) == schema
    assert full.safety_identifier and "ann" not in full.safety_identifier


def test_a_conversation_finds_its_server_again() -> None:
    async def use(provider: GrokProvider, server: GrokServer) -> list[str | None]:
        await events_of(provider, HELLO)
        await events_of(provider, Request(messages=HELLO.messages, conversation_id="talk-1"))
        await events_of(provider, Request(messages=HELLO.messages, conversation_id="Gespräch"))
        return [metadata.get("x-grok-conv-id") for metadata in server.metadata]

    first, named, unspeakable = with_provider(use)

    assert (first, named) == (None, "talk-1")
    assert unspeakable and unspeakable.isascii()


@pytest.mark.parametrize(
    ("failure", "kind", "wait_s"),
    [
        (failed(StatusCode.RESOURCE_EXHAUSTED, "Slow down", retry_after="7"), RemoteDown, 7.0),
        (failed(StatusCode.UNAVAILABLE, "Overloaded"), RemoteDown, None),
        (failed(StatusCode.INTERNAL, "Oops"), RemoteDown, None),
        (failed(StatusCode.PERMISSION_DENIED, "Not you"), RemoteRefused, None),
        (failed(StatusCode.INVALID_ARGUMENT, "This model's maximum prompt length is 9"), RemoteFull, None),
        (failed(StatusCode.INVALID_ARGUMENT, "temperature: too warm"), RequestError, None),
        (failed(StatusCode.NOT_FOUND, "No such model"), RemoteError, None),
    ],
)
def test_failures_are_told_in_our_words(failure: Step, kind: type[EmberkeepError], wait_s: float | None) -> None:
    with pytest.raises(kind, match=r"grok-4\.6 at 127\.0\.0\.1") as caught:
        ask(HELLO, [failure])
    assert getattr(caught.value, "retry_after", None) == wait_s


def test_a_number_that_does_not_fit_is_the_requests_fault() -> None:
    with pytest.raises(RequestError, match="cannot be asked"):
        ask(Request(messages=HELLO.messages, max_tokens=2**40))


def test_nothing_is_asked_twice_behind_our_back() -> None:
    async def use(provider: GrokProvider, server: GrokServer) -> int:
        with pytest.raises(RemoteDown):
            await events_of(provider, HELLO)
        return len(server.asked)

    assert with_provider(use, [failed(StatusCode.UNAVAILABLE, "Overloaded")]) == 1


@pytest.mark.parametrize(
    "broken", [[chunk(content="Well")], [chunk(content="Well"), failed(StatusCode.UNAVAILABLE, "gone")], []]
)
def test_an_answer_without_an_end_is_no_answer(broken: list[Step]) -> None:
    with pytest.raises(RemoteDown, match="broke off"):
        ask(HELLO, broken)


def test_a_server_that_is_not_there_is_down() -> None:
    with pytest.raises(RemoteDown, match="cannot be reached"):
        with_provider(ask_when_it_is_gone)


def test_it_tells_about_itself_and_without_a_name_the_first_model_is_asked_for() -> None:
    assert with_provider(about, model="grok") == RemoteAbout((MODEL,), 131_072)
    assert sent(HELLO, model="").model == MODEL


def test_it_may_be_opened_before_there_is_an_event_loop() -> None:
    server = GrokServer()
    provider = GrokProvider(RemoteModel("grok", "grok", MODEL, "http://127.0.0.1:1"), KEY)

    async def use(_: GrokProvider, __: GrokServer) -> None:
        with pytest.raises(RemoteDown, match="cannot be reached"):
            await events_of(provider, HELLO)

    drive(lambda: server, lambda _: provider, use)


def test_a_key_is_needed_and_an_address_must_be_one() -> None:
    with pytest.raises(RemoteRefused, match="XAI_API_KEY"):
        open_grok(RemoteModel("grok", "grok", MODEL), None)
    with pytest.raises(ConfigError, match="no address"):
        open_grok(RemoteModel("grok", "grok", MODEL, "http://"), KEY)


def test_the_key_is_never_shown(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    caplog.set_level(logging.DEBUG)
    wrong = "xai-wrong-canary-00"

    async def use(provider: GrokProvider, _: GrokServer) -> str:
        try:
            await events_of(provider, HELLO)
        except EmberkeepError as error:
            return f"{provider!r} {error!r} {error.__cause__!r}"
        return ""

    refused = with_provider(use, key=wrong)
    repeated = with_provider(use, [failed(StatusCode.INVALID_ARGUMENT, f"odd {KEY}")])

    assert "RemoteRefused" in refused and "RequestError" in repeated
    everything = refused + repeated + caplog.text + "".join(capsys.readouterr())
    assert wrong not in everything and KEY not in everything
