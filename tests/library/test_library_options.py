"""What can be said over HTTP can be said in Python, in the same words and with the same meaning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from emberkeep import Emberkeep
from emberkeep.api.body import validate
from emberkeep.api.llama_server import InfillBody, LlamaCompletionBody
from emberkeep.api.openai_chat import ChatBody
from emberkeep.api.openai_completions import CompletionBody
from emberkeep.config.settings import Config
from emberkeep.errors import InvalidField
from emberkeep.library.arguments import (
    HTTP_NAMES,
    ChatOptions,
    PrefixOptions,
    PromptOptions,
    _ChatCall,
    _PrefixCall,
    _PromptCall,
    chat_request,
    option_names,
    prompt_request,
)
from emberkeep.types.events import Finished, FinishReason, Progress, TextDelta, TokenLogprob
from emberkeep.types.request import Request
from helpers.scripted_backend import ScriptedBackend, answer, fake_backend

HELLO = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "t"}}

ONLY_OVER_HTTP = {
    "model": "what was loaded answers",
    "messages": "given by place",
    "prompt": "given by place",
    "tools": "a parameter of its own",
    "stream": "a method of its own",
    "stream_options": "a result always has its usage",
    "timings_per_token": "a result always has its timings",
    "return_tokens": "a result always has its tokens",
    "response_fields": "a result has its fields",
    "lora": "only to be refused",
    "ask_permission": "a program decides itself what its functions do",
    "input_prefix": "the prompt of generate",
    "input_suffix": "the suffix of generate",
    "input_extra": "files of an editor's project",
}

SAID: dict[str, Any] = {
    "max_tokens": 7,
    "stop": ["a", "b"],
    "n": 3,
    "temperature": 0.3,
    "top_k": -1,
    "top_p": 0.4,
    "min_p": 0.2,
    "typical_p": 0.6,
    "seed": -4,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "repeat_penalty": 1.3,
    "repeat_last_n": -1,
    "dry_multiplier": 0.8,
    "dry_base": 2.0,
    "dry_allowed_length": 3,
    "dry_penalty_last_n": 99,
    "dry_sequence_breakers": ["\n", "#"],
    "xtc_probability": 0.5,
    "xtc_threshold": 0.2,
    "mirostat": 2,
    "mirostat_tau": 4.0,
    "mirostat_eta": 0.2,
    "top_n_sigma": 1.5,
    "dynatemp_range": 0.5,
    "dynatemp_exponent": 2.0,
    "adaptive_target": -1.0,
    "samplers": ["top_k", "temperature"],
    "min_keep": 2,
    "ignore_eos": True,
    "logit_bias": {"5": -100.0, "6": 3.0},
    "response_format": {"type": "json_object"},
    "grammar": 'root ::= "a"',
    "json_schema": {"type": "object"},
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
    "guided_choice": ["a", "b"],
    "guided_grammar": 'root ::= "a"',
    "structured_outputs": {"regex": "a+"},
    "kv_bits": 8,
    "prefill_chunk_size": 64,
    "approximate": "selective",
    "speculation": False,
    "prediction": {"type": "content", "content": "Hello"},
    "id_slot": 1,
    "user": "Ann",
    "conversation_id": "c",
    "prompt_cache_key": "k",
    "prefix_hash": "h",
    "logprobs": True,
    "evict": False,
    "recall": "tool",
    "chat_template_kwargs": {"enable_thinking": False},
    "reasoning_format": "hidden",
    "parallel_tool_calls": False,
    "tool_choice": "required",
    "echo": True,
    "suffix": "end",
    "best_of": 4,
    "t_max_predict_ms": 1500,
    "n_indent": 2,
    "post_sampling_probs": True,
}
"""A value for every option whose name is the same."""

TOGETHER: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True, "top_logprobs": 4},
    "return_progress": {"return_progress": True, "stream": True},
}
"""Those that need another one over HTTP."""

IN_PYTHON = {"use_cache", "namespace", "ttl"}
"""Those that have another name over HTTP (`HTTP_NAMES`)."""

CHAT, PROMPT = option_names(_ChatCall), option_names(_PromptCall)


def fields_of(*bodies: type) -> set[str]:
    return {info.alias or name for body in bodies for name, info in body.model_fields.items()}


def test_python_has_every_field_of_http() -> None:
    chats, texts = fields_of(ChatBody), fields_of(CompletionBody, LlamaCompletionBody, InfillBody)
    assert chats - {*HTTP_NAMES, *ONLY_OVER_HTTP} == set(CHAT) - IN_PYTHON - {"post_sampling_probs"}
    assert texts - {*HTTP_NAMES, *ONLY_OVER_HTTP} <= set(PROMPT)


def test_nothing_is_left_out_that_http_does_not_have() -> None:
    everything = fields_of(ChatBody, CompletionBody, LlamaCompletionBody, InfillBody)
    assert {*HTTP_NAMES, *ONLY_OVER_HTTP} <= everything


@pytest.mark.parametrize(
    ("call", "told"), [(_PromptCall, PromptOptions), (_PrefixCall, PrefixOptions), (_ChatCall, ChatOptions)]
)
def test_what_editors_are_told_is_what_is_accepted(call: Any, told: Any) -> None:
    assert set(option_names(call)) == set(get_type_hints(told))


def test_every_option_is_compared_below() -> None:
    assert {*SAID, *TOGETHER, *IN_PYTHON} == {*CHAT, *PROMPT}


@pytest.mark.parametrize("name", [name for name in CHAT if name in SAID or name in TOGETHER])
def test_an_option_of_a_chat_means_what_it_means_over_http(name: str) -> None:
    said = TOGETHER.get(name) or {name: SAID[name]}
    tools = [TOOL] if name == "tool_choice" else []
    if name == "post_sampling_probs":
        over_http = validate(LlamaCompletionBody, {"prompt": "hi", **said}).to_requests(list)[0]
        assert chat_request("hi", None, said).logprobs_as_drawn is over_http.logprobs_as_drawn is True
        return
    over_http = validate(ChatBody, {"messages": HELLO, "max_tokens": 256, "tools": tools, **said}).to_request()
    in_python = chat_request("hi", tools, {key: value for key, value in said.items() if key != "stream"})
    assert in_python == over_http
    assert in_python != chat_request("hi", tools, {}) or name == "adaptive_target"


@pytest.mark.parametrize("name", [name for name in PROMPT if name in SAID or name in TOGETHER])
def test_an_option_of_a_text_means_what_it_means_over_http(name: str) -> None:
    said = TOGETHER.get(name) or {name: SAID[name]}
    in_python = prompt_request("hi", {key: value for key, value in said.items() if key != "stream"})
    assert in_python == _over_http(said)
    assert in_python != prompt_request("hi", {}) or name == "adaptive_target"


def _over_http(said: dict[str, Any]) -> Request:
    if {"t_max_predict_ms", "n_indent", "post_sampling_probs"} & said.keys():
        body = {"prompt": "hi", "max_tokens": 256, **said}
        (request,) = validate(LlamaCompletionBody, body).to_requests(list)
        # What penalties look at is llama-server's own default.
        return replace(request, sampling=replace(request.sampling, repeat_last_n=None))
    if {"evict", "recall"} & said.keys():  # of chats alone over HTTP
        over_http = validate(ChatBody, {"messages": HELLO, "max_tokens": 256, **said}).to_request()
        return replace(over_http, messages=(), prompt="hi")
    told = {**said, "logprobs": said.get("top_logprobs", 0)} if "logprobs" in said else said
    told = {key: value for key, value in told.items() if key != "top_logprobs"}
    return validate(CompletionBody, {"prompt": "hi", **told}).to_requests()[0]


def test_a_name_of_http_leads_to_the_one_of_python() -> None:
    for theirs, ours in HTTP_NAMES.items():
        with pytest.raises(InvalidField, match=rf"^{theirs}: is not an argument here: use {ours}\.$"):
            prompt_request("hi", {theirs: 1})


def test_an_option_of_chats_is_refused_for_a_text_and_the_other_way_round() -> None:
    with pytest.raises(InvalidField, match=r"^tool_choice: is not an argument here"):
        prompt_request("hi", {"tool_choice": "auto"})
    with pytest.raises(InvalidField, match=r"^suffix: is not an argument here"):
        chat_request("hi", None, {"suffix": "x"})


def test_a_bias_may_have_numbers_as_keys_or_pairs() -> None:
    assert prompt_request("hi", {"logit_bias": {5: -1.0}}).sampling.logit_bias == {5: -1.0}
    pairs = prompt_request("hi", {"logit_bias": [(5, False), ("word", 2)]}).sampling
    assert (pairs.logit_bias, pairs.text_bias) == ({5: float("-inf")}, (("word", 2.0),))


def test_choices_are_told_apart() -> None:
    steps = [
        TextDelta(1, "second", tokens=(4,)),
        TextDelta(0, "first", (TokenLogprob(3, b"first", -0.5),), (3,)),
        Finished(1, FinishReason.LENGTH),
        *answer(""),
    ]
    with Emberkeep(ScriptedBackend(lambda request: steps)) as llm:
        result = llm.generate("hi", n=2)
        with llm.stream("hi", n=2) as stream:
            assert "".join(stream) == "first"
            assert stream.result.choices == result.choices
    assert [(choice.text, choice.tokens) for choice in result.choices] == [("first", (3,)), ("second", (4,))]
    assert [choice.finish_reason for choice in result.choices] == [FinishReason.STOP, FinishReason.LENGTH]
    assert (result.text, result.tokens, result.logprobs[0].logprob) == ("first", (3,), -0.5)


def test_the_likeliest_of_several_is_given() -> None:
    def scored(index: int, logprob: float) -> TextDelta:
        return TextDelta(index, f"answer {index}", (TokenLogprob(1, b"x", logprob),))

    steps = [scored(0, -2.0), scored(1, -0.1), scored(2, -1.0), *answer("")]
    backend = ScriptedBackend(lambda request: steps)
    with Emberkeep(backend) as llm:
        best = llm.generate("hi", best_of=3)
        two = llm.generate("hi", best_of=3, n=2, logprobs=True)
    assert (best.text, best.logprobs, len(best.choices)) == ("answer 1", (), 1)
    assert [(choice.text, len(choice.logprobs)) for choice in two.choices] == [("answer 1", 1), ("answer 2", 1)]
    assert (backend.requests[0].n, backend.requests[0].top_logprobs) == (3, 0)


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[Emberkeep]:
    with Emberkeep(fake_backend(Config(data_dir=tmp_path))) as llm:
        yield llm


@pytest.mark.slow
def test_a_model_gives_choices_with_log_probabilities(llm: Emberkeep) -> None:
    result = llm.generate("Once upon", n=3, seed=5, max_tokens=6, logprobs=True, top_logprobs=2, ignore_eos=True)
    assert len(result.choices) == 3
    assert len({choice.text for choice in result.choices}) > 1
    for choice in result.choices:
        assert [len(token.top) for token in choice.logprobs] == [2] * 6
        assert tuple(token.token_id for token in choice.logprobs) == choice.tokens
        assert choice.finish_reason is FinishReason.LENGTH
    assert result.usage.completion_tokens == 18


@pytest.mark.slow
def test_a_banned_token_is_not_drawn(llm: Emberkeep) -> None:
    first = llm.generate("Once upon", temperature=0, max_tokens=1).tokens[0]
    assert llm.generate("Once upon", temperature=0, max_tokens=1, logit_bias=[(first, False)]).tokens[0] != first


@pytest.mark.slow
def test_an_echo_comes_with_the_prompts_own_log_probabilities(llm: Emberkeep) -> None:
    result = llm.generate("Once upon", echo=True, logprobs=True, max_tokens=2, ignore_eos=True)
    assert result.text.startswith("Once upon")
    assert len(result.logprobs) == result.usage.prompt_tokens + 2


@pytest.mark.slow
def test_a_stream_tells_how_far_the_prompt_is(llm: Emberkeep) -> None:
    with llm.stream("hi", return_progress=True, max_tokens=1) as stream:
        assert any(isinstance(event, Progress) for event in stream.events())
