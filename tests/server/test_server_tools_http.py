"""Tools that the server runs and other models behind it, as clients see them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from emberkeep.backend.base import ModelCard
from emberkeep.backend.fallback import FallbackBackend, Link
from emberkeep.backend.limits import Permits
from emberkeep.backend.remote.openai import OpenAIProvider
from emberkeep.config.settings import Config
from emberkeep.errors import RemoteDown, RemoteError, RemoteRefused
from emberkeep.types.events import (
    CallEnded,
    CallStarted,
    Completed,
    Event,
    Finished,
    FinishReason,
    LookupRecord,
    ReasoningDelta,
    TextDelta,
    Timings,
    ToolOutcome,
    Usage,
)
from emberkeep.types.models import RemoteModel
from emberkeep.types.request import Image, ReasoningFormat, Request, ToolCall
from helpers.conversing import Harbour, ScriptedEngine
from helpers.remote_model import ScriptedProvider, remote, said
from helpers.scripted_server import COMPLETED, HANG, WAIT_S, Running, ScriptedBackend, running, says

HELLO: Any = [{"role": "user", "content": "When did the Zephyr come?"}]
READ = ToolCall("call_1", "read_file", '{"path": "log.txt"}')
MISSING = ToolCall("call_2", "read_file", '{"path": "no.txt"}')
DONE = CallEnded(ToolOutcome(READ, "It came in at noon.", ms=1.5))
FAILED = CallEnded(
    ToolOutcome(MISSING, "Error: no.txt is not there.", failed=True, ms=0.5, remark="of the harbour")
)
TURN = [
    TextDelta(0, "Let me look."),
    CallStarted(READ),
    DONE,
    CallStarted(MISSING),
    FAILED,
    TextDelta(0, " At noon."),
    Finished(0, FinishReason.STOP),
    COMPLETED,
]
WRITTEN_CALL = '<tool_call>\n{"name": "read_file", "arguments": {"path": "log.txt"}}\n</tool_call>'
READ_FILE = {"type": "function", "function": {"name": "read_file", "parameters": {"type": "object"}}}
PIXEL = "data:image/png;base64,iVBORw0KGgo="
LOOK: Any = [
    {
        "role": "user",
        "content": [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": PIXEL}}],
    }
]


def ask(http: httpx.Client, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    return http.post("/v1/chat/completions", json={"messages": HELLO, **fields}, headers=headers)


def frames(response: httpx.Response) -> list[tuple[str, Any]]:
    """(event name, chunk) of a stream, without what says that it is over."""
    blocks = [block.split("\n") for block in response.text.split("\n\n") if block]
    named = [(block[0].removeprefix("event: ") if len(block) == 2 else "", block[-1]) for block in blocks]
    return [(name, json.loads(data.removeprefix("data: "))) for name, data in named if "{" in data]


def told(response: httpx.Response) -> list[str]:
    """A stream in one word per chunk: its text, or what a tool did."""
    found = []
    for name, chunk in frames(response):
        tool = chunk.get("emberkeep", {}).get("tool")
        text = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
        found += [f"{name}: {tool['id']} {tool['state']}"] if tool else [text] if text else []
    return found


@contextmanager
def served(backend: object, **config: Any) -> Iterator[httpx.Client]:
    with running(backend, Config(**config)) as server, httpx.Client(base_url=server.url, timeout=20) as http:  # type: ignore[arg-type]
        yield http


# ── tools that the server runs ───────────────────────────────────────────────────────────────────


def test_a_stream_tells_of_tools_where_they_run(backend: ScriptedBackend, http: httpx.Client) -> None:
    backend.reset(*TURN)
    assert told(ask(http, stream=True)) == [
        "Let me look.",
        "emberkeep: call_1 started",
        "emberkeep: call_1 done",
        "emberkeep: call_2 started",
        "emberkeep: call_2 failed",
        " At noon.",
    ]


def test_what_a_tool_was_called_with_and_gave_is_in_the_stream(
    backend: ScriptedBackend, http: httpx.Client
) -> None:
    backend.reset(*TURN)
    tools = [
        chunk["emberkeep"]["tool"]
        for name, chunk in frames(ask(http, stream=True))
        if name and "tool" in chunk["emberkeep"]
    ]
    called = {"id": "call_1", "name": "read_file", "arguments": '{"path": "log.txt"}'}
    assert tools[0] == {**called, "state": "started"}
    assert tools[1] == {**called, "state": "done", "result": "It came in at noon.", "ms": 1.5, "remark": None}
    assert tools[3]["remark"] == "of the harbour"
    assert tools[3]["result"] == "Error: no.txt is not there."


def test_openais_client_accumulates_such_a_stream(backend: ScriptedBackend, client: openai.OpenAI) -> None:
    backend.reset(*TURN)
    with client.chat.completions.stream(model="default", messages=HELLO) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.content == "Let me look. At noon."
    assert not message.tool_calls


def test_an_answer_lists_the_tools_that_ran_for_it(backend: ScriptedBackend, client: openai.OpenAI) -> None:
    backend.reset(*TURN)
    answer = client.chat.completions.create(model="default", messages=HELLO)
    assert answer.choices[0].message.content == "Let me look. At noon."
    assert answer.choices[0].message.tool_calls is None
    tools = (answer.model_extra or {})["emberkeep"]["tools"]
    assert [(tool["id"], tool["state"]) for tool in tools] == [("call_1", "done"), ("call_2", "failed")]


def test_an_answer_without_tools_lists_none(backend: ScriptedBackend, http: httpx.Client) -> None:
    assert "tools" not in ask(http).json()["emberkeep"]


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(context=2048)


@pytest.fixture
def harbour(tmp_path: Path, engine: ScriptedEngine) -> Iterator[Harbour]:
    (tmp_path / "log.txt").write_text("The Zephyr came in at noon.\n")
    options: dict[str, Any] = {"server_tools": "safe", "enable_tools": ("files",), "tools_root": tmp_path}
    with Harbour(tmp_path / "data", engine, **options) as harbour:
        yield harbour


@pytest.mark.parametrize("stream", [False, True])
def test_a_real_tool_runs_between_the_words_of_a_model(
    harbour: Harbour, engine: ScriptedEngine, stream: bool
) -> None:
    engine.will_say(f"Let me look. {WRITTEN_CALL}", "At noon.")
    with served(harbour.backend) as http:
        answer = ask(http, stream=stream, max_tokens=400, temperature=0)
    if stream:
        words = told(answer)
        started = next(place for place, word in enumerate(words) if word.endswith("started"))
        assert "".join(words[:started]) == "Let me look.\n\n"
        assert words[started + 1].endswith("done")
        assert "".join(words[started + 2 :]) == "At noon."
    else:
        body = answer.json()
        assert body["choices"][0]["message"]["content"] == "Let me look.\n\nAt noon."
        assert [tool["result"].strip() for tool in body["emberkeep"]["tools"]] == ["The Zephyr came in at noon."]


def test_a_client_with_tools_gets_the_call_instead(harbour: Harbour, engine: ScriptedEngine) -> None:
    engine.will_say(WRITTEN_CALL)
    with served(harbour.backend) as http:
        body = ask(http, tools=[READ_FILE], max_tokens=400, temperature=0).json()
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    assert body["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "read_file"
    assert "tools" not in body["emberkeep"]


@pytest.mark.parametrize("stream", [False, True])
def test_with_notools_a_client_gets_what_the_model_wrote(
    tmp_path: Path, engine: ScriptedEngine, stream: bool
) -> None:
    engine.will_say(WRITTEN_CALL)
    with Harbour(tmp_path, engine, tools="off") as harbour, served(harbour.backend) as http:
        answer = ask(http, stream=stream, tools=[READ_FILE], max_tokens=400, temperature=0)
    if stream:
        assert "".join(told(answer)) == WRITTEN_CALL
    else:
        (choice,) = answer.json()["choices"]
        assert choice["message"] == {"role": "assistant", "content": WRITTEN_CALL}
        assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"tools": [READ_FILE], "tool_choice": "required"}),
        ("/v1/messages", {"tools": [{"name": "read_file", "input_schema": {}}], "tool_choice": {"type": "any"}}),
    ],
)
def test_with_notools_a_forced_call_is_refused(
    tmp_path: Path, engine: ScriptedEngine, path: str, body: dict[str, Any]
) -> None:
    with Harbour(tmp_path, engine, tools="off") as harbour, served(harbour.backend) as http:
        refused = http.post(path, json={"messages": HELLO, "max_tokens": 40, **body})
        shown = http.get("/v1/models").json()["data"][0]
        capabilities = http.post("/api/show", json={"model": shown["id"]}).json()["capabilities"]
    assert (refused.status_code, "--tools off" in refused.text) == (400, True)
    assert "tools" not in capabilities


# ── what a request says about itself ─────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("header", "depth"),
    [("0", 0), ("2", 2), ("", 0), ("-1", 0), ("two", 0), ("٣", 0), ("9" * 5000, 9999)],
    ids=["none", "two", "empty", "negative", "word", "other digits", "bomb"],
)
def test_the_depth_of_a_request_is_in_its_header(
    backend: ScriptedBackend, http: httpx.Client, header: str, depth: int
) -> None:
    raw = [(b"X-Emberkeep-Depth", header.encode())]
    response = http.post("/v1/chat/completions", json={"messages": HELLO}, headers=raw)  # type: ignore[arg-type]
    assert response.status_code == 200
    assert backend.last.execution.depth == depth


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        (None, None),
        ("auto", ReasoningFormat.SEPARATE),
        ("deepseek", ReasoningFormat.SEPARATE),
        ("separate", ReasoningFormat.SEPARATE),
        ("hidden", ReasoningFormat.STRIP),
        ("strip", ReasoningFormat.STRIP),
        ("none", ReasoningFormat.INLINE),
        ("inline", ReasoningFormat.INLINE),
    ],
)
def test_a_request_says_where_reasoning_goes(
    backend: ScriptedBackend, http: httpx.Client, said: str | None, meant: ReasoningFormat | None
) -> None:
    assert ask(http, reasoning_format=said).status_code == 200
    assert backend.last.reasoning is meant


@pytest.mark.parametrize(
    ("format", "content", "reasoning"),
    [("separate", "Noon.", "Ships."), ("strip", "Noon.", ""), ("inline", "<think>Ships.</think>Noon.", "")],
)
@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_goes_where_the_client_wants_it(
    tmp_path: Path, engine: ScriptedEngine, format: str, content: str, reasoning: str, stream: bool
) -> None:
    engine.will_say("<think>Ships.</think>Noon.")
    with Harbour(tmp_path, engine) as harbour, served(harbour.backend) as http:
        answer = ask(http, stream=stream, reasoning_format=format, max_tokens=100, temperature=0)
    if stream:
        messages = [choice["delta"] for _, chunk in frames(answer) for choice in chunk["choices"]]
    else:
        messages = [answer.json()["choices"][0]["message"]]
    assert "".join(message.get("content") or "" for message in messages) == content
    assert "".join(message.get("reasoning_content") or "" for message in messages) == reasoning


# ── images ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_reads_text_refuses_images(tmp_path: Path, engine: ScriptedEngine, stream: bool) -> None:
    with Harbour(tmp_path, engine) as harbour, served(harbour.backend) as http:
        refused = ask(http, messages=LOOK, stream=stream)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "messages")
    assert "leave the images out" in error["message"]


def test_a_model_elsewhere_gets_the_images() -> None:
    provider = ScriptedProvider(lambda _: said("A pixel."))
    with served(remote(provider, context=4000)) as http:
        answer = ask(http, messages=LOOK)
    assert answer.json()["choices"][0]["message"]["content"] == "A pixel."
    (message,) = provider.asked[0].messages
    assert message.images == (Image(PIXEL),)
    assert message.content == "What is it?"


@pytest.mark.parametrize("url", ["file:///etc/passwd", "data:text/html,hi", "javascript:1", ""])
def test_an_address_that_is_no_image_is_refused(backend: ScriptedBackend, http: httpx.Client, url: str) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    refused = ask(http, messages=[{"role": "user", "content": [part]}])
    assert refused.status_code == 400
    assert "https: or data:image/" in refused.json()["error"]["message"]
    assert backend.requests == []


# ── models that run elsewhere ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code", "retry_after"),
    [
        (RemoteDown("far cannot be reached."), 503, "backend_unavailable", None),
        (RemoteDown("far has too much to do.", retry_after=7.2), 503, "backend_unavailable", "8"),
        (RemoteDown("far has too much to do.", retry_after=0.0), 503, "backend_unavailable", "1"),
        (RemoteRefused("far refused the key."), 502, "backend_failed", None),
        (RemoteError("far gave an answer that is none."), 502, "backend_failed", None),
    ],
)
def test_what_a_service_fails_with_has_its_status(
    backend: ScriptedBackend,
    http: httpx.Client,
    error: RemoteError,
    status: int,
    code: str,
    retry_after: str | None,
    stream: bool,
) -> None:
    backend.reset(error)
    failed = ask(http, stream=stream)
    assert failed.status_code == status
    assert failed.headers.get("Retry-After") == retry_after
    assert failed.json()["error"] == {"message": str(error), "type": "upstream_error", "param": None, "code": code}


def test_a_service_that_breaks_off_is_told_at_the_end_of_the_stream(
    backend: ScriptedBackend, http: httpx.Client
) -> None:
    backend.reset(TextDelta(0, "At"), RemoteDown("far broke off in the middle of its answer: try again."))
    broken = ask(http, stream=True)
    assert broken.status_code == 200
    assert frames(broken)[-1][1]["error"]["code"] == "backend_unavailable"
    assert "[DONE]" not in broken.text


def test_openais_client_raises_what_a_service_failed_with(backend: ScriptedBackend, client: openai.OpenAI) -> None:
    backend.reset(TextDelta(0, "At"), RemoteDown("far broke off in the middle of its answer: try again."))
    with pytest.raises(openai.APIError, match="broke off"):
        list(client.chat.completions.create(model="default", messages=HELLO, stream=True))
    backend.reset(RemoteDown("far has too much to do.", retry_after=3))
    with pytest.raises(openai.InternalServerError) as failed:
        client.chat.completions.create(model="default", messages=HELLO)
    assert failed.value.response.headers["retry-after"] == "3"


def dead() -> Any:
    raise RemoteDown("far at 127.0.0.1:9 cannot be reached: check its address and the network.")


def chain(*script: Any) -> FallbackBackend:
    return FallbackBackend([Link("far", dead), Link("near", lambda: ScriptedBackend(script))])


def test_health_says_which_model_of_a_chain_answers_and_why() -> None:
    with served(chain()) as http:
        health = http.get("/health").json()
    assert (health["status"], health["backend_connected"]) == ("ok", True)
    assert health["model"] == "org/tiny"
    far, near = health["chain"]
    assert (far["name"], far["state"]) == ("far", "failed")
    assert "127.0.0.1:9" in far["error"]
    assert near == {"name": "near", "state": "ready"}


def test_where_a_key_is_needed_health_keeps_the_reasons_to_itself() -> None:
    with served(chain(), api_key="sesame") as http:
        text = http.get("/health").text
    assert json.loads(text)["chain"] == [
        {"name": "far", "state": "failed"},
        {"name": "near", "state": "ready"},
    ]
    assert "127.0.0.1" not in text


def test_an_answer_names_who_gave_it() -> None:
    with served(chain()) as http:
        assert ask(http).json()["emberkeep"]["answered_by"] == "near"
        *_, (name, last) = frames(ask(http, stream=True))
    assert name == "emberkeep"
    assert last["emberkeep"]["answered_by"] == "near"


@pytest.mark.parametrize("name", ["far", "near", "org/tiny", "default", ""])
def test_a_chain_goes_by_the_names_of_all_its_backends(name: str) -> None:
    with served(chain()) as http:
        assert ask(http, model=name).status_code == 200
        refused = ask(http, model="gpt-unknown")
    assert refused.status_code == 404
    assert refused.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_has_the_name_of_the_model_that_gave_it(stream: bool) -> None:
    """The one that was there when the request came may not be the one that answers it."""
    away = remote(ScriptedProvider(lambda _: [RemoteDown("far went away.")]), retries=0)
    away.card = ModelCard("away-1", 0, 400)
    near = remote(ScriptedProvider(lambda _: said("Noon.")))
    with served(FallbackBackend([Link("away", lambda: away), Link("near", lambda: near)])) as http:
        answer = ask(http, stream=stream)
    told = [chunk for _, chunk in frames(answer)] if stream else [answer.json()]
    assert {chunk["model"] for chunk in told} == {"far-1"}


def test_health_forgets_a_failure_that_is_over() -> None:
    """Over HTTP nothing is read after Completed."""
    failing = [RemoteDown("far went away.")]
    far = remote(ScriptedProvider(lambda _: failing or said("Noon.")), retries=0)
    with served(FallbackBackend([Link("far", lambda: far)])) as http:
        assert ask(http).status_code == 503
        broken = http.get("/health").json()
        failing.clear()
        assert ask(http).status_code == 200
        mended = http.get("/health").json()
    assert "went away" in broken["error"]
    assert not broken["backend_connected"]
    assert broken["chain"][0]["state"] == "failed"
    assert mended == {
        "status": "ok",
        "backend": "far",
        "model": "far-1",
        "chain": [{"name": "far", "state": "ready"}],
        "backend_connected": True,
    }


def test_a_registered_model_goes_by_its_own_name_and_by_its_services() -> None:
    provider = ScriptedProvider(lambda _: said("Yes."))
    backend = remote(provider)
    backend.card = ModelCard("vendor-model-9", 0, 400, owned_by="openai", also=("far",))
    with served(backend) as http:
        assert http.get("/v1/models").json()["data"][0]["owned_by"] == "openai"
        assert ask(http, model="far").status_code == ask(http, model="vendor-model-9").status_code == 200
        assert http.get("/v1/models/far").json()["id"] == "vendor-model-9"
        assert ask(http, model="near").status_code == 404


def test_what_only_a_model_here_can_do_is_refused_with_the_way_out() -> None:
    with served(remote(ScriptedProvider(lambda _: said("Yes.")))) as http:
        refused = [
            http.post("/v1/completions", json={"prompt": "Once"}),
            http.post("/tokenize", json={"content": "Once"}),
            ask(http, logprobs=True),
        ]
    assert [response.status_code for response in refused] == [400, 400, 400]
    assert all("far" in response.json()["error"]["message"] for response in refused)


def test_a_user_has_as_many_requests_at_a_model_elsewhere_as_a_user_may_have(
    backend: ScriptedBackend, server: Running
) -> None:
    backend.reset(TextDelta(0, "Wait."), HANG, *says(" Done."))
    far = OpenAIProvider(RemoteModel("far", "compatible", "org/tiny", server.url), None)
    front = remote(far, permits=Permits(10, per_user=1))  # type: ignore[arg-type]
    body = {"messages": HELLO, "user_id": "ann", "stream": True}
    with served(front) as http:
        with http.stream("POST", "/v1/chat/completions", json=body) as first:
            lines = first.iter_lines()  # held: dropping it closes the connection
            assert "Wait." in next(lines)
            refused = ask(http, user_id="ann")
        assert backend.stopped_early.wait(WAIT_S)
        backend.reset(*says("Hello."))
        later = (ask(http, user_id="ann").status_code for _ in range(1000))  # asking is waiting enough
        assert 200 in later
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"


def test_reasoning_of_a_service_goes_where_the_client_wants_it() -> None:
    completed = Completed(Usage(10, 3), Timings(), LookupRecord())

    def script(_: Request) -> list[Any]:
        return [ReasoningDelta(0, "Ships."), *says("Noon.")[:-1], completed]

    with served(remote(ScriptedProvider(script))) as http:
        separate, stripped = (
            ask(http, reasoning_format=format).json()["choices"][0]["message"] for format in ("separate", "strip")
        )
    assert separate == {"role": "assistant", "content": "Noon.", "reasoning_content": "Ships."}
    assert stripped == {"role": "assistant", "content": "Noon."}


class Mirror(ScriptedBackend):
    """Its server is its own backend."""

    def looks_at(self, url: str) -> None:
        itself = OpenAIProvider(RemoteModel("itself", "compatible", "org/tiny", url), None)
        self._remote = remote(itself)  # type: ignore[arg-type]

    async def generate(self, request: Request) -> AsyncIterator[Event]:
        self.requests.append(request)
        async for event in self._remote.generate(request):
            yield event


@pytest.mark.parametrize("stream", [False, True])
def test_servers_that_pass_a_request_on_in_a_circle_notice_it(stream: bool) -> None:
    mirror = Mirror()
    with running(mirror, Config()) as server, httpx.Client(base_url=server.url, timeout=20) as http:
        mirror.looks_at(server.url)
        failed = ask(http, stream=stream)
    assert failed.status_code == 508
    assert failed.json()["error"]["code"] == "backend_loop"
    assert "check its backends" in failed.json()["error"]["message"]
    assert [request.execution.hops for request in mirror.requests] == list(range(9))


def test_a_chain_leaves_a_circle_for_the_next_backend() -> None:
    mirror, near = Mirror(), remote(ScriptedProvider(lambda _: said("Noon.")))
    chain = FallbackBackend([Link("itself", lambda: mirror), Link("near", lambda: near)])
    with running(chain, Config()) as server, httpx.Client(base_url=server.url, timeout=20) as http:  # type: ignore[arg-type]
        mirror.looks_at(server.url)
        answer = ask(http).json()
    assert answer["choices"][0]["message"]["content"] == "Noon."
    assert len(mirror.requests) == 9
