"""Items of the Responses API: checked, completed, and made into messages."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.api.body import validate
from emberkeep.api.kinds import custom_arguments, custom_input, seal, unseal
from emberkeep.api.responses_body import PromptBody
from emberkeep.api.responses_items import SEALED, Item, output_id, references, resolve, response_of, to_messages
from emberkeep.errors import InvalidField
from emberkeep.types.request import Breakpoint, Image, Message, ToolCall, Ttl

CALL = {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": '{"city":"Oslo"}'}
CUSTOM = {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": 'a "b"'}
TEXT = {"type": "input_text", "text": "x"}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "rain"}


def to_items(given: Any) -> list[Item]:
    return validate(PromptBody, {"input": given}).to_items()


def messages_of(*items: dict[str, Any]) -> tuple[Message, ...]:
    return to_messages(to_items(list(items)))[0]


def test_a_text_is_a_message_of_the_user() -> None:
    [item] = to_items("Hello!")
    assert item.pop("id").startswith("msg_")
    content = [{"type": "input_text", "text": "Hello!"}]
    assert item == {"type": "message", "role": "user", "content": content, "status": "completed"}
    assert to_messages(to_items("Hello!")) == ((Message("user", "Hello!"),), ())


def test_messages_may_leave_out_their_type_and_keep_their_id() -> None:
    items = to_items([{"role": "developer", "content": "Be brief.", "id": "msg_7"}])
    assert (items[0]["type"], items[0]["id"]) == ("message", "msg_7")
    assert to_messages(items)[0] == (Message("developer", "Be brief."),)


@pytest.mark.parametrize(
    ("role", "parts", "text"),
    [
        ("user", [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}], "one\ntwo"),
        ("assistant", [{"type": "output_text", "text": "yes", "annotations": [], "logprobs": []}], "yes"),
        ("assistant", [{"type": "refusal", "refusal": "I cannot."}], "I cannot."),
        ("system", [{"type": "text", "text": "plain"}], "plain"),
    ],
)
def test_parts_are_texts(role: str, parts: list[Any], text: str) -> None:
    assert [m.content for m in messages_of({"type": "message", "role": role, "content": parts})] == [text]


def test_images_stay_beside_the_text() -> None:
    parts = [
        {"type": "input_text", "text": "What is it?"},
        {"type": "input_image", "image_url": "data:image/png;,"},
    ]
    [message] = messages_of({"role": "user", "content": parts})
    assert (message.content, message.images) == ("What is it?", (Image("data:image/png;,"),))


def test_reasoning_text_and_calls_that_follow_each_other_are_one_message() -> None:
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    said = {"role": "assistant", "content": "I will look."}
    second = CALL | {"call_id": "call_2"}
    messages = messages_of({"role": "user", "content": "Rain?"}, thought, said, CALL, second, RESULT)
    calls = tuple(ToolCall(f"call_{i}", "get_weather", '{"city":"Oslo"}') for i in (1, 2))
    assert messages == (
        Message("user", "Rain?"),
        Message("assistant", "I will look.", "Hm.", calls),
        Message("tool", "rain", tool_call_id="call_1"),
    )


def test_what_follows_a_call_is_another_message() -> None:
    said = {"role": "assistant", "content": "It rains."}
    assert [m.content for m in messages_of(CALL, RESULT, said, said)] == ["", "rain", "It rains.", "It rains."]


def test_custom_calls_take_a_text_and_tools_may_have_a_namespace() -> None:
    output = [{"type": "input_text", "text": "done"}, {"type": "input_text", "text": "well"}]
    result = {"type": "custom_tool_call_output", "call_id": "c", "output": output}
    said, told = messages_of({**CUSTOM, "namespace": "files"}, result)
    assert said.tool_calls == (ToolCall("c", "files__patch", '{"input": "a \\"b\\""}'),)
    assert (told.role, told.content, told.tool_call_id) == ("tool", "done\nwell", "c")


@given(st.text())
def test_a_custom_input_comes_back_from_its_arguments(text: str) -> None:
    assert custom_input(custom_arguments(text)) == text


@pytest.mark.parametrize("arguments", ["", "plain text", "[1]", '{"input": 3}', '{"other": "x"}'])
def test_arguments_that_are_not_as_agreed_are_the_input(arguments: str) -> None:
    assert custom_input(arguments) == arguments


@given(st.text())
def test_reasoning_that_was_sealed_comes_back(text: str) -> None:
    item = {"type": "reasoning", "summary": [], "encrypted_content": seal(text, SEALED)}
    assert messages_of(item)[0].reasoning == unseal(seal(text, SEALED), SEALED) == text


@pytest.mark.parametrize("sealed", ["gAAAAABo", "ek1.", "ek1.!!!", "ek1.AAAA", ""])
def test_reasoning_that_others_sealed_is_nothing(sealed: str) -> None:
    assert unseal(sealed, SEALED) == ""


def test_ids_of_output_tell_their_response() -> None:
    response = "resp_" + "0123456789abcdef" * 2
    assert response_of(output_id(response, "message", 3)) == response
    assert response_of("msg_7") is None


def test_references_become_what_they_refer_to() -> None:
    known = {"msg_1": {"type": "message", "id": "msg_1", "role": "user", "content": []}}
    items = to_items([{"type": "item_reference", "id": "msg_1"}, {"id": "msg_2"}])
    assert references(items) == ["msg_1", "msg_2"]
    assert resolve(items[:1], known) == [known["msg_1"]]
    with pytest.raises(InvalidField, match=r"input\[1\].id: no such item is stored"):
        resolve(items, known)


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "web_search_call", "id": "ws_1"}, "input[0]"),
        ({"type": ["message"]}, "input[0]"),
        ({"role": "robot", "content": "x"}, "input[0].role"),
        ({"role": "user"}, "input[0].content"),
        ({"role": "user", "content": 7}, "input[0].content"),
        ({"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}, "input[0].content[0]"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[0].content[0].text"),
        ({"role": "user", "content": ["x"]}, "input[0].content[0]"),
        ({"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}, "input[0].content[0].image_url"),
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "input[0].call_id"),
        ({"type": "function_call_output", "call_id": "c", "output": {}}, "input[0].output"),
        ({"type": "reasoning", "content": [{"type": "other"}]}, "input[0].content[0].type"),
        ({}, "input[0].id"),
        ({"role": "user", "content": "x", "cache_control": {"type": "for ever"}}, "input[0].cache_control.type"),
        ({"role": "user", "content": [{**TEXT, "stable": "yes"}]}, "input[0].content[0].stable"),
        *(
            ({**item, "stable": 5}, "input[0].stable")
            for item in ({"role": "user", "content": "x"}, CALL, RESULT, CUSTOM, {"type": "reasoning"})
        ),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_place(item: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidField) as refused:
        to_items([item])
    assert refused.value.param == param
    assert str(refused.value).startswith(f"{param}: ") and str(refused.value).count(param) == 1


# ── marks ──


CACHED, CACHED_1H = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}


def test_beginnings_end_where_items_and_parts_are_marked() -> None:
    parts = [
        {"type": "input_text", "text": "The list.", "cache_control": CACHED_1H},
        {"type": "input_text", "text": "What does it say?"},
    ]
    items = to_items(
        [
            {"role": "developer", "content": "Be brief.", "stable": True},
            {"role": "user", "content": parts},
            {"role": "assistant", "content": "I look."},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "15", "cache_control": CACHED},
            {"role": "user", "content": "And now?", "stable": False},
        ]
    )
    messages, breakpoints = to_messages(items)
    assert len(messages) == 5
    assert breakpoints == (Breakpoint(1), Breakpoint(2, len("The list."), Ttl.LONG), Breakpoint(4))
