"""Every vendor as a row: what it says on the wire for the same answers and the same failures."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, cast

from emberkeep.backend.remote.base import Provider, RemoteAbout
from emberkeep.backend.remote.vendors import open_provider
from emberkeep.types.events import Event, Usage
from emberkeep.types.models import RemoteModel
from emberkeep.types.request import Message, Request, ToolCall
from helpers.vendors import anthropic_server as anthropic
from helpers.vendors import openai_server as openai
from helpers.vendors.loopback import LoopbackServer, Reply, Stream
from helpers.vendors.openai_server import OpenAIServer, TrtllmServer

WAIT_S = 60.0
HELLO = Request(messages=(Message("user", "Hello?"),))
CALLED = Message(
    "assistant", reasoning="Lyon, then.", tool_calls=(ToolCall("c1", "weather", '{"place": "Lyon"}'),)
)
RAIN = Message("tool", "rain", tool_call_id="c1")
P = TypeVar("P", bound=Provider)


class Serving(Protocol):
    @property
    def url(self) -> str: ...

    async def __aenter__(self) -> Any: ...

    async def __aexit__(self, *_: Any) -> None: ...


def drive(
    make_server: Callable[[], Serving], open_at: Callable[[str], P], use: Callable[[P, Any], Awaitable[Any]]
) -> Any:
    """`use(provider, server)` with both running."""

    async def run() -> Any:
        async with make_server() as server:
            provider = open_at(server.url)
            try:
                return await asyncio.wait_for(use(provider, server), WAIT_S)
            finally:
                await provider.close()

    return asyncio.run(run())


async def events_of(provider: Provider, request: Request) -> list[Event]:
    return [event async for event in provider.answer(request)]


# ── what to do with both ──
def asking(*requests: Request) -> Callable[[Provider, Any], Awaitable[list[Event]]]:
    """The events of the last of them."""

    async def use(provider: Provider, _: Any) -> list[Event]:
        for request in requests:
            events = await events_of(provider, request)
        return events

    return use


def sending(request: Request) -> Callable[[Provider, Any], Awaitable[Any]]:
    """What reaches the server."""

    async def use(provider: Provider, server: Any) -> Any:
        await events_of(provider, request)
        return [asked for asked in server.asked if asked.body is not None][-1]

    return use


async def leave_early(provider: Provider, server: Any) -> Event:
    """The first event of an answer that does not end; returns when the server has noticed
    that the client is gone."""
    async with aclosing(provider.answer(HELLO)) as events:
        first = await anext(events)
        assert not server.was_left.is_set()
    await server.was_left.wait()
    return first


async def ask_when_it_is_gone(provider: Provider, server: Any) -> None:
    await server.__aexit__(None, None, None)
    await events_of(provider, HELLO)


async def about(provider: Provider, _: Any) -> RemoteAbout:
    return await provider.about()


@dataclass(frozen=True)
class Thought:
    text: str


Part = str | Thought | ToolCall
"""Of an answer: a piece of its text, a thought, a whole call."""
ASKED, ANSWERED, CACHED, THOUGHT = 12, 30, 8, 20
_TOTALS = {"prompt_tokens": ASKED, "completion_tokens": ANSWERED, "total_tokens": ASKED + ANSWERED}
_HIDDEN = {**_TOTALS, "completion_tokens": ANSWERED - THOUGHT}
_CACHED = {"prompt_tokens_details": {"cached_tokens": CACHED}}
_THOUGHT = {"completion_tokens_details": {"reasoning_tokens": THOUGHT}}


@dataclass(frozen=True, eq=False)
class OpenAIWire:
    kind: str = "compatible"
    usage: Any = field(default_factory=lambda: {**_TOTALS, **_CACHED, **_THOUGHT})
    counts: Usage = field(default_factory=lambda: Usage(ASKED, ANSWERED, CACHED, THOUGHT))
    """How that is read."""
    whole_calls: bool = False
    """It sends each call in one piece."""
    card: Any = field(default_factory=lambda: {"id": openai.MODEL})
    beside: Any = None
    context: int | None = None
    model: str = openai.MODEL
    key: str = openai.KEY

    def server(self, *replies: Reply | Stream) -> LoopbackServer:
        if self.kind == "trtllm":
            return TrtllmServer(*replies, key=self.key, model=self.model)
        return OpenAIServer(*replies, key=self.key, models=[self.card], kind=self.kind, beside=self.beside)

    def answer(self, *parts: Part, finish: str = "stop", end: str = "whole", is_cut: bool = False) -> Stream:
        deltas = [delta for place, part in enumerate(parts) for delta in self._deltas(place, part)]
        if is_cut:
            return openai.answer(*deltas, finish=None, usage=None, end=end)
        return openai.answer(*deltas, finish=finish, usage=self.usage, end=end)

    def failed(self, status: int, message: str) -> Reply:
        """It says to come back in seven seconds."""
        headers = {} if self.kind == "gemini" else {"retry-after": "7"}
        return openai.failed(status, "some_error", message, headers=headers, kind=self.kind)

    def fails_midway(self) -> Stream:
        error = openai.failure("overloaded", "Busy", 503)
        return Stream([openai.chunk({"content": "Well"}), openai.event(error)])

    def garbage(self) -> Stream:
        return Stream(["data: {oops\n\n"])

    def _deltas(self, place: int, part: Part) -> list[dict[str, Any]]:
        if isinstance(part, ToolCall):
            if self.whole_calls:
                return [openai.call(place, part.id, part.name, part.arguments)]
            first = openai.call(place, part.id, part.name, part.arguments[:3])
            return [first, openai.call(place, arguments=part.arguments[3:])]
        if isinstance(part, str):
            return [{"content": part}]
        if self.kind == "gemini":
            is_thought = {"extra_content": {"google": {"thought": True}}}
            return [{"content": f"<thought>{part.text}", **is_thought}, {"content": "</thought>"}]
        return [{"reasoning" if self.kind == "ollama" else "reasoning_content": part.text}]


@dataclass(frozen=True)
class AnthropicWire:
    kind: str = "anthropic"
    counts: Usage = field(default_factory=lambda: Usage(ASKED, ANSWERED, CACHED, THOUGHT))
    context: int = 200_000
    model: str = anthropic.MODELS[0]
    key: str = anthropic.KEY

    def server(self, *replies: Reply | Stream) -> LoopbackServer:
        return anthropic.AnthropicServer(*replies)

    def answer(self, *parts: Part, finish: str = "stop", end: str = "whole", is_cut: bool = False) -> Stream:
        counts = {
            "input_tokens": ASKED - CACHED,
            "cache_read_input_tokens": CACHED,
            "output_tokens": ANSWERED,
            "output_tokens_details": {"thinking_tokens": THOUGHT},
        }
        blocks = [self._block(place, part) for place, part in enumerate(parts)]
        if is_cut:
            return Stream([*anthropic.begun(), *(event for block in blocks for event in block)], end)
        stop = "max_tokens" if finish == "length" else "end_turn"
        is_calling = any(isinstance(part, ToolCall) for part in parts)
        return Stream(anthropic.answer(*blocks, usage=counts, stop="tool_use" if is_calling else stop), end)

    def failed(self, status: int, message: str) -> Reply:
        return anthropic.failed(status, "some_error", message, {"retry-after": "7"})

    def fails_midway(self) -> Stream:
        error = {"type": "overloaded_error", "message": "Busy"}
        return Stream([*anthropic.begun(), anthropic.event("error", error=error)])

    def garbage(self) -> Stream:
        return Stream([*anthropic.begun(), "event: message_delta\ndata: {oops\n\n"])

    def _block(self, place: int, part: Part) -> list[str]:
        if isinstance(part, ToolCall):
            return anthropic.tool_block(place, part.id, part.name, part.arguments[:3], part.arguments[3:])
        if isinstance(part, Thought):
            return anthropic.thinking_block(place, part.text, "signed")
        return anthropic.text_block(place, part)


Wire = OpenAIWire | AnthropicWire
_OLLAMA = {
    "/api/ps": {"models": [{"model": f"{openai.MODEL}:latest", "context_length": 16_384}]},
    "/api/show": {"parameters": "stop x"},
}
OPENAI_WIRES = (
    OpenAIWire("openai"),
    OpenAIWire("compatible", card={"id": openai.MODEL, "max_model_len": 4096}, context=4096),
    OpenAIWire("gemini", {**_HIDDEN, **_CACHED}, whole_calls=True, card={"id": f"models/{openai.MODEL}"}),
    OpenAIWire("grok", {**_HIDDEN, **_CACHED, **_THOUGHT}, whole_calls=True),
    OpenAIWire("ollama", _TOTALS, Usage(ASKED, ANSWERED), whole_calls=True, beside=_OLLAMA, context=16_384),
    OpenAIWire("trtllm"),
)
WIRES: tuple[Wire, ...] = (*OPENAI_WIRES, AnthropicWire())


def provider_at(wire: Wire, key: str | None = None, **settings: Any) -> Callable[[str], Provider]:
    """Opens the vendor's provider at an address. `settings`: of `RemoteModel`."""

    def open_at(url: str) -> Provider:
        path = openai.PATHS.get(wire.kind, "")
        model = settings.pop("model", wire.model)
        remote = RemoteModel(wire.kind, wire.kind, model, f"{url}{path}", "THE_KEY", **settings)
        env = {"THE_KEY": key or wire.key}
        if wire.kind != "openai":
            return open_provider(remote, env)
        # At any address but its own, it is taken for a server like it.
        provider: Any = open_provider(replace(remote, base_url=None), env)
        provider._client.base_url = f"{url}/v1"
        return cast(Provider, provider)

    return open_at
