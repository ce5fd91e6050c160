"""What rules of prefix hygiene make of a request, before it becomes a prompt.

State is reused up to the first token that differs, so a header with a new hash at the top of a system prompt costs
all of it. A rule takes such a place out of the way. Nothing becomes approximate by it: the state is that of the
tokens that were evaluated, and the answer names the rules that changed them.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import field, replace
from itertools import accumulate
from time import perf_counter
from typing import Generic, TypeVar

from emberkeep.latest import Latest, drop_owners
from emberkeep.types.hygiene import LONGEST_LINE, HygieneAction, HygieneRule, HygieneWhere, Tidied
from emberkeep.types.request import Breakpoint, Json, Message, Request, Tool
from emberkeep.values import dataclass

log = logging.getLogger("emberkeep.hygiene")

_REMEMBERED = 4096
"""Values that are kept frozen, and orders of tools."""
_LONGEST_S = 0.05
"""What a rule may take for one request: then the rest of it is left as it is."""
_ROLES = {"system": HygieneWhere.SYSTEM, "developer": HygieneWhere.SYSTEM, "user": HygieneWhere.USER}

V = TypeVar("V")


class FirstSeen(Generic[V]):
    """The value that each owner's key had first, for as long as it is among those used latest. For one thread at a
    time."""

    def __init__(self, limit: int) -> None:
        self._values = Latest[tuple[str, object], V](limit)

    def of(self, owner: str, key: object, value: V, *, learn: bool) -> V:
        """The first one, which is `value` where there was none; remembered if `learn`."""
        known = self._values.get((owner, key))
        first = value if known is None else known
        if learn:
            self._values[owner, key] = first
        return first

    def forget(self, owners: Container[str]) -> None:
        drop_owners(self._values, owners)


class Hygiene:
    """Safe to use from several threads. Frozen values live as long as the process."""

    def __init__(self, rules: Sequence[HygieneRule]) -> None:
        self._rules = [(rule, re.compile(rule.pattern)) for rule in rules if rule.pattern]
        self._orders_tools = next((rule for rule in rules if not rule.pattern), None)
        self._values = FirstSeen[str](_REMEMBERED)
        self._orders = FirstSeen[tuple[str, ...]](_REMEMBERED)
        self._slow: set[str] = set()
        self._lock = threading.Lock()

    def apply(self, request: Request, *, learn: bool = True) -> Request:
        """What its prompt is made of, with what was done to it (`tidied`). The very same where nothing was done.

        `learn`: values that were not seen before are the ones to be kept. Blocks for milliseconds. Never raises.
        """
        if request.prompt is not None:
            return request
        with self._lock:
            work = _Work(request.namespace, self._values, learn)
            messages, tools = request.messages, request.tools
            for rule, pattern in self._rules:
                edit = _Edit(rule, pattern, work)
                messages, tools = edit.messages(messages), edit.tools(tools)
                self._note_slow(rule, edit)
            if self._orders_tools:
                tools = self._in_first_order(tools, work)
        if not work.touched:
            return request
        moved = "\n".join(work.moved)
        rules = tuple(dict.fromkeys([*request.execution.tidied.rules, *work.touched]))
        tidied = Tidied(rules, moved or request.execution.tidied.moved)
        return replace(_with_messages(request, messages), tools=tools).decided(tidied=tidied)

    def forget(self, owners: Container[str]) -> None:
        with self._lock:
            self._values.forget(owners)
            self._orders.forget(owners)

    def _in_first_order(self, tools: tuple[Tool, ...], work: _Work) -> tuple[Tool, ...]:
        """As this client has sent the same tools first: models read them in some order, and any will do."""
        by_name = {tool.name: tool for tool in tools}
        if len(by_name) != len(tools) or len(tools) < 2:
            return tools
        names = tuple(by_name)
        first = self._orders.of(work.owner, frozenset(names), names, learn=work.learn)
        if first == names:
            return tools
        assert self._orders_tools is not None
        work.touched.append(self._orders_tools.name)
        return tuple(by_name[name] for name in first)

    def _note_slow(self, rule: HygieneRule, edit: _Edit) -> None:
        if edit.is_late and rule.name not in self._slow:
            self._slow.add(rule.name)
            log.warning(
                "the hygiene rule %s takes longer than %d ms for some requests, and then leaves the rest of them "
                "as it is: make its pattern simpler",
                rule.name,
                1e3 * _LONGEST_S,
            )


@dataclass(slots=True)
class _Work:
    """What is done to one request."""

    owner: str
    values: FirstSeen[str]
    learn: bool
    touched: list[str] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)
    places: Counter[object] = field(default_factory=Counter)
    """How often a line that is the same but for its frozen value has come."""


class _Edit:
    """One rule at work on one request."""

    def __init__(self, rule: HygieneRule, pattern: re.Pattern[str], work: _Work) -> None:
        self._rule = rule
        self._pattern = pattern
        self._work = work
        self._ends = perf_counter() + _LONGEST_S

    @property
    def is_late(self) -> bool:
        return perf_counter() > self._ends

    def messages(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        if self._rule.where is HygieneWhere.TOOLS:
            return messages
        return tuple(map(self._message, messages))

    def tools(self, tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
        return tuple(map(self._tool, tools)) if self._rule.where is HygieneWhere.TOOLS else tools

    def _message(self, message: Message) -> Message:
        if _ROLES.get(message.role) is not self._rule.where:
            return message
        text = self._text(message.content, may_go=self._rule.where is HygieneWhere.SYSTEM)
        return message if text == message.content else replace(message, content=text)

    def _tool(self, tool: Tool) -> Tool:
        description, parameters = self._text(tool.description), _described(tool.parameters, self._text)
        return replace(tool, description=description, parameters=parameters)

    def _text(self, text: str, *, may_go: bool = True) -> str:
        """`may_go`: nothing needs to be left. What a user asks is never taken away as a whole."""
        lines = text.split("\n")
        edited: list[str | None] = []
        moved: list[str] = []
        for line in lines:
            is_tried = len(line) <= LONGEST_LINE and not self.is_late
            edited.append(self._line(line, moved) if is_tried and self._pattern.search(line) else line)
        kept = "\n".join(line for line in edited if line is not None)
        if edited == lines or not (may_go or kept.strip()):
            return text
        self._work.moved += moved
        if self._rule.name not in self._work.touched:
            self._work.touched.append(self._rule.name)
        return kept.lstrip("\n") if edited[0] is None else kept

    def _line(self, line: str, moved: list[str]) -> str | None:
        """What becomes of a line with the pattern in it; None where it goes, into `moved` if it is to be read."""
        match self._rule.action:
            case HygieneAction.MOVE:
                moved.append(line)
                return None
            case HygieneAction.DROP:
                rest = self._pattern.sub("", line)
                return rest if rest.strip() else None
            case _:
                return self._pattern.sub(lambda match: self._frozen(line, match), line)

    def _frozen(self, line: str, match: re.Match[str]) -> str:
        place = self._rule.name, self._outside(line)
        self._work.places[place] += 1
        key = place, self._work.places[place]
        return self._work.values.of(self._work.owner, key, match[0], learn=self._work.learn)

    def _outside(self, line: str) -> tuple[str, ...]:
        """What stands before, between and after the places with the pattern."""
        starts, ends = zip(*(match.span() for match in self._pattern.finditer(line)), strict=True)
        return tuple(line[end:start] for end, start in zip((0, *ends), (*starts, len(line)), strict=True))


def _with_messages(request: Request, edited: tuple[Message, ...]) -> Request:
    """Give it these in place of its own, and leave its breakpoints where they were."""
    is_left = [new is old or bool(new.content.strip()) for old, new in zip(request.messages, edited, strict=True)]
    # A system message of which nothing is left goes too, but no request loses its last one.
    is_left = is_left if any(is_left) else [True] * len(edited)
    left_until = [0, *accumulate(is_left)]
    breakpoints = tuple(_shifted(one, request.messages, edited, left_until) for one in request.breakpoints)
    messages = tuple(message for message, is_one in zip(edited, is_left, strict=True) if is_one)
    return replace(request, messages=messages, breakpoints=breakpoints)


def _shifted(
    mark: Breakpoint, before: Sequence[Message], edited: Sequence[Message], left_until: Sequence[int]
) -> Breakpoint:
    """`left_until`: how many of so many of the first messages are left."""
    count = left_until[mark.messages]
    if mark.chars is None or not mark.messages or left_until[mark.messages - 1] == count:
        return replace(mark, messages=count, chars=None)
    old, new = before[mark.messages - 1].content, edited[mark.messages - 1].content
    behind = old[mark.chars :]
    chars = len(new) - len(behind) if new.endswith(behind) else min(mark.chars, len(new))
    return replace(mark, messages=count, chars=chars)


def _described(value: Json, edit: Callable[[str], str], key: str = "") -> Json:
    """A schema with its descriptions edited."""
    if isinstance(value, str):
        return edit(value) if key == "description" else value
    if isinstance(value, Mapping):
        return {name: _described(item, edit, name) for name, item in value.items()}
    return [_described(item, edit) for item in value] if isinstance(value, list) else value
