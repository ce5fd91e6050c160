"""Several backends that stand in for each other: the first that can answer does.

A backend is opened when it is needed. One that fails before the first word of an answer is left alone for a while,
and the next one answers; who did is in every bill and in `/health`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from time import monotonic
from typing import cast

from emberkeep.backend.base import Backend, Cache, ModelCard
from emberkeep.errors import ConfigError, EmberkeepError, EngineError, ModelError, RemoteError, StepFailed
from emberkeep.memory.memory import Memory
from emberkeep.types import (
    AttentionTier,
    Completed,
    Event,
    ExpertStats,
    Json,
    Message,
    Request,
    Tool,
    Verified,
    Warmed,
)

log = logging.getLogger("emberkeep.backend")

_REST_S = 30.0
"""How long one that failed is left alone."""

FAILURES = (RemoteError, EngineError, ModelError, ConfigError)
"""For these another backend is asked; whatever else is wrong with a request is wrong everywhere."""


@dataclass(slots=True)
class Link:
    """One backend of the chain."""

    name: str
    open: Callable[[], Backend]
    """Blocks. Raises EmberkeepError."""
    backend: Backend | None = None
    error: str = ""
    failed_at: float | None = None

    @property
    def is_resting(self) -> bool:
        return self.failed_at is not None and monotonic() - self.failed_at < _REST_S

    def failed(self, error: EmberkeepError) -> None:
        self.error, self.failed_at = str(error), monotonic()

    def worked(self) -> None:
        self.error, self.failed_at = "", None

    def health(self) -> dict[str, Json]:
        state = "failed" if self.failed_at is not None else "ready" if self.backend else "not opened"
        return {"name": self.name, "state": state, **({"error": self.error} if self.error else {})}


class FallbackBackend:
    """Owns its backends. Everything but answers is asked of the one that answered last."""

    def __init__(self, links: Sequence[Link]) -> None:
        """Opens the first that can be. Blocks. Raises the first one's error where none can be."""
        self._links = links
        self._opening = asyncio.Lock()
        self._prefixes: Sequence[Request] = ()
        self._active = self._first()

    def _first(self) -> Link:
        errors: list[EmberkeepError] = []
        for link in self._links:
            try:
                link.backend = link.open()
                return link
            except EmberkeepError as error:
                link.failed(error)
                errors.append(error)
                log.warning("%s cannot be used: %s", link.name, error)
        raise errors[0]

    @property
    def card(self) -> ModelCard:
        names = [link.backend.card.id for link in self._links if link.backend] + [
            link.name for link in self._links
        ]
        own = self._backend.card
        return replace(own, also=tuple(dict.fromkeys(name for name in names if name != own.id)))

    @property
    def _backend(self) -> Backend:
        assert self._active.backend is not None
        return self._active.backend

    async def generate(self, request: Request) -> AsyncIterator[Event]:
        failure: EmberkeepError | None = None
        waiting = [link for link in self._links if not link.is_resting] or list(self._links)
        for link in waiting:
            has_begun = False
            try:
                backend = await self._opened(link)
                self._now(link, failure)
                events = cast("AsyncGenerator[Event, None]", backend.generate(request))
                async with aclosing(events):
                    async for event in events:
                        has_begun = True
                        if isinstance(event, Completed):
                            link.worked()  # now: who has the bill reads no further
                            event = replace(event, answered_by=link.name)
                        yield event
                return
            except FAILURES as error:
                if has_begun or isinstance(error, StepFailed):
                    raise
                link.failed(error)
                failure = failure or error
                log.warning("%s did not answer: %s", link.name, error)
        assert failure is not None
        raise failure

    async def _opened(self, link: Link) -> Backend:
        async with self._opening:
            if link.backend is None:
                link.backend = await asyncio.to_thread(link.open)
                await link.backend.start()
                link.backend.keep_warm(self._prefixes)
            return link.backend

    def _now(self, link: Link, failure: EmberkeepError | None) -> None:
        if link is not self._active:
            log.warning("%s answers now%s", link.name, f": {failure}" if failure else ".")
            self._active = link

    async def warm(self, request: Request) -> Warmed:
        return await self._backend.warm(request)

    async def verify(self, entry_id: str, tokens: int) -> Verified:
        return await self._backend.verify(entry_id, tokens)

    def keep_warm(self, prefixes: Sequence[Request]) -> None:
        self._prefixes = (*self._prefixes, *prefixes)
        self._backend.keep_warm(prefixes)

    @property
    def cache(self) -> Cache:
        return self._backend.cache

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return self._backend.tokenize(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, tokens: Sequence[int]) -> str:
        return self._backend.detokenize(tokens)

    def apply_template(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        return self._backend.apply_template(messages, tools)

    def stats(self) -> dict[str, Json]:
        return self._backend.stats()

    def health(self) -> dict[str, Json]:
        return {**self._backend.health(), "chain": [link.health() for link in self._links]}

    def expert_stats(self) -> ExpertStats:
        return self._backend.expert_stats()

    async def track_experts(self, enabled: bool | None, *, reset: bool) -> ExpertStats:
        return await self._backend.track_experts(enabled, reset=reset)

    @property
    def memory(self) -> Memory | None:
        return self._backend.memory

    def attention_tier(self) -> AttentionTier | None:
        return self._backend.attention_tier()

    async def switch_attention(self, tier: AttentionTier) -> None:
        await self._backend.switch_attention(tier)

    async def start(self) -> None:
        await self._backend.start()

    async def close(self) -> None:
        for link in self._links:
            if link.backend is not None:
                with suppress(EmberkeepError):
                    await link.backend.close()
