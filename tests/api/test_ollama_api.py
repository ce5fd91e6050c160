from __future__ import annotations

import base64
import json
from operator import attrgetter
from typing import Any

import pytest

from emberkeep.api.body import validate
from emberkeep.api.ollama_answer import GenerateEnvelope, OllamaEnvelope, OllamaFrames, timestamp
from emberkeep.api.ollama_body import EmbedBody, EmbeddingsBody, GenerateBody, OllamaChatBody, to_context
from emberkeep.api.openai_completions import USUAL_COMPLETION
from emberkeep.errors import InvalidField
from emberkeep.types.events import (
    Event,
    Finished,
    FinishReason,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
)
from emberkeep.types.request import (
    Image,
    Infill,
    JsonFormat,
    Message,
    ReasoningFormat,
    Request,
    Sampling,
    ToolCall,
)
from helpers.scripted_server import COMPLETED

HELLO = {"role": "user", "content": "why is the sky blue?"}
PIXEL = base64.b64encode(b"\x89PNG\r\n\x1a\n....").decode()


def chat(**fields: Any) -> Request:
    return validate(OllamaChatBody, {"messages": [HELLO], **fields}).to_request()


def generate(**fields: Any) -> Request:
    return validate(GenerateBody, {"prompt": "Hi", **fields}).to_request()


# ── options ──


def test_options_that_say_how_a_model_is_loaded_are_ignored() -> None:
    loading = {"numa": False, "num_gpu": 1, "num_batch": 2, "main_gpu": 0, "use_mmap": True, "num_thread": 8}
    assert chat(options={**loading, "num_keep": 5, "penalize_newline": True, "num_ctx": 1024}) == chat()


# ── messages ──

CALL = {"function": {"name": "get_weather", "arguments": {"city": "Zürich"}}}


def test_a_call_without_an_id_gets_one_and_its_result_the_same() -> None:
    messages = [HELLO, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    request = chat(messages=[*messages, {"role": "tool", "tool_name": "get_weather", "content": "11 degrees"}])
    called, result = request.messages[1:]
    assert called.tool_calls == (ToolCall("call_0", "get_weather", '{"city": "Zürich"}'),)
    assert (result.tool_call_id, result.name, result.content) == ("call_0", "get_weather", "11 degrees")
    assert chat(messages=messages).messages[1] == called


def test_results_find_their_calls_by_name_whatever_their_order() -> None:
    other = {"function": {"name": "get_time", "arguments": {}}}
    calls = {"role": "assistant", "tool_calls": [CALL, other, CALL]}
    results = [{"role": "tool", "content": "x", "tool_name": name} for name in ("get_time", "get_weather", "")]
    request = chat(messages=[HELLO, calls, *results])
    assert [message.tool_call_id for message in request.messages[2:]] == ["call_1", "call_0", "call_2"]


def test_ids_that_are_given_stay() -> None:
    called = {"role": "assistant", "tool_calls": [{"id": "abc", **CALL}]}
    request = chat(messages=[HELLO, called, {"role": "tool", "content": "x", "tool_call_id": "abc"}])
    assert request.messages[1].tool_calls[0].id == request.messages[2].tool_call_id == "abc"


def test_a_result_without_a_call_has_no_id() -> None:
    assert chat(messages=[HELLO, {"role": "tool", "content": "x"}]).messages[1].tool_call_id is None


def test_images_are_data_with_their_kind() -> None:
    request = chat(messages=[{**HELLO, "images": [PIXEL, "/9j/4AAQ"]}])
    assert request.messages[0].images == (
        Image(f"data:image/png;base64,{PIXEL}"),
        Image("data:image/jpeg;base64,/9j/4AAQ"),
    )


def test_thoughts_come_back() -> None:
    said = {"role": "assistant", "content": "4", "thinking": "2 and 2"}
    assert chat(messages=[HELLO, said]).messages[1] == Message("assistant", "4", "2 and 2")


# ── generate ──


def test_a_prompt_becomes_a_message_after_the_system_prompt() -> None:
    request = generate(system="Be brief.", images=[PIXEL])
    assert [message.role for message in request.messages] == ["system", "user"]
    assert request.messages[1].images


def test_a_raw_prompt_stays_as_it_is() -> None:
    request = generate(raw=True, prompt="[INST] hi [/INST]")
    assert (request.prompt, request.messages) == ("[INST] hi [/INST]", ())


def test_a_raw_prompt_has_the_usual_limit_of_completions_unless_it_says() -> None:
    assert generate(raw=True).max_tokens == USUAL_COMPLETION
    assert generate(raw=True, options={"num_predict": -1}).max_tokens is None
    assert generate(raw=True, options={"num_predict": 7}).max_tokens == 7
    assert generate().max_tokens is None


def test_a_suffix_asks_for_the_text_in_between() -> None:
    request = generate(prompt="def f(", suffix="return 1")
    assert (request.prompt, request.infill) == ("def f(", Infill("return 1"))


SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}}
SAMPLED = {"temperature": 0.5, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.7, "presence_penalty": 1.5}
SAMPLED |= {"frequency_penalty": 1.0, "seed": 42, "repeat_last_n": 33, "mirostat": 1, "mirostat_tau": 0.8}


@pytest.mark.parametrize(
    ("fields", "attribute", "expected"),
    [
        ({"options": {**SAMPLED, "repeat_penalty": 1.2}}, "sampling", Sampling(**SAMPLED, repetition_penalty=1.2)),
        ({"options": {"num_predict": 100.0}}, "max_tokens", 100),
        ({"options": {"num_predict": -1}}, "max_tokens", None),
        ({"options": {"num_predict": -2}}, "max_tokens", None),
        ({"options": {"stop": ["\n", "user:"]}}, "stop", ("\n", "user:")),
        ({"options": {"seed": -1}}, "sampling.seed", None),
        ({"format": "json"}, "format", JsonFormat()),
        ({"format": SCHEMA}, "format", JsonFormat(SCHEMA)),
        ({"format": ""}, "format", None),
        ({}, "template_args", {}),
        ({"think": True}, "template_args", {"enable_thinking": True}),
        ({"think": True}, "reasoning", ReasoningFormat.SEPARATE),
        ({"think": "high"}, "template_args", {"enable_thinking": True, "reasoning_effort": "high"}),
        ({"think": False}, "template_args", {"enable_thinking": False}),
        ({"think": False}, "reasoning", ReasoningFormat.STRIP),
        ({}, "top_logprobs", None),
        ({"logprobs": True}, "top_logprobs", 0),
        ({"logprobs": True, "top_logprobs": 3}, "top_logprobs", 3),
        ({}, "evict", None),
        ({"truncate": False}, "evict", False),
        ({"user_id": "ada"}, "user", "ada"),
        ({"conversation_id": "c1"}, "conversation_id", "c1"),
        ({}, "keep_alive_s", None),
        *(({"keep_alive": one}, "keep_alive_s", s) for one, s in (("5m", 300), ("1h30m", 5400), ("300ms", 0.3))),
        *(
            ({"keep_alive": one}, "keep_alive_s", s)
            for one, s in ((60, 60), ("0", 0), (0, 0), (-1, -1), ("-1m", -60))
        ),
        *(({"keep_alive": one}, "keep_alive_s", -1) for one in (10**400, -(10**400), 1e300, "9999999999999h")),
    ],
)
def test_fields_reach_the_request(fields: dict[str, Any], attribute: str, expected: Any) -> None:
    found = attrgetter(attribute)(chat(**fields))
    assert found == (pytest.approx(expected) if attribute == "keep_alive_s" and expected else expected)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"options": {"num_predict": -3}}, r"options\.num_predict: give 0 or more, -1 for no limit or -2"),
        *(({"options": {"mirostat": mode}}, r"options\.mirostat") for mode in (3, False, "1")),
        *(({"keep_alive": one}, "keep_alive: give seconds") for one in ("soon", "5 minutes", True, [])),
        ({"format": "yaml"}, "format"),
        (
            {"messages": [{**HELLO, "images": ["./cat.png"]}]},
            r"messages\[0\]\.images\[0\]: give an image as base64",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_by_its_name(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidField, match=sentence):
        chat(**fields)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"raw": True, "system": "x"}, "system: does not go with raw"),
        ({"suffix": "x", "system": "y"}, "system: does not go with raw and suffix"),
        ({"template": "{{ .Prompt }}"}, "template: is the model's own here"),
    ],
)
def test_what_cannot_be_generated_is_refused_by_its_name(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidField, match=sentence):
        generate(**fields)


def test_a_context_is_the_conversation_so_far() -> None:
    before = [Message("system", "Be brief."), Message("user", "Grüße 👋"), Message("assistant", "Hallo.", "hm")]
    context = to_context(before)
    assert all(0 <= number < 2**31 for number in context)
    assert generate(context=context).messages == (*before, Message("user", "Hi"))
    changed = generate(context=context, system="Be long.").messages
    assert [message.content for message in changed] == ["Be long.", "Grüße 👋", "Hallo.", "Hi"]


@pytest.mark.parametrize("text", ["", "a", "ab", "abc", "é\u2028😀\0"])
def test_a_context_holds_any_text(text: str) -> None:
    before = (Message("assistant", text, reasoning=text),)
    assert generate(context=to_context(before)).messages == (*before, Message("user", "Hi"))


@pytest.mark.parametrize("context", [[1, 2, 3], "x", [0x656B31, -1], [0x656B31, 1 << 40], [0x656B31, 9]])
def test_a_context_of_another_server_is_refused(context: Any) -> None:
    with pytest.raises(InvalidField, match="context: was not made here"):
        generate(context=context)


def test_a_context_with_half_a_character_is_refused() -> None:
    """It could not be written into the next one, after the whole answer."""
    written = rb'[["user", "\ud800", ""]] '
    packed = [int.from_bytes(written[i : i + 3]) for i in range(0, len(written), 3)]
    with pytest.raises(InvalidField, match="context: was not made here"):
        generate(context=[0x656B31, *packed])


def test_no_context_is_an_empty_one() -> None:
    assert generate(context=[]) == generate(context=None) == generate()


def test_nothing_asked_only_loads_the_model() -> None:
    assert validate(GenerateBody, {"model": "m"}).only_loads
    assert validate(OllamaChatBody, {"model": "m", "messages": []}).only_loads
    assert not validate(GenerateBody, {"prompt": "x"}).only_loads


def test_inputs_of_embeddings() -> None:
    one = validate(EmbedBody, {"input": "a"}).to_request()
    assert (one.inputs, one.truncate, one.normalize) == (("a",), True, True)
    two = validate(EmbedBody, {"input": ["a", "b"], "truncate": False, "dimensions": 8}).to_request()
    assert (two.inputs, two.truncate, two.dimensions) == (("a", "b"), False, 8)
    old = validate(EmbeddingsBody, {"prompt": "a"}).to_request()
    assert (old.inputs, old.normalize) == (("a",), False)


# ── answers ──


def lines(envelope: OllamaEnvelope, *events: Event) -> list[dict[str, Any]]:
    frames = OllamaFrames(envelope)
    written = b"".join([*map(frames.frame, events), frames.end()])
    return [json.loads(line) for line in written.splitlines()]


@pytest.mark.parametrize("name", ["\0", '"\0"', "\\u0000"])
def test_a_model_is_called_what_its_client_calls_it(name: str) -> None:
    told = lines(OllamaEnvelope(name, Request()), TextDelta(0, "\0"), _END, COMPLETED)
    assert [(line["model"], line["message"]["content"]) for line in told] == [(name, "\0"), (name, "")]


def test_a_stream_of_a_chat_has_a_line_per_piece_and_its_cost_in_the_last() -> None:
    told = lines(OllamaEnvelope("m", Request()), TextDelta(0, "Hel"), TextDelta(0, "lo"), _END, COMPLETED)
    assert [line["message"] for line in told] == [
        {"role": "assistant", "content": text} for text in ("Hel", "lo", "")
    ]
    assert [line["done"] for line in told] == [False, False, True]
    assert all(line["model"] == "m" and line["created_at"].endswith("Z") for line in told)
    last = told[-1]
    assert (last["done_reason"], last["prompt_eval_count"], last["eval_count"]) == ("stop", 12, 3)
    assert (last["prompt_eval_duration"], last["eval_duration"]) == (20_000_000, 30_000_000)
    assert last["total_duration"] > 0 and last["load_duration"] >= 0
    assert last["emberkeep"]["reused"] == {"hot": 1, "warm": 2, "cold": 5, "remote": 0}


def test_thoughts_have_a_field_of_their_own() -> None:
    first, *_ = lines(OllamaEnvelope("m", Request()), ReasoningDelta(0, "hm"), _END, COMPLETED)
    assert first["message"] == {"role": "assistant", "content": "", "thinking": "hm"}
    first, *_ = lines(GenerateEnvelope("m", Request()), ReasoningDelta(0, "hm"), _END, COMPLETED)
    assert (first["response"], first["thinking"]) == ("", "hm")


def test_calls_come_whole_with_their_arguments_as_objects() -> None:
    told = lines(
        OllamaEnvelope("m", Request()),
        ToolCallDelta(0, 0, "a", "get_weather", '{"city":'),
        ToolCallDelta(0, 0, None, None, ' "Oslo"}'),
        ToolCallDelta(0, 1, "b", "get_time", ""),
        Finished(0, FinishReason.TOOL_CALLS),
        COMPLETED,
    )
    assert [line["message"].get("tool_calls") for line in told] == [
        [{"id": "a", "function": {"index": 0, "name": "get_weather", "arguments": {"city": "Oslo"}}}],
        [{"id": "b", "function": {"index": 1, "name": "get_time", "arguments": {}}}],
        None,
    ]
    assert told[-1]["done_reason"] == "stop"


def test_a_call_that_was_cut_off_is_left_out() -> None:
    cut = ToolCallDelta(0, 0, "a", "f", '{"city": "Os')
    (last,) = lines(OllamaEnvelope("m", Request()), cut, Finished(0, FinishReason.LENGTH), COMPLETED)
    assert last["done_reason"] == "length"


def test_logprobs_stand_beside_the_text() -> None:
    token = TokenLogprob(1, b"Hi", -0.5, (TokenLogprob(1, b"Hi", -0.5),))
    first, *_ = lines(OllamaEnvelope("m", Request()), TextDelta(0, "Hi", (token,)), _END, COMPLETED)
    entry = {"token": "Hi", "logprob": -0.5, "bytes": [72, 105]}
    assert first["logprobs"] == [{**entry, "top_logprobs": [entry]}]


def test_a_generated_text_ends_with_its_context() -> None:
    request = generate()
    *_, last = lines(GenerateEnvelope("m", request), TextDelta(0, "Hello."), _END, COMPLETED)
    assert last["response"] == ""
    assert generate(context=last["context"], prompt="More").messages == (
        *request.messages,
        Message("assistant", "Hello."),
        Message("user", "More"),
    )


def test_a_raw_text_has_no_context() -> None:
    *_, last = lines(GenerateEnvelope("m", generate(raw=True)), TextDelta(0, "x"), _END, COMPLETED)
    assert "context" not in last


def test_times_have_nanoseconds() -> None:
    assert timestamp(1_700_000_000_000_000_042) == "2023-11-14T22:13:20.000000042Z"


_END = Finished(0, FinishReason.STOP)
