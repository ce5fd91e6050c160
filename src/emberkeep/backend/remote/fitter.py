"""A conversation with a remote model: which messages leave where it is longer than the context, by an estimate
of tokens, and which are archived because a server has dropped their state.

A remote model's tokens are not known here. What it counted in earlier prompts tells how many bytes make one, and
what it refuses tells how much was too much. Bytes, not characters: of Chinese a token holds one or two characters,
of English four.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Protocol, runtime_checkable

from emberkeep.errors import ContextExceeded
from emberkeep.latest import Latest, drop_owners
from emberkeep.session.conversation import evict_until, plan_eviction
from emberkeep.session.sessions import Sessions
from emberkeep.session.view import Inserted, View
from emberkeep.types.events import Eviction, Fit
from emberkeep.types.request import Message, Request, Tool
from emberkeep.values import dataclass

_BYTES_PER_TOKEN = 3.5
"""Before the first answer: fewer than most texts have, so that the estimate is rather too long."""

_AROUND = 12
"""Bytes that a template writes around a message, about."""

_IMAGE = 4000

_WEIGHT = 0.3
"""How much the latest answer counts in what is known about the model's tokens."""

_LESS = 0.9


@dataclass(frozen=True, slots=True)
class FittedChat:
    shown: Request
    """What the model sees."""
    fit: Fit
    size: int
    """About how many bytes."""


class RemoteFitter:
    """Safe to use from several threads; `fit` blocks for milliseconds."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._policy = sessions.policy
        self._lock = threading.Lock()
        self._per_token = _BYTES_PER_TOKEN

    def learn(self, fitted: FittedChat, prompt_tokens: int) -> None:
        """What the service has counted in it."""
        if prompt_tokens > 0:
            seen = min(max(fitted.size / prompt_tokens, 0.5), 12.0)
            with self._lock:
                self._per_token += _WEIGHT * (seen - self._per_token)

    def note_too_long(self, fitted: FittedChat) -> None:
        """The service refused it for its length: its tokens are shorter than was thought."""
        with self._lock:
            most = _LESS * fitted.size / self._policy.context
            self._per_token = max(min(_LESS * self._per_token, most), 0.3)

    def fit(self, request: Request) -> FittedChat:
        """`request` without what left it before, and without more if it seems too long.

        Raises ContextExceeded where nothing more may leave.
        """
        if not self._sessions.applies(request):
            return _fitted(request, request.messages, Fit())
        view = self._sessions.view(request)
        if not self._sessions.may_evict(request):
            return _fitted(request, view.messages, Fit())
        return self._evict(request, view)

    def tokens(self, size: int) -> int:
        """About how many tokens so many bytes are."""
        return math.ceil(size / self._per_token)

    def _evict(self, request: Request, view: View) -> FittedChat:
        systems = [message for message in request.messages if message.role in ("system", "developer")]
        target = self._policy.target(self.tokens(_size(request.tools, systems)))
        wanted = self._policy.recall_tokens if self._sessions.may_recall(request, view) else 0
        evictions: tuple[Eviction, ...] = ()
        now = self._shown(request, view)
        if now > self._policy.limit(request) - wanted:
            begin = perf_counter()
            groups, shorter = evict_until(
                lambda view: self._shown(request, view) <= target,
                view,
                plan_eviction(view, now - target, lambda turn: self._tokens_of(view, turn)),
                partial(self._sessions.without, view, request),
            )
            if groups:
                freed = max(now - self._shown(request, shorter), 0)
                plan_ms = 1e3 * (perf_counter() - begin)
                view, eviction = self._sessions.left(request, shorter, groups, freed, plan_ms)
                evictions = (eviction,)
            elif now >= self._policy.context:
                raise ContextExceeded(now, self._policy.context)
        room = self._policy.comfortable - self._shown(request, view)
        recalled = self._sessions.recalled(request, view, lambda text: self.tokens(_length(text)), room)
        return _fitted(request, recalled.messages, Fit(evictions=evictions, recalled=recalled.recalled))

    def _shown(self, request: Request, view: View) -> int:
        return self.tokens(_size(request.tools, view.messages))

    def _tokens_of(self, view: View, turn: Iterable[int]) -> int:
        size = 0
        for place in turn:
            put = view.inserted.get(place, Inserted())
            spoken = view.history.messages[view.history.spoken[place]]
            size += _length(put.before) + _size((), (spoken, *put.after))
        return self.tokens(size)


def _fitted(request: Request, messages: Sequence[Message], fit: Fit) -> FittedChat:
    return FittedChat(replace(request, messages=tuple(messages)), fit, _size(request.tools, messages))


def _size(tools: Iterable[Tool], messages: Iterable[Message]) -> int:
    """About how many bytes they are in a prompt."""
    size = sum(len(tool.name) + _length(tool.description) + _length(str(tool.parameters)) for tool in tools)
    for message in messages:
        size += _length(message.content) + _AROUND + _IMAGE * len(message.images)
        size += sum(len(call.name) + _length(call.arguments) + _AROUND for call in message.tool_calls)
    return size


def _length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


OnRemoved = Callable[[Request, Sequence[int]], None]
"""Gets a conversation's last request, with the answer to it as its last message, and the places of the messages
whose state is gone, each once. Is called in the event loop: must not block."""

_MOST_REQUESTS = 256


@runtime_checkable
class ReportsEvictions(Protocol):
    """A provider that reports what happens to its server's KV cache."""

    on_removed: OnRemoved | None

    def forget(self, owners: Container[str]) -> None:
        """Keep nothing of these. Call it in the event loop."""


class LostMessages:
    """Archives the messages whose state a server has dropped. Belongs to the event loop."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._sent = Latest[tuple[str, tuple[Message, ...]], Request](_MOST_REQUESTS)
        self._archiving: set[asyncio.Task[None]] = set()

    def note_request(self, shown: Request, sent: Request) -> None:
        """Note the request as the server gets it, and as the client sent it."""
        self._sent[shown.namespace, shown.messages] = sent

    def forget(self, owners: Container[str]) -> None:
        drop_owners(self._sent, owners)

    def archive(self, request: Request, places: Sequence[int]) -> None:
        """An `OnRemoved`: writes in a thread, and returns at once."""
        *shown, answer = request.messages
        sent = self._sent.get((request.namespace, tuple(shown)))
        if sent is None:
            return
        whole = replace(sent, messages=(*sent.messages, answer))
        lost = _places_in(request.messages, whole.messages, places)
        task = asyncio.create_task(asyncio.to_thread(self._sessions.lost, whole, lost))
        self._archiving.add(task)
        task.add_done_callback(self._archiving.discard)

    async def close(self) -> None:
        await asyncio.gather(*self._archiving, return_exceptions=True)


def _places_in(shown: Sequence[Message], sent: Sequence[Message], places: Sequence[int]) -> frozenset[int]:
    """Where messages that the model was shown stand among those that were sent: some were left out or put in."""
    matches: dict[int, int] = {}
    at = 0
    for place, one in enumerate(shown):
        for i, other in enumerate(sent[at:], at):
            # A notice or what was recalled may stand before its text.
            is_same = (one.role, one.tool_calls) == (other.role, other.tool_calls)
            if is_same and one.content.endswith(other.content):
                matches[place], at = i, i + 1
                break
    return frozenset(matches[place] for place in places if place in matches)
