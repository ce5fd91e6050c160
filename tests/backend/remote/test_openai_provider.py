"""OpenAI's provider: its real SDK against servers that speak its wire format."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from emberkeep.backend.remote.base import RemoteAbout
from emberkeep.backend.remote.openai import (
    COMPATIBLE,
    OPENAI,
    TRTLLM,
    OpenAIProvider,
    ServerDialect,
    open_openai,
)
from emberkeep.errors import EmberkeepError, RemoteDown, RemoteError, RemoteFull, RemoteRefused, RequestError
from emberkeep.types.events import Event, FinishReason, ReasoningDelta, TextDelta, ToolCallDelta, Usage
from emberkeep.types.models import RemoteModel
from emberkeep.types.request import Image, JsonFormat, Message, Request, Sampling, Tool, ToolChoice
from helpers.events import end_of, text_of
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
from helpers.vendors.openai_server import (
    DONE,
    KEY,
    OpenAIServer,
    answer,
    call,
    chunk,
    event,
    failed,
    failure,
    said,
)

WEATHER = Tool("weather", "Of a place.", {"properties": {"place": {"type": "string"}}})


def with_provider(
    use: Callable[[OpenAIProvider, OpenAIServer], Awaitable[Any]],
    *replies: Reply | Stream,
    dialect: ServerDialect = COMPATIBLE,
    key: str | None = KEY,
    model: str = "gpt-6",
    **settings: Any,
) -> Any:
    def open_at(url: str) -> OpenAIProvider:
        remote = RemoteModel(
            "gpt", "openai", model, f"{url}/v1", "OPENAI_API_KEY", max_tokens=settings.pop("limit", None)
        )
        return OpenAIProvider(remote, key, dialect)

    server_key = settings.pop("server_key", KEY)
    models = settings.pop("models", ({"id": "gpt-6"},))
    return drive(lambda: OpenAIServer(*replies, key=server_key, models=models), open_at, use)


def ask(request: Request, *replies: Reply | Stream, **settings: Any) -> list[Event]:
    return with_provider(asking(request), *replies, **settings)  # type: ignore[no-any-return]


def sent(request: Request, **settings: Any) -> Any:
    """The body that reaches the server."""
    return with_provider(sending(request), **settings).body


def test_text_comes_in_pieces_and_ends_with_the_usage() -> None:
    usage = {
        "prompt_tokens": 12,
        "completion_tokens": 30,
        "total_tokens": 42,
        "prompt_tokens_details": {"cached_tokens": 8},
        "completion_tokens_details": {
            "reasoning_tokens": 20,
            "accepted_prediction_tokens": 5,
            "rejected_prediction_tokens": 2,
        },
    }

    events = ask(HELLO, said("Good", " day", usage=usage))

    assert events[:2] == [TextDelta(0, "Good"), TextDelta(0, " day")]
    finished, completed = end_of(events)
    assert finished.reason is FinishReason.STOP
    assert completed.usage == Usage(12, 30, 8, 20, 5, 2)


def test_an_event_is_there_before_the_next_one_is_written_and_leaving_closes_the_connection() -> None:
    hanging = Stream([chunk({"content": "Wait"})], end="never")
    assert with_provider(leave_early, hanging) == TextDelta(0, "Wait")


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_is_separate_and_goes_back_under_the_name_it_came_with(name: str) -> None:
    async def use(provider: OpenAIProvider, server: OpenAIServer) -> tuple[list[Event], Any]:
        events = await events_of(provider, HELLO)
        await events_of(provider, Request(messages=(Message("user", "Rain?"), CALLED, RAIN)))
        return events, server.asked[-1].body["messages"][1]

    events, told = with_provider(use, answer({name: "Hm."}, {"content": "Yes."}))

    assert events[:2] == [ReasoningDelta(0, "Hm."), TextDelta(0, "Yes.")]
    assert told[name] == "Lyon, then."


def test_thoughts_of_earlier_turns_and_thoughts_for_openai_are_left_out() -> None:
    earlier = Request(messages=(Message("user", "Rain?"), CALLED, RAIN, Message("user", "And now?")))
    within = Request(messages=earlier.messages[:3])

    assert "reasoning_content" not in sent(earlier)["messages"][1]
    assert "reasoning_content" not in sent(within, dialect=OPENAI)["messages"][1]


def test_tool_calls_stream_their_arguments() -> None:
    pieces = [
        call(0, "c1", "weather"),
        call(0, arguments='{"place"'),
        call(0, arguments=': "Lyon"}'),
        call(1, "c2", "weather", "{}"),
    ]

    events = ask(HELLO, answer(*pieces, finish="tool_calls"))

    assert events[:4] == [
        ToolCallDelta(0, 0, "c1", "weather", ""),
        ToolCallDelta(0, 0, None, None, '{"place"'),
        ToolCallDelta(0, 0, None, None, ': "Lyon"}'),
        ToolCallDelta(0, 1, "c2", "weather", "{}"),
    ]
    assert end_of(events)[0].reason is FinishReason.TOOL_CALLS


def test_whole_calls_without_ids_or_with_the_same_index_are_told_apart() -> None:
    nameless = ask(HELLO, answer(call(None, None, "a", "{}"), call(None, None, "b", "{}")))
    same = ask(HELLO, answer(call(0, "x", "a", "{}"), call(0, "y", "b", "{}")))

    for events in (nameless, same):
        calls = [event for event in events if isinstance(event, ToolCallDelta)]
        assert [(one.call_index, one.name) for one in calls] == [(0, "a"), (1, "b")]
        assert len({one.id for one in calls}) == 2 and all(one.id for one in calls)
        assert end_of(events)[0].reason is FinishReason.TOOL_CALLS


def test_history_with_tools_goes_out_in_openais_form() -> None:
    request = Request(
        messages=(Message("developer", "Be brief."), Message("user", "Rain?", name="ann"), CALLED, RAIN),
        tools=(WEATHER,),
        parallel_tool_calls=False,
    )

    body = sent(request)

    function = {"name": "weather", "arguments": '{"place": "Lyon"}'}
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Rain?", "name": "ann"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Lyon, then.",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "c1"},
    ]
    parameters = {"type": "object", "properties": {"place": {"type": "string"}}}
    assert body["tools"] == [
        {
            "type": "function",
            "function": {"name": "weather", "description": "Of a place.", "parameters": parameters},
        }
    ]
    assert body["tool_choice"] == "auto" and body["parallel_tool_calls"] is False
    assert sent(request, dialect=OPENAI)["messages"][0]["role"] == "developer"


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (ToolChoice("none"), "none"),
        (ToolChoice("required"), "required"),
        (ToolChoice("named", "weather"), {"type": "function", "function": {"name": "weather"}}),
    ],
)
def test_the_choice_of_tools_is_passed_on(choice: ToolChoice, expected: Any) -> None:
    assert sent(Request(messages=HELLO.messages, tools=(WEATHER,), tool_choice=choice))["tool_choice"] == expected


def test_what_a_server_wants_back_with_a_call_comes_back_with_it() -> None:
    detail = {"type": "reasoning.encrypted", "data": "opaque"}
    signed = {"google": {"thought_signature": "sig"}}
    first = answer({"reasoning_details": [detail]}, call(0, "c1", "weather", "{}", extra_content=signed))

    async def use(provider: OpenAIProvider, server: OpenAIServer) -> Any:
        await events_of(provider, HELLO)
        await events_of(provider, Request(messages=(Message("user", "Rain?"), CALLED, RAIN)))
        return server.asked[-1].body["messages"][1]

    told = with_provider(use, first)

    assert told["reasoning_details"] == [detail]
    assert told["tool_calls"][0]["extra_content"] == signed


def test_images_follow_the_text_whatever_their_address() -> None:
    images = (Image("data:image/png;base64,AAAA"), Image("https://example.org/cat.png"))

    body = sent(Request(messages=(Message("user", "Which is it?", images=images),)))

    assert body["messages"][0]["content"] == [
        {"type": "text", "text": "Which is it?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}},
    ]


def test_only_what_the_user_chose_is_sent() -> None:
    assert sent(HELLO) == {
        "model": "gpt-6",
        "messages": [{"role": "user", "content": "Hello?"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_each_kind_of_server_gets_the_fields_that_it_has() -> None:
    request = Request(
        messages=HELLO.messages,
        sampling=Sampling(temperature=0.0, top_k=1, seed=7, logit_bias={5: -100}),
        max_tokens=9,
        stop=("END",),
        user="ann",
        conversation_id="talk-1",
        template_args={"enable_thinking": False},
    )
    shared = {"temperature": 0.0, "seed": 7, "logit_bias": {"5": -100}, "stop": ["END"]}

    compatible, vendor = sent(request), sent(request, dialect=OPENAI)

    own = {"max_tokens": 9, "top_k": 1, "user": "ann", "chat_template_kwargs": {"enable_thinking": False}}
    assert compatible.items() >= {**shared, **own}.items()
    assert "prompt_cache_key" not in compatible
    assert vendor.items() >= {**shared, "max_completion_tokens": 9, "prompt_cache_key": "talk-1"}.items()
    assert not vendor.keys() & {"max_tokens", "top_k", "user", "chat_template_kwargs"}
    assert "ann" not in vendor["safety_identifier"]


@pytest.mark.parametrize(("dialect", "takes_it"), [(OPENAI, True), (COMPATIBLE, True), (TRTLLM, False)])
def test_a_prediction_goes_where_there_is_a_field_for_it(dialect: ServerDialect, takes_it: bool) -> None:
    body = sent(Request(messages=HELLO.messages, prediction="Good day", speculation=False), dialect=dialect)

    assert body.get("prediction") == ({"type": "content", "content": "Good day"} if takes_it else None)
    assert "speculation" not in body


def test_the_models_own_limit_holds_unless_the_request_has_one() -> None:
    assert sent(HELLO, limit=64)["max_tokens"] == 64
    assert sent(Request(messages=HELLO.messages, max_tokens=9), limit=64)["max_tokens"] == 9


def test_a_schema_is_strict_where_openai_can_hold_an_answer_to_it() -> None:
    open_schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    closed = {**open_schema, "required": ["a"], "additionalProperties": False}

    def format_of(schema: Any) -> Any:
        return sent(Request(messages=HELLO.messages, format=JsonFormat(schema)))["response_format"]

    assert format_of(None) == {"type": "json_object"}
    assert format_of(closed)["json_schema"] == {"name": "answer", "schema": closed, "strict": True}
    assert format_of(open_schema)["json_schema"]["strict"] is False


def test_the_depth_travels_to_other_servers_and_not_to_openai() -> None:
    deep = Request(messages=HELLO.messages).decided(depth=2)

    async def use(provider: OpenAIProvider, server: OpenAIServer) -> str | None:
        await events_of(provider, deep)
        return server.asked[-1].headers.get("x-emberkeep-depth")

    assert with_provider(use) == "2"
    assert with_provider(use, dialect=OPENAI) is None


def test_without_a_key_none_is_sent_whatever_the_environment_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-another")
    monkeypatch.setenv("OPENAI_ADMIN_KEY", "sk-of-another")
    monkeypatch.setenv("OPENAI_ORG_ID", "org-of-another")

    async def use(provider: OpenAIProvider, server: OpenAIServer) -> str:
        await events_of(provider, HELLO)
        return str(server.asked[-1].headers)

    assert "of-another" not in with_provider(use, key=None, server_key=None)


FAILURES = [
    (failed(429, "rate_limit_error", "Slow down", headers={"retry-after": "7"}), RemoteDown, 7.0),
    (failed(503, "overloaded", "Busy", headers={"retry-after-ms": "250"}), RemoteDown, 0.25),
    (failed(500, "server_error", "Oops"), RemoteDown, None),
    (failed(403, "permission_error", "Not you"), RemoteRefused, None),
    (failed(400, "invalid_request_error", "Bad", "context_length_exceeded"), RemoteFull, None),
    (failed(400, "exceed_context_size_error", "the request exceeds the available context size"), RemoteFull, None),
    (failed(400, "BadRequestError", "This model's maximum context length is 9 tokens", 400), RemoteFull, None),
    (failed(400, "invalid_request_error", "temperature: too warm"), RequestError, None),
    (
        Reply({"object": "error", "message": "top_x: Extra inputs", "type": "x", "code": 400}, 400),
        RequestError,
        None,
    ),
    (failed(404, "invalid_request_error", "No such model", "model_not_found"), RemoteError, None),
    (Reply("<html>proxy</html>", 502), RemoteDown, None),
]


@pytest.mark.parametrize(("reply", "kind", "wait_s"), FAILURES)
def test_failures_are_told_in_our_words(reply: Reply, kind: type[EmberkeepError], wait_s: float | None) -> None:
    with pytest.raises(kind, match=r"gpt-6 at 127\.0\.0\.1") as caught:
        ask(HELLO, reply)

    assert getattr(caught.value, "retry_after", None) == wait_s
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (failure("invalid_request_error", "no", "context_length_exceeded"), RemoteFull),
        (failure("overloaded", "busy", "overloaded"), RemoteDown),
        (failure("BadRequestError", "bad", 400), RequestError),
        (failure("InternalServerError", "oops"), RemoteDown),
    ],
)
def test_a_failure_in_the_middle_of_a_stream_is_told_too(body: Any, kind: type[EmberkeepError]) -> None:
    with pytest.raises(kind):
        ask(HELLO, Stream([chunk({"content": "Well"}), event({"error": body})]))


@pytest.mark.parametrize(
    "broken",
    [
        Stream([chunk({"content": "Well"})], end="broken"),
        Stream([chunk({"content": "Well"}), DONE]),
        Stream([]),
    ],
)
def test_an_answer_without_an_end_is_no_answer(broken: Stream) -> None:
    with pytest.raises(RemoteDown, match="broke off"):
        ask(HELLO, broken)


@pytest.mark.parametrize("data", ["{oops", "[]", '{"choices": [{"delta": "x"}]}', '{"choices": 7}'])
def test_what_is_no_chunk_is_no_answer(data: str) -> None:
    with pytest.raises(RemoteError, match="cannot be read"):
        ask(HELLO, Stream([f"data: {data}\n\n"]))


def test_a_server_that_is_not_there_is_down() -> None:
    with pytest.raises(RemoteDown, match="cannot be reached"):
        with_provider(ask_when_it_is_gone)


@pytest.mark.parametrize(
    ("card", "context"),
    [
        ({"max_model_len": 4096}, 4096),
        ({"context_length": 8192}, 8192),
        ({"meta": {"n_ctx_train": 2048}}, 2048),
        ({}, None),
    ],
)
def test_servers_say_their_context_in_their_own_ways(card: dict[str, Any], context: int | None) -> None:
    told = with_provider(about, models=({"id": "other"}, {"id": "gpt-6", **card}))
    assert told == RemoteAbout(("other", "gpt-6"), context)


def test_without_a_name_the_first_model_is_asked_for() -> None:
    assert sent(HELLO, model="", models=({"id": "only-one"},))["model"] == "only-one"


def test_the_vendor_needs_a_key_and_an_address_without_a_path_gets_one() -> None:
    with pytest.raises(RemoteRefused, match="OPENAI_API_KEY"):
        open_openai(RemoteModel("gpt", "openai", "gpt-6"), None)

    async def use(provider: OpenAIProvider, server: OpenAIServer) -> str:
        return text_of(await events_of(provider, HELLO))

    def open_at(url: str) -> Any:
        return open_openai(RemoteModel("own", "compatible", "gpt-6", url), KEY)

    assert drive(OpenAIServer, open_at, use) == "Hello!"


def test_the_key_is_never_shown(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    caplog.set_level(logging.DEBUG)
    wrong = "sk-wrong-canary-00"

    async def use(provider: OpenAIProvider, _: OpenAIServer) -> str:
        told = [repr(provider), repr(vars(provider)["_service"])]
        try:
            await events_of(provider, HELLO)
        except EmberkeepError as error:
            told += [repr(error), str(error.__cause__)]
        return " ".join(told)

    refused = with_provider(use, key=wrong)
    repeated = with_provider(use, failed(400, "invalid_request_error", f"odd {KEY}"))

    assert "RemoteRefused" in refused and "RequestError" in repeated
    everything = refused + repeated + caplog.text + "".join(capsys.readouterr())
    assert wrong not in everything and KEY not in everything
