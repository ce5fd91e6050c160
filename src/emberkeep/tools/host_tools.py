"""The tools of a server; the dangerous ones only for clients that ask a person, who has to allow each call."""

from __future__ import annotations

from collections import OrderedDict

from emberkeep.backend.tool_loop import Gate
from emberkeep.tools.function import ToolFunction
from emberkeep.tools.permissions import PermissionGate, Permissions, Questions
from emberkeep.tools.toolbox import ToolBox
from emberkeep.types import Decision, HostTool, Request, ToolMode, ToolServer

PATIENCE_S = 600.0
"""After which a question that nobody answers counts as a no: its answer holds a place that others wait for."""
_REMEMBERED = 1000
"""Conversations whose decisions are remembered."""


class HostToolBox:
    """Belongs to the event loop. Owns the toolbox."""

    def __init__(self, tools: ToolBox, *, asks: bool) -> None:
        """`asks`: clients may ask a person."""
        self._tools = tools
        self._asked = tools.asking() if asks else None
        self._questions = Questions(PATIENCE_S)
        self._permissions: OrderedDict[tuple[str, str], Permissions] = OrderedDict()
        """By namespace and conversation."""

    async def start(self) -> None:
        await self._tools.start()

    async def close(self) -> None:
        await self._tools.close()

    def of(self, request: Request) -> ToolBox:
        return self._asked if self._asked is not None and request.asks_permission else self._tools

    def gate(self, request: Request) -> Gate:
        tools = self.of(request)
        if tools is self._tools:
            return Gate()
        return PermissionGate(tools, self._permissions_of(request))

    def _permissions_of(self, request: Request) -> Permissions:
        """Decisions for good hold for a conversation; where it has no name, for this answer."""
        new = Permissions(asks=True, questions=self._questions)
        if request.conversation_id is None:
            return new
        known = self._permissions.setdefault((request.namespace, request.conversation_id), new)
        self._permissions.move_to_end((request.namespace, request.conversation_id))
        while len(self._permissions) > _REMEMBERED:
            self._permissions.popitem(last=False)
        return known

    def decide(self, question: str, decision: Decision) -> bool:
        """Whether a call has waited for it."""
        return self._questions.answer(question, decision)

    def listed(self) -> list[HostTool]:
        return [self._listed(function) for function in self._tools.known()]

    def servers(self) -> list[ToolServer]:
        return [server for source in self._tools.sources for server in source.servers()]

    def _listed(self, function: ToolFunction) -> HostTool:
        definition = function.definition
        return HostTool(
            definition.name, function.group, definition.description, self._mode(function), function.allowed_by
        )

    def _mode(self, function: ToolFunction) -> ToolMode:
        can_ask = self._asked is not None and self._asked.find(function.name) is not None
        if can_ask and function.is_dangerous:
            return ToolMode.ASKS
        return ToolMode.RUNS if self._tools.find(function.name) is not None else ToolMode.OFF
