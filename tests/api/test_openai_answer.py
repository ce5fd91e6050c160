"""Answers in OpenAI's shapes: tool calls, custom tools, the older function call; and the fast path of a stream,
which says exactly what the plain encoding would say."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.api.answer import Answer, detail_json
from emberkeep.api.body import parse_body
from emberkeep.api.kinds import custom_input
from emberkeep.api.openai_answer import CallShape, ChatFrames, Envelope, TextFrames, chat_json
from emberkeep.api.openai_chat import ChatBody
from emberkeep.errors import InvalidField
from emberkeep.types.events import (
    Completed,
    Event,
    Finished,
    FinishReason,
    Loading,
    LookupRecord,
    ReasoningDelta,
    TextDelta,
    Timings,
    ToolCallDelta,
    Usage,
)
from emberkeep.types.request import Message, Request, Tool, ToolCall, ToolChoice
from helpers.scripted_server import COMPLETED

ENVELOPE = Envelope("id", 1, "m", "fp", None)

HELLO = [{"role": "user", "content": "hi"}]

CUSTOM = {"type": "custom", "custom": {"name": "patch", "description": "Applies one."}}

FUNCTION = {"name": "add", "parameters": {"type": "object"}}

CALLED = [
    ToolCallDelta(0, 0, "c1", "patch", '{"inp'),
    ToolCallDelta(0, 0, None, None, 'ut": "a \\"b\\""}'),
    ToolCallDelta(0, 1, "c2", "add", "{}"),
    Finished(0, FinishReason.TOOL_CALLS),
]


def request_of(**fields: Any) -> Request:
    return parse_body(ChatBody, json.dumps({"messages": HELLO, **fields}).encode()).to_request()


def whole(events: list[Event], calls: CallShape) -> dict[str, Any]:
    answer = Answer(1)
    answer.add([*events, Completed(Usage(), Timings(), LookupRecord())])
    choice: dict[str, Any] = chat_json(answer, ENVELOPE, calls)["choices"][0]
    return choice


def deltas(events: list[Event], calls: CallShape) -> list[dict[str, Any]]:
    frames = ChatFrames(ENVELOPE, False, calls)
    sent = b"".join(map(frames.frame, events)).decode().split("\n\n")
    return [json.loads(each.removeprefix("data: "))["choices"][0] for each in sent if each]


def test_a_custom_tool_is_called_with_a_text() -> None:
    shape = CallShape(frozenset({"patch"}))
    patch = {"id": "c1", "type": "custom", "custom": {"name": "patch", "input": 'a "b"'}}
    add = {"id": "c2", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    told = whole(CALLED, shape)
    assert told["message"]["tool_calls"] == [patch, add]
    assert told["finish_reason"] == "tool_calls"
    streamed = [call for each in deltas(CALLED, shape) for call in each["delta"].get("tool_calls", ())]
    assert streamed == [{"index": 0, **patch}, {"index": 1, **add}]


def test_a_custom_call_that_comes_last_is_told_before_the_end() -> None:
    told = deltas([*CALLED[:2], CALLED[3]], CallShape(frozenset({"patch"})))
    assert [each["delta"].get("tool_calls", [{}])[0].get("type") for each in told] == ["custom", None]


def test_clients_of_functions_get_one_function_call() -> None:
    shape = CallShape(is_legacy=True)
    told = whole(CALLED, shape)
    assert told["message"]["function_call"] == {"name": "patch", "arguments": '{"input": "a \\"b\\""}'}
    assert "tool_calls" not in told["message"]
    assert told["finish_reason"] == "function_call"
    streamed = deltas(CALLED, shape)
    pieces = [each["delta"]["function_call"] for each in streamed if "function_call" in each["delta"]]
    assert pieces == [{"name": "patch", "arguments": '{"inp'}, {"arguments": 'ut": "a \\"b\\""}'}]
    assert streamed[-1]["finish_reason"] == "function_call"


def test_a_custom_tool_is_a_function_with_one_text_to_the_model() -> None:
    (tool,) = request_of(tools=[CUSTOM]).tools
    assert (tool.name, tool.description) == ("patch", "Applies one.")
    assert tool.parameters["required"] == ["input"]
    chosen = request_of(tools=[CUSTOM], tool_choice={"type": "custom", "custom": {"name": "patch"}})
    assert chosen.tool_choice == ToolChoice("named", "patch")
    call = {"id": "c1", "type": "custom", "custom": {"name": "patch", "input": "é"}}
    (message,) = request_of(messages=[{"role": "assistant", "tool_calls": [call]}]).messages
    assert message.tool_calls == (ToolCall("c1", "patch", '{"input": "é"}'),)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"tools": [{"type": "custom", "custom": {"name": "p", "format": {"type": "grammar"}}}]},
            "tools[0].custom.format",
        ),
        ({"tools": [{"type": "custom", "custom": {"name": "a b"}}]}, "tools[0].custom.name"),
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"tools": [CUSTOM], "functions": [FUNCTION]}, "functions"),
        ({"functions": [FUNCTION], "function_call": {"name": "other"}}, "function_call"),
        ({"functions": [FUNCTION], "function_call": "required"}, "function_call"),
        ({"functions": [{"name": "a b"}]}, "functions[0].name"),
        (
            {
                "tools": [CUSTOM],
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}},
            },
            "tool_choice",
        ),
    ],
)
def test_what_cannot_be_called_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidField) as caught:
        request_of(**fields)
    assert caught.value.param == param


def test_functions_are_tools_of_which_one_is_called() -> None:
    request = request_of(functions=[FUNCTION], function_call={"name": "add"})
    assert request.tools == (Tool("add", "", {"type": "object"}),)
    assert request.tool_choice == ToolChoice("named", "add")
    assert not request.parallel_tool_calls
    assert request_of(functions=[FUNCTION], function_call="none").tool_choice == ToolChoice("none")


def test_the_result_of_a_function_belongs_to_the_call_before_it() -> None:
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": "{}"}},
        {"role": "function", "name": "add", "content": "3"},
    ]
    _, called, result = request_of(messages=messages).messages
    (call,) = called.tool_calls
    assert (call.name, call.arguments) == ("add", "{}")
    assert result == Message("tool", "3", tool_call_id=call.id, name="add")
    assert request_of(messages=messages).messages == request_of(messages=[*messages, *HELLO]).messages[:3]


def test_what_a_model_refused_is_what_it_said() -> None:
    parts = [{"type": "refusal", "refusal": "No."}, {"type": "text", "text": "Sorry."}]
    for said, text in (({"content": parts}, "No.\nSorry."), ({"content": None, "refusal": "No."}, "No.")):
        assert request_of(messages=[{"role": "assistant", **said}]).messages == (Message("assistant", text),)


def test_only_allowed_tools_may_be_called_of_those_that_the_model_is_told_of() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("a", "b")]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": tools[:1]}}
    request = request_of(tools=tools, tool_choice=choice)
    assert request.tool_choice == ToolChoice("required", allowed=("a",))
    assert [tool.name for tool in request.tools] == ["a", "b"]
    assert [tool.name for tool in request.callable_tools] == ["a"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\nb"}', "a\nb"),
        ('{"input": "a\\nb', "a\nb"),
        ('{"input": "a\\', "a"),
        ('{"input": "a\\u00e', "a"),
        ('{"input": "', ""),
        ('{"inp', '{"inp'),
        ("free", "free"),
        ('{"input": 5}', '{"input": 5}'),
    ],
)
def test_the_text_of_a_custom_call_is_what_was_written_of_it(arguments: str, text: str) -> None:
    assert custom_input(arguments) == text


ODD_ENVELOPE = Envelope("id", 5, 'mo"del', "fp", None)

ODD_NAMES = ('mo"del', "\0", '"\0"', "\\u0000")

TEXT = st.text(min_size=1)


def payload(frame: bytes) -> dict[str, Any]:
    assert frame.startswith(b"data: ")
    assert frame.endswith(b"\n\n")
    assert frame.count(b"\n") == 2
    decoded = json.loads(frame.removeprefix(b"data: "))
    assert isinstance(decoded, dict)
    return decoded


@given(TEXT, TEXT, st.integers(0, 15), st.booleans())
def test_a_later_chat_chunk_differs_from_the_first_in_text_and_role_only(
    first: str, later: str, index: int, include_usage: bool
) -> None:
    frames = ChatFrames(ODD_ENVELOPE, include_usage=include_usage)
    one = payload(frames.frame(TextDelta(index, first)))
    for delta, event in [
        ({"content": later}, TextDelta(index, later)),
        ({"reasoning_content": later}, ReasoningDelta(index, later)),
    ]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        assert payload(frames.frame(event)) == one | {"choices": [choice]}


@given(TEXT, st.integers(0, 15))
def test_a_text_chunk_holds_the_text(text: str, index: int) -> None:
    frame = TextFrames(ODD_ENVELOPE, include_usage=False).frame(TextDelta(index, text))
    choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
    assert payload(frame) == ODD_ENVELOPE.head("text_completion") | {"choices": [choice]}


@pytest.mark.parametrize("name", ODD_NAMES)
@pytest.mark.parametrize("kind", [ChatFrames, TextFrames])
def test_a_model_may_have_any_name(kind: type[ChatFrames | TextFrames], name: str) -> None:
    frames = kind(replace(ODD_ENVELOPE, model=name), include_usage=True)
    first, later = (payload(frames.frame(TextDelta(0, "\0"))) for _ in range(2))
    assert first["model"] == later["model"] == name
    assert [choice.get("text") or choice["delta"]["content"] for choice in later["choices"]] == ["\0"]


@pytest.mark.parametrize("kind", [ChatFrames, TextFrames])
@pytest.mark.parametrize("event", [TextDelta(0, ""), COMPLETED])
def test_nothing_is_sent_for_what_has_nothing_to_show(kind: type[ChatFrames | TextFrames], event: Event) -> None:
    assert kind(ODD_ENVELOPE, include_usage=True).frame(event) == b""


@pytest.mark.parametrize("kind", [ChatFrames, TextFrames])
def test_that_a_model_is_being_loaded_is_a_comment_of_one_line(kind: type[ChatFrames | TextFrames]) -> None:
    frames = kind(ODD_ENVELOPE, include_usage=False)
    assert frames.frame(Loading("mine")) == b': "mine" is being loaded\n\n'
    assert frames.frame(Loading("a\nb", 0.5)) == b': "a\\nb" is being loaded, 50%\n\n'


def test_rules_that_changed_the_prompt_are_named() -> None:
    assert "hygiene" not in detail_json(COMPLETED, None)
    assert detail_json(replace(COMPLETED, hygiene=("tool-order",)), None)["hygiene"] == ["tool-order"]
