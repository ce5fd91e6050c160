"""Registered models as tools of the one that answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from time import perf_counter

from emberkeep.backend.base import Backend, read_answer
from emberkeep.config.settings import OFF, Config, TooLong
from emberkeep.errors import EmberkeepError
from emberkeep.memory.memory import Memory
from emberkeep.models.remotes import Remotes
from emberkeep.runtime.remote import named_backends, open_remote
from emberkeep.tools.function import ToolFunction
from emberkeep.tools.model_tools import Consulted, ModelTools
from emberkeep.types.models import RemoteModel
from emberkeep.types.request import Request
from emberkeep.types.tools import ToolServer


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
    """Of those that a model which is asked by another one would have."""
