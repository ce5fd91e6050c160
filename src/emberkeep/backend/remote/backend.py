"""A backend over a model that runs elsewhere: conversations, memory and tools as over one that runs here, and
retries.

One request's way: with the tools that run here (`backend/server_tools.py`), what of it fits (`fitter.py`) is sent
to the service (`Provider.answer`), and once more where that failed before its first word.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Container
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import astuple, replace
from functools import partial
from time import monotonic

from emberkeep.backend.base import Extras, ModelCard
from emberkeep.backend.limits import Permits, with_deadline
from emberkeep.backend.remote.base import Provider, translate_faults
from emberkeep.backend.remote.fitter import FittedChat, LostMessages, RemoteFitter, ReportsEvictions
from emberkeep.backend.server_tools import HostTools, ServerTools, without_tools
from emberkeep.errors import ContextExceeded, RemoteDown, RemoteError, RemoteFull, RequestError
from emberkeep.kv.forgetting import Holders
from emberkeep.memory.memory import Memory
from emberkeep.session.sessions import Sessions
from emberkeep.types.events import (
    Completed,
    Event,
    Events,
    Finished,
    LookupRecord,
    Marked,
    MissReason,
    ReasoningDelta,
    TextDelta,
    Timings,
    ToolCallDelta,
    Usage,
    merge_usage,
)
from emberkeep.types.request import Json, ReasoningFormat, Request
from emberkeep.values import dataclass

log = logging.getLogger("emberkeep.remote")

_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 20.0
_LONGEST = 4 << 20
"""Most characters of an answer: several times what any model writes."""
_MOST_TOKENS = 10**9
_SHORTER = 4
"""How often a conversation that the service finds too long is shortened again."""
_CHOICE = (TextDelta, ReasoningDelta, ToolCallDelta, Finished)
_COUNTS = ("requests", "retries", "failures", "prompt_tokens", "cached_tokens", "completion_tokens")


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    retries: int = 2
    """How often a request is sent again after the service failed before its first word."""
    max_tokens: int | None = None
    """Longest answer in tokens, if the request does not say."""
    most_tokens: int | None = None
    """Longest answer, whatever a request says."""
    deadline_s: float | None = None
    reasoning: ReasoningFormat = ReasoningFormat.SEPARATE
    no_tools: bool = False
    """Models are told of no tools."""
    close_memory: Callable[[Memory], None] = Memory.close
    """How it lets go of it at its end: others may need it."""


class RemoteBackend(Extras):
    """Owns the provider. Belongs to the event loop. What a model has besides its answers is not here."""

    def __init__(
        self,
        card: ModelCard,
        provider: Provider,
        sessions: Sessions,
        settings: RemoteOptions,
        *,
        tools: HostTools | None = None,
        permits: Permits | None = None,
        holders: Holders | None = None,
    ) -> None:
        """`permits`: for requests at a time; None: as many as there are."""
        self.name = card.remote
        self.card = card
        self.memory = sessions.memory
        self._provider = provider
        self._sessions = sessions
        self._settings = settings
        self._permits = permits
        self.host_tools = tools
        self._server_tools = ServerTools(sessions, tools, settings.deadline_s)
        self._fitter = RemoteFitter(sessions)
        self.holders = holders or Holders()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lost: LostMessages | None = None
        if isinstance(provider, ReportsEvictions):
            self._lost = LostMessages(sessions)
            self.holders.join("messages whose state a server may drop", self, partial(self._forget, provider))
            provider.on_removed = self._lost.archive
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._last_error = ""

    def generate(self, request: Request) -> Events:
        request = self._check(request)
        asks = self._server_tools.applies(request)
        answer = self._server_tools.run(request, self._answer) if asks else self._answer(request)
        return _with_permit(answer, self._permits, request.user) if self._permits else answer

    def _check(self, request: Request) -> Request:
        """Raises RequestError for what only a model that runs here can do."""
        if request.prompt is not None:
            raise RequestError(f"{self.name} answers chats only: send messages instead of a prompt.", "prompt")
        if request.top_logprobs is not None:
            raise RequestError(f"{self.name} runs elsewhere and gives no logprobs: ask without them.", "logprobs")
        if self._settings.no_tools:
            request = without_tools(request)
        if request.tool_choice.allowed is not None:
            choice = replace(request.tool_choice, allowed=None)
            request = replace(request, tools=request.callable_tools, tool_choice=choice)
        limit = request.max_tokens if request.max_tokens is not None else self._settings.max_tokens
        reasoning = request.reasoning or self._settings.reasoning
        return replace(request, max_tokens=limit, reasoning=reasoning).clamped(self._settings.most_tokens)

    def _answer(self, request: Request) -> Events:
        return with_deadline(self._choices(request), request.deadline_s or self._settings.deadline_s)

    async def _choices(self, request: Request) -> Events:
        """One after the other: services charge a prompt for each of them anyway."""
        completed: list[Completed] = []
        for index in range(request.n):
            async with aclosing(self._fitted_answer(replace(request, n=1))) as events:
                async for event in events:
                    if isinstance(event, Completed):
                        completed.append(event)
                    else:
                        yield replace(event, index=index) if index and isinstance(event, _CHOICE) else event
        yield merge_usage(completed, are_rounds=True)

    async def _fitted_answer(self, request: Request) -> Events:
        """Send the request. If the service finds it too long, shorten it and send it again."""
        for left in reversed(range(_SHORTER)):
            fitted = await asyncio.to_thread(self._fitter.fit, request)
            if self._lost is not None:
                self._lost.note_request(fitted.shown, request)
            try:
                async with aclosing(self._with_retries(fitted)) as events:
                    async for event in events:
                        yield event
                return
            except RemoteFull as error:
                self._fitter.note_too_long(fitted)
                if not left or not self._sessions.may_evict(request):
                    raise ContextExceeded(
                        self._fitter.tokens(fitted.size),
                        self._sessions.policy.context,
                        may_evict=self._sessions.may_evict(request),
                    ) from error

    async def _with_retries(self, fitted: FittedChat) -> Events:
        """Try again if the service failed before its first word; later, sent text cannot be taken back."""
        for attempt in range(self._settings.retries + 1):
            has_begun = False
            try:
                async with aclosing(self._ask_once(fitted)) as events:
                    async for event in events:
                        has_begun = True
                        if (shown := _present(event, fitted.shown.reasoning)) is not None:
                            yield shown
                return
            except RemoteDown as error:
                self._counts["failures"] += 1
                self._last_error = str(error)
                wait = error.retry_after if error.retry_after is not None else _backoff(attempt)
                if has_begun or attempt == self._settings.retries or wait > _LONGEST_WAIT_S:
                    raise
                self._counts["retries"] += 1
                log.info("%s: asking again in %.1f s: %s", self.name, wait, error)
                await asyncio.sleep(wait)

    async def _ask_once(self, fitted: FittedChat) -> Events:
        begin = monotonic()
        first, length, is_complete = 0.0, 0, False
        self._counts["requests"] += 1
        with translate_faults(self.name):
            async with aclosing(self._provider.answer(fitted.shown)) as events:
                async for event in events:
                    if isinstance(event, Completed):
                        is_complete = True
                        event = self._complete(event, fitted, first, monotonic() - begin)
                    elif not isinstance(event, Finished):
                        first = first or monotonic() - begin
                        length += _length(event)
                    if length > _LONGEST:
                        raise RemoteError(f"{self.name} does not come to an end: ask for less, or set max_tokens.")
                    yield event
        if not is_complete:
            raise RemoteError(f"{self.name} ended its answer without its usage: its backend has to give it.")

    def _complete(self, completed: Completed, fitted: FittedChat, first: float, seconds: float) -> Completed:
        usage = _plausible(completed.usage)
        self._last_error = ""
        self._fitter.learn(fitted, usage.prompt_tokens)
        for name in ("prompt_tokens", "cached_tokens", "completion_tokens"):
            self._counts[name] += getattr(usage, name)
        timings = Timings(
            cache_n=usage.cached_tokens,
            prompt_n=usage.prompt_tokens - usage.cached_tokens,
            prompt_ms=1e3 * first,
            predicted_n=usage.completion_tokens,
            predicted_ms=1e3 * (seconds - first),
            ttft_ms=1e3 * first,
            draft_n=usage.accepted_prediction_tokens + usage.rejected_prediction_tokens,
            draft_n_accepted=usage.accepted_prediction_tokens,
        )
        lookup = LookupRecord(usage.prompt_tokens, reason=MissReason.REMOTE)
        fit = replace(fitted.fit, clamped_to=fitted.shown.execution.clamped_to)
        return Completed(usage, timings, lookup, fit, self.name)

    def stats(self) -> dict[str, Json]:
        return {
            "model": self.card.id,
            "remote": dict(self._counts),
            "sessions": self._sessions.stats(),
            "memory": self.memory.stats() if self.memory else None,
        }

    def health(self) -> dict[str, Json]:
        health = {"backend": self.name, "model": self.card.id}
        return {**health, "error": self._last_error} if self._last_error else health

    def _forget(self, provider: ReportsEvictions, owners: Container[str]) -> Future[None] | None:
        if self._loop is None or self._loop.is_closed():
            return None

        async def drop() -> None:
            provider.forget(owners)
            if self._lost is not None:
                self._lost.forget(owners)

        return asyncio.run_coroutine_threadsafe(drop(), self._loop)

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._server_tools.start()

    async def close(self) -> None:
        self.holders.leave(self)
        await self._server_tools.close()
        await self._provider.close()
        if self._lost is not None:
            await self._lost.close()
        if self.memory is not None:
            await asyncio.to_thread(self._settings.close_memory, self.memory)


def _length(event: Event) -> int:
    """In characters. Raises TypeError for what is no text: not every SDK checks what it reads."""
    texts = [getattr(event, name, None) for name in ("text", "id", "name", "arguments")]
    return len("".join(text for text in texts if text is not None))


def _plausible(usage: Usage) -> Usage:
    """Counts within sensible bounds: a service may write anything, and they are added up."""
    *counts, marked = astuple(usage)
    bounded = (min(max(count, 0), _MOST_TOKENS) if isinstance(count, int) else 0 for count in (*counts, *marked))
    prompt, completion, cached, reasoning, accepted, rejected, before, long = bounded
    before, cached = min(before, prompt), min(cached, prompt)
    reasoning, accepted = min(reasoning, completion), min(accepted, completion)
    return Usage(prompt, completion, cached, reasoning, accepted, rejected, Marked(before, min(long, before)))


def _backoff(attempt: int) -> float:
    """Seconds to wait: longer each time, and random, because many clients may have failed at the same time."""
    return float(min(_FIRST_WAIT_S * 2**attempt, _LONGEST_WAIT_S) * random.uniform(0.75, 1.25))


def _present(event: Event, format: ReasoningFormat | None) -> Event | None:
    """The event with reasoning as the client wants it: separate, in the text, or (None) left out."""
    if isinstance(event, ReasoningDelta) and format is ReasoningFormat.STRIP:
        return None
    if isinstance(event, ReasoningDelta) and format is ReasoningFormat.INLINE:
        return TextDelta(event.index, event.text)
    return event


async def _with_permit(answer: Events, permits: Permits, user: str) -> Events:
    with permits.acquire(user):
        async with aclosing(answer) as events:
            async for event in events:
                yield event
