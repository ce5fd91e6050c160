"""Registered models as tools of the one that answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from time import perf_counter

from emberkeep.backend.base import Backend, read_answer
from emberkeep.backend.server_tools import ToolServer
from emberkeep.config.settings import OFF, Config, TooLong
from emberkeep.errors import EmberkeepError, ToolFailed
from emberkeep.memory.memory import Memory
from emberkeep.models.remotes import Remotes
from emberkeep.runtime.remote import named_backends, open_remote
from emberkeep.tools.function import Answered, ToolFunction, as_tool, tool
from emberkeep.types.events import Caller
from emberkeep.types.models import RemoteModel
from emberkeep.types.request import Execution, Message, Request
from emberkeep.values import dataclass


def open_consultants(config: Config) -> list[Consultants]:
    """All but those that answer themselves. Raises ConfigError."""
    others = [remote for remote in Remotes(config).list() if remote.name not in named_backends(config)]
    return [Consultants(config, others)] if others else []


class Consultants:
    """A ToolSource. A model is connected to when it is asked for the first time. Belongs to the event loop."""

    def __init__(self, config: Config, remotes: Sequence[RemoteModel]) -> None:
        # A consulted model keeps nothing of it, has no tools of ours, and is not told which user asked.
        self._config = replace(
            config, memory=False, server_tools=OFF, too_long=TooLong.REFUSE, max_concurrent_per_user=None
        )
        self._functions = ModelTools(remotes, self._consult).functions()
        self._opened: dict[str, Backend] = {}
        self._opening = asyncio.Lock()

    async def start(self) -> None:
        """Nothing to do before a model asks."""

    def functions(self) -> Sequence[ToolFunction]:
        return self._functions

    def servers(self) -> Sequence[ToolServer]:
        return ()

    def withdrawn(self, name: str) -> str | None:
        return None

    async def close(self) -> None:
        for backend in self._opened.values():
            with suppress(EmberkeepError):
                await backend.close()

    async def _consult(self, remote: RemoteModel, request: Request) -> Consulted:
        begin = perf_counter()
        backend = await self._backend(remote)
        answer = await read_answer(backend.generate(request))
        ms = 1e3 * (perf_counter() - begin)
        return Consulted(
            answer.text, backend.card.id, answer.usage.prompt_tokens, answer.usage.completion_tokens, ms
        )

    async def _backend(self, remote: RemoteModel) -> Backend:
        async with self._opening:
            if remote.name not in self._opened:
                self._opened[remote.name] = await asyncio.to_thread(open_remote, self._config, remote, _no_tools)
            return self._opened[remote.name]


def _no_tools(config: Config, memory: Memory | None) -> None:
    """A model that is asked by another one has no tools."""


# ── the tools ──


GROUP = "models"

_TIMEOUT_S = 600.0
"""A model that thinks, or runs on a laptop, takes minutes."""
_MOST_IN_A_CHAIN = 1
"""A model that was asked by another one asks no third."""


@dataclass(frozen=True, slots=True)
class Consulted:
    """What another model answered, its tokens and its time."""

    text: str
    model: str
    """Its name at its service."""
    prompt_tokens: int
    completion_tokens: int
    ms: float


Consult = Callable[[RemoteModel, Request], Awaitable[Consulted]]
"""Asks it. May raise anything: only that call fails."""


class ModelTools:
    """One tool for each model."""

    def __init__(self, remotes: Sequence[RemoteModel], consult: Consult) -> None:
        self._remotes = remotes
        self._consult = consult

    def functions(self) -> list[ToolFunction]:
        return [self._function(remote) for remote in self._remotes]

    def _function(self, remote: RemoteModel) -> ToolFunction:
        async def ask(question: str, caller: Caller, context: str = "") -> Answered:
            return await self._ask(remote, question, context, caller)

        ask.__doc__ = _description(remote)
        return as_tool(tool(group=GROUP, name=f"ask_{remote.name}", timeout_s=_TIMEOUT_S)(ask))

    async def _ask(self, remote: RemoteModel, question: str, context: str, caller: Caller) -> Answered:
        if caller.depth >= _MOST_IN_A_CHAIN:
            raise ToolFailed(
                f"{remote.name} cannot be asked, because a model asked you: answer with what you know."
            )
        consulted = await self._consult(remote, _request(remote, question, context, caller))
        if not consulted.text.strip():
            raise ToolFailed(f"{remote.name} said nothing: ask in another way, or answer without it.")
        return Answered(f"{remote.name} says: {consulted.text}", _remark(remote, consulted))


def _description(remote: RemoteModel) -> str:
    is_what = f", {remote.model}" if remote.model else ""
    good_at = f" {remote.description.rstrip('.')}." if remote.description else ""
    return f"""Ask another model ({remote.name}{is_what}) for its opinion.{good_at}

    Args:
        question: What to ask. It knows nothing of this conversation.
        context: What it needs to know for that.
    """


def _request(remote: RemoteModel, question: str, context: str, caller: Caller) -> Request:
    text = f"{context}\n\n{question}" if context.strip() else question
    return Request(
        messages=(Message("user", text),),
        max_tokens=remote.max_tokens,
        execution=Execution(depth=caller.depth + 1, in_pieces=False),
    )


def _remark(remote: RemoteModel, consulted: Consulted) -> str:
    tokens = f"{consulted.prompt_tokens:,} + {consulted.completion_tokens:,} tokens"
    return f"{remote.name} ({consulted.model}), {tokens}, {consulted.ms / 1e3:.1f} s"
