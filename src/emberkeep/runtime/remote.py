"""Models that run somewhere else: from a Config to a backend, or to tools of the model that answers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from time import perf_counter

from emberkeep.backend.base import Backend, ModelCard, read_answer
from emberkeep.backend.limits import Permits
from emberkeep.backend.server_tools import HostTools, ToolServer
from emberkeep.config.settings import OFF, Config, TooLong
from emberkeep.errors import EmberkeepError, ToolFailed
from emberkeep.memory.memory import Memory
from emberkeep.models.remotes import Remotes
from emberkeep.runtime.parts import ModelParts, open_sessions
from emberkeep.tools.function import Answered, ToolFunction, as_tool, tool
from emberkeep.types.events import Caller
from emberkeep.types.models import RemoteModel
from emberkeep.types.request import Execution, Message, ReasoningFormat, Request

RETRIES = 2


def named_backends(config: Config) -> list[str]:
    """Those that were chosen by name, in their order."""
    return list(dict.fromkeys(name.strip() for name in config.backend.split(",") if name.strip()))


def open_remote(
    config: Config,
    remote: RemoteModel,
    parts: ModelParts | None = None,
    *,
    open_tools: Callable[[Config, Memory | None], HostTools | None] | None = None,
    retries: int = RETRIES,
) -> Backend:
    """Asks the service what it has. Blocks; not for a thread with a running event loop. Raises RemoteError.

    `parts`: those that it shares with other models. `open_tools`: those that it may call here. `retries`: how
    often a request is sent again that it failed.
    """
    from emberkeep.backend.remote.backend import RemoteBackend, RemoteOptions
    from emberkeep.backend.remote.base import Provider, RemoteAbout, translate_faults
    from emberkeep.backend.remote.vendors import default_context, open_provider, with_defaults

    async def read_about(provider: Provider) -> RemoteAbout:
        try:
            return await provider.about()
        finally:
            await provider.close()

    with translate_faults(remote.name):
        # A client belongs to the event loop that used it first: this one is for asking, another for answers.
        about = asyncio.run(read_about(open_provider(remote, os.environ)))
    model = with_defaults(remote).model or next(iter(about.models), "")
    context = remote.ctx or about.context or default_context(remote)
    card = ModelCard(
        model or remote.name, 0, context, owned_by=remote.backend, also=(remote.name,), remote=remote.name
    )
    parts = parts or ModelParts(config)
    memory = parts.memory()
    return RemoteBackend(
        card,
        open_provider(replace(remote, model=model), os.environ),
        open_sessions(config, memory, context),
        RemoteOptions(
            retries=retries,
            max_tokens=remote.max_tokens,
            most_tokens=config.max_tokens,
            deadline_s=config.deadline_s,
            reasoning=ReasoningFormat(config.reasoning),
            no_tools=config.tools == OFF,
            close_memory=parts.close_memory,
        ),
        tools=open_tools(config, memory) if open_tools else None,
        permits=Permits(config.parallel + config.queue, config.max_concurrent_per_user),
        holders=parts.holders,
    )


# ── models as tools of the one that answers ──

GROUP = "models"
_TIMEOUT_S = 600.0
"""A model that thinks, or runs on a laptop, takes minutes."""
_MOST_IN_A_CHAIN = 1
"""A model that was asked by another one asks no third."""


def open_consultants(config: Config) -> list[Consultants]:
    """All but those that answer themselves. Raises ConfigError."""
    others = [remote for remote in Remotes(config).list() if remote.name not in named_backends(config)]
    return [Consultants(config, others)] if others else []


class Consultants:
    """A ToolSource with one tool for each model, which is connected to when it is asked for the first time.
    Belongs to the event loop."""

    def __init__(
        self,
        config: Config,
        remotes: Sequence[RemoteModel],
        open_model: Callable[[Config, RemoteModel], Backend] = open_remote,
    ) -> None:
        # A consulted model keeps nothing of it, has no tools of ours, and is not told which user asked.
        self._config = replace(
            config, memory=False, server_tools=OFF, too_long=TooLong.REFUSE, max_concurrent_per_user=None
        )
        self._open_model = open_model
        self._functions = [self._function(remote) for remote in remotes]
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
        begin = perf_counter()
        backend = await self._backend(remote)
        answer = await read_answer(backend.generate(_request(remote, question, context, caller)))
        if not answer.text.strip():
            raise ToolFailed(f"{remote.name} said nothing: ask in another way, or answer without it.")
        tokens = f"{answer.usage.prompt_tokens:,} + {answer.usage.completion_tokens:,} tokens"
        remark = f"{remote.name} ({backend.card.id}), {tokens}, {perf_counter() - begin:.1f} s"
        return Answered(f"{remote.name} says: {answer.text}", remark)

    async def _backend(self, remote: RemoteModel) -> Backend:
        async with self._opening:
            if remote.name not in self._opened:
                self._opened[remote.name] = await asyncio.to_thread(self._open_model, self._config, remote)
            return self._opened[remote.name]


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
