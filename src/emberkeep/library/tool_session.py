"""Answers for which tools run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from emberkeep.config.settings import TOOL_TURNS
from emberkeep.library.bridge import Bridge
from emberkeep.library.results import Stream
from emberkeep.types.events import Decision
from emberkeep.types.request import Message, Request, Tool, ToolCall

if TYPE_CHECKING:
    from emberkeep.backend.base import Backend
    from emberkeep.mcp.answers import McpPrompt
    from emberkeep.mcp.client import McpClients, ServerState
    from emberkeep.tools.function import ToolFunction
    from emberkeep.tools.toolbox import ToolBox


class ToolSession:
    """A toolbox for one model, and what the user has allowed it.

    Every method blocks and may be called from any thread. Owns the toolbox: close it.
    """

    def __init__(self, bridge: Bridge, backend: Backend, tools: ToolBox, *, asks: bool) -> None:
        """Connects to what the tools need. `asks`: dangerous ones wait for `decide`."""
        from emberkeep.tools.permissions import Agent, Permissions

        self._bridge = bridge
        self._tools = tools
        self._permissions = Permissions(asks=asks)
        self._agent = Agent(backend, tools, self._permissions, turns=TOOL_TURNS)
        try:
            bridge.run(tools.start())
        except BaseException:  # interrupted: servers that have started must not live on
            self.close()
            raise

    def stream(self, request: Request) -> Stream:
        return Stream(self._bridge.iterate(lambda: self._agent.generate(request)))

    def decide(self, call: ToolCall, decision: Decision) -> None:
        """The answer to a `PermissionAsked` of a stream."""
        self._permissions.decide(call, decision)

    def functions(self) -> list[ToolFunction]:
        return self._bridge.call(self._tools.functions)

    def definitions(self) -> tuple[Tool, ...]:
        return self._bridge.call(lambda: self._tools.definitions)

    def prompts(self) -> list[McpPrompt]:
        """Those of MCP servers."""
        return [prompt for clients in self._mcp() for prompt in clients.prompts()]

    def prompt(self, name: str, arguments: Mapping[str, str]) -> Message:
        """One of them, filled. Raises NoSuchEntry, ToolFailed."""
        (clients,) = self._mcp()
        return self._bridge.run(clients.get_prompt(name, arguments))

    def servers(self) -> list[ServerState]:
        """What MCP servers are doing."""
        return [state for clients in self._mcp() for state in clients.states()]

    def _mcp(self) -> list[McpClients]:
        if not self._tools.sources:
            return []
        from emberkeep.mcp.client import McpClients

        return [source for source in self._tools.sources if isinstance(source, McpClients)]

    def close(self) -> None:
        self._bridge.run(self._tools.close())


def own_toolbox(functions: Sequence[Callable[..., Any] | ToolFunction]) -> ToolBox:
    """For tools that a program passes itself: they run unasked. Raises ConfigError for what is no tool."""
    from emberkeep.tools.function import ToolFunction, as_tool
    from emberkeep.tools.toolbox import ALL, ToolBox, ToolLimits, ToolPolicy

    made = [one if isinstance(one, ToolFunction) else as_tool(one) for one in functions]
    # How long a result is, is up to the program too; and a small model calls whatever it is told of.
    return ToolBox(made, ToolPolicy(enabled=(ALL,)), limits=ToolLimits(output_chars=None))


def is_runnable(tool: object) -> bool:
    """Whether it is a function to run, and not a definition of a tool that the caller executes."""
    return callable(tool) or hasattr(tool, "run")
