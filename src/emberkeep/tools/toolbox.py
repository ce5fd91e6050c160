"""All tools that can be called here: chosen by name, run with a time limit, their results page by page."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from fnmatch import fnmatchcase
from time import perf_counter
from typing import Any, NoReturn

from pydantic_core import to_json

from emberkeep.errors import ConfigError, EmberkeepError, ToolFailed
from emberkeep.signals import Leaving
from emberkeep.text import did_you_mean, encodable
from emberkeep.tools.function import Answered, TookTooLong, ToolFunction, ToolSource, within
from emberkeep.types.events import Caller, ToolOutcome
from emberkeep.types.request import Json, Tool, ToolCall
from emberkeep.values import dataclass

log = logging.getLogger("emberkeep.tools")

ALL = "all"


@dataclass(frozen=True, slots=True)
class ToolLimits:
    timeout_s: float = 60.0
    output_chars: int | None = 8000
    """How much of one result is shown; the rest can be asked for. None: results are whole."""


_LIMITS = ToolLimits()


class ToolBox:
    """Belongs to the event loop. Close it."""

    def __init__(
        self,
        functions: Sequence[ToolFunction],
        policy: ToolPolicy,
        *,
        limits: ToolLimits = _LIMITS,
        sources: Sequence[ToolSource] = (),
    ) -> None:
        """`policy`: which of them are used here, now and of those that come later."""
        self._functions = functions
        self._policy = policy
        self._limits = limits
        self._sources = sources
        self._pages = None if limits.output_chars is None else _Pages(limits.output_chars)

    def under(self, policy: ToolPolicy) -> ToolBox:
        """The same tools, of which others are used. Belongs to this one."""
        other = copy(self)
        other._policy = policy
        return other

    async def start(self) -> None:
        """Returns when tools of other servers are known, or will not be soon. Never raises."""
        await asyncio.gather(*(source.start() for source in self._sources))
        self._warn_left_out()

    async def close(self) -> None:
        await asyncio.gather(*(source.close() for source in self._sources), return_exceptions=True)

    @property
    def sources(self) -> Sequence[ToolSource]:
        return self._sources

    def known(self) -> list[ToolFunction]:
        """All tools, used or not, by group and name."""
        found = [*self._functions, *(function for source in self._sources for function in source.functions())]
        by_name = {function.name: function for function in reversed(found)}
        return sorted(by_name.values(), key=lambda function: (function.group, function.name))

    def functions(self) -> list[ToolFunction]:
        """Those that may be called, in a stable order, because their definitions begin every prompt."""
        return [function for function in self.known() if self._policy.takes(function)]

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

    async def run(self, call: ToolCall, caller: Caller) -> ToolOutcome:
        """Never raises: whatever goes wrong is the result. Cancelling it cancels the call."""
        begin = perf_counter()
        try:
            value = await self._call(call, caller)
            answered = value if isinstance(value, Answered) else Answered(value, "")
            text, remark, failed = _result_text(answered.value), answered.remark, False
        except (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit, Leaving):
            raise
        except BaseException as error:
            text, remark, failed = _error_text(error, call.name), "", True
        if self._pages is not None and call.name != MORE.name:
            text = self._pages.first(text, caller)
        return ToolOutcome(call, text, failed, 1e3 * (perf_counter() - begin), remark)

    async def _call(self, call: ToolCall, caller: Caller) -> Any:
        if self._pages is not None and call.name == MORE.name:
            return self._pages.more(_arguments(call), caller)
        function = self.find(call.name)
        if function is None:
            raise ToolFailed(self.explain_unknown(call.name))
        arguments = _arguments(call)
        target = function.target(arguments)
        if not self._policy.allows(function, target):
            raise ToolFailed(self._explain_refusal(call.name, target))
        limit = function.timeout_s or self._limits.timeout_s
        try:
            return await within(limit, function.run(arguments, caller))
        except TookTooLong as error:
            # Not that it was stopped: a thread cannot be.
            raise ToolFailed(
                f"{call.name} took longer than {limit:g} s: its result is no longer waited for."
            ) from error

    def _explain_refusal(self, name: str, target: ToolFunction) -> str:
        if not self._policy.would_ask(target):
            return f"{target.name} is disabled: use another tool."
        way = target.allowed_by or f"--enable-tools {name}"
        return f"{name} asks before it runs, and there is no user to ask: the operator can allow it with {way}."

    def _warn_left_out(self) -> None:
        """What other servers offer and the user has not allowed, once for each of them."""
        offered = [function for source in self._sources for function in source.functions()]
        left_out = [function for function in offered if function.allowed_by and self._policy.would_ask(function)]
        for way in dict.fromkeys(function.allowed_by for function in left_out):
            names = [function.name for function in left_out if function.allowed_by == way]
            log.warning("left out, as there is no user to ask: %s; allow them with %s", ", ".join(names), way)

    def explain_unknown(self, name: str) -> str:
        """Why there is no tool of that name, or none that may be called."""
        if reason := next((why for source in self._sources if (why := source.withdrawn(name))), None):
            return reason
        known = next((function for function in self.known() if function.name == name), None)
        if known is not None and self._policy.would_ask(known):
            return self._explain_refusal(name, known)
        names = [tool.name for tool in self.definitions]
        hint = did_you_mean(name, names, f"use {', '.join(names) or 'none'}.")
        return f"There is no tool {name!r}: {hint}"


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


# ── which tools are used ──


@dataclass(frozen=True, slots=True)
class ToolPolicy:
    """Which tools are used here. Each entry is a tool's name, a group, a pattern (`time__*`) or `all`."""

    enabled: tuple[str, ...] = ()
    """None given: every tool, the dangerous ones only where `asks`."""
    disabled: tuple[str, ...] = ()
    asks: bool = False
    """A user can be asked before a dangerous one runs. Where none can, it has to be enabled."""
    is_harmless: bool = False
    """No dangerous one, also where it is enabled: that is for others, who can be asked."""

    def takes(self, function: ToolFunction) -> bool:
        if _any_fits(self.disabled, function) or (self.is_harmless and function.is_dangerous):
            return False
        if self.enabled:
            return _any_fits(self.enabled, function)
        return self.asks or not function.is_dangerous

    def allows(self, function: ToolFunction, target: ToolFunction) -> bool:
        """A call of `function`, which is taken, that acts as `target`."""
        if self.takes(target):
            return True
        is_free = not _any_fits(self.disabled, target) and not (self.is_harmless and target.is_dangerous)
        return is_free and _any_fits(self.enabled, function)

    def would_ask(self, function: ToolFunction) -> bool:
        """Whether it is left out only because there is no user to ask."""
        is_left_out = self.is_harmless or not (self.enabled or self.asks)
        return is_left_out and function.is_dangerous and not _any_fits(self.disabled, function)

    def check(self, functions: Sequence[ToolFunction], later: Iterable[str] = ()) -> None:
        """Raises ConfigError for an entry that fits nothing; `later`: groups whose tools are not known yet."""
        known = {ALL, *later, *(function.group for function in functions)}
        for entry in (*self.enabled, *self.disabled):
            prefix, separator, _ = entry.partition("__")
            fits = entry in known or (separator and prefix in known) or any(_fits(entry, f) for f in functions)
            if not fits:
                names = [*known, *(function.name for function in functions)]
                hint = did_you_mean(entry, names, "`emberkeep tools list` shows them.")
                raise ConfigError(f"There is no tool or group {entry!r}: {hint}")


def _any_fits(entries: Iterable[str], function: ToolFunction) -> bool:
    return any(_fits(entry, function) for entry in entries)


def _fits(entry: str, function: ToolFunction) -> bool:
    return (
        entry in (ALL, function.group)
        or fnmatchcase(function.name, entry)
        or function.name.startswith(f"{entry}__")
    )


# ── what a model reads of a call ──

_ERROR_CHARS = 2000
"""Most characters of a foreign error message."""


def _result_text(value: Any) -> str:
    """A text as it is; anything else as JSON: also pydantic's models, dataclasses, dates, paths and sets.

    Raises ToolFailed.
    """
    if value is None:
        return "Done."
    if isinstance(value, (bytes, bytearray)):
        value = bytes(value).decode("utf-8", "replace")
    if isinstance(value, Iterator):
        # It may never end, and the event loop would wait for it.
        raise ToolFailed("What it returned cannot be written as JSON: it has to return a list, not an iterator.")
    if not isinstance(value, str):
        try:
            # As words, since JSON has no numbers for them: null would say that there is none.
            value = to_json(value, inf_nan_mode="strings").decode()
        except (ValueError, RecursionError) as error:
            raise ToolFailed(f"What it returned cannot be written as JSON: {encodable(str(error))}.") from error
    return encodable(value)


def _error_text(error: BaseException, name: str) -> str:
    """One sentence about a call of the tool `name`. What the tool itself did wrong is in the log too."""
    if not isinstance(error, (EmberkeepError, LookupError, ValueError, OSError)):
        log.debug("the tool %s failed", name, exc_info=error)
    return f"Error: {encodable(_say(error))}"


def _say(error: BaseException) -> str:
    try:
        text = str(error).strip()
    except Exception:  # one that cannot even say what it is
        text = ""
    kind = type(error).__name__
    if isinstance(error, (EmberkeepError, ValueError, OSError)) and text:
        return text[:_ERROR_CHARS]
    # Only with its kind does `'colour'` say that a key is missing.
    return f"{kind}: {text[:_ERROR_CHARS]}" if text else kind


# ── long results, page by page: the model gets the first, and can ask for the next ──

_OUTPUT = "output-"
_KEPT = 64
_KEPT_CHARS = 32 << 20
_LONGEST = 8 << 20
"""Characters of one result; no model reads as much, and everything has to be in memory."""

MORE = Tool(
    "more_output",
    "Read the next page of a long result: only where one ended with a line like [output-1, page 1 of 3].",
    {
        "type": "object",
        "properties": {
            "output": {"type": "string", "description": "The name that the result gave."},
            "page": {"type": "integer", "minimum": 1, "description": "Which page; the first has been shown."},
        },
        "required": ["output", "page"],
        "additionalProperties": False,
    },
)


class _Pages:
    """The latest long results, each for the user it was made for. Belongs to the event loop."""

    def __init__(self, chars: int) -> None:
        self._chars = chars
        self._count = 0
        self._kept: OrderedDict[tuple[str, str], str] = OrderedDict()

    def first(self, text: str, caller: Caller) -> str:
        if len(text) <= self._chars:
            return text
        if len(text) > _LONGEST:
            text = f"{text[:_LONGEST]}\n[Cut: {len(text) - _LONGEST} more characters are lost.]"
        self._count += 1
        name = f"{_OUTPUT}{self._count}"
        self._kept[caller.owner, name] = text
        while len(self._kept) > 1 and (len(self._kept) > _KEPT or self._size() > _KEPT_CHARS):
            self._kept.popitem(last=False)
        return self._page(name, text, 1)

    def more(self, arguments: Mapping[str, Json], caller: Caller) -> str:
        """Raises ToolFailed."""
        name, page = str(arguments.get("output")), str(arguments.get("page", 2))
        text = self._kept.get((caller.owner, name))
        if text is None and not name.startswith(_OUTPUT):
            raise ToolFailed(f"{name[:64]!r} names no long result, what was shown is all of it: answer with it.")
        if text is None:
            raise ToolFailed(f"There is no output {name[:64]!r} any more: call the tool again.")
        # As a text: models write numbers in quotes too.
        if not (page.isdecimal() and len(page) < 9 and 1 <= int(page) <= self._pages(text)):
            raise ToolFailed(f"{name} has pages 1 to {self._pages(text)}.")
        return self._page(name, text, int(page))

    def _size(self) -> int:
        return sum(map(len, self._kept.values()))

    def _pages(self, text: str) -> int:
        return -(-len(text) // self._chars)

    def _page(self, name: str, text: str, page: int) -> str:
        part = text[(page - 1) * self._chars : page * self._chars]
        last = self._pages(text)
        where = f"[{name}, page {page} of {last}, {len(text)} characters in all"
        return f"{part}\n{where}{f': more_output gives page {page + 1}' if page < last else ''}.]"
