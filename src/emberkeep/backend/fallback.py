"""Several backends that stand in for each other: the first that can answer does.

A backend is opened when it is needed. One that fails before the first word of an answer is left alone for a while,
and the next one answers; which one did is told with the usage and in `/health`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from time import monotonic
from typing import Any

from emberkeep.backend.base import (
    AttentionSwitch,
    Backend,
    Cache,
    Embedder,
    Experts,
    ModelCard,
    Tokenizer,
    Warmer,
    keep_warm,
    warm_prefix,
)
from emberkeep.backend.server_tools import JoinedDesks, ToolDesk
from emberkeep.errors import (
    ConfigError,
    EmberkeepError,
    EngineError,
    ModelError,
    RemoteError,
    RequestError,
    StepFailed,
)
from emberkeep.kv.forgetting import Holders
from emberkeep.memory.memory import Memory
from emberkeep.types.cache import Warmed
from emberkeep.types.events import Accepted, Completed, Event, Events, ToolEvent
from emberkeep.types.models import SpeculationStats, TimelineRecord
from emberkeep.types.request import Json, Request
from emberkeep.values import dataclass

log = logging.getLogger("emberkeep.backend")

_BACKOFF_S = 30.0
"""Seconds for which a backend that failed is not asked again."""

FAILURES = (RemoteError, EngineError, ModelError, ConfigError)
"""For these another backend is asked. What the first one finds wrong with a request is wrong everywhere; what a
stand-in does, such as a text too long for it, is not."""


@dataclass(slots=True)
class Link:
    """One backend of the chain."""

    name: str
    open: Callable[[], Backend]
    """Blocks. Raises EmberkeepError."""
    backend: Backend | None = None
    opening: asyncio.Task[None] | None = None
    error: str = ""
    failed_at: float | None = None

    @property
    def is_backing_off(self) -> bool:
        return self.failed_at is not None and monotonic() - self.failed_at < _BACKOFF_S

    def note_failure(self, error: EmberkeepError) -> None:
        self.error, self.failed_at = str(error), monotonic()

    def note_success(self) -> None:
        self.error, self.failed_at = "", None

    def health(self) -> dict[str, Json]:
        state = "failed" if self.failed_at is not None else "ready" if self.backend else "not opened"
        return {"name": self.name, "state": state, **({"error": self.error} if self.error else {})}


def _of_active(name: str) -> Any:
    """An attribute of the backend that answered last."""
    return property(lambda chain: getattr(chain._backend, name))


class FallbackBackend:
    """Owns its backends. Everything but answers is asked of the one that answered last."""

    cache: Cache | None = _of_active("cache")
    tokenizer: Tokenizer | None = _of_active("tokenizer")
    embedder: Embedder | None = _of_active("embedder")
    experts: Experts | None = _of_active("experts")
    attention: AttentionSwitch | None = _of_active("attention")
    memory: Memory | None = _of_active("memory")
    holders: Holders = _of_active("holders")
    stats: Callable[[], dict[str, Json]] = _of_active("stats")
    speculation_stats: Callable[[], SpeculationStats | None] = _of_active("speculation_stats")

    def __init__(self, links: Sequence[Link]) -> None:
        """Open the first backend that can be opened. Blocks. If none can, raises the error of the first one."""
        self._links = links
        self._prefixes: Sequence[Request] = ()
        self._active = self._open_first()

    def _open_first(self) -> Link:
        errors: list[EmberkeepError] = []
        for link in self._links:
            try:
                link.backend = link.open()
                return link
            except EmberkeepError as error:
                link.note_failure(error)
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

    async def generate(self, request: Request) -> Events:
        failures: list[EmberkeepError] = []
        # Those that failed lately come last: rather one that may have recovered than none.
        for link in sorted(self._links, key=lambda link: link.is_backing_off):
            has_begun, held = False, list[Event]()
            try:
                backend = await self._opened_backend(link)
                async with aclosing(backend.generate(request)) as events:
                    async for event in events:
                        if isinstance(event, Accepted):
                            yield event  # it may still fail before its first word
                            continue
                        is_seen = request.execution.in_pieces or isinstance(event, ToolEvent | Completed)
                        if not has_begun and is_seen:
                            has_begun = True
                            self._activate(link, failures)
                        # Where the client gets nothing before the end, another one can still answer.
                        held.append(
                            replace(event, answered_by=link.name) if isinstance(event, Completed) else event
                        )
                        while has_begun and held:
                            yield held.pop(0)
                return
            except (*FAILURES, RequestError) as error:
                is_requests_fault = isinstance(error, RequestError)
                if has_begun or isinstance(error, StepFailed) or (is_requests_fault and link is self._links[0]):
                    raise
                if not is_requests_fault:
                    link.note_failure(error)
                log.warning("%s did not answer: %s", link.name, error)
                failures.append(error)
        raise next((error for error in failures if isinstance(error, FAILURES)), failures[0])

    async def _opened_backend(self, link: Link) -> Backend:
        """A cancelled request does not cancel the opening: a thread that loads a model cannot be stopped."""
        if link.backend is None:
            if link.opening is None:
                link.opening = asyncio.create_task(self._open(link))
                link.opening.add_done_callback(_retrieve_error)
            await asyncio.shield(link.opening)
        assert link.backend is not None
        return link.backend

    async def _open(self, link: Link) -> None:
        try:
            backend = await asyncio.to_thread(link.open)
            await backend.start()
            keep_warm(backend, self._prefixes)
            link.backend = backend
        finally:
            link.opening = None

    def _activate(self, link: Link, failures: Sequence[EmberkeepError]) -> None:
        link.note_success()
        if link is not self._active:
            log.warning("%s answers now%s", link.name, f": {failures[0]}" if failures else ".")
            self._active = link

    async def warm(self, request: Request) -> Warmed:
        return await warm_prefix(self._backend, request)

    def keep_warm(self, prefixes: Sequence[Request]) -> None:
        """Also holds for backends that are opened later."""
        self._prefixes = (*self._prefixes, *prefixes)
        keep_warm(self._backend, prefixes)

    def timeline(self) -> Sequence[TimelineRecord]:
        return [record for backend in self._opened() for record in backend.timeline()]

    def health(self) -> dict[str, Json]:
        return {**self._backend.health(), "chain": [link.health() for link in self._links]}

    def failure(self) -> EmberkeepError | None:
        """The failure of any backend: others may still answer, but only a new process brings that one back."""
        return next((failure for backend in self._opened() if (failure := backend.failure())), None)

    async def start(self) -> None:
        await self._backend.start()

    async def close(self) -> None:
        """Close all backends. Waits for those that are being opened, because they must be closed too."""
        opening = [link.opening for link in self._links if link.opening]
        await asyncio.gather(*opening, return_exceptions=True)
        for link in self._links:
            if link.backend is not None:
                with suppress(EmberkeepError):
                    await link.backend.close()

    @property
    def warmer(self) -> Warmer:
        return self

    @property
    def host_tools(self) -> ToolDesk | None:
        """Those of all that are open: one that answers no new requests may still wait for a decision."""
        desks = [desk for backend in self._opened() if (desk := backend.host_tools) is not None]
        return JoinedDesks(desks) if desks else None

    def _opened(self) -> list[Backend]:
        """The one that answers now first."""
        active = self._backend
        return [active, *(link.backend for link in self._links if link.backend not in (None, active))]


def _retrieve_error(opening: asyncio.Task[None]) -> None:
    """Read the error of a task that nothing awaits, or asyncio would log it."""
    if not opening.cancelled():
        opening.exception()
