"""The body of `/v1/responses`, field by field."""

from __future__ import annotations

from typing import Any

import pytest

from emberkeep.api.body import validate
from emberkeep.api.responses_body import ResponseBody, response_head
from emberkeep.api.responses_items import Called
from emberkeep.errors import InvalidField
from emberkeep.types.request import JsonFormat, Message, Request, Tool, ToolChoice, Ttl

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}


def body(**fields: Any) -> ResponseBody:
    read = validate(ResponseBody, {"input": "Hello!", **fields})
    read.check()
    return read


def request(**fields: Any) -> Request:
    asked = body(**fields)
    return asked.to_request(asked.to_items())


def test_instructions_stand_before_everything() -> None:
    assert request(instructions="Be brief.").messages == (
        Message("system", "Be brief."),
        Message("user", "Hello!"),
    )


# ── tools ──


def test_a_custom_tool_is_a_function_of_one_text() -> None:
    asked = body(tools=[{"type": "custom", "name": "run", "description": "Runs it.", "format": {"type": "text"}}])
    [tool] = asked.toolset.tools
    assert tool.parameters["required"] == ["input"]
    assert tool.description == "Runs it."
    assert asked.toolset.as_called("run") == Called("run", None, is_custom=True)


def test_tools_of_a_namespace_are_called_by_both_names() -> None:
    asked = body(tools=[{"type": "namespace", "name": "crm", "description": "d", "tools": [WEATHER]}])
    assert [tool.name for tool in asked.toolset.tools] == ["crm__get_weather"]
    assert asked.toolset.as_called("crm__get_weather") == Called("get_weather", "crm")


@pytest.mark.parametrize(
    "kind",
    [
        "web_search",
        "web_search_preview",
        "file_search",
        "code_interpreter",
        "computer_use_preview",
        "image_generation",
        "mcp",
        "local_shell",
        "shell",
        "apply_patch",
        "tool_search",
    ],
)
def test_tools_that_only_openai_hosts_are_refused_by_name(kind: str) -> None:
    with pytest.raises(InvalidField, match=rf"tools\[1\]: '{kind}' runs at OpenAI only"):
        request(tools=[WEATHER, {"type": kind}])


@pytest.mark.parametrize("may_go_out", [True, False])
def test_the_search_that_codex_always_offers_is_left_out(may_go_out: bool) -> None:
    asked = body(tools=[WEATHER, {"type": "web_search", "external_web_access": may_go_out}])
    assert [tool.name for tool in asked.toolset.tools] == ["get_weather"]
    assert asked.toolset.left_out == ("web_search",)


@pytest.mark.parametrize(
    ("fields", "attribute", "expected"),
    [
        *(({}, name, None) for name in ("evict", "max_tokens", "top_logprobs", "ttl", "format")),
        ({"max_output_tokens": 7}, "max_tokens", 7),
        ({"temperature": 0.5}, "sampling.temperature", 0.5),
        ({"top_p": 0.9}, "sampling.top_p", 0.9),
        ({"top_logprobs": 3}, "top_logprobs", 3),
        ({"include": ["message.output_text.logprobs"]}, "top_logprobs", 0),
        ({"truncation": "auto"}, "evict", True),
        ({"truncation": "disabled"}, "evict", False),
        ({}, "template_args", {}),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, "template_args.enable_thinking", True),
        ({"reasoning": {"effort": "low"}}, "template_args.reasoning_effort", "low"),
        ({"reasoning": {"effort": "none"}}, "template_args.enable_thinking", False),
        ({"parallel_tool_calls": False}, "parallel_tool_calls", False),
        ({"prompt_cache_key": "key"}, "cache_key", "key"),
        ({"prompt_cache_retention": "24h"}, "ttl", Ttl.EXTENDED),
        ({"prompt_cache_options": {"ttl": "30m"}}, "ttl", Ttl.LONG),
        ({"prompt_cache_options": {"ttl": "12h"}}, "ttl", Ttl.EXTENDED),
        ({"safety_identifier": "abc"}, "user", "abc"),
        ({"safety_identifier": "abc", "user": "ada"}, "user", "ada"),
        ({"stop": ["END"]}, "stop", ("END",)),
        ({"text": {"format": {"type": "text"}, "verbosity": "low"}}, "format", None),
        ({"text": {"format": {"type": "json_object"}}}, "format", JsonFormat()),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {}}}}, "format", JsonFormat({})),
        ({}, "tools", ()),
        ({"tools": [WEATHER]}, "tools", (Tool("get_weather", "The weather", WEATHER["parameters"]),)),
        ({"tools": [WEATHER], "tool_choice": "none"}, "tool_choice", ToolChoice("none")),
        ({"tools": [WEATHER], "tool_choice": "required"}, "tool_choice", ToolChoice("required")),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "get_weather"}},
            "tool_choice",
            ToolChoice("named", "get_weather"),
        ),
    ],
)
def test_fields_reach_the_request(fields: dict[str, Any], attribute: str, expected: Any) -> None:
    name, _, key = attribute.partition(".")
    found = getattr(request(**fields), name)
    if key:
        found = found[key] if isinstance(found, dict) else getattr(found, key)
    assert found == expected


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_are_all_that_may_be_called_of_those_that_the_model_is_told_of(mode: str) -> None:
    allowed = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "get_weather"}]}
    asked = request(tools=[WEATHER, WEATHER | {"name": "other"}], tool_choice=allowed)
    assert [tool.name for tool in asked.tools] == ["get_weather", "other"]
    assert [tool.name for tool in asked.callable_tools] == ["get_weather"]
    assert asked.tool_choice.mode == mode


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{}]}},
            "tool_choice.tools[0].type",
        ),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tools": [{"type": "custom", "name": "c", "format": {"type": "grammar"}}]}, "tools[0].format"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]},
            "tools[0].tools[0].name",
        ),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": 7}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"background": True, "stream": True}, "stream"),
        ({"background": True, "store": False}, "store"),
        ({"conversation": "conv_1", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": {"name": "x"}}, "conversation"),
        ({"input": []}, "input"),
        ({"input": 7}, "input"),
        ({"input": [7]}, "input[0]"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k"),
        ({"top_logprobs": 21}, "top_logprobs"),
    ],
)
def test_what_cannot_be_done_is_refused_by_its_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidField) as refused:
        request(**fields)
    assert refused.value.param == param


def test_a_conversation_is_named_by_its_id_or_by_an_object() -> None:
    assert body(conversation="conv_1").conversation == body(conversation={"id": "conv_1"}).conversation == "conv_1"


def test_a_response_tells_what_was_asked() -> None:
    schema = {"type": "object"}
    asked = body(
        instructions="Be brief.",
        tools=[{"type": "function", "name": "f"}],
        text={"format": {"type": "json_schema", "name": "n", "schema": schema}},
        metadata={"a": "b"},
        conversation={"id": "conv_1"},
        reasoning={"effort": "high"},
    )
    head = response_head(asked, "resp_1", 5, "tiny", is_stored=True)
    assert (head["id"], head["object"], head["created_at"], head["model"]) == ("resp_1", "response", 5, "tiny")
    assert (head["status"], head["output"], head["usage"], head["error"]) == ("in_progress", [], None, None)
    assert head["tools"] == [
        {"type": "function", "name": "f", "description": None, "parameters": None, "strict": None}
    ]
    assert head["text"]["format"]["schema"] == schema
    assert (head["metadata"], head["conversation"], head["store"]) == ({"a": "b"}, {"id": "conv_1"}, True)
    assert head["reasoning"]["effort"] == "high"
