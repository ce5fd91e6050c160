"""Tools, and models behind models, with `emberkeep serve` in processes of its own and the real default model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from emberkeep.server.lifecycle import bind
from emberkeep.types.request import Json
from helpers.commands import emberkeep
from helpers.server_process import RULES, ServerProcess, assistant, serve, system, user

pytestmark = pytest.mark.slow

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo"]}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather in a city", "parameters": SCHEMA},
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
ASK: dict[str, Any] = {
    "model": "default",
    "messages": [system("You are a weather station."), user("What is the weather in Oslo?")],
    "tools": [WEATHER],
    "temperature": 0,
    "max_tokens": 80,
}
ANSWERED = "POST /v1/chat/completions 200:"
LEFT = "the client left"
CALL = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'


def register(data_dir: Path, name: str, url: str, max_tokens: int = 40) -> None:
    options = ("--base-url", f"{url}/v1", "--max-tokens", str(max_tokens))
    emberkeep(data_dir, "api", "add", name, "compatible", *options)


def read(*paths: str) -> list[Json]:
    """Files are asked for, and each time the model has called for it: even a small one then calls for the last."""
    calls = [CALL.format("read_file", json.dumps({"path": path})) for path in paths]
    turns = ([user(f"Read {path}"), assistant(call)] for path, call in zip(paths, calls, strict=True))
    return [message for turn in turns for message in turn][:-1]


def scripted(data_dir: Path, tools: str, *texts: str, port: int = 0) -> ServerProcess:
    """One whose model says these, one after the other."""
    program = str(Path(__file__).with_name("serve_scripted.py"))
    return ServerProcess(program, str(data_dir), str(port), tools, *texts)


@contextmanager
def client_of(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def comes_to_say(server: ServerProcess, text: str, times: int) -> bool:
    """Whether its log has it so often by and by. Asking is waiting enough."""
    asked = (server.http.get(f"{server.url}/health") for _ in range(5000))
    return any(server.log.count(text) == times for _ in asked)


def closed_port() -> int:
    with bind("127.0.0.1", 0) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def small(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serve(smollm2, tmp_path_factory.mktemp("small")) as server:
        yield server


@pytest.fixture(scope="module")
def home(small: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder in which `small` is registered."""
    folder = tmp_path_factory.mktemp("home")
    register(folder, "small", small.url)
    return folder


@pytest.fixture(scope="module")
def front(smollm2: Path, home: Path) -> Iterator[ServerProcess]:
    """Emberkeep in front of Emberkeep."""
    with serve(smollm2, home, "--backend", "small") as server:
        yield server


@pytest.fixture(scope="module", params=["small", "front"])
def client(request: pytest.FixtureRequest) -> Iterator[openai.OpenAI]:
    with client_of(request.getfixturevalue(request.param)) as client:
        yield client


# ── the client's tools ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_call_is_streamed_in_pieces_that_add_up_to_what_fits_the_schema(
    client: openai.OpenAI, choice: Any
) -> None:
    demand = {**ASK, "tool_choice": choice, "parallel_tool_calls": False}
    chunks = list(client.chat.completions.create(**demand, stream=True))
    deltas = [call for chunk in chunks for one in chunk.choices for call in one.delta.tool_calls or ()]
    (first, *others) = [delta for delta in deltas if delta.index == 0]
    assert first.id and first.function and first.function.name == "get_weather"
    assert len(others) > 1
    assert not any(other.id or (other.function and other.function.name) for other in others)
    pieces = [delta.function.arguments or "" for delta in (first, *others) if delta.function]
    jsonschema.validate(json.loads("".join(pieces)), SCHEMA)
    assert [one.finish_reason for chunk in chunks for one in chunk.choices if one.finish_reason] == ["tool_calls"]


def test_a_result_goes_back_and_nothing_is_evaluated_twice(client: openai.OpenAI) -> None:
    asked = client.chat.completions.create(**ASK, tool_choice=NAMED, parallel_tool_calls=False)  # type: ignore[call-overload]
    (call,) = asked.choices[0].message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "light rain, 7 degrees"}
    messages = [*ASK["messages"], asked.choices[0].message, result]
    answer = client.chat.completions.create(**{**ASK, "messages": messages}, tool_choice="none")
    assert answer.choices[0].message.content
    assert answer.choices[0].message.tool_calls is None
    assert answer.usage.prompt_tokens_details.cached_tokens >= asked.usage.total_tokens - 1


# ── the server's tools ───────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def acting(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("acting")
    root = folder / "root"
    root.mkdir()
    (root / "log.txt").write_text("The Zephyr came in at noon.\n")
    (folder / "secret.txt").write_text("sesame-4711")
    options = ("--server-tools", "safe", "--enable-tools", "read_file", "--tools-root", str(root))
    with serve(smollm2, folder / "data", *options) as server:
        yield server


def test_the_model_reads_a_file_and_the_client_gets_an_answer(acting: ServerProcess) -> None:
    with client_of(acting) as client:
        answer = client.chat.completions.create(
            model="default", messages=read("a.txt", "b.txt", "notes.txt", "log.txt"), temperature=0, max_tokens=80
        )
    (tool,) = answer.model_extra["emberkeep"]["tools"]  # type: ignore[index]
    assert (tool["name"], json.loads(tool["arguments"]), tool["state"]) == (
        "read_file",
        {"path": "log.txt"},
        "done",
    )
    assert tool["result"].strip() == "The Zephyr came in at noon."
    assert "noon" in (answer.choices[0].message.content or "")
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"
    # The second round begins where the first one ended.
    assert answer.usage.prompt_tokens_details.cached_tokens > answer.usage.prompt_tokens * 0.8  # type: ignore[union-attr]


def test_a_stream_shows_what_the_server_does_in_between(acting: ServerProcess) -> None:
    with client_of(acting) as client:
        messages = read("b.txt", "notes.txt", "a.txt", "log.txt")
        stream = client.chat.completions.create(
            model="default", messages=messages, temperature=0, max_tokens=80, stream=True
        )
        chunks = list(stream)
    told = [(chunk.model_extra or {}).get("emberkeep", {}).get("tool") for chunk in chunks]
    assert [tool["state"] for tool in told if tool] == ["started", "done"]
    text = "".join(one.delta.content or "" for chunk in chunks for one in chunk.choices)
    assert "noon" in text
    assert "tool_call>" not in text


def test_the_model_reads_nothing_outside_its_root(acting: ServerProcess) -> None:
    reply = acting.chat(read("a.txt", "b.txt", "notes.txt", "../secret.txt"), max_tokens=80)
    (tool,) = reply.detail["tools"]
    assert tool["state"] == "failed"
    assert "secret" in tool["arguments"]
    assert "sesame" not in json.dumps(reply.detail) + reply.text


def test_what_a_client_forces_is_its_own_tool(acting: ServerProcess) -> None:
    with client_of(acting) as client:
        answer = client.chat.completions.create(**ASK, tool_choice="required")
    assert answer.choices[0].message.tool_calls[0].function.name == "get_weather"
    assert "tools" not in answer.model_extra["emberkeep"]


def test_a_client_that_leaves_ends_the_command_that_runs_for_it(tmp_path: Path) -> None:
    started = tmp_path / "started"
    command = ["sh", "-c", f"echo $$ > {started}.new; mv {started}.new {started}; sleep 61"]
    call = CALL.format("run_command", json.dumps({"command": command}))
    body = {"messages": [user("Wait.")], "max_tokens": 400, "temperature": 0, "stream": True}
    with scripted(tmp_path / "data", "command", call) as server:
        with server.http.stream("POST", f"{server.url}/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()  # held: dropping it closes the connection
            assert any('"started"' in line for line in lines)
            pid = int(next(content for _ in range(1_000_000) if (content := text_of(started))))
        asked = (server.http.get(f"{server.url}/health") for _ in range(5000))  # asking is waiting enough
        assert any(not Path(f"/proc/{pid}").exists() for _ in asked)


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_the_servers_tools_work_for_a_model_elsewhere(smollm2: Path, home: Path, tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("The Zephyr came in at noon.\n")
    options = ("--server-tools", "safe", "--enable-tools", "read_file", "--tools-root", str(tmp_path))
    with serve(smollm2, home, "--backend", "small", *options) as server:
        reply = server.chat(read("a.txt", "b.txt", "notes.txt", "log.txt"), max_tokens=80)
    (tool,) = reply.detail["tools"]
    assert (tool["state"], tool["result"].strip()) == ("done", "The Zephyr came in at noon.")
    assert "noon" in reply.text
    assert reply.cached_tokens > reply.prompt_tokens * 0.8


# ── one that is not there ────────────────────────────────────────────────────────────────────────


def test_with_notools_and_a_backend_that_is_down_the_local_model_writes_as_it_likes(
    smollm2: Path, tmp_path: Path
) -> None:
    register(tmp_path, "dead", f"http://127.0.0.1:{closed_port()}")
    with serve(smollm2, tmp_path, "--backend", "dead,local", "--tools", "off") as server:
        tool = {"type": "function", "function": {"name": "read_file", "parameters": {"type": "object"}}}
        messages = read("a.txt", "b.txt", "notes.txt", "log.txt")
        reply = server.chat(messages, tools=[tool], max_tokens=60, model="dead")
        health = server.http.get(f"{server.url}/health").json()
    assert "<tool_call>" in reply.text
    assert '"log.txt"' in reply.text
    assert reply.detail["answered_by"] == "local"
    assert health["backend"] == "local"
    dead, local = health["chain"]
    assert (dead["state"], local["state"]) == ("failed", "ready")
    assert "cannot be reached" in dead["error"]
    assert "dead cannot be used" in server.log


# ── another Emberkeep, by its name ───────────────────────────────────────────────────────────────


def test_a_registered_server_can_be_asked_from_the_command_line(home: Path) -> None:
    asked = emberkeep(home, "tools", "run", "ask_small", "question=Name one animal that lives in the sea.")
    assert asked.stdout.startswith("small says: ")
    assert re.search(r"small \(smollm2.*\), \d+ \+ \d+ tokens, [\d.]+ s", asked.stderr)


def test_a_chat_from_a_pipe_goes_to_a_registered_server(home: Path, small: ServerProcess) -> None:
    options = ("--backend", "small", "--tools", "off", "--max-tokens", "6", "-t", "0")
    before = small.log.count(ANSWERED)
    talked = emberkeep(home, "chat", *options, said="Name three animals that live in the sea.\nThanks.\n")
    assert len(talked.stdout.split()) > 2
    assert comes_to_say(small, ANSWERED, before + 2)
    (first, _), (second, asked) = re.findall(r"reused (\d+)/(\d+) tokens", talked.stderr)
    assert int(first) < int(second) > int(asked) / 2
    assert "instead of" not in talked.stderr


def test_an_answer_is_the_same_through_another_server(small: ServerProcess, front: ServerProcess) -> None:
    messages = [system(), user("Which ships wait at pier 7?")]
    small.chat(messages, max_tokens=8)
    plain = small.chat(messages, max_tokens=8)  # from stored state, as those that follow
    passed_on = front.chat(messages, max_tokens=8)
    assert passed_on.text == plain.text
    assert passed_on.prompt_tokens == plain.prompt_tokens > len(RULES) // 6
    assert passed_on.cached_tokens == plain.prompt_tokens - 1
    assert passed_on.detail["reason"] == "remote"
    assert passed_on.detail["answered_by"] == "small"
    with client_of(front) as client:
        stream = client.chat.completions.create(
            model="small", messages=messages, temperature=0, max_tokens=8, stream=True
        )
        pieces = [one.delta.content or "" for chunk in stream for one in chunk.choices]
    assert "".join(pieces) == plain.text
    assert len([piece for piece in pieces if piece]) > 3
    assert "HTTP Request" not in front.log


def test_what_is_too_long_there_is_told_here(front: ServerProcess) -> None:
    with client_of(front) as client, pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model="small", messages=[user("word " * 12_000)], extra_body={"evict": False}
        )
    assert refused.value.code == "context_length_exceeded"


def test_leaving_stops_the_work_of_both(small: ServerProcess, front: ServerProcess) -> None:
    body = {"messages": [user("Tell me a very long story.")], "max_tokens": 4000, "stream": True}
    before = small.log.count(LEFT)
    with front.http.stream("POST", f"{front.url}/v1/chat/completions", json=body) as response:
        for _, line in zip(range(6), response.iter_lines(), strict=False):
            assert "error" not in line
    assert comes_to_say(small, LEFT, before + 1)
    assert any(not small.stats()["scheduler"]["active"] for _ in range(5000))  # asking is waiting enough


def test_a_server_that_is_killed_in_the_middle_of_an_answer(
    smollm2: Path, small: ServerProcess, tmp_path: Path
) -> None:
    """That answer is lost, and the client is told; the next one is given by another server."""
    with serve(smollm2, tmp_path / "doomed") as doomed:
        register(tmp_path, "doomed", doomed.url)
        register(tmp_path, "spare", small.url)
        with serve(smollm2, tmp_path, "--backend", "doomed,spare") as front, client_of(front) as client:
            story = [user("Tell me a very long story.")]
            stream = client.chat.completions.create(model="default", messages=story, max_tokens=4000, stream=True)
            with pytest.raises(openai.APIError, match="broke off in the middle of its answer"):
                for place, _ in enumerate(stream):
                    if place == 5:
                        doomed.kill()
            reply = front.chat([user("Name one animal.")], max_tokens=8)
            health = front.http.get(f"{front.url}/health").json()
            failed = front.http.post(f"{front.url}/v1/chat/completions", json={"messages": story, "model": "gone"})
    assert reply.text
    assert reply.detail["answered_by"] == "spare"
    assert [link["state"] for link in health["chain"]] == ["failed", "ready"]
    assert health["backend"] == "spare"
    assert failed.status_code == 404


def test_a_single_backend_that_was_killed_is_a_503(smollm2: Path, tmp_path: Path) -> None:
    with scripted(tmp_path / "doomed", "models", "Hello.") as doomed:
        register(tmp_path, "doomed", doomed.url)
        with serve(smollm2, tmp_path, "--backend", "doomed") as front:
            assert front.chat([user("Hello?")], max_tokens=40).text == "Hello."
            doomed.kill()
            failed = front.http.post(f"{front.url}/v1/chat/completions", json={"messages": [user("Hello?")]})
    assert failed.status_code == 503
    error = failed.json()["error"]
    assert (error["type"], error["code"]) == ("upstream_error", "backend_unavailable")
    assert "cannot be reached" in error["message"]


# ── models that ask models ───────────────────────────────────────────────────────────────────────


def test_two_servers_that_registered_each_other_do_not_ask_forever(tmp_path: Path) -> None:
    """Both models call for the other one as soon as they are asked anything."""
    left_port = closed_port()
    register(tmp_path / "right", "left", f"http://127.0.0.1:{left_port}", 400)
    ask_left, ask_right = (
        CALL.format(name, '{"question": "What do you think?"}') for name in ("ask_left", "ask_right")
    )
    told = [ask_left, "I do not know either."]
    with scripted(tmp_path / "right", "models", *told, *told) as right:
        register(tmp_path / "left", "right", right.url, 400)
        script = (ask_right, "Then nobody knows.")
        with scripted(tmp_path / "left", "models", *script, port=left_port) as left:
            reply = left.chat([user("Who knows?")], max_tokens=400)
            headers = {"X-Emberkeep-Depth": "1"}
            body = {"messages": [user("Do you?")], "temperature": 0, "max_tokens": 400}
            deep = right.http.post(f"{right.url}/v1/chat/completions", json=body, headers=headers).json()
    assert reply.text == "Then nobody knows."
    (consulted,) = reply.detail["tools"]
    assert consulted["result"] == "right says: I do not know either."
    assert consulted["remark"].startswith("right (scripted), ")
    (refused,) = deep["emberkeep"]["tools"]
    assert (refused["name"], refused["state"]) == ("ask_left", "failed")
    assert "a model asked you" in refused["result"]
