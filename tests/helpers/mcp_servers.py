"""Servers for the tests of MCP."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from emberkeep.config.tables import McpServer
from emberkeep.mcp.client import McpClients
from emberkeep.tools.toolbox import ToolBox, ToolPolicy
from emberkeep.types.events import Caller, ToolOutcome
from emberkeep.types.request import Json, ToolCall

HOSTILE = Path(__file__).with_name("hostile_mcp_server.py")


def hostile(name: str, *arguments: object, **settings: Any) -> McpServer:
    return McpServer(name, (sys.executable, str(HOSTILE), *map(str, arguments)), **settings)


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def connected(folder: Path, *servers: McpServer, clock: Clock | None = None) -> AsyncIterator[McpClients]:
    clients = McpClients(servers, folder / "pins.json", clock=clock or Clock())
    await clients.start()
    try:
        yield clients
    finally:
        await clients.close()


async def call(clients: McpClients, name: str, /, **arguments: Json) -> ToolOutcome:
    box = ToolBox((), ToolPolicy(enabled=("all",)), sources=(clients,))
    return await box.run(ToolCall("1", name, json.dumps(arguments)), Caller())


def offered(clients: McpClients) -> list[str]:
    """What the servers have, without the tools that are always there."""
    return [function.name for function in clients.functions() if "__" in function.name]


def alive(pids: Sequence[int]) -> list[int]:
    """Those that run; a zombie does not."""
    return [pid for pid in pids if _state(pid) not in ("", "Z", "X")]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
