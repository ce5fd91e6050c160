"""A model that runs somewhere else: from a Config to its backend."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace

from emberkeep.backend.base import Backend, ModelCard
from emberkeep.backend.limits import Permits
from emberkeep.backend.server_tools import HostTools
from emberkeep.config.settings import OFF, TOOL_TURNS, Config
from emberkeep.memory.memory import Memory
from emberkeep.runtime.memory import open_sessions
from emberkeep.runtime.parts import ModelParts, OwnParts
from emberkeep.types.models import RemoteModel
from emberkeep.types.request import ReasoningFormat

RETRIES = 2


def named_backends(config: Config) -> list[str]:
    """Those that were chosen by name, in their order."""
    return list(dict.fromkeys(name.strip() for name in config.backend.split(",") if name.strip()))


def open_remote(
    config: Config,
    remote: RemoteModel,
    open_tools: Callable[[Config, Memory | None], HostTools | None],
    parts: ModelParts | None = None,
    *,
    retries: int = RETRIES,
) -> Backend:
    """Asks the service what it has. Blocks; not for a thread with a running event loop. Raises RemoteError.

    `parts`: those that it shares with other models. `retries`: how often a request is sent again that it failed.
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
    parts = parts or OwnParts(config)
    memory = parts.memory()
    return RemoteBackend(
        card,
        open_provider(replace(remote, model=model), os.environ),
        open_sessions(config, memory, context),
        RemoteOptions(
            retries=retries,
            max_tokens=remote.max_tokens,
            most_tokens=config.max_tokens,
            tool_rounds=TOOL_TURNS + 1,
            deadline_s=config.deadline_s,
            reasoning=ReasoningFormat(config.reasoning),
            no_tools=config.tools == OFF,
            close_memory=parts.close_memory,
        ),
        tools=open_tools(config, memory),
        permits=Permits(config.parallel + config.queue, config.max_concurrent_per_user),
        holders=parts.holders,
    )
