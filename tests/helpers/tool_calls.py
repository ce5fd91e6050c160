"""Tool boxes for tests, and calls as a model writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import Field

from emberkeep.tools import as_tool, tool
from emberkeep.tools.function import ToolFunction
from emberkeep.tools.toolbox import ToolBox, ToolLimits, ToolPolicy
from emberkeep.types.events import (
    Caller,
    Completed,
    Event,
    Finished,
    FinishReason,
    LookupRecord,
    TextDelta,
    Timings,
    ToolCallDelta,
    ToolOutcome,
    Usage,
)
from emberkeep.types.request import Json, ToolCall

ALL = ToolPolicy(asks=True)
_COMPLETED = Completed(Usage(10, 5), Timings(predicted_n=5), LookupRecord())


def box_of(*functions: Callable[..., Any] | ToolFunction, timeout_s: float = 60.0, chars: int = 8000) -> ToolBox:
    made = [one if isinstance(one, ToolFunction) else as_tool(one) for one in functions]
    return ToolBox(made, ALL, limits=ToolLimits(timeout_s, chars))


def calling(name: str, arguments: str = "{}", id: str = "c1") -> list[Event]:
    """A round in which a model calls one tool."""
    return [ToolCallDelta(0, 0, id, name, arguments), Finished(0, FinishReason.TOOL_CALLS), _COMPLETED]


def calling_all(
    *calls: tuple[str, Mapping[str, Json]],
    text: str = "",
    ids: str = "c",
    reason: FinishReason = FinishReason.TOOL_CALLS,
) -> list[Event]:
    """A round in which it calls several, and the arguments come in pieces."""
    events: list[Event] = [TextDelta(0, text)] if text else []
    for place, (name, arguments) in enumerate(calls):
        told = json.dumps(arguments)
        events += [
            ToolCallDelta(0, place, f"{ids}{place}", name, told[:3]),
            ToolCallDelta(0, place, None, None, told[3:]),
        ]
    return [*events, Finished(0, reason), _COMPLETED]


def depth(pier: Annotated[int, Field(description="Its number.")]) -> str:
    """Measure the depth at a pier."""
    return f"{pier + 4} metres"


@tool(dangerous=True)
def sink(ship: str) -> str:
    """Sink a ship."""
    return f"{ship} is gone"


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
