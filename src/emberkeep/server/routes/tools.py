"""Tools that run here: which there are, and the answers of people who are asked before a dangerous one runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Literal

from emberkeep.api.body import Body
from emberkeep.backend.models import Models
from emberkeep.backend.server_tools import ToolDesk
from emberkeep.config.settings import OFF
from emberkeep.errors import NoSuchEntry
from emberkeep.server.routes.base import Routes, Served
from emberkeep.types.events import Decision
from emberkeep.types.request import Json


class DecisionBody(Body):
    id: str
    decision: Literal["once", "no", "always", "never"]


def routes(served: Served) -> Routes:
    routes, models = Routes(), served.models

    @routes.get("/v1/tools")
    async def tools() -> Json:
        return tools_json(_tools_of(models), is_enabled=served.config.server_tools != OFF)

    @routes.post("/v1/tools/decisions", example={"id": "question", "decision": "once"})
    async def decide(body: DecisionBody) -> Json:
        decision = Decision(body.decision)
        if not any(tools.decide(body.id, decision) for tools in _tools_of(models)):
            raise NoSuchEntry("Nothing waits for this decision: the call was answered already, or given up.")
        return {"object": "tool.decision", "id": body.id, "decision": decision}

    return routes


def _tools_of(models: Models) -> list[ToolDesk]:
    """The tools of every model that is loaded, since each has its own."""
    return [tools for backend in models.loaded() if (tools := backend.host_tools) is not None]


def tools_json(found: Sequence[ToolDesk], *, is_enabled: bool) -> dict[str, Json]:
    """They are the same for every model: those of the first. None are known before one is loaded."""
    tools = found[0].listed() if found else []
    servers = found[0].servers() if found else []
    return {
        "object": "list",
        "enabled": is_enabled or bool(found),
        "data": [asdict(tool) for tool in tools],
        "servers": [asdict(server) for server in servers],
    }
