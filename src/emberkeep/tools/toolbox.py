"""All tools that can be called here: found by name, run with a time limit, results of a bearable length."""

from __future__ import annotations

import asyncio
import difflib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NoReturn

from emberkeep.errors import ToolFailed
from emberkeep.tools.base import Answered, ToolFunction, ToolSource
from emberkeep.tools.choosing import Choice
from emberkeep.tools.pages import MORE, Pages
from emberkeep.tools.results import explained, spelled
from emberkeep.tools.running import TookTooLong, within
from emberkeep.types import Caller, Json, Outcome, Tool, ToolCall

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ToolLimits:
    timeout_s: float = 60.0
    output_chars: int | None = 8000
    """Of one result; the rest can be asked for. None: results are whole."""


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
        self._pages = None if limits.output_chars is None else Pages(limits.output_chars)

    async def start(self) -> None:
        """Returns when tools of other servers are known, or will not be soon. Never raises."""
        await asyncio.gather(*(source.start() for source in self._sources))
        self._tell_left_out()

    async def close(self) -> None:
        await asyncio.gather(*(source.close() for source in self._sources), return_exceptions=True)

    @property
    def sources(self) -> Sequence[ToolSource]:
        return self._sources

    def known(self) -> list[ToolFunction]:
        """All there are, used or not, by group and name."""
        found = [*self._functions, *(function for source in self._sources for function in source.functions())]
        by_name = {function.name: function for function in reversed(found)}
        return sorted(by_name.values(), key=lambda function: (function.group, function.name))

    def functions(self) -> list[ToolFunction]:
        """Those that may be called, in an order that stays: definitions are the beginning of every prompt."""
        return [function for function in self.known() if self._choice.takes(function)]

    @property
    def definitions(self) -> tuple[Tool, ...]:
        chosen = tuple(function.definition for function in self.functions())
        return (*chosen, MORE) if chosen and self._pages else chosen

    def find(self, name: str) -> ToolFunction | None:
        return next((function for function in self.functions() if function.name == name), None)

    def target(self, call: ToolCall) -> ToolFunction | None:
        """The tool that has to be allowed for this call; None where there is none of that name."""
        function = self.find(call.name)
        try:
            return None if function is None else function.target(_arguments(call))
        except ToolFailed:  # nothing is going to run
            return function

    def is_ours(self, name: str) -> bool:
        return (name == MORE.name and self._pages is not None) or self.find(name) is not None

    def may_run_beside(self, name: str) -> bool:
        """While other calls run."""
        function = self.find(name)
        return function is None or function.runs_beside

    async def run(self, call: ToolCall, caller: Caller) -> Outcome:
        """Never raises: whatever goes wrong is the result. Cancelling it cancels the call."""
        begin = perf_counter()
        try:
            value = await self._called(call, caller)
            answered = value if isinstance(value, Answered) else Answered(value, "")
            text, remark, failed = spelled(answered.value), answered.remark, False
        except (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:
            text, remark, failed = explained(error, call.name), "", True
        if self._pages is not None and call.name != MORE.name:
            text = self._pages.first(text, caller)
        return Outcome(call, text, failed, 1e3 * (perf_counter() - begin), remark)

    async def _called(self, call: ToolCall, caller: Caller) -> Any:
        if self._pages is not None and call.name == MORE.name:
            return self._pages.more(_arguments(call), caller)
        function = self.find(call.name)
        if function is None:
            raise ToolFailed(self._unknown(call.name))
        arguments = _arguments(call)
        target = function.target(arguments)
        if not self._choice.allows(function, target):
            raise ToolFailed(self._not_allowed(call.name, target))
        limit = function.timeout_s or self._limits.timeout_s
        try:
            return await within(limit, function.run(arguments, caller))
        except TookTooLong as error:
            # Not that it was stopped: a thread cannot be.
            raise ToolFailed(f"{call.name} took longer than {limit:g} s: nobody waits for it any more.") from error

    def _not_allowed(self, name: str, target: ToolFunction) -> str:
        if not self._choice.would_ask(target):
            return f"{target.name} is disabled: use another tool."
        way = target.allowed_by or f"--enable-tools {name}"
        return (
            f"{name} asks before it runs, and nobody can be asked here: whoever runs this can allow it with {way}."
        )

    def _tell_left_out(self) -> None:
        """What other servers offer and nobody has allowed, once for each of them."""
        offered = [function for source in self._sources for function in source.functions()]
        left_out = [function for function in offered if function.allowed_by and self._choice.would_ask(function)]
        for way in dict.fromkeys(function.allowed_by for function in left_out):
            names = [function.name for function in left_out if function.allowed_by == way]
            log.warning("left out, as nobody can be asked here: %s; allow them with %s", ", ".join(names), way)

    def _unknown(self, name: str) -> str:
        if reason := next((why for source in self._sources if (why := source.withdrawn(name))), None):
            return reason
        known = next((function for function in self.known() if function.name == name), None)
        if known is not None and self._choice.would_ask(known):
            return self._not_allowed(name, known)
        names = [tool.name for tool in self.definitions]
        near = difflib.get_close_matches(name, names, n=1)
        if near:
            return f"There is no tool {name!r}: did you mean {near[0]}?"
        return f"There is no tool {name!r}: use {', '.join(names) or 'none'}."


def _arguments(call: ToolCall) -> Mapping[str, Json]:
    """Raises ToolFailed."""
    try:
        given = json.loads(call.arguments or "{}", strict=False, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise ToolFailed(f"The arguments are not JSON ({error}): write an object.") from error
    if not isinstance(given, dict):
        raise ToolFailed("The arguments must be an object.")
    return given


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number")
