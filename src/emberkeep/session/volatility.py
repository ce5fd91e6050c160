"""Noticing by observation that requests of one client differ in nothing but what changes with every call.

Of a part of a request (its system messages, the first message of its user, its tools) two things are kept: a hash
of what it looks like with every date, id and number left out, and a hash of each of these. A part that looks the
same and has other values differs in them only.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
from collections import deque
from collections.abc import Container, Iterator

from emberkeep.chat.messages import RequestPart, stable_messages
from emberkeep.latest import Latest, drop_owners
from emberkeep.types.hygiene import BUILT_IN, IDS, TIMESTAMP, TIMESTAMPS, TOOL_ORDER
from emberkeep.types.request import Message, Request

log = logging.getLogger("emberkeep.hygiene")

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
_REMEMBERED = 1024
_VERSIONS = 4
"""So many of one part are kept, the latest."""

Look = tuple[str, bytes]
"""The name of a part, and a hash of what it looks like."""
Value = tuple[str, bytes]
"""A kind, and a hash of what stood there: what users wrote is not kept."""


def told(volatile: tuple[str, ...]) -> str:
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
    """Safe to use from several threads. Methods take milliseconds for long prompts."""

    def __init__(self) -> None:
        self._versions = Latest[tuple[str, Look], deque[tuple[Value, ...]]](_REMEMBERED)
        self._learnt = Latest[tuple[str, bytes], None](_REMEMBERED)
        self._told = Latest[tuple[str, str, tuple[str, ...]], None](_REMEMBERED)
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
            told(volatile),
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
