"""Tool boxes for tests, and calls as a model writes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from emberkeep.tools import as_tool
from emberkeep.tools.function import ToolFunction
from emberkeep.tools.toolbox import ToolBox, ToolLimits, ToolPolicy
from emberkeep.types import Caller, Json, ToolCall, ToolOutcome

ALL = ToolPolicy(asks=True)


def box_of(*functions: Callable[..., Any] | ToolFunction, timeout_s: float = 60.0, chars: int = 8000) -> ToolBox:
    made = [one if isinstance(one, ToolFunction) else as_tool(one) for one in functions]
    return ToolBox(made, ALL, limits=ToolLimits(timeout_s, chars))


def written(name: str, /, **arguments: Json) -> ToolCall:
    return ToolCall("call-1", name, json.dumps(arguments))


async def called(box: ToolBox, name: str, /, owner: str = "", **arguments: Json) -> ToolOutcome:
    return await box.run(written(name, **arguments), Caller(owner))


async def told(box: ToolBox, name: str, /, owner: str = "", **arguments: Json) -> str:
    """The result of a call that must go well."""
    outcome = await called(box, name, owner=owner, **arguments)
    assert not outcome.failed, outcome.text
    return outcome.text


async def refused(box: ToolBox, name: str, /, owner: str = "", **arguments: Json) -> str:
    outcome = await called(box, name, owner=owner, **arguments)
    assert outcome.failed, outcome.text
    return outcome.text
