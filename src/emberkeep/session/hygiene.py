"""Parts of prompts that change with every call: rules take them out of the way, `Volatility` notices the others.

State is reused up to the first token that differs, so a header with a new hash at the top of a system prompt costs
all of it. A rule takes such a place out of the way. Nothing becomes approximate by it: the state is that of the
tokens that were evaluated, and the answer names the rules that changed them.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
from collections import Counter, deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import field, replace
from itertools import accumulate
from time import perf_counter
from typing import Generic, TypeVar

from emberkeep.chat.messages import RequestPart, stable_messages
from emberkeep.latest import Latest, drop_owners
from emberkeep.types.hygiene import (
    BUILT_IN,
    IDS,
    LONGEST_LINE,
    TIMESTAMP,
    TIMESTAMPS,
    TOOL_ORDER,
    HygieneAction,
    HygieneRule,
    HygieneWhere,
    Tidied,
)
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


NUMBERS = "numbers"

_BORDERS = re.compile(r'([\s",;(){}\[\]<>]+)')
"""Between words, also in JSON."""

_DAY_OR_MONTH = re.compile(
    r"(?:(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day|Mon|Tue|Wed|Thu|Fri|Sat|Sun|Jan(?:uary)?|Feb(?:ruary)?"
    r"|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sep(?:tember)?|Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?"
    r"|AM|PM|am|pm)\.?"
)

_DIGIT = re.compile(r"\d")

_LETTER = re.compile(r"[A-Za-z]")

_TIME = re.compile(TIMESTAMP)

_NEARBY = 4
"""Words and borders between the name of a month and the day or the year."""

_WORDS = {
    TIMESTAMPS.name: "a date or a time",
    IDS.name: "an id or a hash",
    NUMBERS: "a number",
    TOOL_ORDER.name: "the order of its tools",
}

_LONGEST = 1 << 18
"""Characters of a part that are looked at."""

_PARTS_REMEMBERED = 1024

_VERSIONS = 4
"""So many of one part are kept, the latest."""

Look = tuple[str, bytes]
"""The name of a part, and a hash of what it looks like."""

Value = tuple[str, bytes]
"""A kind, and a hash of what stood there: what users wrote is not kept."""


def in_words(volatile: tuple[str, ...]) -> str:
    """What a part differs in, in words."""
    return " and ".join(_WORDS[kind] for kind in volatile)


def remedy(volatile: tuple[str, ...]) -> str:
    """The rules that would mend it."""
    named = [kind for kind in volatile if kind in BUILT_IN]
    if named != list(volatile):
        return "A [[hygiene]] rule with a pattern for that line, in emberkeep.toml, moves it behind the rest."
    tables = " and ".join(f'[[hygiene]] name = "{name}"' for name in named)
    does = "keeps the first one" if named == [TOOL_ORDER.name] else "moves it behind the rest"
    return f"{tables} in emberkeep.toml {does}."


class Volatility:
    """Notices by observation that requests of one client differ in nothing but what changes with every call.

    What a part of a request looks like with every date, id and number left out is kept as a hash, and each of
    these. A part that looks the same and has other values differs in them only. Safe to use from several threads.
    Methods take milliseconds for long prompts."""

    def __init__(self) -> None:
        self._versions = Latest[tuple[str, Look], deque[tuple[Value, ...]]](_PARTS_REMEMBERED)
        self._learnt = Latest[tuple[str, bytes], None](_PARTS_REMEMBERED)
        self._told = Latest[tuple[str, str, tuple[str, ...]], None](_PARTS_REMEMBERED)
        self._lock = threading.Lock()

    def learn(self, request: Request) -> None:
        """Remember what its parts look like. Those that were here just the same cost a hash of their text."""
        owner = request.namespace
        for name, texts in _parts_of(request):
            text_hash = owner, _digest(name, *texts)
            with self._lock:
                if text_hash in self._learnt:
                    self._learnt.move_to_end(text_hash)
                    continue
                self._learnt[text_hash] = None
            look, values = _looked_at(name, texts)
            with self._lock:
                known = self._versions.get((owner, look))
                if known is None:
                    known = self._versions[owner, look] = deque(maxlen=_VERSIONS)
                if values not in known:
                    known.append(values)

    def compare(self, request: Request, place: RequestPart) -> tuple[str, ...]:
        """The kinds in which the part at `place` differs from one that the same client has sent before; empty
        where it differs in more, or in nothing."""
        for name, texts in _parts_of(request):
            if name == _part_at(request, place):
                look, values = _looked_at(name, texts)
                with self._lock:
                    known = list(self._versions.get((request.namespace, look), ()))
                others = [version for version in known if version != values]
                return _difference(values, others[-1]) if others else ()
        return ()

    def tell(self, request: Request, where: str, volatile: tuple[str, ...], tokens: int) -> None:
        """One line in the log for each client and kind."""
        key = request.namespace, where, volatile
        with self._lock:
            if key in self._told:
                return
            self._told[key] = None
        log.warning(
            "requests of %s differ in %s only in %s, and %d tokens are evaluated again because of it. %s",
            f"the user {request.user}" if request.user else "a client without a name",
            where,
            in_words(volatile),
            tokens,
            remedy(volatile),
        )

    def forget(self, owners: Container[str]) -> None:
        with self._lock:
            for known in (self._versions, self._learnt, self._told):
                drop_owners(known, owners)


def _parts_of(request: Request) -> Iterator[tuple[str, list[str]]]:
    """Each with its texts."""
    if system := stable_messages(request.messages):
        yield "system", [message.content for message in system]
    if (first := _first_user(request.messages)) is not None:
        yield "user", [request.messages[first].content]
    if request.tools:
        yield "tools", [tool.name for tool in request.tools]


def _part_at(request: Request, place: RequestPart) -> str:
    if place.message is None:
        return "tools"
    if place.message < len(stable_messages(request.messages)):
        return "system"
    return "user" if place.message == _first_user(request.messages) else ""


def _first_user(messages: tuple[Message, ...]) -> int | None:
    return next((i for i, message in enumerate(messages) if message.role == "user"), None)


def _looked_at(name: str, texts: list[str]) -> tuple[Look, tuple[Value, ...]]:
    if name == "tools":
        # Their names in any order, and the order that they have.
        return (name, _digest(*sorted(texts))), ((TOOL_ORDER.name, _digest(*texts)),)
    words = _BORDERS.split("\0".join(texts)[:_LONGEST])
    known = {word: _kind(word) for word in set(words)}
    kinds = _in_dates([known[word] for word in words])
    # A kind stands between characters that end words: no word of a client looks like it.
    look = _digest("\0".join(f"<{kind}>" if kind else word for word, kind in zip(words, kinds, strict=True)))
    hashes = {word: _digest(word) for word, kind in known.items() if kind}
    return (name, look), tuple((kind, hashes[word]) for word, kind in zip(words, kinds, strict=True) if kind)


def _kind(word: str) -> str:
    """The kind of a word that may change with every call; empty for other words."""
    if _DAY_OR_MONTH.fullmatch(word):
        return TIMESTAMPS.name
    if not _DIGIT.search(word):
        return ""
    if _TIME.search(word):
        return TIMESTAMPS.name
    return IDS.name if _LETTER.search(word) else NUMBERS


def _in_dates(kinds: list[str]) -> list[str]:
    """Take numbers beside the name of a day or a month, or beside a time, for parts of a date."""
    found = list(kinds)
    for place in (i for i, kind in enumerate(kinds) if kind == TIMESTAMPS.name):
        for i in range(max(place - _NEARBY, 0), min(place + _NEARBY + 1, len(kinds))):
            if kinds[i] == NUMBERS:
                found[i] = TIMESTAMPS.name
    return found


def _difference(a: tuple[Value, ...], b: tuple[Value, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(mine[0] for mine, other in zip(a, b, strict=True) if mine != other))


def _digest(*texts: str) -> bytes:
    state = hashlib.blake2b(digest_size=12)
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        state.update(len(data).to_bytes(8, "little") + data)
    return state.digest()
