"""Ollama's API over HTTP, and the examples of requests and streams in its documentation, shape by shape."""

from __future__ import annotations

import json
from typing import Any

import httpx
import ollama
import pytest

from emberkeep.errors import EngineError, Overloaded
from emberkeep.types.events import Finished, FinishReason, ReasoningDelta, TextDelta, ToolCallDelta
from emberkeep.types.request import JsonFormat, Message, Tool
from helpers.scripted_server import COMPLETED, Running, ScriptedBackend

MODEL = "org/tiny"
SKY = {"role": "user", "content": "why is the sky blue?"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_current_weather",
        "description": "Get the current weather for a location",
        "parameters": {
            "type": "object",
            "properties": {
                "location": {"type": "string", "description": "The location to get the weather for"},
                "format": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["location", "format"],
        },
    },
}
COSTS = {
    "total_duration",
    "load_duration",
    "prompt_eval_count",
    "prompt_eval_duration",
    "eval_count",
    "eval_duration",
}


def ask(http: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    answer = http.post(path, json={"model": MODEL, **body})
    assert answer.status_code == 200, answer.text
    kind = "application/x-ndjson" if body.get("stream", True) else "application/json"
    assert answer.headers["content-type"] == kind
    return [json.loads(line) for line in answer.text.splitlines()]


# ── the documentation's examples ──


def test_a_chat_streams_unless_it_says_otherwise(http: httpx.Client, backend: ScriptedBackend) -> None:
    *pieces, last = ask(http, "/api/chat", messages=[SKY])
    assert [set(piece) for piece in pieces] == [{"model", "created_at", "message", "done"}] * 2
    assert "".join(piece["message"]["content"] for piece in pieces) == "Hello world"
    assert last["message"] == {"role": "assistant", "content": ""}
    assert {"model", "created_at", "message", "done", "done_reason"} | COSTS <= set(last)
    assert backend.last.messages == (Message("user", "why is the sky blue?"),)


def test_a_chat_without_a_stream_is_one_object(http: httpx.Client, backend: ScriptedBackend) -> None:
    (whole,) = ask(http, "/api/chat", messages=[SKY], stream=False)
    assert whole["message"] == {"role": "assistant", "content": "Hello world"}
    assert (whole["done"], whole["done_reason"]) == (True, "stop")
    assert set(whole) >= COSTS


def test_a_chat_with_tools_answers_with_calls(http: httpx.Client, backend: ScriptedBackend) -> None:
    arguments = {"format": "celsius", "location": "Paris, FR"}
    backend.reset(
        ToolCallDelta(0, 0, "call_1", "get_current_weather", json.dumps(arguments)),
        Finished(0, FinishReason.TOOL_CALLS),
        COMPLETED,
    )
    (whole,) = ask(http, "/api/chat", messages=[SKY], tools=[WEATHER], stream=False)
    (call,) = whole["message"]["tool_calls"]
    assert call["function"] == {"index": 0, "name": "get_current_weather", "arguments": arguments}
    assert (whole["message"]["content"], whole["done_reason"]) == ("", "stop")
    assert [tool.name for tool in backend.last.tools] == ["get_current_weather"]
    called, last = ask(http, "/api/chat", messages=[SKY], tools=[WEATHER])
    assert called["message"]["tool_calls"] == whole["message"]["tool_calls"]
    assert (called["done"], last["done"]) == (False, True)


def test_a_chat_goes_on_after_a_tools_result(http: httpx.Client, backend: ScriptedBackend) -> None:
    history = [
        {"role": "user", "content": "what is the weather in Toronto?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "get_temperature", "arguments": {"city": "Toronto"}}}],
        },
        {"role": "tool", "content": "11 degrees celsius", "tool_name": "get_temperature"},
    ]
    ask(http, "/api/chat", messages=history, stream=False)
    _, called, result = backend.last.messages
    assert called.tool_calls[0].id == result.tool_call_id
    assert result.content == "11 degrees celsius"


def test_a_structured_answer_keeps_to_its_schema(http: httpx.Client, backend: ScriptedBackend) -> None:
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer"}, "available": {"type": "boolean"}},
        "required": ["age", "available"],
    }
    ask(http, "/api/chat", messages=[SKY], stream=False, format=schema, options={"temperature": 0})
    assert backend.last.format == JsonFormat(schema)
    ask(http, "/api/generate", prompt="Respond using JSON", stream=False, format="json")
    assert backend.last.format == JsonFormat()


def test_thinking_comes_before_the_text(http: httpx.Client, backend: ScriptedBackend) -> None:
    script = (ReasoningDelta(0, "Hm."), TextDelta(0, "Blue."), Finished(0, FinishReason.STOP), COMPLETED)
    backend.reset(*script)
    thought, text, _ = ask(http, "/api/chat", messages=[SKY], think=True)
    assert thought["message"] == {"role": "assistant", "content": "", "thinking": "Hm."}
    assert text["message"] == {"role": "assistant", "content": "Blue."}
    (whole,) = ask(http, "/api/generate", prompt="Why?", think=True, stream=False)
    assert (whole["response"], whole["thinking"]) == ("Blue.", "Hm.")


def test_a_generated_text_streams_too(http: httpx.Client, backend: ScriptedBackend) -> None:
    *pieces, last = ask(http, "/api/generate", prompt="Why is the sky blue?")
    assert [set(piece) for piece in pieces] == [{"model", "created_at", "response", "done"}] * 2
    assert "".join(piece["response"] for piece in pieces) == "Hello world"
    assert last["response"] == ""
    assert {"context", "done_reason"} | COSTS <= set(last)


def test_a_context_continues_a_generated_text(http: httpx.Client, backend: ScriptedBackend) -> None:
    (first,) = ask(http, "/api/generate", prompt="One", system="Count.", stream=False)
    ask(http, "/api/generate", prompt="Two", context=first["context"], stream=False)
    told = [(message.role, message.content) for message in backend.last.messages]
    assert told == [("system", "Count."), ("user", "One"), ("assistant", "Hello world"), ("user", "Two")]


def test_a_raw_prompt_is_passed_on(http: httpx.Client, backend: ScriptedBackend) -> None:
    raw = "[INST] why is the sky blue? [/INST]"
    (whole,) = ask(http, "/api/generate", prompt=raw, raw=True, stream=False)
    assert backend.last.prompt == raw
    assert "context" not in whole


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_nothing_asked_loads_or_unloads(http: httpx.Client, path: str) -> None:
    loaded = http.post(path, json={"model": MODEL}).json()
    assert (loaded["done"], loaded["done_reason"]) == (True, "load")
    gone = http.post(path, json={"model": MODEL, "keep_alive": 0}).json()
    assert gone["done_reason"] == "unload"


def test_the_version_is_new_enough_for_clients(http: httpx.Client) -> None:
    version = http.get("/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)


# ── errors ──


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate", "/api/show"])
def test_a_model_that_is_not_here_is_told_as_clients_expect(http: httpx.Client, path: str) -> None:
    answer = http.post(path, json={"model": "llama3.2", "messages": [SKY], "prompt": "x"})
    assert answer.status_code == 404
    assert answer.json()["error"].startswith("model 'llama3.2' not found")


def test_latest_is_the_model_itself(http: httpx.Client, backend: ScriptedBackend) -> None:
    (whole,) = ask(http, "/api/chat", model=f"{MODEL}:latest", messages=[SKY], stream=False)
    assert whole["model"] == f"{MODEL}:latest"


def test_a_bad_field_is_one_sentence(http: httpx.Client) -> None:
    answer = http.post("/api/chat", json={"model": MODEL, "messages": [{"role": "wizard"}]})
    assert answer.status_code == 400
    assert answer.json() == {
        "error": "messages[0].role: give 'system', 'developer', 'user', 'assistant' or 'tool'."
    }


def test_an_overloaded_server_says_when_to_come_back(http: httpx.Client, backend: ScriptedBackend) -> None:
    backend.reset(Overloaded("The queue is full.", 7))
    answer = http.post("/api/chat", json={"model": MODEL, "messages": [SKY]})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")
    assert answer.json() == {"error": "The queue is full."}


def test_an_error_in_the_middle_is_the_last_line(http: httpx.Client, backend: ScriptedBackend) -> None:
    backend.reset(TextDelta(0, "Hel"), EngineError("The engine failed."))
    answer = http.post("/api/chat", json={"model": MODEL, "messages": [SKY]})
    assert [json.loads(line) for line in answer.text.splitlines()][-1] == {"error": "The engine failed."}


@pytest.mark.parametrize("path", ["/api/create", "/api/push", "/api/blobs/sha256:ab"])
def test_what_is_not_served_is_refused_by_name(http: httpx.Client, path: str) -> None:
    answer = http.post(path, json={"model": "x"})
    assert answer.status_code == 400
    assert "is not served here: " in answer.json()["error"]


def test_a_larger_context_than_there_is_does_not_fail(
    http: httpx.Client, backend: ScriptedBackend, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "emberkeep.server.routes.ollama"):
        for _ in range(2):
            ask(http, "/api/chat", messages=[SKY], stream=False, options={"num_ctx": 131_072})
    told = [record.message for record in caplog.records if "num_ctx" in record.message]
    assert len(told) == 1 and "131072 tokens (num_ctx) and gets 4096" in told[0]


# ── the SDK ──


@pytest.fixture
def client(server: Running, backend: ScriptedBackend) -> ollama.Client:
    return ollama.Client(server.url)


def test_the_sdk_reads_answers_streams_and_errors(client: ollama.Client) -> None:
    assert client.chat(MODEL, [SKY]).message.content == "Hello world"
    assert [part.message.content for part in client.chat(MODEL, [SKY], stream=True)] == ["Hello", " world", ""]
    assert client.generate(MODEL, "Hi").response == "Hello world"
    with pytest.raises(ollama.ResponseError, match="model 'no' not found") as caught:
        client.chat("no", [SKY])
    assert caught.value.status_code == 404


def test_the_sdk_sends_functions_as_tools(client: ollama.Client, backend: ScriptedBackend) -> None:
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first
            b: The second
        """
        return a + b

    client.chat(MODEL, [SKY], tools=[add])
    (tool,) = backend.last.tools
    assert isinstance(tool, Tool) and tool.name == "add"
    assert tool.parameters["properties"]["a"]["type"] == "integer"
