"""One chat over every API, whole and streamed: plain HTTP, as any client would send it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from emberkeep.types.request import Json
from helpers.server_process import ServerProcess, user

QUESTION = "Name three animals that live in the sea."
BEGINNING = "The three primary colours are"
GREEDY: Mapping[str, Any] = {"temperature": 0, "speculation": False}
"""Steps with drafts round differently, and which drafts there are depends on what was asked before."""
LIMIT = 12

Text = Callable[[Any], str]
"""The text of an answer, or of one piece of a stream."""


def post(server: ServerProcess, path: str, **body: Json) -> Json:
    response = server.http.post(f"{server.url}{path}", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def pieces(server: ServerProcess, path: str, **body: Json) -> list[Json]:
    """What a stream sends: server-sent events, or lines of JSON."""
    with server.http.stream("POST", f"{server.url}{path}", json={**body, "stream": True}) as response:
        assert response.status_code == 200
        lines = [line.removeprefix("data: ") for line in response.iter_lines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def chat_text(answer: Any) -> str:
    return "".join((c.get("message") or c["delta"]).get("content") or "" for c in answer.get("choices", ()))


def completion_text(answer: Any) -> str:
    return "".join(choice["text"] for choice in answer.get("choices", ()))


def response_text(answer: Any) -> str:
    if answer.get("object") == "response":
        return str(answer["output"][0]["content"][0]["text"])
    return str(answer["delta"]) if answer["type"] == "response.output_text.delta" else ""


def anthropic_text(answer: Any) -> str:
    if answer["type"] == "message":
        return "".join(block["text"] for block in answer["content"])
    return str(answer["delta"].get("text", "")) if answer["type"] == "content_block_delta" else ""


def ollama_text(answer: Any) -> str:
    return str(answer["message"]["content"] if "message" in answer else answer["response"])


ASKED: Json = {"messages": [user(QUESTION)]}
OPTIONS: Json = {"options": {**GREEDY, "num_predict": LIMIT}, "model": "smollm2-135m"}
APIS: dict[str, tuple[str, Json, Text]] = {
    "openai-chat": ("/v1/chat/completions", {**ASKED, **GREEDY, "max_tokens": LIMIT}, chat_text),
    "openai-completions": (
        "/v1/completions",
        {"prompt": BEGINNING, **GREEDY, "max_tokens": LIMIT},
        completion_text,
    ),
    "openai-responses": (
        "/v1/responses",
        {"input": QUESTION, **GREEDY, "max_output_tokens": LIMIT},
        response_text,
    ),
    "anthropic": ("/v1/messages", {"model": "default", **ASKED, **GREEDY, "max_tokens": LIMIT}, anthropic_text),
    "ollama-chat": ("/api/chat", {**ASKED, **OPTIONS}, ollama_text),
    "ollama-generate": ("/api/generate", {"prompt": QUESTION, **OPTIONS}, ollama_text),
    "llama-server": (
        "/completion",
        {"prompt": BEGINNING, **GREEDY, "n_predict": LIMIT},
        lambda a: str(a["content"]),
    ),
}


def again(server: ServerProcess, path: str, **body: Json) -> Json:
    """The second answer to the same. The last token of a prompt rounds otherwise when it is evaluated alone, as
    after a reuse, than beside all others, and the likeliest words may change with that."""
    post(server, path, **body)
    return post(server, path, **body)


@pytest.mark.parametrize(("path", "body", "text"), APIS.values(), ids=APIS.keys())
def test_a_streamed_answer_is_the_answer_in_pieces(
    server: ServerProcess, path: str, body: Json, text: Text
) -> None:
    whole = text(again(server, path, **body, **({} if "/api/" not in path else {"stream": False})))
    streamed = [text(piece) for piece in pieces(server, path, **body)]
    assert "".join(streamed) == whole != ""
    assert len([piece for piece in streamed if piece]) > 3


def test_every_api_for_chats_gives_the_same_answer(server: ServerProcess) -> None:
    chats = (APIS[name] for name in ("openai-chat", "openai-responses", "anthropic"))
    assert len({text(again(server, path, **body)) for path, body, text in chats}) == 1


def test_a_response_goes_on_from_the_one_before(server: ServerProcess, me: str) -> None:
    fields: Json = {**GREEDY, "max_output_tokens": LIMIT, "safety_identifier": me}
    first = post(server, "/v1/responses", input=QUESTION, **fields)
    second = post(server, "/v1/responses", input="Why?", previous_response_id=first["id"], **fields)
    usage = second["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] >= first["usage"]["input_tokens"]


def test_text_becomes_tokens_and_tokens_text(server: ServerProcess) -> None:
    tokens = post(server, "/tokenize", content=QUESTION)["tokens"]
    assert len(tokens) > 4
    assert post(server, "/detokenize", tokens=tokens)["content"] == QUESTION


WEATHER: Json = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo"]}, "tomorrow": {"type": "boolean"}},
    "required": ["city", "tomorrow"],
    "additionalProperties": False,
}
ASK_WEATHER = user("What is the weather in Oslo tomorrow?")


def fits(arguments: Json) -> bool:
    return arguments.keys() == {"city", "tomorrow"} and arguments["city"] in ("Paris", "Oslo")


def test_an_answer_fits_its_schema(server: ServerProcess) -> None:
    form: Json = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER}}
    asked: Json = {"messages": [ASK_WEATHER], **GREEDY, "max_tokens": 60, "response_format": form}
    assert fits(json.loads(chat_text(post(server, "/v1/chat/completions", **asked))))


def test_a_tool_is_called_with_arguments_that_fit_and_its_result_goes_back(server: ServerProcess, me: str) -> None:
    tool: Json = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}
    asked: Json = {**GREEDY, "user_id": me, "tools": [tool], "max_tokens": 60}
    first = post(server, "/v1/chat/completions", messages=[ASK_WEATHER], tool_choice="required", **asked)
    said = first["choices"][0]["message"]
    (call,) = said["tool_calls"][:1]
    assert call["function"]["name"] == "get_weather" and fits(json.loads(call["function"]["arguments"]))
    result: Json = {"role": "tool", "tool_call_id": call["id"], "content": "light rain, 7 degrees"}
    history = [ASK_WEATHER, {**said, "tool_calls": [call]}, result]
    told = post(server, "/v1/chat/completions", messages=history, tool_choice="none", **{**asked, "max_tokens": 4})
    assert chat_text(told)
    assert told["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"] - 1


def test_a_tool_is_called_over_anthropics_api_too(server: ServerProcess) -> None:
    asked: Json = {
        "model": "default",
        "messages": [ASK_WEATHER],
        "max_tokens": 60,
        **GREEDY,
        "tools": [{"name": "get_weather", "input_schema": WEATHER}],
        "tool_choice": {"type": "tool", "name": "get_weather"},
    }
    answer = post(server, "/v1/messages", **asked)
    assert answer["stop_reason"] == "tool_use"
    assert fits(answer["content"][-1]["input"])


def test_what_cannot_be_is_refused_in_a_sentence_that_names_it(server: ServerProcess) -> None:
    for field, value in (("temperature", -1), ("max_tokens", -5), ("model", "gpt-unknown")):
        body = {"messages": [user("hi")], field: value}
        response = server.http.post(f"{server.url}/v1/chat/completions", json=body)
        assert response.status_code in (400, 404)
        assert str(value) in response.text or field in response.text


def test_other_web_pages_do_not_reach_it(server: ServerProcess) -> None:
    for header in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
        response = server.http.get(f"{server.url}/v1/models", headers=header)
        assert response.status_code in (400, 403), response.text


def test_it_tells_how_it_is(server: ServerProcess) -> None:
    for path, word in (
        ("/health", "ok"),
        ("/metrics", "emberkeep_"),
        ("/v1/models", "smollm2"),
        ("/", "Emberkeep"),
    ):
        response = server.http.get(f"{server.url}{path}")
        assert response.status_code == 200
        assert word in response.text
