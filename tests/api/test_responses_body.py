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


def test_every_field_finds_its_place() -> None:
    asked = request(
        max_output_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_logprobs=3,
        truncation="auto",
        reasoning={"effort": "low", "summary": "auto"},
        parallel_tool_calls=False,
        prompt_cache_key="key",
        prompt_cache_retention="24h",
        user="ada",
        stop=["END"],
        speculation=False,
    )
    assert (asked.max_tokens, asked.sampling.temperature, asked.sampling.top_p) == (7, 0.5, 0.9)
    assert (asked.top_logprobs, asked.evict, asked.parallel_tool_calls) == (3, True, False)
    assert asked.template_args == {"enable_thinking": True, "reasoning_effort": "low"}
    assert (asked.cache_key, asked.ttl, asked.user, asked.stop) == ("key", Ttl.EXTENDED, "ada", ("END",))
    assert asked.speculation is False


def test_what_is_left_out_is_as_configured() -> None:
    asked = request()
    assert (asked.evict, asked.max_tokens, asked.top_logprobs, asked.ttl) == (None, None, None, None)
    assert asked.template_args == {} and asked.tools == () and asked.format is None


def test_effort_none_switches_thinking_off() -> None:
    assert request(reasoning={"effort": "none"}).template_args["enable_thinking"] is False


def test_truncation_disabled_refuses_long_prompts() -> None:
    assert request(truncation="disabled").evict is False


def test_logprobs_are_asked_for_by_include() -> None:
    assert request(include=["message.output_text.logprobs"]).top_logprobs == 0


@pytest.mark.parametrize(("ttl", "kept"), [("30m", Ttl.LONG), ("12h", Ttl.EXTENDED)])
def test_cache_options_say_how_long_state_is_kept(ttl: str, kept: Ttl) -> None:
    assert request(prompt_cache_options={"ttl": ttl}).ttl is kept


def test_a_safety_identifier_is_a_user() -> None:
    assert request(safety_identifier="abc").user == "abc"
    assert request(safety_identifier="abc", user="ada").user == "ada"


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, JsonFormat()),
        ({"type": "json_schema", "name": "n", "schema": {"type": "object"}}, JsonFormat({"type": "object"})),
    ],
)
def test_text_formats(wanted: dict[str, Any], expected: JsonFormat | None) -> None:
    assert request(text={"format": wanted, "verbosity": "low"}).format == expected


# ── tools ──


def test_functions_are_flat() -> None:
    assert request(tools=[WEATHER]).tools == (Tool("get_weather", "The weather", WEATHER["parameters"]),)


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
    ("choice", "expected"),
    [
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "name": "get_weather"}, ToolChoice("named", "get_weather")),
    ],
)
def test_tool_choices(choice: Any, expected: ToolChoice) -> None:
    assert request(tools=[WEATHER], tool_choice=choice).tool_choice == expected


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
