"""Conversations that are longer than a remote model's context: which messages leave, by an estimate of tokens.

A remote model's tokens are not known here. What it counted in earlier prompts tells how many bytes make one, and
what it refuses tells how much was too much. Bytes, not characters: of Chinese a token holds one or two characters,
of English four.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter

from emberkeep.errors import ContextExceeded
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
