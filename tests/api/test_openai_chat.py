"""The bounds of every field, and what a body becomes."""

from __future__ import annotations

import json
import re
from operator import attrgetter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.api.body import parse_body
from emberkeep.api.openai_chat import ChatBody
from emberkeep.errors import InvalidField
from emberkeep.types.lineage import SHARED, user_of
from emberkeep.types.request import (
    Breakpoint,
    ChoiceFormat,
    GrammarFormat,
    JsonFormat,
    RegexFormat,
    Request,
    Sampling,
    ToolCall,
    Ttl,
)

HELLO = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "t"}}
CALL = {"id": "x", "type": "function", "function": {"name": "t", "arguments": "{}"}}


def request_of(**fields: Any) -> Request:
    return parse_body(ChatBody, json.dumps({"messages": HELLO, **fields}).encode()).to_request()


MESSAGE = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content")


def assert_our_words(message: str) -> None:
    """pydantic's sentences begin with a capital letter; ours say something about every kind of error."""
    assert re.fullmatch(r"[a-z_][^:]*: [a-z].*\.", message), message
    assert "cannot be used" not in message


BOUNDS: list[tuple[str, list[Any], list[Any]]] = [
    ("n", [1, 16, 2.0, None], [0, 17, 1.5, "1", True]),
    ("stop", ["a", ["a"] * 16, ["a" * 256], [], None], ["", [""], ["a"] * 17, ["a" * 257], 5, [5]]),
    ("max_tokens", [-1, 0, 1, 2.0, 2**31 - 1, None], [-2, 2**31, 1.5, "1"]),
    ("max_completion_tokens", [-1, 0, 1], [-2, "1"]),
    ("temperature", [0, 0.0, 5, 1.5], [-0.1, 5.1, "1", True]),
    ("top_p", [0, 0.01, 1], [-0.1, 1.1]),
    ("top_k", [-1, 0, 40, 40.0], [-2, 1.5]),
    ("min_p", [0, 1], [-0.1, 1.1]),
    ("typical_p", [0.1, 1], [0, 1.1]),
    ("frequency_penalty", [-2, 2], [-2.1, 2.1]),
    ("presence_penalty", [-2, 2], [-2.1, 2.1]),
    ("repetition_penalty", [0.01, 10], [0, 0.001, 10.1]),
    ("seed", [-(2**63), 0, 7.0, 2**63 - 1], [2**63, -(2**63) - 1, 1.5, "1"]),
    ("logit_bias", [{}, {"5": -100, "6": 100}], [{"5": 101}, {"-1": 1}, {"x": 1}, {"5": "1"}, [1]]),
    ("user_id", ["", "a-B_9", "a" * 512], ["a b", "é", "../x", "a\n", "a" * 513, 5]),
    ("llama_user_id", ["", "a-B_9"], ["a b", "a" * 513]),
    ("cache_salt", ["s"], ["", "s" * 513, 5]),
    ("user", ["", "Ann <ann@example.org>", "é" * 512], ["u" * 513, 5]),
    ("conversation_id", ["c", ""], ["c" * 513, 5]),
    ("prompt_cache_key", ["c"], ["c" * 513, 5]),
    ("prefix_hash", ["9f", ""], ["c" * 513, 5]),
    ("prompt_cache_retention", ["in_memory", "in-memory", "24h", None], ["1h", 24]),
    ("cache_prompt", [True, False, None], ["yes", 1]),
    ("kv_bits", [16, 8, 8.0, 4, None], [0, 32, "8", 8.5, True]),
    ("prefill_chunk_size", [32, 512.0, 65_536, None], [31, 0, 65_537, "64", 64.5, True]),
    ("stream", [True, False, None], ["true", 1]),
    ("parallel_tool_calls", [True, False, None], ["true"]),
    ("messages", [HELLO], [[], HELLO * 100_001, "hi", None]),
    ("tools", [[], None, [TOOL] * 256], [[TOOL] * 257, [{"type": "retrieval"}], "t"]),
    ("tool_choice", ["none", "auto", None], ["all", "required", {"type": "function"}, 5]),
    ("response_format", [{"type": "text"}, {"type": "json_object"}], ["json", {"type": "xml"}, {}]),
    ("grammar", ["", 'root ::= "a"', None], [5, ["a"], "x" * 300_000]),
    ("json_schema", [{}, "{}", {"type": "object"}, None], ["{", 5, "[]", []]),
    ("guided_json", [{}, '{"type": "integer"}', None], ["{", 5, '{"a":' * 500 + "1" + "}" * 500, '{"a": NaN}']),
    ("guided_regex", ["a+", "", None], [5]),
    ("guided_choice", [["a", "b"], None], [[], "a", [5]]),
    ("guided_grammar", ["start: 'a'", None], [5]),
    ("structured_outputs", [{"json": {}}, {"regex": "a"}, {}, None], [[], {"regex": 5}, {"structural_tag": {}}]),
    ("logprobs", [True, False], [1, "true"]),
    ("top_logprobs", [0, None], [5, 21, -1, "1"]),
    ("chat_template_kwargs", [{"enable_thinking": False, "a": 1, "b": "x", "c": None}], [{"a": []}, {"a b": 1}]),
    ("id_slot", [0, -1, 7, None], [-2, 2**31, 1.5, "0", True]),
    ("speculation", [True, False, None], ["off", "auto", 0]),
    (
        "prediction",
        [{"type": "content", "content": c} for c in ("", "x" * 2**18, [], [{"type": "text", "text": "a"}])]
        + [None],
        ["x", [], {}, {"content": "x"}, {"type": "text", "content": "x"}, {"type": "content"}]
        + [{"type": "content", "content": c} for c in (None, 5, "x" * (2**18 + 1), ["x"], [{"type": "text"}])]
        + [{"type": "content", "content": [{"type": "image_url", "image_url": {"url": "https://x"}}]}],
    ),
    ("an_unknown_field", [{"anything": []}], []),
]


@pytest.mark.parametrize(("field", "value"), [(name, v) for name, good, _ in BOUNDS for v in good])
def test_a_value_inside_the_bounds_is_taken(field: str, value: Any) -> None:
    assert request_of(**{field: value}).messages[0].content == "hi"


@pytest.mark.slow
def test_as_many_messages_as_there_may_be_are_taken() -> None:
    assert len(request_of(messages=HELLO * 100_000).messages) == 100_000


@pytest.mark.parametrize(("field", "value"), [(name, v) for name, _, bad in BOUNDS for v in bad])
def test_a_value_outside_the_bounds_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidField) as caught:
        request_of(**{field: value})
    assert caught.value.param is not None
    assert caught.value.param.split(".")[0].split("[")[0] == field
    assert_our_words(str(caught.value))


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": "x"}, "messages[0].role"),
        ({"role": "wizard", "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "system", "content": None}, "messages[0].content"),
        ({"role": "tool", "content": None, "tool_call_id": "x"}, "messages[0].content"),
        ({"role": "assistant"}, "messages[0].content"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "messages[0].content"),
        ({"role": "user", "content": None, "tool_calls": [CALL]}, "messages[0].content"),
        ("hi", "messages[0]"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            "messages[0].content[0].image_url.url",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "assistant", "tool_calls": [{"id": "x"}]}, "messages[0].tool_calls[0].function"),
    ],
)
def test_a_bad_message_is_refused_with_its_place(message: Any, param: str) -> None:
    with pytest.raises(InvalidField) as caught:
        request_of(messages=[message])
    assert caught.value.param == param
    assert_our_words(str(caught.value))


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_an_assistant_message_may_hold_tool_calls_or_reasoning_alone(content: dict[str, Any]) -> None:
    called = request_of(messages=[{"role": "assistant", **content, "tool_calls": [CALL]}])
    assert called.messages[0].tool_calls[0].name == "t"
    thought = request_of(messages=[{"role": "assistant", **content, "reasoning_content": "hm"}])
    assert thought.messages[0].reasoning == "hm"


def test_arguments_of_a_call_may_be_an_object() -> None:
    call = {"id": "x", "function": {"name": "t", "arguments": {"a": 1}}}
    assert request_of(messages=[{"role": "assistant", "tool_calls": [call]}]).messages[0].tool_calls == (
        ToolCall("x", "t", '{"a": 1}'),
    )


def test_a_huge_schema_is_refused() -> None:
    schema = {"type": "object", "description": "x" * 300_000}
    with pytest.raises(InvalidField) as caught:
        request_of(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    assert caught.value.param == "response_format.json_schema.schema"
    with pytest.raises(InvalidField):
        request_of(tools=[{"type": "function", "function": {"name": "t", "parameters": schema}}])


def test_too_many_biases_are_refused() -> None:
    assert len(request_of(logit_bias={str(i): 1 for i in range(1024)}).sampling.logit_bias) == 1024
    with pytest.raises(InvalidField):
        request_of(logit_bias={str(i): 1 for i in range(1025)})


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        (
            {"response_format": {"type": "json_object", "schema": {"type": "integer"}}},
            JsonFormat({"type": "integer"}),
        ),
        (
            {"response_format": {"type": "json_schema", "schema": {"type": "integer"}}},
            JsonFormat({"type": "integer"}),
        ),
        ({"response_format": {"type": "text"}, "grammar": "g"}, GrammarFormat("g")),
        ({"json_schema": {"type": "integer"}}, JsonFormat({"type": "integer"})),
        ({"guided_json": '{"type": "integer"}'}, JsonFormat({"type": "integer"})),
        ({"guided_regex": "a+"}, RegexFormat("a+")),
        ({"guided_choice": ["a", "b"]}, ChoiceFormat(("a", "b"))),
        ({"guided_grammar": "g"}, GrammarFormat("g")),
        ({"structured_outputs": {"json": {"type": "integer"}}}, JsonFormat({"type": "integer"})),
        ({"structured_outputs": {"json_object": True}}, JsonFormat()),
        ({"structured_outputs": {"regex": "a+"}}, RegexFormat("a+")),
        ({"structured_outputs": {"choice": ["a"]}}, ChoiceFormat(("a",))),
        ({"structured_outputs": {"grammar": "g"}}, GrammarFormat("g")),
        ({"grammar": "", "guided_regex": ""}, None),
    ],
)
def test_what_an_answer_must_look_like_has_many_names(fields: dict[str, Any], wanted: Any) -> None:
    found = request_of(**fields).format
    assert found == wanted
    if found is not None:
        assert found.param.partition(".")[0] in fields


def test_an_error_never_repeats_a_long_name() -> None:
    with pytest.raises(InvalidField) as caught:
        request_of(logit_bias={"x" * 100_000: 1})
    assert len(str(caught.value)) < 300


PAIRS = [[15, 1], ["Hello", -0.5], [2, False], ["no", False]]
TEXTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
SAMPLED = {
    "temperature": 1.0,
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.1,
    "typical_p": 0.9,
    "repetition_penalty": 1.1,
    "dry_multiplier": 0.8,
    "dry_base": 2.0,
    "dry_allowed_length": 3,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.2,
    "mirostat": 2,
    "mirostat_tau": 3.0,
    "mirostat_eta": 0.2,
    "top_n_sigma": 1.0,
    "dynatemp_range": 0.5,
    "dynatemp_exponent": 2.0,
    "min_keep": 2,
    "ignore_eos": True,
    "seed": 7,
}


@pytest.mark.parametrize(
    ("fields", "attribute", "expected"),
    [
        (SAMPLED, "sampling", Sampling(**SAMPLED)),
        ({"dry_base": 0.5}, "sampling", Sampling()),
        ({"dry_sequence_breakers": ["\n", "."]}, "sampling.dry_sequence_breakers", ("\n", ".")),
        ({"dry_penalty_last_n": -1}, "sampling.dry_penalty_last_n", 2**31 - 1),
        ({"top_k": -1}, "sampling.top_k", 0),
        ({"top_p": 0}, "sampling.top_p", 0),
        ({"seed": -1}, "sampling.seed", 2**64 - 1),
        ({"repeat_penalty": 1.2}, "sampling", Sampling(repetition_penalty=1.2, repeat_last_n=64)),
        ({"repeat_penalty": 1.2, "repeat_last_n": 8}, "sampling.repeat_last_n", 8),
        ({"repetition_penalty": 1.2}, "sampling.repeat_last_n", None),
        (
            {"samplers": ["top-k", "typical_p", "TEMP", "tfs_z"]},
            "sampling.samplers",
            ("top_k", "typ_p", "temperature"),
        ),
        ({"samplers": "kyt?"}, "sampling.samplers", ("top_k", "typ_p", "temperature")),
        ({"logit_bias": {"42": -1.5}}, "sampling.logit_bias", {42: -1.5}),
        ({"logit_bias": PAIRS}, "sampling.logit_bias", {15: 1.0, 2: float("-inf")}),
        ({"logit_bias": PAIRS}, "sampling.text_bias", (("Hello", -0.5), ("no", float("-inf")))),
        ({"max_tokens": 5, "max_completion_tokens": 0}, "max_tokens", 0),
        ({"max_tokens": -1}, "max_tokens", None),
        ({"max_tokens": 5, "max_completion_tokens": -1}, "max_tokens", None),
        ({"max_tokens": -1, "max_completion_tokens": 5}, "max_tokens", 5),
        ({"logprobs": True}, "top_logprobs", 0),
        ({"logprobs": True, "top_logprobs": 20}, "top_logprobs", 20),
        ({"logprobs": False}, "top_logprobs", None),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "template_args", {"enable_thinking": False}),
        ({"cache_prompt": False}, "use_cache", False),
        ({"cache_prompt": None}, "use_cache", True),
        ({"conversation_id": "c", "prompt_cache_key": "k"}, "conversation_id", "c"),
        ({"conversation_id": "c", "prompt_cache_key": "k"}, "cache_key", "k"),
        ({"prompt_cache_key": "k", "user": "u"}, "conversation_id", None),
        ({"conversation_id": "", "prompt_cache_key": ""}, "cache_key", None),
        ({"prefix_hash": "9f"}, "prefix_hash", "9f"),
        ({"prefix_hash": ""}, "prefix_hash", None),
        ({"prompt_cache_key": "k", "conversation_id": "c", "id_slot": 1}, "namespace", ""),
        ({"user_id": "", "user": ""}, "namespace", ""),
        ({"prompt_cache_retention": "in_memory"}, "ttl", Ttl.SHORT),
        ({"prompt_cache_retention": "in-memory"}, "ttl", Ttl.SHORT),
        ({"prompt_cache_retention": "24h"}, "ttl", Ttl.EXTENDED),
        ({"id_slot": 7}, "slot", 7),
        ({"id_slot": -1}, "slot", None),
        ({"speculation": False}, "speculation", False),
        ({"prediction": {"type": "content", "content": "def f():"}}, "prediction", "def f():"),
        ({"prediction": {"type": "content", "content": TEXTS}}, "prediction", "a\nb"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "t"}}},
            "tool_choice.name",
            "t",
        ),
    ],
)
def test_fields_reach_the_request(fields: dict[str, Any], attribute: str, expected: Any) -> None:
    assert attrgetter(attribute)(request_of(**fields)) == expected


def test_fields_left_out_and_nulls_mean_the_defaults() -> None:
    nulls = {name: None for name in ChatBody.model_fields if name != "messages"}
    assert request_of(**nulls) == request_of()
    assert request_of().sampling == Sampling()


ODD: list[Any] = [None, True, -3, 10**400, 1.5, float(10**300), "", "x y", [], [None], {}, {"": None}, [[]], [{}]]


def test_whatever_is_sent_is_refused_in_our_words() -> None:
    """Every field, with values of every JSON type, also one level down."""
    shapes = {
        **dict.fromkeys(ChatBody.model_fields, ODD),
        "messages": [*ODD, *([{"role": "user", "content": "x", key: odd}] for key in MESSAGE for odd in ODD)],
        "tools": [
            *ODD,
            *([{**TOOL, key: odd}] for key in TOOL for odd in ODD),
            [{"function": {"name": "x", "parameters": []}}],
        ],
        "response_format": [*ODD, *({"type": "json_schema", "json_schema": odd} for odd in ODD)],
    }
    refused = 0
    for name, values in shapes.items():
        for value in values:
            try:
                request_of(**{name: value})
            except InvalidField as error:
                assert_our_words(str(error))
                refused += 1
    assert refused > 300


CACHED, CACHED_1H = {"type": "ephemeral", "ttl": "5m"}, {"type": "ephemeral", "ttl": "1h"}


def test_beginnings_end_where_messages_and_parts_are_marked() -> None:
    parts = [
        {"type": "text", "text": "The list.", "cache_control": CACHED_1H},
        {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}, "stable": True},
        {"type": "text", "text": "What does it say?", "stable": True},
    ]
    request = request_of(
        messages=[
            {"role": "system", "content": "Be brief.", "cache_control": CACHED},
            {"role": "user", "content": parts},
            {"role": "assistant", "content": "15.", "stable": True},
            {"role": "user", "content": "And now?", "stable": False, "cache_control": None},
        ]
    )
    assert request.breakpoints == (
        Breakpoint(1),
        Breakpoint(2, len("The list."), Ttl.LONG),
        Breakpoint(2, len("The list.")),
        Breakpoint(2),
        Breakpoint(3),
    )
    assert request.ttl is Ttl.LONG
    plain = request_of(messages=[{"role": "user", "content": [{"type": "text", "text": "x"}]}])
    assert (plain.breakpoints, plain.ttl) == ((), None)


def test_how_long_the_whole_conversation_is_kept_is_said_by_the_request_first() -> None:
    marked = [{"role": "user", "content": "x", "cache_control": CACHED_1H}]
    assert request_of(messages=marked, prompt_cache_retention="24h").ttl is Ttl.EXTENDED
    assert request_of(messages=[{**marked[0], "cache_control": CACHED}]).ttl is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prediction": "x"}, "prediction"),
        ({"prediction": {"content": "x"}}, "prediction.type"),
        ({"prediction": {"type": "content"}}, "prediction.content"),
        ({"prediction": {"type": "content", "content": [{"type": "image_url"}]}}, "prediction.content[0].type"),
        ({"prediction": {"type": "content", "content": "x" * (2**18 + 1)}}, "prediction.content"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"tools": [], "tool_choice": {"type": "function", "function": {"name": "t"}}}, "tool_choice"),
        *(({"tools": [{"function": {"name": n}}]}, "tools[0].function.name") for n in ("", "a b", "a" * 129, "é")),
        *(
            ({"messages": [{"role": "user", "content": "x", **mark}]}, f"messages[0].{param}")
            for mark, param in (
                ({"cache_control": {"type": "persistent"}}, "cache_control.type"),
                ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl"),
                ({"cache_control": True}, "cache_control"),
                ({"stable": "yes"}, "stable"),
                ({"content": [{"type": "text", "text": "x", "stable": 1}]}, "content[0].stable"),
                ({"content": [{"type": "text", "text": "x", "cache_control": "1h"}]}, "content[0].cache_control"),
            )
        ),
    ],
)
def test_a_bad_field_is_refused_with_its_place(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidField) as caught:
        request_of(**fields)
    assert caught.value.param == param


def test_many_marks_are_read_in_time_that_grows_with_their_number() -> None:
    part = {"type": "text", "text": "hello", "stable": True}
    request = request_of(messages=[{"role": "user", "content": [part] * 50_000}])
    assert request.breakpoints[:2] == (Breakpoint(1, 5), Breakpoint(1, 11))
    assert (len(request.breakpoints), request.breakpoints[-1]) == (50_000, Breakpoint(1))


@pytest.mark.parametrize(
    ("fields", "user"),
    [
        ({}, ""),
        ({"user_id": "a"}, "a"),
        ({"llama_user_id": "a"}, "a"),
        ({"user": "a@b.c"}, "a@b.c"),
        ({"user_id": "a", "user": "b"}, "a"),
        ({"llama_user_id": "a", "user": "b"}, "a"),
        ({"user_id": "", "llama_user_id": "", "user": "b"}, "b"),
        ({"user_id": "", "user": ""}, ""),
    ],
    ids=str,
)
def test_the_user_is_taken_from_ids_before_names(fields: dict[str, str], user: str) -> None:
    request = request_of(**fields, cache_salt="s")
    assert request.user == user
    assert user_of(request.namespace) == user


HOSTILE = st.text(st.sampled_from('a*"[], \\\x00\u2028é'), max_size=6)


@given(one=st.tuples(HOSTILE, HOSTILE), other=st.tuples(HOSTILE, HOSTILE))
def test_namespaces_are_equal_exactly_when_user_and_salt_are(one: tuple[str, str], other: tuple[str, str]) -> None:
    spaces = []
    for user, salt in (one, other):
        request = request_of(user=user, **({"cache_salt": salt} if salt else {}))
        assert request.namespace != SHARED
        assert user_of(request.namespace) == user
        spaces.append(request.namespace)
    assert (spaces[0] == spaces[1]) == (one == other)


def test_an_id_and_a_name_that_are_equal_are_one_user() -> None:
    assert len({request_of(**{key: "a"}).namespace for key in ("user_id", "llama_user_id", "user")}) == 1


def test_two_different_users_in_one_request_are_refused() -> None:
    assert request_of(user_id="a", llama_user_id="a").namespace
    with pytest.raises(InvalidField):
        request_of(user_id="a", llama_user_id="b")


@pytest.mark.parametrize(
    "pairs", [[[1]], [[1, 2, 3]], [[True, 1]], [[1, True]], [[-1, 1]], [[1.5, 1]], [["a", "b"]]]
)
def test_other_pairs_are_refused(pairs: Any) -> None:
    with pytest.raises(InvalidField, match=r"logit_bias: give an object, or a list of pairs"):
        request_of(logit_bias=pairs)
