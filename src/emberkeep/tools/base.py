"""A tool: a typed Python function, of which its schema is derived.

    @tool(group="harbour")
    def berth(ship: Annotated[str, Field(description="Its name.")], metres: int = 20) -> str:
        '''Find a free berth for a ship.'''

What it returns is the result: a text as it is, anything else as JSON. What it raises is one too.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from emberkeep.tools.schema import Arguments, read_signature
from emberkeep.types import Caller, Json, Tool

Run = Callable[[Mapping[str, Json], Caller], Awaitable[Json]]

USER_GROUP = "user"
"""Of tools that say no other."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A result with something to say to the person who watches."""

    value: Json
    remark: str


@dataclass(frozen=True, slots=True)
class ToolFunction:
    definition: Tool
    group: str
    run: Run
    """May raise anything; what it raises is what the model reads. Raises pydantic's ValidationError for arguments
    that do not fit. Returns JSON, or `Answered`."""
    is_dangerous: bool = False
    """It can do harm: somebody is asked first, or it is off."""
    runs_beside: bool = True
    """It may run while others do."""
    timeout_s: float | None = None
    """None: the usual one."""

    @property
    def name(self) -> str:
        return self.definition.name


class ToolSource(Protocol):
    """Tools that come and go, such as those of a server. Belongs to the event loop."""

    async def start(self) -> None:
        """Returns when its tools are known, or will not be soon. Never raises."""

    def functions(self) -> Sequence[ToolFunction]:
        """Those that can be called now."""

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Mark:
    group: str
    name: str | None
    is_dangerous: bool
    runs_beside: bool
    timeout_s: float | None


def tool(
    function: Callable[..., Any] | None = None,
    *,
    group: str = USER_GROUP,
    name: str | None = None,
    dangerous: bool = False,
    parallel: bool = True,
    timeout_s: float | None = None,
) -> Any:
    """Mark a function or a method as a tool. It stays what it is: `as_tool` makes the tool of it."""
    mark = _Mark(group, name, dangerous, parallel, timeout_s)

    def marked(function: Callable[..., Any]) -> Callable[..., Any]:
        function._emberkeep_tool = mark  # type: ignore[attr-defined]
        return function

    return marked if function is None else marked(function)


def as_tool(function: Callable[..., Any]) -> ToolFunction:
    """The tool that a function is: marked or not, a bound method too, blocking or a coroutine.

    A parameter of type `Caller` is not the model's to give. Raises ConfigError where a parameter has no type, or
    the function no docstring.
    """
    mark = getattr(function, "_emberkeep_tool", _Mark(USER_GROUP, None, False, True, None))
    signature = read_signature(function)
    definition = Tool(mark.name or signature.name, signature.description, signature.parameters)
    run = _runner(function, signature.arguments, signature.caller)
    return ToolFunction(definition, mark.group, run, mark.is_dangerous, mark.runs_beside, mark.timeout_s)


def tools_of(owner: object) -> list[ToolFunction]:
    """Every marked method of an object, or every marked function of a module, in the order of their definition."""
    members = owner.__dict__ if inspect.ismodule(owner) else type(owner).__dict__
    names = [name for name, value in members.items() if hasattr(value, "_emberkeep_tool")]
    return [as_tool(getattr(owner, name)) for name in names]


def _runner(function: Callable[..., Any], arguments: Arguments, caller_name: str | None) -> Run:
    async def run(given: Mapping[str, Json], caller: Caller) -> Json:
        values = arguments(given)
        if caller_name is not None:
            values[caller_name] = caller
        if inspect.iscoroutinefunction(function):
            return await function(**values)
        return await asyncio.to_thread(function, **values)

    return run
