"""The official client of Ollama against `emberkeep serve` with the real default model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ollama
import pytest

from helpers.server_process import STEADY, ServerProcess, serve, user

pytestmark = pytest.mark.slow

QUESTION = [user("Name three animals that live in the sea.")]
GREEDY: dict[str, Any] = {"temperature": 0, "num_predict": 16, "speculation": False}


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serve(smollm2, tmp_path_factory.mktemp("data"), "--ctx", "2048", *STEADY) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> ollama.Client:
    return ollama.Client(server.url)


@pytest.fixture(scope="module")
def model(client: ollama.Client) -> str:
    (only,) = client.list().models
    assert only.model is not None
    return only.model


def test_a_streamed_answer_is_the_answer_in_pieces(client: ollama.Client, model: str) -> None:
    client.chat(model, QUESTION, options=GREEDY)
    whole = client.chat(model, QUESTION, options=GREEDY)
    parts = list(client.chat(model, QUESTION, options=GREEDY, stream=True))
    assert "".join(part.message.content or "" for part in parts) == whole.message.content != ""
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    last = parts[-1]
    assert (last.done_reason, last.eval_count, last.prompt_eval_count) == ("length", 16, whole.prompt_eval_count)
    assert last.total_duration and last.eval_duration and last.total_duration >= last.eval_duration


def test_the_second_turn_reuses_the_first(client: ollama.Client, model: str) -> None:
    said = client.chat(model, QUESTION, options=GREEDY).message
    turn = [*QUESTION, said, user("Name one more.")]
    answer = client.chat(model, turn, options=GREEDY)
    raw = client._client.post(  # the SDK leaves out fields that it does not know
        "/api/chat", json={"model": model, "messages": [*QUESTION, dict(said), turn[-1]], "stream": False}
    ).json()
    reused = raw["emberkeep"]["reused"]
    # A second without requests is used to measure, and what rested in the engine is in RAM then.
    assert reused["hot"] + reused["warm"] >= (answer.prompt_eval_count or 0) - 1


def test_a_generated_text_goes_on_with_its_context(client: ollama.Client, model: str) -> None:
    first = client.generate(model, "My name is Ada. Say hello.", options=GREEDY)
    second = client.generate(model, "What is my name?", context=first.context, options=GREEDY)
    alone = client.generate(model, "What is my name?", options=GREEDY)
    assert (second.prompt_eval_count or 0) > (alone.prompt_eval_count or 0) + (first.eval_count or 0)
    assert [part.response for part in client.generate(model, "Hi", options=GREEDY, stream=True)][-1] == ""


def test_a_raw_text_is_continued(client: ollama.Client, model: str) -> None:
    text = client.generate(model, "One, two, three, four,", raw=True, options={**GREEDY, "num_predict": 3})
    assert text.response is not None and "five" in text.response
    assert text.context is None


def test_an_answer_keeps_to_its_schema(client: ollama.Client, model: str) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "legs": {"enum": [0, 2, 4, 8]}},
        "required": ["name", "legs"],
    }
    answer = client.chat(model, [user("Describe a dog.")], format=schema, options={"temperature": 0})
    told = json.loads(answer.message.content or "")
    assert set(told) == {"name", "legs"} and told["legs"] in (0, 2, 4, 8)
    text = client.generate(model, "A dog as JSON", format="json", options=GREEDY).response
    assert text is not None and text.startswith("{")


_SHORT = {"temperature": 0, "num_predict": 200}


def test_tools_are_called_and_their_results_read(client: ollama.Client, model: str) -> None:
    def get_weather(city: str) -> str:
        """The weather in a city.

        Args:
            city: The name of the city
        """
        return f"11 degrees in {city}"

    ask = [user("What is the weather in Oslo? Use the tool.")]
    answer = client.chat(model, ask, tools=[get_weather], options=_SHORT)
    called = answer.message.tool_calls or [
        ollama.Message.ToolCall(function={"name": "get_weather", "arguments": {"city": "Oslo"}})
    ]
    history = [
        *ask,
        {"role": "assistant", "content": "", "tool_calls": called},
        *({"role": "tool", "tool_name": "get_weather", "content": "11 degrees"} for _ in called),
    ]
    said = client.chat(model, history, tools=[get_weather], options=GREEDY)
    assert said.done and (said.prompt_eval_count or 0) > (answer.prompt_eval_count or 0)


def test_a_template_without_thoughts_takes_both_answers_about_thinking(client: ollama.Client, model: str) -> None:
    assert client.chat(model, QUESTION, think=True, options=GREEDY).message.content
    assert client.chat(model, QUESTION, think=False, options=GREEDY).message.thinking is None


def test_logprobs_belong_to_the_text(client: ollama.Client, model: str) -> None:
    answer = client.chat(model, QUESTION, logprobs=True, top_logprobs=2, options=GREEDY)
    assert answer.logprobs is not None
    assert "".join(token.token for token in answer.logprobs) == answer.message.content
    assert all(len(token.top_logprobs or ()) == 2 for token in answer.logprobs)


def test_the_model_is_described(client: ollama.Client, model: str) -> None:
    shown = client.show(model)
    assert shown.parameters == "num_ctx 2048"
    assert shown.modelinfo is not None and shown.modelinfo["llama.context_length"] == 8192
    assert shown.details is not None and shown.details.family == "llama"
    (loaded,) = client.ps().models
    assert (loaded.model, loaded.context_length) == (model, 2048)


def test_what_cannot_be_done_is_said(client: ollama.Client, model: str) -> None:
    pixel = "iVBORw0KGgo="
    with pytest.raises(ollama.ResponseError, match="reads text only: leave the images out"):
        client.chat(model, [{**QUESTION[0], "images": [pixel]}])
    with pytest.raises(ollama.ResponseError, match="no tokens for filling in the middle"):
        client.generate(model, "def f(", suffix="return 1")
    with pytest.raises(ollama.ResponseError, match=r"context holds|maximum context length"):
        client.chat(model, [user("word " * 5000)])
    with pytest.raises(ollama.ResponseError, match="gives no embeddings"):
        client.embed(model, "text")
