"""How models write tool calls and reasoning: markers as data, and one reader of JSON calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from emberkeep.chat.messages import CALL_END, CALL_START
from emberkeep.types import Json, Vocab


@dataclass(frozen=True, slots=True)
class Reasoning:
    start: str
    end: str


REASONING = (
    Reasoning("<think>", "</think>"),
    Reasoning("<thinking>", "</thinking>"),
    Reasoning("<seed:think>", "</seed:think>"),
    Reasoning("[THINK]", "[/THINK]"),
)


def open_reasoning(prompt: str) -> Reasoning | None:
    """The block that the prompt itself has opened, if it ends with a start marker."""
    prompt = prompt[-80:].rstrip()
    return next((block for block in REASONING if prompt.endswith(block.start)), None)


@dataclass(frozen=True, slots=True)
class ParsedCall:
    name: str
    arguments: str
    """JSON text of an object, as the model wrote it where that is valid."""


@dataclass(frozen=True, slots=True)
class Dialect:
    start: str
    end: str
    parse: Callable[[str, frozenset[str]], tuple[ParsedCall, ...]]
    """(what stands between the markers, the request's tools) to calls; () when it is no call."""

    def begun(self, body: str, tools: frozenset[str]) -> ParsedCall | None:
        """The call that `body` is the beginning of, with as much of its arguments as was written."""
        call = _begun_call(body)
        if call is None or self is TAGGED or (call.name in tools and call.arguments):
            return call
        return None


def held_suffix(text: str, markers: Iterable[str]) -> int:
    """How many characters at the end of `text` may be the beginning of one of `markers`."""
    longest = max(map(len, markers), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        tail = text[-length:]
        if any(marker.startswith(tail) for marker in markers):
            return length
    return 0


def hidden_tokens(vocab: Vocab) -> frozenset[int]:
    """Tokens that are not part of the text: control tokens, except those that are markers of a dialect."""
    markers = {vocab.specials[text] for text in _MARKERS if text in vocab.specials}
    return (vocab.controls | vocab.eog) - markers


# ── reading JSON calls ───────────────────────────────────────────────────────────────────────────


def _any_call(body: str, tools: frozenset[str]) -> tuple[ParsedCall, ...]:
    """The tags say that it is a call, so an unknown name is the caller's to answer."""
    try:
        objects = _objects(body)
    except (ValueError, RecursionError):
        return ()
    calls = [_call(members) for members in objects]
    return tuple(call for call in calls if call) if all(calls) else ()


def _known_call(body: str, tools: frozenset[str]) -> tuple[ParsedCall, ...]:
    """Any JSON could be an answer: only a known name with arguments makes it a call."""
    try:
        objects = _objects(body)
    except (ValueError, RecursionError):
        return ()
    calls = [_call(members) for members in objects if not _ARGUMENTS.isdisjoint(members)]
    known = tuple(call for call in calls if call and call.name in tools)
    return known if len(known) == len(objects) else ()


@dataclass(frozen=True, slots=True)
class _Member:
    value: Json
    raw: str


# Models write newlines into strings, which strict JSON forbids.
_JSON = json.JSONDecoder(strict=False)
_BLANK = re.compile(r"\s*")
_BETWEEN = re.compile(r"[\s,;\[\]]*")
_ARGUMENTS = frozenset({"arguments", "parameters"})
_FIRST_KEYS = _ARGUMENTS | {"name", "type", "id"}
_FIRST_KEY = re.compile(r'\s*\[?\s*\{\s*"([^"]*)"')
_NO_KEY_YET = re.compile(r'\s*\[?\s*(\{\s*("[^"]{0,20})?)?\Z')


def may_be_call(text: str, start: int) -> bool:
    """Whether `text[start:]` can still become a JSON call, going by its first key."""
    key = _FIRST_KEY.match(text, start)
    return key[1] in _FIRST_KEYS if key else _NO_KEY_YET.match(text, start) is not None


def _objects(text: str) -> list[dict[str, _Member]]:
    """All objects of a list, or written one after the other. Raises ValueError for anything else."""
    found = []
    at = _skip(_BETWEEN, text, 0)
    while at < len(text):
        members, at = _members(text, at)
        found.append(_members(members["function"].raw, 0)[0] if _is_wrapped(members) else members)
        at = _skip(_BETWEEN, text, at)
    return found


def _is_wrapped(members: dict[str, _Member]) -> bool:
    """OpenAI's own form: {"type": "function", "function": {"name": ...}}."""
    return "function" in members and isinstance(members["function"].value, dict)


def _members(text: str, at: int) -> tuple[dict[str, _Member], int]:
    """The members of the object at `at`, each with the text it was written as, and where the object ends."""
    if text[at] != "{":
        raise ValueError("no object")
    found: dict[str, _Member] = {}
    at = _skip(_BLANK, text, at + 1)
    while text[at : at + 1] == '"':
        key, at = _JSON.raw_decode(text, at)
        at = _skip(_BLANK, text, at)
        if text[at : at + 1] != ":":
            raise ValueError("no value")
        start = _skip(_BLANK, text, at + 1)
        value, at = _JSON.raw_decode(text, start)
        found[key] = _Member(value, text[start:at])
        at = _skip(_BLANK, text, at)
        if text[at : at + 1] == ",":
            at = _skip(_BLANK, text, at + 1)
    if text[at : at + 1] != "}":
        raise ValueError("no end")
    return found, at + 1


def _skip(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match else at


def _call(members: dict[str, _Member]) -> ParsedCall | None:
    name = members.get("name")
    if name is None or not isinstance(name.value, str):
        return None
    given = members.get("arguments") or members.get("parameters")
    arguments = _arguments(given) if given else "{}"
    return ParsedCall(name.value, arguments) if arguments is not None else None


def _arguments(member: _Member) -> str | None:
    """The text of an object, also when it was written as a string; None for anything else."""
    value, raw = member.value, member.raw
    try:
        if isinstance(value, str):
            value, raw = _JSON.decode(value), value
        if not isinstance(value, dict):
            return None
        json.loads(raw)
        return raw
    except ValueError:
        return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else None


_KEY = re.compile(r'[\s,]*"((?:[^"\\]|\\.)*)"\s*:\s*', re.DOTALL)


def _begun_call(body: str) -> ParsedCall | None:
    """None while the name is not complete."""
    members: dict[str, str] = {}
    name: Json = None
    at = body.find("{") + 1
    while at and (key := _KEY.match(body, at)):
        try:
            value, at = _JSON.raw_decode(body, key.end())
        except (ValueError, RecursionError):
            if key[1] == "function":
                return _begun_call(body[key.end() :])
            value, at = None, len(body)
        members[key[1]] = body[key.end() : at]
        name = value if key[1] == "name" else name
    if not isinstance(name, str):
        return None
    return ParsedCall(name, members.get("arguments") or members.get("parameters") or "")


TAGGED = Dialect(CALL_START, CALL_END, _any_call)
FENCED = Dialect("```json", "```", _known_call)
BARE = Dialect("", "", _known_call)
"""JSON as the whole answer: it begins where the answer begins, and ends with it."""

MARKED_DIALECTS = (TAGGED, FENCED)

_MARKERS = [CALL_START, CALL_END, *(text for block in REASONING for text in (block.start, block.end))]
