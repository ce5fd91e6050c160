"""The tools of a server; the dangerous ones only for clients that ask a person, who has to allow each call."""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Container
from dataclasses import replace

from emberkeep.backend.tool_loop import Gate
from emberkeep.tools.function import ToolFunction
from emberkeep.tools.permissions import PermissionGate, Permissions, Questions
from emberkeep.tools.toolbox import ToolBox, ToolPolicy
from emberkeep.types.events import Decision
from emberkeep.types.request import Request
from emberkeep.types.tools import HostTool, ToolMode, ToolServer

PATIENCE_S = 600.0
"""After which a question that nobody answers counts as a no: its answer holds a place that others wait for."""
_REMEMBERED = 1000
"""Conversations whose decisions are remembered."""


class HostToolBox:
    """Belongs to the event loop. Owns the toolbox."""

    def __init__(self, tools: ToolBox, policy: ToolPolicy, *, asks: bool) -> None:
        """`policy`: which tools are used. `asks`: clients may ask a person, and then only those get dangerous
        ones."""
        self._tools = tools.under(replace(policy, is_harmless=True)) if asks else tools
        self._asked = tools.under(replace(policy, asks=True)) if asks else None
        self._questions = Questions(PATIENCE_S)
        self._permissions: OrderedDict[bytes, Permissions] = OrderedDict()
        """By conversation."""
        self._secret = secrets.token_bytes(16)

    async def start(self) -> None:
        await (self._asked or self._tools).start()

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
        # Not under its names: a user who is forgotten leaves none.
        names = f"{len(request.namespace)} {request.namespace} {request.conversation_id}"
        key = hashlib.blake2b(names.encode(), key=self._secret, digest_size=16).digest()
        known = self._permissions.setdefault(key, new)
        self._permissions.move_to_end(key)
        while len(self._permissions) > _REMEMBERED:
            self._permissions.popitem(last=False)
        return known

    def decide(self, question: str, decision: Decision) -> bool:
        """Whether a call has waited for it."""
        return self._questions.answer(question, decision)

    def listed(self) -> list[HostTool]:
        run = {function.name for function in self._tools.functions()}
        asked = {function.name for function in self._asked.functions()} if self._asked else set()
        return [_listed(function, run, asked) for function in self._tools.known()]

    def servers(self) -> list[ToolServer]:
        return [server for source in self._tools.sources for server in source.servers()]


def _listed(function: ToolFunction, run: Container[str], asked: Container[str]) -> HostTool:
    """`run` and `asked`: names of those that run unasked, and of those that run for clients that ask."""
    definition, name = function.definition, function.name
    mode = ToolMode.RUNS if name in run else ToolMode.ASKS if name in asked else ToolMode.OFF
    return HostTool(name, function.group, definition.description, mode, function.allowed_by)
