"""MCP servers and what they offer, as people read it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from textwrap import indent
from typing import TYPE_CHECKING

from emberkeep.cli.tables import printable, show, texts
from emberkeep.errors import EmberkeepError
from emberkeep.types import Json

if TYPE_CHECKING:
    from rich.table import Table

    from emberkeep.mcp.answers import ListedTool
    from emberkeep.mcp.client import McpClients, ServerState

_APPROVED = "approved"


def server_json(state: ServerState) -> dict[str, Json]:
    return {
        "name": state.name,
        "status": str(state.status),
        "reason": state.reason,
        "about": state.about,
        "tools": {name: str(standing) for name, standing in state.tools.items()},
        "prompts": state.prompts,
    }


def print_servers(servers: Sequence[dict[str, Json]]) -> None:
    table = _table("server", "status", "tools", "prompts", "")
    for server in servers:
        waiting = sum(standing != _APPROVED for standing in server["tools"].values())
        remark = f"{waiting} to approve" if waiting else server["reason"] or server["about"]
        numbers = str(len(server["tools"])), str(server["prompts"])
        table.add_row(*texts(server["name"], server["status"], *numbers, remark))
    show(table)


async def print_server(clients: McpClients, name: str) -> None:
    """Raises NoSuchEntry, and EmberkeepError where the server does not work."""
    _check(clients, name)
    _print_tools(clients, name)
    prompts = _table("prompt", "arguments", "")
    for prompt in clients.prompts():
        arguments = ", ".join(one.name if one.is_required else f"[{one.name}]" for one in prompt.arguments)
        prompts.add_row(*texts(prompt.name, arguments, _line(prompt.description)))
    resources = _table("resource", "type", "")
    for found in await clients.resources(name):
        about = found.get("description", found["name"])
        resources.add_row(*texts(found["uri"], found.get("type", ""), _line(about)))
    show(*(table for table in (prompts, resources) if table.row_count))


def print_waiting(clients: McpClients, name: str) -> int:
    """The tools that are new or changed, all that models are told of them; returns how many.

    Raises as `print_server`.
    """
    _check(clients, name)
    standings = _standings(clients, name)
    waiting = [tool for tool in clients.tools(name) if standings[tool.name] != _APPROVED]
    for tool in waiting:
        told = tool.definition
        parameters = json.dumps(told.parameters, indent=2, ensure_ascii=False)
        remarks = [standings[tool.name], _runs(clients, name, tool), _claim(tool)]
        print(f"{told.name} ({', '.join(filter(None, remarks))})")
        print(printable(indent(f"{told.description}\n{parameters}", "  ")), end="\n\n")
    return len(waiting)


def _print_tools(clients: McpClients, name: str) -> None:
    standings = _standings(clients, name)
    table = _table("tool", "", "runs", "claims", "")
    for tool in clients.tools(name):
        about = _line(tool.definition.description)
        cells = standings[tool.name], _runs(clients, name, tool), _claim(tool)
        table.add_row(*texts(tool.definition.name, *cells, about))
    if table.row_count:
        show(table)


def _runs(clients: McpClients, name: str, tool: ListedTool) -> str:
    return "trusted" if clients.trusts(name, tool.name) else "asks first"


def _claim(tool: ListedTool) -> str:
    """What it says of itself: nobody has checked it."""
    return "says that it only reads" if tool.is_read_only else ""


def _standings(clients: McpClients, name: str) -> dict[str, str]:
    tools = next(state.tools for state in clients.states() if state.name == name)
    return {tool: str(standing) for tool, standing in tools.items()}


def _check(clients: McpClients, name: str) -> None:
    clients.tools(name)
    state = next(state for state in clients.states() if state.name == name)
    if state.reason:
        raise EmberkeepError(f"{name} does not work: {state.reason}.")


def _line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for column in table.columns:
        column.overflow = "fold"
    return table
