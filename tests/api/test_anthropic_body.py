"""Bodies of Anthropic's Messages, shape by shape, as requests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from emberkeep.api.anthropic_blocks import pack_reasoning, signature_of, unpack_reasoning
from emberkeep.api.anthropic_messages import CountBody, MessagesBody, user_of_metadata
from emberkeep.api.body import parse_body
from emberkeep.errors import InvalidField
from emberkeep.types.request import (
    Breakpoint,
    Image,
    JsonFormat,
    Message,
    ReasoningFormat,
    Request,
    Tool,
    ToolCall,
    ToolChoice,
    Ttl,
)

CACHED = {"type": "ephemeral"}
CACHED_1H = {"type": "ephemeral", "ttl": "1h"}
HELLO = {"role": "user", "content": "Hello"}
WEATHER = {"name": "get_weather", "description": "The weather.", "input_schema": {"type": "object"}}
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "A"}}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Zürich"}}


def read(**body: Any) -> Request:
    full = {"model": "claude", "max_tokens": 16, "messages": [HELLO], **body}
    return parse_body(MessagesBody, json.dumps(full).encode()).to_request()


def said(*blocks: Any, role: str = "user") -> tuple[Message, ...]:
    return read(messages=[{"role": role, "content": list(blocks)}]).messages


def text(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **fields}


# ── system and messages ──


@pytest.mark.parametrize("system", ["You are kind.\nBe brief.", [text("You are kind."), text("Be brief.")]])
def test_the_system_prompt_is_one_message(system: Any) -> None:
    assert read(system=system).messages == (
        Message("system", "You are kind.\nBe brief."),
        Message("user", "Hello"),
    )


def test_neighbours_of_one_role_are_one_message() -> None:
    messages = [
        HELLO,
        {"role": "user", "content": "Are you there?"},
        {"role": "assistant", "content": "Yes."},
        HELLO,
    ]
    assert read(messages=messages).messages == (
        Message("user", "Hello\nAre you there?"),
        Message("assistant", "Yes."),
        Message("user", "Hello"),
    )


def test_a_system_message_may_stand_between_others() -> None:
    messages = [HELLO, {"role": "system", "content": "Be brief."}, HELLO]
    assert [message.role for message in read(messages=messages).messages] == ["user", "system", "user"]


def test_empty_texts_say_nothing() -> None:
    assert read(system="", messages=[HELLO, {"role": "assistant", "content": ""}, HELLO]).messages == (
        Message("user", "Hello\nHello"),
    )


def test_images_are_passed_on_to_models_that_can_see() -> None:
    inline = {"type": "base64", "media_type": "image/png", "data": "iVBOR"}
    linked = {"type": "url", "url": "https://example.com/cat.png"}
    (message,) = said(
        text("What is it?"), {"type": "image", "source": inline}, {"type": "image", "source": linked}
    )
    assert message == Message(
        "user",
        "What is it?",
        images=(Image("data:image/png;base64,iVBOR"), Image("https://example.com/cat.png")),
    )


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({**DOCUMENT, "title": "Ship", "citations": {"enabled": False}}, "Ship\nA"),
        ({"type": "document", "context": "Old", "source": {"type": "content", "content": "A"}}, "Old\nA"),
        ({"type": "document", "source": {"type": "content", "content": [text("A"), text("B")]}}, "A\nB"),
        (
            {"type": "search_result", "title": "T", "source": "https://x", "content": [text("A"), text("B")]},
            "T\nhttps://x\nA\nB",
        ),
    ],
)
def test_documents_of_text_and_search_results_are_read(block: Any, expected: str) -> None:
    assert said(block, text("Sum it up.")) == (Message("user", f"{expected}\nSum it up."),)


# ── calls and results ──


def test_a_call_and_its_result_are_found_again() -> None:
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "15 degrees"}
    messages = [
        HELLO,
        {"role": "assistant", "content": [text("Let me see."), CALL]},
        {"role": "user", "content": [result]},
    ]
    assert read(messages=messages, tools=[WEATHER]).messages[1:] == (
        Message(
            "assistant", "Let me see.", tool_calls=(ToolCall("toolu_1", "get_weather", '{"city": "Zürich"}'),)
        ),
        Message("tool", "15 degrees", tool_call_id="toolu_1", name="get_weather"),
    )


def test_several_results_stand_before_what_the_user_says() -> None:
    results = [{"type": "tool_result", "tool_use_id": f"toolu_{i}", "content": str(i)} for i in range(2)]
    assert said(results[0], text("Go on."), results[1]) == (
        Message("tool", "0", tool_call_id="toolu_0"),
        Message("tool", "1", tool_call_id="toolu_1"),
        Message("user", "Go on."),
    )


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ({}, ""),
        ({"content": []}, ""),
        ({"content": [text("A"), text("B")]}, "A\nB"),
        ({"content": "no such city", "is_error": True}, "Error: no such city"),
        ({"is_error": True}, "Error"),
        ({"content": "fine", "is_error": False}, "fine"),
    ],
)
def test_results_come_as_text_and_errors_say_so(result: dict[str, Any], expected: str) -> None:
    (message,) = said({"type": "tool_result", "tool_use_id": "toolu_1", **result})
    assert message == Message("tool", expected, tool_call_id="toolu_1")


def test_a_result_may_be_an_image() -> None:
    image = {"type": "image", "source": {"type": "url", "url": "https://example.com/x.png"}}
    (message,) = said({"type": "tool_result", "tool_use_id": "t", "content": [image]})
    assert message.images == (Image("https://example.com/x.png"),)


def test_tools_are_named_and_described() -> None:
    request = read(tools=[{**WEATHER, "type": "custom", "strict": True, "cache_control": None}])
    assert request.tools == (Tool("get_weather", "The weather.", {"type": "object"}),)


@pytest.mark.parametrize(
    ("choice", "expected", "parallel"),
    [
        ({"type": "auto"}, ToolChoice("auto"), True),
        ({"type": "any", "disable_parallel_tool_use": True}, ToolChoice("required"), False),
        ({"type": "tool", "name": "get_weather"}, ToolChoice("named", "get_weather"), True),
        ({"type": "none"}, ToolChoice("none"), True),
    ],
)
def test_which_tool_is_called_can_be_chosen(choice: Any, expected: ToolChoice, parallel: bool) -> None:
    request = read(tools=[WEATHER], tool_choice=choice)
    assert (request.tool_choice, request.parallel_tool_calls) == (expected, parallel)


# ── thinking ──


def test_thinking_goes_back_as_the_reasoning_of_its_message() -> None:
    thought = {"type": "thinking", "thinking": "It rains.", "signature": "whatever it is"}
    assert said(thought, text("Rain."), role="assistant") == (Message("assistant", "Rain.", "It rains."),)


def test_thinking_that_was_not_shown_comes_back_in_its_signature() -> None:
    thought = {"type": "thinking", "thinking": "", "signature": pack_reasoning("It rains. ☂")}
    assert said(thought, text("Rain."), role="assistant") == (Message("assistant", "Rain.", "It rains. ☂"),)


def test_a_signature_that_unpacks_to_too_much_is_cut() -> None:
    assert len(unpack_reasoning(pack_reasoning("x" * (5 << 20)))) == 4 << 20


def test_equal_reasoning_has_equal_signatures() -> None:
    assert signature_of("a") == signature_of("a") != signature_of("b")


def test_thinking_that_only_others_can_read_is_left_out() -> None:
    redacted = {"type": "redacted_thinking", "data": "EmwKAhgB"}
    assert said(redacted, text("Rain."), role="assistant") == (Message("assistant", "Rain."),)


@pytest.mark.parametrize(
    ("thinking", "args", "reasoning"),
    [
        (None, {}, ReasoningFormat.STRIP),
        ({"type": "disabled"}, {"enable_thinking": False}, ReasoningFormat.STRIP),
        ({"type": "enabled", "budget_tokens": 2048}, {"enable_thinking": True}, None),
        ({"type": "adaptive", "display": "omitted"}, {}, None),
    ],
)
def test_models_think_where_it_is_asked_for(thinking: Any, args: Any, reasoning: Any) -> None:
    request = read(thinking=thinking)
    assert (request.template_args, request.reasoning) == (args, reasoning)
    assert request.thinks_if_asked is (thinking is None)


@pytest.mark.parametrize(("effort", "expected"), [("low", "low"), ("medium", "medium"), ("max", "high")])
def test_how_much_effort_is_told_to_templates_that_know_it(effort: str, expected: str) -> None:
    assert read(output_config={"effort": effort}).template_args["reasoning_effort"] == expected


# ── what else is asked for ──


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_an_answer_may_have_to_fit_a_schema(field: str) -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    body = {"output_config": {"format": form}} if field == "output_config" else {"output_format": form}
    assert read(**body).format == JsonFormat({"type": "object"})


def test_sampling_and_limits() -> None:
    request = read(temperature=0.2, top_p=0.9, top_k=5, stop_sequences=["END", "###"])
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (0.2, 0.9, 5)
    assert (request.max_tokens, request.stop) == (16, ("END", "###"))


def test_our_own_fields_work_here_too() -> None:
    request = read(seed=7, user_id="ann", conversation_id="c1", evict=False, speculation=False)
    assert request.sampling.seed == 7
    assert (request.user, request.conversation_id) == ("ann", "c1")
    assert (request.evict, request.speculation) == (False, False)


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([HELLO], False),
        ([HELLO, {"role": "assistant", "content": "The best answer is ("}], True),
        ([HELLO, {"role": "assistant", "content": [CALL]}], False),
        ([HELLO, {"role": "assistant", "content": ""}], False),
    ],
)
def test_an_answer_goes_on_with_the_assistants_last_message(messages: Any, expected: bool) -> None:
    assert read(messages=messages).continues is expected


def test_a_stream_wants_to_know_what_was_reused() -> None:
    assert read(stream=True).want_progress and not read().want_progress


def test_counting_takes_the_same_prompt_without_a_limit() -> None:
    body = {"model": "claude", "system": "Be kind.", "messages": [HELLO], "tools": [WEATHER]}
    request = parse_body(CountBody, json.dumps(body).encode()).to_prompt()
    assert request.messages == (Message("system", "Be kind."), Message("user", "Hello"))
    assert [tool.name for tool in request.tools] == ["get_weather"]


# ── whose it is ──


@pytest.mark.parametrize(
    ("said", "user", "session"),
    [
        ("", "", ""),
        ("13803d75-b4b5-4c3e-b2a2-6f21399b021b", "13803d75-b4b5-4c3e-b2a2-6f21399b021b", ""),
        ('{"device_id": "d1", "account_uuid": "", "session_id": "s1"}', '{"device_id": "d1"}', "s1"),
        (
            '{"session_id": "s2", "device_id": "d1", "account_uuid": "a1"}',
            '{"account_uuid": "a1", "device_id": "d1"}',
            "s2",
        ),
        ("user_d1_account__session_s1", "user_d1_account_", "s1"),
        ("1234", "1234", ""),
        ('{"session_id": "s1"}', '{"session_id": "s1"}', "s1"),
        ("_session_s1", "_session_s1", "s1"),
        ('{"id": 0, "session_id": "s1"}', '{"id": 0}', "s1"),
    ],
)
def test_sessions_of_one_user_share_what_is_stored(said: str, user: str, session: str) -> None:
    assert user_of_metadata(said) == (user, session)
    request = read(metadata={"user_id": said})
    assert (request.user, request.cache_key) == (user, session or None)
    assert request.namespace == (json.dumps([user, ""]) if user else "")


def test_a_user_that_is_named_otherwise_counts_more() -> None:
    assert read(metadata={"user_id": "d1"}, user_id="ann").namespace == json.dumps(["ann", ""])


def test_users_whose_names_join_to_the_same_words_are_two() -> None:
    one, other = ('{"a": "x", "b": "y z"}', '{"a": "x y", "b": "z"}')
    assert user_of_metadata(one) != user_of_metadata(other)


# ── breakpoints ──


def test_many_breakpoints_are_read_in_time_that_grows_with_their_number() -> None:
    """Each once took as long as all before it together: minutes for these."""
    block = {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}
    request = read(messages=[{"role": "user", "content": [block] * 20_000}])
    assert len(request.breakpoints) == 20_000
    assert request.breakpoints[:2] == (Breakpoint(1, 5), Breakpoint(1, 11))
    assert request.breakpoints[-1] == Breakpoint(1)


def test_breakpoints_stand_after_tools_system_and_blocks() -> None:
    request = read(
        tools=[WEATHER, {**WEATHER, "name": "get_time", "cache_control": CACHED_1H}],
        system=[text("Rules.", cache_control=CACHED_1H), text("Date.", cache_control=CACHED)],
        messages=[{"role": "user", "content": [text("List.", cache_control=CACHED), text("Go.")]}],
    )
    assert request.breakpoints == (
        Breakpoint(0, ttl=Ttl.LONG),
        Breakpoint(1, chars=len("Rules."), ttl=Ttl.LONG),
        Breakpoint(1),
        Breakpoint(2, chars=len("List.")),
    )
    assert request.ttl is Ttl.LONG


def test_a_breakpoint_may_stand_on_calls_and_results() -> None:
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "15", "cache_control": CACHED}
    messages = [
        {"role": "assistant", "content": [text("See."), {**CALL, "cache_control": CACHED}]},
        {"role": "user", "content": [result, text("Go on.", cache_control=CACHED)]},
    ]
    assert read(messages=messages).breakpoints == (Breakpoint(1), Breakpoint(2), Breakpoint(3))


def test_one_for_the_whole_request_stands_at_its_end() -> None:
    request = read(system="Rules.", cache_control=CACHED)
    assert request.breakpoints == (Breakpoint(2),)
    assert request.ttl is None


# ── what is refused ──


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"max_tokens": None}, "max_tokens: give a whole number."),
        ({"max_tokens": -1}, "max_tokens: give 0 or more."),
        ({"messages": []}, "messages: give 1 or more entries."),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text: is required.",
        ),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content: give a list."),
        (
            {"messages": [{"role": "tool", "content": "x"}]},
            "messages[0].role: give 'user', 'assistant' or 'system'.",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "server_tool_use"}]}]},
            "messages[0].content[0]: 'server_tool_use' is no block that can be read here: leave it out.",
        ),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "tools[0]: web_search_20250305 is Anthropic's own: give a tool of yours, with name and input_schema.",
        ),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema: is required."),
        ({"tool_choice": {"type": "any"}}, "tool_choice: required needs at least one tool: give tools."),
        (
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}},
            "tool_choice.disable_parallel_tool_use: give true or false.",
        ),
        # Without it the model would go on with its own last message.
        (
            {"messages": [HELLO, {"role": "assistant", "content": "x"}, {"role": "user", "content": ""}]},
            "messages[2].content: is empty: give at least one block with a text.",
        ),
        *(
            (
                {"messages": [{"role": "user", "content": [{"type": "document", "source": source}]}]},
                "messages[0].content[0].source: models here read text: "
                "give the document as a source of type text or content.",
            )
            for source in (
                {"type": "base64", "data": "JVBER"},
                {"type": "url", "url": "https://x"},
                {"type": "file"},
            )
        ),
        (
            {"messages": [{"role": "user", "content": [{**DOCUMENT, "citations": {"enabled": True}}]}]},
            "messages[0].content[0].citations: models here do not cite: leave it out.",
        ),
        ({"mcp_servers": [{}]}, "mcp_servers: is not supported: let the client call these servers."),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl: give '5m' or '1h'."),
    ],
)
def test_what_cannot_be_done_is_said_with_its_place(body: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidField) as refused:
        read(**body)
    assert str(refused.value) == sentence


def test_what_agents_send_besides_is_ignored() -> None:
    read(
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        service_tier="auto",
        betas=["x"],
        container=None,
        speed="standard",
    )
