"""All tools that can be called here: found by name, run with a time limit, results of a bearable length."""

from __future__ import annotations

import asyncio
import difflib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

from pydantic import ValidationError

from emberkeep.errors import EmberkeepError
from emberkeep.tools.base import Answered, ToolFunction, ToolSource
from emberkeep.tools.choosing import Choice
from emberkeep.tools.pages import MORE, Pages
from emberkeep.types import Caller, Json, Outcome, Tool, ToolCall

log = logging.getLogger("emberkeep.tools")


@dataclass(frozen=True, slots=True)
class ToolLimits:
    timeout_s: float = 60.0
    output_chars: int = 8000
    """Of one result; the rest can be asked for."""


_LIMITS = ToolLimits()


class ToolBox:
    """Belongs to the event loop. Close it."""

    def __init__(
        self,
        functions: Sequence[ToolFunction],
        choice: Choice,
        *,
        limits: ToolLimits = _LIMITS,
        sources: Sequence[ToolSource] = (),
    ) -> None:
        """`choice`: which of them are used here, now and of those that come later."""
        self._functions = functions
        self._choice = choice
        self._limits = limits
        self._sources = sources
        self._pages = Pages(limits.output_chars)

    async def start(self) -> None:
        """Returns when tools of other servers are known, or will not be soon. Never raises."""
        await asyncio.gather(*(source.start() for source in self._sources))

    async def close(self) -> None:
        await asyncio.gather(*(source.close() for source in self._sources), return_exceptions=True)

    def functions(self) -> list[ToolFunction]:
        """Those that may be called, in an order that stays: definitions are the beginning of every prompt."""
        found = [*self._functions, *(function for source in self._sources for function in source.functions())]
        chosen = {function.name: function for function in reversed(found) if self._choice.takes(function)}
        return sorted(chosen.values(), key=lambda function: (function.group, function.name))

    @property
    def definitions(self) -> tuple[Tool, ...]:
        chosen = tuple(function.definition for function in self.functions())
        return (*chosen, MORE) if chosen else ()

    def find(self, name: str) -> ToolFunction | None:
        return next((function for function in self.functions() if function.name == name), None)

    def is_ours(self, name: str) -> bool:
        return name == MORE.name or self.find(name) is not None

    async def run(self, call: ToolCall, caller: Caller) -> Outcome:
        """Never raises: whatever goes wrong is the result. Cancelling it cancels the call."""
        begin = perf_counter()
        try:
            value = await self._called(call, caller)
            text, remark = _spelled(value), value.remark if isinstance(value, Answered) else ""
            failed = False
        except (asyncio.CancelledError, KeyboardInterrupt):
            raise
        except BaseException as error:
            text, remark, failed = _explained(error, call), "", True
        cut = text if call.name == MORE.name else self._pages.first(text, caller)
        return Outcome(call, cut, failed, 1e3 * (perf_counter() - begin), remark)

    async def _called(self, call: ToolCall, caller: Caller) -> Json:
        if call.name == MORE.name:
            return self._pages.more(_arguments(call), caller)
        function = self.find(call.name)
        if function is None:
            raise LookupError(self._unknown(call.name))
        limit = function.timeout_s or self._limits.timeout_s
        try:
            return await asyncio.wait_for(function.run(_arguments(call), caller), limit)
        except TimeoutError as error:
            raise EmberkeepError(f"{call.name} took longer than {limit:g} s and was stopped.") from error

    def _unknown(self, name: str) -> str:
        names = [tool.name for tool in self.definitions]
        near = difflib.get_close_matches(name, names, n=1)
        return f"There is no tool {name!r}: " + (
            f"did you mean {near[0]}?" if near else f"use {', '.join(names)}."
        )


def _arguments(call: ToolCall) -> Mapping[str, Json]:
    """Raises ValueError."""
    try:
        given = json.loads(call.arguments or "{}", strict=False)
    except ValueError as error:
        raise ValueError(f"The arguments are not JSON ({error}): write an object.") from error
    if not isinstance(given, dict):
        raise ValueError("The arguments must be an object.")
    return given


def _spelled(value: Json) -> str:
    if isinstance(value, Answered):
        value = value.value
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def _explained(error: BaseException, call: ToolCall) -> str:
    """One sentence for the model. What is our own fault is in the log too."""
    if isinstance(error, ValidationError):
        told = [f"{'.'.join(map(str, part['loc'])) or 'arguments'}: {part['msg']}" for part in error.errors()]
        return f"Error: the arguments of {call.name} do not fit: {'; '.join(told)}."
    if not isinstance(error, (EmberkeepError, LookupError, ValueError, OSError)):
        log.debug("the tool %s failed", call.name, exc_info=error)
    said = str(error).strip() or type(error).__name__
    return f"Error: {said}"
