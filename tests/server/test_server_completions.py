"""Text completions."""

from __future__ import annotations

import math
from typing import Any

import httpx
import openai
import pytest

from emberkeep.errors import ContextExceeded
from emberkeep.types.events import Finished, FinishReason, TextDelta, TokenLogprob
from emberkeep.types.request import Infill
from helpers.scripted_server import COMPLETED, ScriptedBackend, says


def test_a_completion_has_openais_shape(backend: ScriptedBackend, client: openai.OpenAI) -> None:
    answer = client.completions.create(model="default", prompt="Once", max_tokens=5, echo=True)
    assert answer.object == "text_completion"
    assert answer.choices[0].text == "Hello world"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == 15
    assert (backend.last.prompt, backend.last.max_tokens, backend.last.echo) == ("Once", 5, True)
    assert backend.last.messages == ()


def test_a_completion_streams(backend: ScriptedBackend, client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model="default", prompt="Once", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello world"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [(1, 2)]),
        ([[1, 2], [3]], [(1, 2), (3,)]),
    ],
)
def test_every_form_of_prompt(
    backend: ScriptedBackend, client: openai.OpenAI, prompt: Any, expected: list[Any]
) -> None:
    client.completions.create(model="default", prompt=prompt)
    assert [request.prompt for request in backend.requests] == expected


def test_choices_of_several_prompts_are_numbered_through(backend: ScriptedBackend, client: openai.OpenAI) -> None:
    backend.reset(
        TextDelta(0, "x"), TextDelta(1, "y"), *(Finished(i, FinishReason.STOP) for i in (0, 1)), COMPLETED
    )
    answer = client.completions.create(model="default", prompt=["a", "b"], n=2)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "x"), (1, "y"), (2, "x"), (3, "y")]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 2 * COMPLETED.usage.prompt_tokens
    texts = ["", "", "", ""]
    for chunk in client.completions.create(model="default", prompt=["a", "b"], n=2, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["x", "y", "x", "y"]


def test_one_bad_prompt_fails_the_whole_request(backend: ScriptedBackend, http: httpx.Client) -> None:
    backend.reset(ContextExceeded(9000, 4096))
    response = http.post("/v1/completions", json={"prompt": ["a", "b"]})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_logprobs_have_the_older_shape(backend: ScriptedBackend, client: openai.OpenAI) -> None:
    tokens = [TokenLogprob(1, b"He", -0.5, top=(TokenLogprob(2, b"Ho", -1.5),)), TokenLogprob(3, b"y", -0.1)]
    backend.reset(*(TextDelta(0, t.piece.decode(), logprobs=(t,)) for t in tokens), *says()[-2:])
    answer = client.completions.create(model="default", prompt="a", logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert (logprobs.tokens, logprobs.token_logprobs) == (["He", "y"], [-0.5, -0.1])
    assert logprobs.top_logprobs == [{"Ho": -1.5}, {}]
    assert logprobs.text_offset == [0, 2]
    chunks = list(client.completions.create(model="default", prompt="a", logprobs=1, stream=True))
    assert [chunk.choices[0].logprobs.text_offset for chunk in chunks if chunk.choices[0].logprobs] == [[0], [2]]


def test_text_offsets_count_an_echoed_prompt(backend: ScriptedBackend, client: openai.OpenAI) -> None:
    token = TokenLogprob(1, b"lo", -0.5)
    backend.reset(TextDelta(0, "Hel"), TextDelta(0, "lo", logprobs=(token,)), *says()[-2:])
    answer = client.completions.create(model="default", prompt="Hel", logprobs=0, echo=True)
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.text_offset == [3]
    chunks = list(client.completions.create(model="default", prompt="Hel", logprobs=0, echo=True, stream=True))
    assert [chunk.choices[0].logprobs.text_offset for chunk in chunks if chunk.choices[0].logprobs] == [[3]]


def test_the_first_token_of_a_prompt_has_no_log_probability(backend: ScriptedBackend, http: httpx.Client) -> None:
    tokens = (TokenLogprob(1, b"He", math.nan), TokenLogprob(2, b"y", -1.0, top=(TokenLogprob(3, b"l", -0.5),)))
    backend.reset(TextDelta(0, "Hey", logprobs=tokens), Finished(0, FinishReason.LENGTH), COMPLETED)
    body = {"prompt": "Hey", "echo": True, "logprobs": 1, "max_tokens": 0}
    answer = http.post("/v1/completions", json=body).json()["choices"][0]
    assert answer["logprobs"] == {
        "tokens": ["He", "y"],
        "token_logprobs": [None, -1.0],
        "top_logprobs": [None, {"l": -0.5}],
        "text_offset": [0, 2],
    }
    assert backend.last.scores_prompt


def test_the_likeliest_of_best_of_choices_are_told(backend: ScriptedBackend, http: httpx.Client) -> None:
    def saying(index: int, *logprobs: float) -> TextDelta:
        tokens = tuple(TokenLogprob(1, b"x", logprob) for logprob in logprobs)
        return TextDelta(index, f"choice {index}", logprobs=tokens)

    ends = [Finished(index, FinishReason.STOP) for index in range(3)]
    backend.reset(saying(0, -3.0), saying(1, -1.0, -1.5), saying(2, -2.0), *ends, COMPLETED)
    answer = http.post("/v1/completions", json={"prompt": "a", "n": 2, "best_of": 3}).json()
    assert [choice["text"] for choice in answer["choices"]] == ["choice 1", "choice 2"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [choice["logprobs"] for choice in answer["choices"]] == [None, None]
    assert (backend.last.n, backend.last.top_logprobs) == (3, 0)


@pytest.mark.parametrize("fields", [{"n": 4}, {"stream": True}, {"echo": True, "logprobs": 0}])
def test_best_of_is_refused_where_nothing_can_be_chosen(
    backend: ScriptedBackend, http: httpx.Client, fields: dict[str, Any]
) -> None:
    response = http.post("/v1/completions", json={"prompt": "a", "best_of": 3, **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "best_of")


@pytest.mark.parametrize(("given", "limit"), [({}, 256), ({"max_tokens": -1}, None), ({"max_tokens": 0}, 0)])
def test_a_completion_that_says_no_limit_has_one(
    backend: ScriptedBackend, http: httpx.Client, given: dict[str, int], limit: int | None
) -> None:
    assert http.post("/v1/completions", json={"prompt": "a", **given}).status_code == 200
    assert backend.last.max_tokens == limit


def test_best_of_equal_to_n_is_fine(backend: ScriptedBackend, http: httpx.Client) -> None:
    backend.reset(Finished(0, FinishReason.STOP), Finished(1, FinishReason.STOP), COMPLETED)
    assert http.post("/v1/completions", json={"prompt": "a", "n": 2, "best_of": 2}).status_code == 200


def test_a_suffix_reaches_the_backend_as_what_follows(backend: ScriptedBackend, http: httpx.Client) -> None:
    assert http.post("/v1/completions", json={"prompt": "a = ", "suffix": "\nprint(a)"}).status_code == 200
    assert backend.last.prompt == "a = "
    assert backend.last.infill == Infill("\nprint(a)")
    assert http.post("/v1/completions", json={"prompt": "a", "suffix": ""}).status_code == 200
    assert backend.last.infill is None


@pytest.mark.parametrize("field", [{"echo": True}, {"prompt": [1, 2]}])
def test_a_suffix_goes_with_a_text_that_is_not_echoed(
    backend: ScriptedBackend, http: httpx.Client, field: dict[str, Any]
) -> None:
    response = http.post("/v1/completions", json={"prompt": "a", "suffix": "b", **field})
    assert response.status_code == 400
    assert backend.requests == []
