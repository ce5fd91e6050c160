"""The same conversation over HTTP and through the library: what was answered, and what the model has read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlencode

from emberkeep.bench.servers import BenchClient, Messages, OwnServer, chat_body, is_settled, parse_stream
from emberkeep.bench.workspace import Workspace
from emberkeep.config.settings import Config
from emberkeep.library.emberkeep import Emberkeep
from emberkeep.types.cache import EntryKind
from emberkeep.types.events import Eviction

_POLL_S = 0.01
_EVERYTHING = 1 << 30
_NAME = "endless"
"""`emberkeep chat` names its conversations; most clients do not."""


@dataclass(frozen=True, slots=True)
class Said:
    """An answer, and what it cost."""

    text: str
    ttft_ms: float
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    evictions: tuple[Eviction, ...]
    is_approximate: bool

    @property
    def reuse(self) -> float:
        return self.cached_tokens / self.prompt_tokens


@dataclass(frozen=True, slots=True)
class Left:
    """The state that a turn has left behind: the prompt as it was evaluated, and the answer."""

    text: str
    tokens: int


class Talker(Protocol):
    """Raises EmberkeepError for whatever fails."""

    async def ask(self, messages: Messages, max_tokens: int, *, exact: bool) -> Said:
        """A greedy answer to the whole history."""
        ...

    async def left(self) -> Left:
        """Waits until everything is stored."""
        ...

    async def search(self, query: str, most: int) -> list[str]:
        """What users said in archived turns, the best first."""
        ...


class OverHttp:
    def __init__(self, port: int) -> None:
        self._client = BenchClient(port)

    async def ask(self, messages: Messages, max_tokens: int, *, exact: bool) -> Said:
        body = chat_body(messages, max_tokens) | ({"approximate": False} if exact else {})
        reply = parse_stream(await self._client.post("/v1/chat/completions", body))
        return Said(
            reply.text,
            reply.ttft_ms,
            reply.prompt_tokens,
            reply.completion_tokens,
            reply.cached_tokens,
            tuple(Eviction(**eviction) for eviction in reply.detail.get("evictions", ())),
            reply.detail["approximate"],
        )

    async def left(self) -> Left:
        await self._client.wait_until_settled()
        latest = (await self._client.get("/v1/cache?kind=conversation&limit=1"))["data"][0]
        shown = await self._client.get(f"/v1/cache/{latest['id']}?chars={_EVERYTHING}")
        return Left(shown["text"], shown["tokens"])

    async def search(self, query: str, most: int) -> list[str]:
        asked = urlencode({"query": query, "max_results": most})
        return [found["user_text"] for found in (await self._client.get(f"/v1/memory/search?{asked}"))["data"]]


class ThroughLibrary:
    def __init__(self, llm: Emberkeep) -> None:
        self._llm = llm

    async def ask(self, messages: Messages, max_tokens: int, *, exact: bool) -> Said:
        approximate = False if exact else None
        with self._llm.stream(
            [dict(message) for message in messages],
            temperature=0,
            max_tokens=max_tokens,
            approximate=approximate,
            conversation_id=_NAME,
        ) as stream:
            for _ in stream:
                pass
            result = stream.result
        return Said(
            result.text,
            result.ttft_ms,
            result.usage.prompt_tokens,
            result.usage.completion_tokens,
            result.usage.cached_tokens,
            result.evictions,
            result.lookup.is_approximate,
        )

    async def left(self) -> Left:
        while not is_settled(self._llm.stats()):
            await asyncio.sleep(_POLL_S)
        cache = self._llm.cache
        latest = next(entry for entry in cache.entries() if entry.kind is EntryKind.CONVERSATION)
        shown = cache.show(latest.id)
        return Left(shown.text, shown.entry.tokens)

    async def search(self, query: str, most: int) -> list[str]:
        return [found.user_text for found in self._llm.memory.search(query, max_results=most)]


@asynccontextmanager
async def _over_http(workspace: Workspace, ctx: int) -> AsyncIterator[Talker]:
    with OwnServer(workspace, parallel=1, ctx=ctx) as server:
        yield OverHttp(server.port)


@asynccontextmanager
async def _through_library(workspace: Workspace, ctx: int) -> AsyncIterator[Talker]:
    """As `emberkeep chat` does it."""
    config = Config(model=str(workspace.model), data_dir=workspace.new_data_dir(), parallel=1, ctx=ctx)
    with Emberkeep.open(config) as llm:
        yield ThroughLibrary(llm)


WAYS = {"http": _over_http, "library": _through_library}
