"""Ollama's provider: its real SDK against a server that speaks its wire format."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from emberkeep.backend.remote.base import RemoteAbout
from emberkeep.backend.remote.ollama import OllamaProvider
from emberkeep.errors import EmberkeepError, RemoteDown, RemoteError, RemoteFull, RemoteRefused, RequestError
from emberkeep.types.events import Event, FinishReason, ReasoningDelta, TextDelta, ToolCallDelta, Usage
from emberkeep.types.models import RemoteModel
from emberkeep.types.request import Image, JsonFormat, Message, Request, Sampling, Tool, ToolChoice
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
from helpers.vendors.loopback import Reply, Stream
from helpers.vendors.ollama_server import MODEL, OllamaServer, answer, failed, line, part

WEATHER = Tool("weather", "Of a place.", {"properties": {"place": {"type": "string"}}, "required": ["place"]})
CLOCK = Tool("clock", "The time.")
KEY = "ollama-canary-19d2"


def with_provider(
    use: Callable[[OllamaProvider, OllamaServer], Awaitable[Any]],
    *replies: Reply | Stream,
    key: str | None = None,
    model: str = MODEL,
    ctx: int | None = None,
    **settings: Any,
) -> Any:
    def open_at(url: str) -> OllamaProvider:
        return OllamaProvider(RemoteModel("local", "ollama", model, url, ctx=ctx), key)

    return drive(lambda: OllamaServer(*replies, **settings), open_at, use)


def ask(request: Request, *replies: Reply | Stream, **settings: Any) -> list[Event]:
    return with_provider(asking(request), *replies, **settings)  # type: ignore[no-any-return]


def sent(request: Request, **settings: Any) -> Any:
    """The body that reaches the server."""
    return with_provider(sending(request), **settings).body


def test_thoughts_and_text_come_in_pieces_and_end_with_the_usage() -> None:
    events = ask(HELLO, answer({"thinking": "Hm."}, {"content": "Good"}, {"content": " day"}))

    assert events[:3] == [ReasoningDelta(0, "Hm."), TextDelta(0, "Good"), TextDelta(0, " day")]
    finished, completed = end_of(events)
    assert finished.reason is FinishReason.STOP
    assert completed.usage == Usage(26, 9)
    assert end_of(ask(HELLO, answer({"content": "Go"}, reason="length")))[0].reason is FinishReason.LENGTH


def test_an_event_is_there_before_the_next_one_is_written_and_leaving_closes_the_connection() -> None:
    assert with_provider(leave_early, Stream([part({"content": "Wait"})], end="never")) == TextDelta(0, "Wait")


def test_calls_come_whole_and_get_ids() -> None:
    calls = [{"function": {"name": name, "arguments": {"place": "Lyon"}}} for name in ("weather", "clock")]
    reply = answer({"tool_calls": calls})

    events = ask(HELLO, reply)

    first, second = events[:2]
    assert isinstance(first, ToolCallDelta) and isinstance(second, ToolCallDelta)
    assert (first.name, json.loads(first.arguments), second.name) == ("weather", {"place": "Lyon"}, "clock")
    assert first.id and second.id and first.id != second.id
    assert end_of(events)[0].reason is FinishReason.TOOL_CALLS

    one = ask(Request(messages=HELLO.messages, parallel_tool_calls=False), reply)
    assert [event.name for event in one if isinstance(event, ToolCallDelta)] == ["weather"]


def test_history_with_tools_goes_out_in_ollamas_form() -> None:
    messages = (Message("developer", "Be brief."), Message("user", "Rain?"), CALLED, RAIN)

    body = sent(Request(messages=messages, tools=(WEATHER,)))

    call = {"function": {"name": "weather", "arguments": {"place": "Lyon"}}}
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "thinking": "Lyon, then.", "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_name": "weather"},
    ]
    parameters = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
    assert body["tools"] == [
        {
            "type": "function",
            "function": {"name": "weather", "description": "Of a place.", "parameters": parameters},
        }
    ]


def test_of_a_schema_that_the_sdk_cannot_carry_the_model_still_reads() -> None:
    nested = {"type": "object", "description": "Where.", "properties": {"lat": {"type": "number"}}}
    tool = Tool("weather", "", {"properties": {"at": nested, "how": {"anyOf": [{"const": "brief"}]}}})

    properties = sent(Request(messages=HELLO.messages, tools=(tool,)))["tools"][0]["function"]["parameters"][
        "properties"
    ]

    assert properties["at"]["type"] == "object"
    assert properties["at"]["description"].startswith("Where. ") and '"lat"' in properties["at"]["description"]
    assert "brief" in properties["how"]["description"]


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        (ToolChoice("none"), []),
        (ToolChoice("auto"), ["weather", "clock"]),
        (ToolChoice("named", "clock"), ["clock"]),
    ],
)
def test_tools_that_shall_not_be_called_are_left_out(choice: ToolChoice, names: list[str]) -> None:
    body = sent(Request(messages=HELLO.messages, tools=(WEATHER, CLOCK), tool_choice=choice))
    assert [tool["function"]["name"] for tool in body["tools"]] == names


def test_images_go_out_as_bytes_and_addresses_are_refused() -> None:
    data = base64.b64encode(b"\x89PNG").decode()

    def looking(url: str) -> Request:
        return Request(messages=(Message("user", "What is it?", images=(Image(url),)),))

    assert sent(looking(f"data:image/png;base64,{data}"))["messages"][0]["images"] == [data]
    with pytest.raises(RequestError, match="data:"):
        ask(looking("https://example.org/cat.png"))
    with pytest.raises(RequestError, match="data:"):
        ask(looking("/etc/hostname"))
    with pytest.raises(RequestError, match="no base64"):
        ask(looking("data:image/png;base64,AAAAA"))


def test_options_are_those_that_the_user_chose() -> None:
    assert "options" not in sent(HELLO)
    request = Request(
        messages=HELLO.messages,
        sampling=Sampling(temperature=0.0, top_k=5, repetition_penalty=1.2, seed=7),
        max_tokens=9,
        stop=("END",),
        template_args={"enable_thinking": False},
    )

    body = sent(request, ctx=8192)

    assert body["options"] == {
        "num_ctx": 8192,
        "num_predict": 9,
        "stop": ["END"],
        "temperature": 0.0,
        "top_k": 5,
        "repeat_penalty": 1.2,
        "seed": 7,
    }
    assert body["think"] is False


def test_a_schema_is_the_format() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}

    assert sent(Request(messages=HELLO.messages, format=JsonFormat(schema)))["format"] == schema
    assert sent(Request(messages=HELLO.messages, format=JsonFormat()))["format"] == "json"


@pytest.mark.parametrize(
    ("reply", "kind", "wait_s"),
    [
        (failed(503, "server busy", {"retry-after": "2"}), RemoteDown, 2.0),
        (failed(500, "model runner has stopped"), RemoteDown, None),
        (failed(401, "unauthorized"), RemoteRefused, None),
        (failed(400, "the prompt is too long for its context length"), RemoteFull, None),
        (failed(400, "does not support tools"), RequestError, None),
        (failed(404, "model 'x' not found"), RemoteError, None),
        (Stream([part({"content": "Well"}), line({"error": "out of memory"})]), RemoteDown, None),
        (Stream([part({"content": "Well"})]), RemoteDown, None),
        (Stream([part({"content": "Well"})], end="broken"), RemoteDown, None),
        (Stream(["oops\n"]), RemoteError, None),
        (Stream(["[]\n"]), RemoteError, None),
        (Stream([line({"message": 7})]), RemoteError, None),
    ],
)
def test_failures_are_told_in_our_words(
    reply: Reply | Stream, kind: type[EmberkeepError], wait_s: float | None
) -> None:
    with pytest.raises(kind, match=r"qwen3:latest at 127\.0\.0\.1") as caught:
        ask(HELLO, reply)
    assert getattr(caught.value, "retry_after", None) == wait_s


def test_a_server_that_is_not_there_is_down() -> None:
    with pytest.raises(RemoteDown, match="cannot be reached"):
        with_provider(ask_when_it_is_gone)


def test_the_context_is_the_loaded_models_or_the_configured_or_the_largest() -> None:
    configured = {"parameters": "stop x\nnum_ctx    2048", "model_info": {"qwen3.context_length": 40960}}

    assert with_provider(about) == RemoteAbout((MODEL,), 40960)
    assert with_provider(about, shown=configured).context == 2048
    assert with_provider(about, shown=configured, loaded={MODEL: 1024}, model="qwen3").context == 1024


def test_without_a_name_the_first_model_is_asked_for() -> None:
    assert sent(HELLO, model="", models=("first", "second"))["model"] == "first"


def test_a_key_is_sent_only_where_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_API_KEY", "of-another")

    async def use(provider: OllamaProvider, server: OllamaServer) -> str | None:
        with suppress(RemoteRefused):
            await events_of(provider, HELLO)
        return server.asked[-1].headers.get("authorization")

    assert with_provider(use) is None
    assert with_provider(use, key=KEY) == f"Bearer {KEY}"


def test_the_key_is_never_shown(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    caplog.set_level(logging.DEBUG)

    async def use(provider: OllamaProvider, server: OllamaServer) -> str:
        assert server.asked == []
        try:
            await events_of(provider, HELLO)
        except EmberkeepError as error:
            return f"{provider!r} {error!r} {error.__cause__!r}"
        return ""

    refused = with_provider(use, key=KEY)

    assert "RemoteRefused" in refused
    assert KEY not in refused + caplog.text + "".join(capsys.readouterr())
