"""The official OpenAI client against `emberkeep serve` with the real default model."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest

from helpers.server_process import STEADY, ServerProcess, serve, user

pytestmark = pytest.mark.slow

QUESTION = [user("Name three animals that live in the sea.")]
GREEDY: dict[str, Any] = {
    "model": "default",
    "messages": QUESTION,
    "temperature": 0,
    "max_tokens": 24,
    # Steps with drafts round differently, and which drafts there are depends on what was asked before.
    "extra_body": {"speculation": False},
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Oslo"]}, "tomorrow": {"type": "boolean"}},
            "required": ["city", "tomorrow"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}
ASK_WEATHER: dict[str, Any] = {
    "model": "default",
    "messages": [user("What is the weather in Oslo tomorrow?")],
    "tools": [WEATHER, TIME],
    "temperature": 0,
    "max_tokens": 80,
}


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serve(smollm2, tmp_path_factory.mktemp("data"), *STEADY) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


# ── answers ──────────────────────────────────────────────────────────────────────────────────────


def test_a_streamed_answer_is_the_answer_in_pieces(client: openai.OpenAI) -> None:
    client.chat.completions.create(**GREEDY)
    whole = client.chat.completions.create(**GREEDY)
    chunks = list(client.chat.completions.create(**GREEDY, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content != ""
    assert len(chunks) > 5
    assert chunks[-1].usage is not None and whole.usage is not None
    usage = chunks[-1].usage
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1


def test_an_answer_ends_before_a_stop_string(client: openai.OpenAI) -> None:
    client.chat.completions.create(**GREEDY)
    full = client.chat.completions.create(**GREEDY).choices[0].message.content
    assert full is not None
    word = full.split()[4]
    choice = client.chat.completions.create(**GREEDY, stop=word).choices[0]
    assert choice.message.content == full[: full.index(word)]
    assert choice.finish_reason == "stop"


def test_log_probabilities_belong_to_the_text(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(**GREEDY, logprobs=True, top_logprobs=3).choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert (
        b"".join(bytes(token.bytes or []) for token in choice.logprobs.content).decode() == choice.message.content
    )
    for token in choice.logprobs.content:
        assert token.token == token.top_logprobs[0].token  # greedy takes the likeliest
        assert sum(math.exp(top.logprob) for top in token.top_logprobs) <= 1 + 1e-6


def test_several_choices_of_one_prompt(client: openai.OpenAI) -> None:
    warm = {**GREEDY, "temperature": 1.5, "seed": 7}
    choices = client.chat.completions.create(**warm, n=2).choices
    assert [choice.index for choice in choices] == [0, 1]
    assert choices[0].message.content != choices[1].message.content


# ── constrained answers ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("choice", "allowed"),
    [
        ("required", {"get_weather", "get_time"}),
        ({"type": "function", "function": {"name": "get_weather"}}, {"get_weather"}),
    ],
    ids=["required", "named"],
)
def test_a_demanded_tool_call_comes_with_arguments_that_fit(
    client: openai.OpenAI, choice: Any, allowed: set[str]
) -> None:
    answer = client.chat.completions.create(**ASK_WEATHER, tool_choice=choice, parallel_tool_calls=False)
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name in allowed
    arguments = json.loads(call.function.arguments)
    if call.function.name == "get_weather":
        assert arguments["city"] in ("Paris", "Oslo")
        assert isinstance(arguments["tomorrow"], bool)


@pytest.mark.parametrize("stream", [False, True])
def test_a_demanded_call_that_is_cut_never_shows_its_markup(server: ServerProcess, stream: bool) -> None:
    demand = {**ASK_WEATHER, "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}
    names = []
    for length in range(1, 24):
        body = {**demand, "max_tokens": length, "stream": stream}
        response = server.http.post(f"{server.url}/v1/chat/completions", json=body)
        lines = [line.removeprefix("data: ") for line in response.text.split("\n") if "{" in line]
        choices = [choice for line in lines for choice in json.loads(line)["choices"]]
        parts = [choice["delta" if stream else "message"] for choice in choices]
        finish = next(choice["finish_reason"] for choice in choices if choice["finish_reason"])
        assert not "".join(part.get("content") or "" for part in parts)
        functions = [call["function"] for part in parts for call in part.get("tool_calls") or ()]
        names += [function["name"] for function in functions if "name" in function]  # in its first piece only
        if finish == "tool_calls":
            break
        assert finish == "length"
    assert set(names) == {"get_weather"}
    assert len(names) > 1


def test_with_tools_left_to_its_choice_the_model_answers_or_calls(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(**ASK_WEATHER, tool_choice="auto").choices[0]
    assert bool(choice.message.tool_calls) == (choice.finish_reason == "tool_calls")
    assert choice.message.content or choice.message.tool_calls


NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize(("choice", "most"), [(NAMED, 1), ("required", 16)])
def test_a_demanded_call_is_not_repeated(client: openai.OpenAI, choice: Any, most: int) -> None:
    answer = client.chat.completions.create(**{**ASK_WEATHER, "max_tokens": 1000}, tool_choice=choice).choices[0]
    calls = [
        call.function.model_dump_json() for call in answer.message.tool_calls or [] if call.type == "function"
    ]
    assert answer.finish_reason == "tool_calls"
    assert 1 <= len(calls) <= most
    assert all(one != other for one, other in pairwise(calls))


def test_a_tool_without_parameters_gets_no_arguments(client: openai.OpenAI) -> None:
    bare: Any = {"type": "function", "function": {"name": "get_time"}}
    ask = {**ASK_WEATHER, "tools": [bare]}
    (call,) = client.chat.completions.create(**ask, tool_choice=bare).choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.arguments == "{}"


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"guided_choice": ["red", "blue"]}, "red|blue"),
        ({"guided_regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"grammar": 'root ::= "yes" | "no"'}, "yes|no"),
        ({"structured_outputs": {"grammar": 'start: "a" "b"'}}, "ab"),
        ({"json_schema": {"type": "integer", "minimum": 0, "maximum": 9}}, "[0-9]"),
    ],
)
def test_what_an_answer_must_look_like_is_never_ignored(
    client: openai.OpenAI, extra: dict[str, Any], pattern: str
) -> None:
    answer = client.chat.completions.create(**{**GREEDY, "extra_body": extra}).choices[0]
    assert re.fullmatch(pattern, answer.message.content or "")
    assert answer.finish_reason == "stop"


def test_texts_can_be_compared_by_how_likely_they_are(client: openai.OpenAI) -> None:
    def score(text: str, limit: int) -> float:
        answer = client.completions.create(
            model="default", prompt=text, echo=True, logprobs=1, max_tokens=limit, temperature=0
        ).choices[0]
        assert answer.logprobs is not None and answer.logprobs.tokens and answer.logprobs.token_logprobs
        count = len(answer.logprobs.tokens) - limit
        assert "".join(answer.logprobs.tokens[:count]) == text == answer.text[: len(text)]
        assert answer.logprobs.token_logprobs[0] is None
        return sum(each or 0.0 for each in answer.logprobs.token_logprobs[:count])

    likely, unlikely = "The capital of France is Paris.", "The capital of France is cheese."
    assert score(likely, 0) > score(unlikely, 0)
    assert score(likely, 1) == pytest.approx(score(likely, 0), abs=1e-3)


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────


def test_a_prompt_beyond_the_context_is_refused_with_the_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="8192") as refused:
        client.chat.completions.create(**{**GREEDY, "messages": [user("word " * 9000)]})
    assert refused.value.code == "context_length_exceeded"
