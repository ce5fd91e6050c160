"""The tools that can be called here, those of other servers and other models among them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from emberkeep.config.settings import ASK, OFF, Config
from emberkeep.memory.memory import Memory

if TYPE_CHECKING:
    from emberkeep.tools.function import ToolSource
    from emberkeep.tools.permissions import HostToolBox
    from emberkeep.tools.toolbox import ToolBox


def open_toolbox(config: Config, *, memory: Memory | None, asks: bool, whole: bool = False) -> ToolBox:
    """`asks`: a person can be asked before a dangerous tool runs. `whole`: results are not divided into pages.
    Nothing is started. Raises ConfigError."""
    from emberkeep.tools.registry import built_in
    from emberkeep.tools.toolbox import ToolBox, ToolLimits, ToolPolicy

    functions = built_in(config, memory)
    policy = ToolPolicy(config.enable_tools, config.disable_tools, asks)
    sources = _sources(config)
    later = {"mcp", "models", *(server.name for server in config.mcp)}
    policy.check([*functions, *(function for source in sources for function in source.functions())], later)
    limits = ToolLimits(config.tool_timeout_s, None) if whole else ToolLimits(config.tool_timeout_s)
    return ToolBox(functions, policy, limits=limits, sources=sources)


def server_tools(config: Config, memory: Memory | None) -> HostToolBox | None:
    """Those that a server runs by itself, where it may. Raises ConfigError."""
    if config.server_tools == OFF:
        return None
    from emberkeep.tools.permissions import HostToolBox
    from emberkeep.tools.toolbox import ToolPolicy

    policy = ToolPolicy(config.enable_tools, config.disable_tools)
    box = open_toolbox(config, memory=memory, asks=False)
    return HostToolBox(box, policy, asks=config.server_tools == ASK)


def _sources(config: Config) -> list[ToolSource]:
    sources: list[ToolSource] = []
    if config.mcp:
        from emberkeep.mcp.client import open_clients

        sources.append(open_clients(config))
    from emberkeep.runtime.remote import open_consultants

    return [*sources, *open_consultants(config)]
