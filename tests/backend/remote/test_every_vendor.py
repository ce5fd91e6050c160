"""One table over all vendors: each through its own SDK, behind our backend, against a server of its wire format.

text · stream · tools that run here · error · retry · cancel · fallback to another one when it is down
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, cast

import grpc
import pytest

from emberkeep.backend.base import ModelCard
from emberkeep.backend.fallback import FallbackBackend, Link
from emberkeep.backend.remote import backend as module
from emberkeep.backend.remote.backend import RemoteBackend, RemoteSettings
from emberkeep.backend.remote.vendors import open_provider
from emberkeep.errors import EmberkeepError, RemoteDown
from emberkeep.session.sessions import Policy, Sessions
from emberkeep.tools.function import as_tool
from emberkeep.tools.host_tools import HostToolBox
from emberkeep.tools.toolbox import ToolBox, ToolPolicy
from emberkeep.types.events import CallEnded, Completed, Event, TextDelta
from emberkeep.types.models import RemoteModel
from emberkeep.types.request import Message, Request
from helpers.events import text_of
from helpers.tool_calls import depth
from helpers.vendors import anthropic_server as anthropic
from helpers.vendors import gemini_server as gemini
from helpers.vendors import grok_server as grok
from helpers.vendors import ollama_server as ollama
from helpers.vendors import openai_server as openai
from helpers.vendors.loopback import Stream
from helpers.vendors.trtllm_server import TrtllmServer

pytestmark = pytest.mark.slow

HELLO = Request(messages=(Message("user", "How deep is it at pier 3?"),))
ARGUMENTS = '{"pier": 3}'


@dataclass(frozen=True)
class Vendor:
    kind: str
    model: str
    key: str | None
    serve: Callable[..., Any]
    said: Callable[..., Any]
    calls: Callable[[], Any]
    busy: Callable[[], Any]
    """It is overloaded, and says so as this vendor does."""
    hangs: Callable[[], Any]
    """It says one word, and nothing more."""

    def backend(self, url: str, tools: ToolBox | None = None, retries: int = 2) -> RemoteBackend:
        remote = RemoteModel(self.kind, self.kind, self.model, url, "THE_KEY")
        provider = open_provider(remote, {"THE_KEY": self.key or "unused"})
        sessions = Sessions(None, Policy(100_000))
        card = ModelCard(self.model, 0, 100_000, remote=self.kind)
        return RemoteBackend(card, provider, sessions, RemoteSettings(retries=retries, tool_rounds=4), tools=tools)


def openai_calls() -> Stream:
    first = openai.call(0, "c1", "depth", ARGUMENTS[:5])
    return openai.answer(first, openai.call(0, arguments=ARGUMENTS[5:]), finish="tool_calls")


def openai_busy() -> Any:
    return openai.failed(429, "rate_limit_error", "Slow down.")


OPENAI_LIKE: dict[str, Any] = {
    "said": openai.said,
    "calls": openai_calls,
    "busy": openai_busy,
    "hangs": lambda: Stream([openai.chunk({"role": "assistant", "content": "Hel"})], "never"),
}
VENDORS = [
    Vendor("openai", "gpt-6", openai.KEY, openai.OpenAIServer, **OPENAI_LIKE),
    Vendor("compatible", "gpt-6", openai.KEY, openai.OpenAIServer, **OPENAI_LIKE),
    Vendor("trtllm", "tiny", "unused", lambda *replies: TrtllmServer(*replies, key="unused"), **OPENAI_LIKE),
    Vendor(
        "anthropic",
        anthropic.MODELS[0],
        anthropic.KEY,
        anthropic.AnthropicServer,
        anthropic.said,
        lambda: Stream(
            anthropic.answer(anthropic.tool_block(0, "c1", "depth", ARGUMENTS[:5], ARGUMENTS[5:]), stop="tool_use")
        ),
        lambda: anthropic.failed(529, "overloaded_error", "Overloaded"),
        lambda: Stream([*anthropic.begun(), *anthropic.text_block(0, "Hel")], "never"),
    ),
    Vendor(
        "gemini",
        gemini.MODEL,
        gemini.KEY,
        gemini.GeminiServer,
        gemini.said,
        lambda: Stream([gemini.chunk({"functionCall": {"name": "depth", "args": {"pier": 3}}}), gemini.last()]),
        lambda: gemini.failed(503, "UNAVAILABLE", "The model is overloaded."),
        lambda: Stream([gemini.chunk({"text": "Hel"})], "never"),
    ),
    Vendor(
        "grok",
        grok.MODEL,
        grok.KEY,
        grok.GrokServer,
        grok.said,
        lambda: [
            grok.chunk(tool_calls=[grok.call("c1", "depth", ARGUMENTS)]),
            grok.ended("REASON_TOOL_CALLS"),
        ],
        lambda: [grok.failed(grpc.StatusCode.UNAVAILABLE, "Busy.")],
        lambda: [grok.chunk(content="Hel"), grok.HANG],
    ),
    Vendor(
        "ollama",
        ollama.MODEL,
        "unused",
        lambda *replies: ollama.OllamaServer(*replies, key="unused"),
        ollama.said,
        lambda: ollama.answer({"tool_calls": [{"function": {"name": "depth", "arguments": {"pier": 3}}}]}),
        lambda: ollama.failed(503, "server busy"),
        lambda: Stream([ollama.part({"content": "Hel"})], "never"),
    ),
]


@pytest.fixture(params=VENDORS, ids=lambda vendor: vendor.kind)
def vendor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Vendor:
    monkeypatch.setattr(module, "_FIRST_WAIT_S", 0.001)
    return cast(Vendor, request.param)


def with_server(server: Any, use: Callable[[str], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with server:
            return await asyncio.wait_for(use(server.url), 20)

    return asyncio.run(run())


async def events_of(backend: Any, request: Request = HELLO) -> list[Event]:
    try:
        return [event async for event in backend.generate(request)]
    finally:
        await backend.close()


def test_text_and_what_it_cost(vendor: Vendor) -> None:
    *events, completed = with_server(
        vendor.serve(vendor.said("Seven metres.")), lambda url: events_of(vendor.backend(url))
    )
    assert text_of(events) == "Seven metres."
    assert isinstance(completed, Completed)
    assert completed.usage.prompt_tokens and completed.usage.completion_tokens
    assert completed.answered_by == vendor.kind


def test_tools_run_here_and_the_result_goes_back(vendor: Vendor) -> None:
    server = vendor.serve(vendor.calls(), vendor.said("Seven metres."))
    tools = HostToolBox(ToolBox([as_tool(depth)], ToolPolicy()), ToolPolicy(), asks=False)
    events = with_server(server, lambda url: events_of(vendor.backend(url, tools)))
    assert [event.outcome.text for event in events if isinstance(event, CallEnded)] == ["7 metres"]
    assert text_of(events) == "Seven metres."
    last = [asked for asked in server.asked if "kv_cache" not in getattr(asked, "path", "")][-1]
    assert "7 metres" in str(getattr(last, "body", last))


def test_a_moment_of_overload_is_waited_for(vendor: Vendor) -> None:
    server = vendor.serve(vendor.busy(), vendor.busy(), vendor.said("Seven metres."))
    assert text_of(with_server(server, lambda url: events_of(vendor.backend(url)))) == "Seven metres."


def test_overload_that_lasts_is_an_error_without_the_key(vendor: Vendor) -> None:
    server = vendor.serve(*(vendor.busy() for _ in range(3)))
    with pytest.raises(RemoteDown) as caught:
        with_server(server, lambda url: events_of(vendor.backend(url)))
    assert vendor.kind in str(caught.value) or vendor.model in str(caught.value)
    assert (vendor.key or "") not in str(caught.value)


def test_a_wrong_key_is_refused(vendor: Vendor) -> None:
    wrong = replace(vendor, key="wrong-key")
    with pytest.raises(EmberkeepError) as caught:
        with_server(vendor.serve(), lambda url: events_of(wrong.backend(url)))
    assert "wrong-key" not in str(caught.value)
    assert "THE_KEY" in str(caught.value)


def test_leaving_stops_the_service(vendor: Vendor) -> None:
    server = vendor.serve(vendor.hangs())

    async def leave(url: str) -> str:
        backend = vendor.backend(url)
        async with aclosing(cast(Any, backend.generate(HELLO))) as events:
            first = await anext(events)
        await server.was_left.wait()
        await backend.close()
        return cast(TextDelta, first).text

    assert with_server(server, leave) == "Hel"


def test_one_that_is_down_is_stood_in_for(vendor: Vendor) -> None:
    """Nothing listens where it should be."""
    stand_in = VENDORS[0]

    async def ask(url: str) -> tuple[list[Event], Any]:
        chain = FallbackBackend(
            [
                Link("first", lambda: vendor.backend("http://127.0.0.1:9", retries=0)),
                Link("second", lambda: stand_in.backend(url)),
            ]
        )
        events = await events_of(chain)
        return events, chain.health()

    (*events, completed), health = with_server(stand_in.serve(stand_in.said("I do.")), ask)
    assert text_of(events) == "I do."
    assert completed.answered_by == "second"
    assert health["chain"][0]["state"] == "failed"
    assert "cannot be reached" in health["chain"][0]["error"]
