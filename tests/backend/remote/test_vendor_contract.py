"""What every vendor's provider has to do: through its real SDK, against a server that speaks its wire format."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from emberkeep.backend.base import ModelCard
from emberkeep.backend.fallback import FallbackBackend, Link
from emberkeep.backend.remote import backend as module
from emberkeep.backend.remote.backend import RemoteBackend, RemoteOptions
from emberkeep.backend.remote.base import Provider, RemoteAbout
from emberkeep.errors import EmberkeepError, RemoteDown, RemoteError, RemoteFull, RemoteRefused, RequestError
from emberkeep.session.sessions import Policy, Sessions
from emberkeep.tools.function import as_tool
from emberkeep.tools.permissions import HostToolBox
from emberkeep.tools.toolbox import ToolBox, ToolPolicy
from emberkeep.types.events import Event, FinishReason, ReasoningDelta, TextDelta
from emberkeep.types.request import (
    Image,
    JsonFormat,
    Message,
    RegexFormat,
    Request,
    Sampling,
    Tool,
    ToolCall,
    ToolChoice,
)
from helpers.scripted_backend import calls_of, end_of, outcomes_of, text_of
from helpers.tool_calls import depth
from helpers.vendors.loopback import Reply, Stream
from helpers.vendors.openai_server import answer, call
from helpers.vendors.wires import (
    CALLED,
    HELLO,
    OPENAI_WIRES,
    RAIN,
    WIRES,
    OpenAIWire,
    Thought,
    Wire,
    about,
    ask_when_it_is_gone,
    asking,
    drive,
    events_of,
    leave_early,
    provider_at,
    sending,
)

CALLS = (ToolCall("c1", "weather", '{"place": "Lyon"}'), ToolCall("c2", "clock", '{"utc": true}'))
TOOLS = (Tool("weather", "Of a place.", {"properties": {"place": {"type": "string"}}}), Tool("clock", "The time."))
OPENAI, COMPATIBLE, GEMINI, GROK, OLLAMA, TRTLLM = OPENAI_WIRES


def _row(wire: Wire) -> Any:
    """Anthropic's SDK takes seconds to import."""
    return pytest.param(wire, id=wire.kind, marks=[pytest.mark.slow] if wire.kind == "anthropic" else [])


@pytest.fixture(params=map(_row, WIRES))
def wire(request: pytest.FixtureRequest) -> Wire:
    return cast(Wire, request.param)


def each(*wires: OpenAIWire) -> Any:
    return pytest.mark.parametrize("wire", wires, ids=lambda wire: wire.kind)


def with_provider(
    wire: Wire, use: Callable[[Any, Any], Awaitable[Any]], *replies: Reply | Stream, **settings: Any
) -> Any:
    return drive(lambda: wire.server(*replies), provider_at(wire, **settings), use)


def ask(wire: Wire, *replies: Reply | Stream, request: Request = HELLO, **settings: Any) -> list[Event]:
    return with_provider(wire, asking(request), *replies, **settings)  # type: ignore[no-any-return]


def error_of(wire: Wire, *replies: Reply | Stream, **settings: Any) -> EmberkeepError:
    with pytest.raises(EmberkeepError) as caught:
        ask(wire, *replies, **settings)
    return caught.value


def sent(wire: Wire, request: Request, **settings: Any) -> Any:
    """The body that reaches the server."""
    return with_provider(wire, sending(request), **settings).body


# ── answers ──


def test_text_comes_in_pieces_and_ends_with_the_usage(wire: Wire) -> None:
    events = ask(wire, wire.answer("Good", " day"))
    assert events[:2] == [TextDelta(0, "Good"), TextDelta(0, " day")]
    finished, completed = end_of(events)
    assert finished.reason is FinishReason.STOP
    assert completed.usage == wire.counts


def test_an_answer_that_was_cut_says_so(wire: Wire) -> None:
    assert end_of(ask(wire, wire.answer("Go", finish="length")))[0].reason is FinishReason.LENGTH


def test_thoughts_are_reasoning(wire: Wire) -> None:
    """OpenAI itself shows none."""
    events = ask(wire, wire.answer(Thought("Hm."), "Yes."))
    assert events[:2] == [ReasoningDelta(0, "Hm."), TextDelta(0, "Yes.")]


def test_tool_calls_come_with_their_ids_and_arguments(wire: Wire) -> None:
    events = ask(wire, wire.answer("Let me see.", *CALLS), request=replace(HELLO, tools=TOOLS))
    assert calls_of(events) == list(CALLS)
    assert end_of(events)[0].reason is FinishReason.TOOL_CALLS


def test_leaving_closes_the_connection(wire: Wire) -> None:
    assert with_provider(wire, leave_early, wire.answer("Wait", end="never", is_cut=True)) == TextDelta(0, "Wait")


def test_it_tells_its_models_and_their_context(wire: Wire) -> None:
    told = with_provider(wire, about)
    assert (wire.model in told.models, told.context) == (True, wire.context)


# ── failures ──


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (429, "Slow down.", RemoteDown),
        (503, "Overloaded", RemoteDown),
        (403, "Not yours.", RemoteRefused),
        (400, "The prompt is too long: its context length is 9 tokens.", RemoteFull),
        (400, "The input token count (9) exceeds the maximum number of tokens.", RemoteFull),
        (413, "Request exceeds the maximum size", RemoteFull),
        (400, "temperature: too warm", RequestError),
        (404, "No such model", RemoteError),
        (307, "Elsewhere", RemoteError),
    ],
)
def test_failures_are_told_in_our_words(wire: Wire, status: int, message: str, kind: type[EmberkeepError]) -> None:
    error = error_of(wire, wire.failed(status, message))
    assert type(error) is kind
    where = "OpenAI" if wire is OPENAI else "127.0.0.1"
    assert f"{wire.model} at {where}" in str(error) and "\n" not in str(error) and error.__cause__ is None
    assert status == 307 or message.rstrip(".") in str(error)
    if kind is RemoteDown:
        assert getattr(error, "retry_after", None) == 7


def test_broken_answers_are_none(wire: Wire) -> None:
    broken = [
        wire.answer("Well", is_cut=True),
        wire.answer("Well", end="broken", is_cut=True),
        wire.fails_midway(),
    ]
    for reply in (*broken, Reply("<html>proxy</html>", 502)):
        assert isinstance(error_of(wire, reply), RemoteDown)
    assert type(error_of(wire, wire.garbage())) is RemoteError


def test_a_request_is_sent_once_whatever_happens(wire: Wire) -> None:
    async def use(provider: Provider, server: Any) -> int:
        with pytest.raises(RemoteDown):
            await events_of(provider, HELLO)
        return sum(asked.path.endswith(("/completions", "/messages")) for asked in server.asked)

    assert with_provider(wire, use, wire.failed(500, "Oops")) == 1


def test_a_service_that_is_not_there_is_down(wire: Wire) -> None:
    with pytest.raises(RemoteDown, match="cannot be reached"):
        with_provider(wire, ask_when_it_is_gone)


def test_a_wrong_key_is_refused_and_no_key_is_shown(
    wire: Wire, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    refused = error_of(wire, key="wrong-canary-55")
    assert isinstance(refused, RemoteRefused) and "THE_KEY" in str(refused)
    repeated = error_of(wire, wire.failed(400, f"odd\n{wire.key}" + "x" * 10_000))
    assert "\n" not in str(repeated) and len(str(repeated)) < 500
    printed = capfd.readouterr()
    shown = [repr(error) + str(error.__cause__) for error in (refused, repeated)]
    shown += [repr(provider_at(wire)("http://127.0.0.1:1")), caplog.text, printed.out, printed.err]
    assert not [text for text in shown if "wrong-canary" in text or wire.key in text]


# ── behind our backend ──


def backend_at(wire: Wire, url: str, **settings: Any) -> RemoteBackend:
    tools = HostToolBox(ToolBox([as_tool(depth)], ToolPolicy()), ToolPolicy(), asks=False)
    card = ModelCard(wire.model, 0, 100_000, remote=wire.kind)
    sessions = Sessions(None, Policy(100_000))
    return RemoteBackend(card, provider_at(wire)(url), sessions, RemoteOptions(**settings), tools=tools)


def through_backend(wire: Wire, *replies: Reply | Stream) -> tuple[list[Event], Any]:
    async def run(_: Provider, server: Any) -> tuple[list[Event], Any]:
        backend = backend_at(wire, server.url)
        try:
            return [event async for event in backend.generate(HELLO)], server.asked
        finally:
            await backend.close()

    return with_provider(wire, run, *replies)  # type: ignore[no-any-return]


def test_tools_run_here_and_the_result_goes_back(wire: Wire) -> None:
    calling = wire.answer(ToolCall("c1", "depth", '{"pier": 3}'))
    events, asked = through_backend(wire, calling, wire.answer("Seven metres."))
    assert outcomes_of(events) == [("7 metres", False)]
    assert text_of(events) == "Seven metres."
    assert "7 metres" in str([one.body for one in asked if "kv_cache" not in one.path][-1])


def test_one_that_is_down_is_stood_in_for(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_WAIT_S", 0.001)

    async def run(_: Provider, server: Any) -> tuple[list[Event], Any]:
        gone = Link("first", lambda: backend_at(wire, "http://127.0.0.1:9", retries=1))
        chain = FallbackBackend([gone, Link("second", lambda: backend_at(COMPATIBLE, server.url))])
        events = [event async for event in chain.generate(HELLO)]
        await chain.close()
        return events, chain.health()

    events, health = with_provider(COMPATIBLE, run, COMPATIBLE.answer("I do."))
    assert text_of(events) == "I do."
    assert (end_of(events)[1].answered_by, health["chain"][0]["state"]) == ("second", "failed")


# ── requests in OpenAI's wire format ──


@each(*OPENAI_WIRES)
def test_only_what_the_user_chose_is_sent(wire: OpenAIWire) -> None:
    assert sent(wire, HELLO) == {
        "model": wire.model,
        "messages": [{"role": "user", "content": "Hello?"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


SAMPLED = Sampling(0.0, 1, 0.5, 0.1, 0.9, 1.2, 0.3, 0.4, 7, {5: -100})
NUCLEUS = {"temperature": 0.0, "top_p": 0.5}
SEEDED = {**NUCLEUS, "frequency_penalty": 0.3, "presence_penalty": 0.4, "seed": 7}
BIASED = {**SEEDED, "logit_bias": {"5": -100}}
CUT = {**BIASED, "top_k": 1, "min_p": 0.1, "repetition_penalty": 1.2}
TEMPLATE = {"chat_template_kwargs": {"enable_thinking": False}}
UNTHINKING = {"extra_body": {"google": {"thinking_config": {"thinking_budget": 0}}}}
PREDICTED = {"prediction": {"type": "content", "content": "Good day"}}
FIELDS = [
    (
        OPENAI,
        {**BIASED, **PREDICTED, "max_completion_tokens": 9, "prompt_cache_key": "talk 1"},
        "safety_identifier",
    ),
    (COMPATIBLE, {**CUT, **PREDICTED, **TEMPLATE, "typical_p": 0.9, "max_tokens": 9, "user": "ann"}, None),
    (TRTLLM, {**CUT, **TEMPLATE, "max_tokens": 9, "user": "ann"}, None),
    (GEMINI, {**NUCLEUS, **UNTHINKING, "max_tokens": 9}, None),
    (GROK, {**SEEDED, "max_completion_tokens": 9}, "user"),
    (OLLAMA, {**SEEDED, "max_tokens": 9, "reasoning_effort": "none"}, None),
]


@pytest.mark.parametrize(("wire", "fields", "hidden"), FIELDS, ids=lambda value: getattr(value, "kind", ""))
def test_each_vendor_gets_the_fields_that_it_has(wire: OpenAIWire, fields: Any, hidden: str | None) -> None:
    """`hidden`: the field in which the vendor can tell users apart, but does not learn their names."""
    request = replace(
        HELLO,
        sampling=SAMPLED,
        max_tokens=9,
        stop=("END",),
        user="ann",
        conversation_id="talk 1",
        prediction="Good day",
        template_args={"enable_thinking": False},
    ).decided(depth=2)
    asked = with_provider(wire, sending(request), max_tokens=64)
    body = {name: value for name, value in asked.body.items() if name not in sent(wire, HELLO)}
    if hidden is not None:
        assert "ann" not in body.pop(hidden)
    assert body == {**fields, "stop": ["END"]}
    assert asked.headers.get("x-emberkeep-depth") == (None if wire in (OPENAI, GEMINI, GROK) else "2")
    assert asked.headers.get("x-grok-conv-id") == ("talk%201" if wire is GROK else None)
    assert next(value for name, value in sent(wire, HELLO, max_tokens=64).items() if "max" in name) == 64


@each(*OPENAI_WIRES)
@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (ToolChoice(), "auto"),
        (ToolChoice("none"), "none"),
        (ToolChoice("required"), "required"),
        (ToolChoice("named", "clock"), {"type": "function", "function": {"name": "clock"}}),
    ],
)
def test_the_choice_of_tools_is_passed_on(wire: OpenAIWire, choice: ToolChoice, expected: Any) -> None:
    """To Ollama, which has no such field, by leaving out the others."""
    body = sent(wire, replace(HELLO, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False))
    names = [tool["function"]["name"] for tool in body.get("tools", ())]
    if wire is OLLAMA:
        assert names == {"none": [], "named": ["clock"]}.get(choice.mode, ["weather", "clock"])
        assert "tool_choice" not in body
    else:
        assert (names, body["tool_choice"]) == (["weather", "clock"], expected)
    assert body.get("parallel_tool_calls") is (None if wire in (GEMINI, OLLAMA) else False)


@each(GEMINI, OLLAMA)
def test_one_call_comes_from_servers_that_cannot_be_asked_for_one(wire: OpenAIWire) -> None:
    request = replace(HELLO, tools=TOOLS, parallel_tool_calls=False)
    assert calls_of(ask(wire, wire.answer(*CALLS), request=request)) == [CALLS[0]]


@each(*OPENAI_WIRES)
def test_history_goes_out_in_the_vendors_form(wire: OpenAIWire) -> None:
    earlier = replace(CALLED, tool_calls=(), content="Dry.")
    asked = (Message("developer", "Be brief."), Message("user", "Rain?", name="ann"))
    messages = (*asked, earlier, Message("user", "And now?"), CALLED, RAIN)
    body = sent(wire, Request(messages=messages, tools=TOOLS[:1]))
    function = {"name": "weather", "arguments": '{"place": "Lyon"}'}
    unsigned = {"extra_content": {"google": {"thought_signature": "skip_thought_signature_validator"}}}
    field = {OPENAI: None, GEMINI: None, OLLAMA: "reasoning"}.get(wire, "reasoning_content")
    assert body["messages"] == [
        {"role": "developer" if wire is OPENAI else "system", "content": "Be brief."},
        {"role": "user", "content": "Rain?", "name": "ann"},
        {"role": "assistant", "content": "Dry."},
        {"role": "user", "content": "And now?"},
        {
            "role": "assistant",
            "content": "",
            **({field: "Lyon, then."} if field else {}),
            "tool_calls": [
                {**(unsigned if wire is GEMINI else {}), "id": "c1", "type": "function", "function": function}
            ],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "c1"},
    ]
    parameters = {"type": "object", "properties": {"place": {"type": "string"}}}
    described = {"name": "weather", "description": "Of a place.", "parameters": parameters}
    assert body["tools"] == [{"type": "function", "function": described}]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_goes_back_under_the_name_it_came_with(name: str) -> None:
    assert followed(answer({name: "Hm."}, {"content": "Yes."}))[name] == "Lyon, then."


def followed(first: Stream, wire: OpenAIWire = COMPATIBLE) -> Any:
    """How the call `c1` is sent back after an answer."""

    async def use(provider: Provider, server: Any) -> Any:
        await events_of(provider, HELLO)
        await events_of(provider, Request(messages=(Message("user", "Rain?"), CALLED, RAIN)))
        return server.asked[-1].body["messages"][1]

    return with_provider(wire, use, first)


@each(COMPATIBLE, GEMINI)
def test_what_a_server_wants_back_with_a_call_comes_back_with_it(wire: OpenAIWire) -> None:
    detail = {"type": "reasoning.encrypted", "data": "opaque"}
    signed = {"google": {"thought_signature": "sig"}}
    first = answer({"reasoning_details": [detail]}, call(0, "c1", "weather", "{}", extra_content=signed))
    message = followed(first, wire)
    assert message["reasoning_details"] == [detail]
    assert message["tool_calls"][0]["extra_content"] == signed


def test_whole_calls_without_ids_or_with_the_same_index_are_told_apart() -> None:
    nameless = answer(call(None, None, "a", "{}"), call(None, None, "b", "{}"))
    same = answer(call(0, "x", "a", "{}"), call(0, "y", "b", "{}"))
    renamed = answer(call(0, "x", "a", "{"), call(0, "x", "a", "}"), call(1, None, "b", "{}"))
    for stream in (nameless, same, renamed):
        calls = calls_of(events := ask(COMPATIBLE, stream))
        assert [(one.name, one.arguments) for one in calls] == [("a", "{}"), ("b", "{}")]
        assert len({one.id for one in calls}) == 2 and all(one.id for one in calls)
        assert end_of(events)[0].reason is FinishReason.TOOL_CALLS


@pytest.mark.parametrize(
    ("reason", "kind"),
    [("content_filter", RequestError), ("function_call_filter: MALFORMED_FUNCTION_CALL", RemoteError)],
)
def test_what_a_filter_held_back_is_no_answer(reason: str, kind: type[EmberkeepError]) -> None:
    assert type(error_of(GEMINI, answer({"content": "Well"}, finish=reason))) is kind


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ({"type": "invalid_request_error", "code": "context_length_exceeded"}, RemoteFull),
        ({"type": "exceed_context_size_error", "code": 400}, RemoteFull),
        ({"type": "overloaded", "code": "overloaded"}, RemoteDown),
        ({"type": "BadRequestError", "code": 400}, RequestError),
        ({"type": "InternalServerError"}, RemoteDown),
    ],
)
def test_a_word_in_an_error_says_what_is_wrong(message: Any, kind: type[EmberkeepError]) -> None:
    """In the middle of a stream, where the status is 200 already."""
    events = [f'data: {{"error": {str(message).replace(chr(39), chr(34))}}}\n\n']
    assert type(error_of(COMPATIBLE, Stream(events))) is kind


@pytest.mark.parametrize("data", ["[]", '{"choices": [{"delta": "x"}]}', '{"choices": 7}'])
def test_what_is_no_chunk_is_no_answer(data: str) -> None:
    assert "cannot be read" in str(error_of(COMPATIBLE, Stream([f"data: {data}\n\n"])))


def test_only_json_can_be_asked_for() -> None:
    error = error_of(COMPATIBLE, request=replace(HELLO, format=RegexFormat("a+", param="guided_regex")))
    assert "guided_regex: needs a model that runs here" in str(error)


@each(*OPENAI_WIRES)
def test_images_follow_the_text_whatever_their_address(wire: OpenAIWire) -> None:
    urls = ("data:image/png;base64,AAAA", "https://example.org/cat.png")
    looking = Message("user", "Which is it?", images=tuple(map(Image, urls)))
    text, *images = sent(wire, Request(messages=(looking,)))["messages"][0]["content"]
    assert text == {"type": "text", "text": "Which is it?"}
    assert images == [{"type": "image_url", "image_url": {"url": url}} for url in urls]


@each(*OPENAI_WIRES)
def test_a_schema_is_strict_where_an_answer_can_be_held_to_it(wire: OpenAIWire) -> None:
    open_schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    closed = {**open_schema, "required": ["a"], "additionalProperties": False}

    def format_of(schema: Any) -> Any:
        return sent(wire, replace(HELLO, format=JsonFormat(schema)))["response_format"]

    assert format_of(None) == {"type": "json_object"}
    assert format_of(closed)["json_schema"] == {"name": "answer", "schema": closed, "strict": True}
    assert format_of(open_schema)["json_schema"]["strict"] is False


@each(COMPATIBLE, OLLAMA, GROK)
def test_what_the_environment_holds_is_sent_to_nobody(wire: OpenAIWire, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_ADMIN_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID", "OLLAMA_API_KEY"):
        monkeypatch.setenv(name, "of-another")
    assert "of-another" not in str(with_provider(wire, sending(HELLO)).headers)


@pytest.mark.parametrize(
    ("card", "context"),
    [({"context_length": 8192}, 8192), ({"meta": {"n_ctx_train": 2048}}, 2048), ({}, None)],
)
def test_servers_tell_their_context_in_their_own_ways(card: dict[str, Any], context: int | None) -> None:
    wire = replace(COMPATIBLE, card={"id": "gpt-6", **card})
    assert with_provider(wire, about) == RemoteAbout(("gpt-6",), context)


def test_ollamas_context_is_that_of_the_loaded_model_or_of_its_modelfile() -> None:
    for shown, context in (({"parameters": "stop x\nnum_ctx    2048"}, 2048), ({}, None)):
        wire = replace(OLLAMA, beside={"/api/ps": {"models": []}, "/api/show": shown})
        assert with_provider(wire, about).context == context
    assert with_provider(replace(OLLAMA, beside=None), about).context is None


def test_without_a_name_the_first_model_is_asked_for() -> None:
    assert sent(OLLAMA, HELLO, model="")["model"] == OLLAMA.model
