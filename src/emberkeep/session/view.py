"""A conversation as the model sees it: without what has left, with what was put in.

Clients send the whole history with every request and rarely say which conversation it is. What a conversation has
said so far names it: the names form a chain, so that a history that was edited has new names from there on.

Many clients do not send back what they got: reasoning is left out, arguments of calls are written anew, ids are
new. That changes no name, and the model is shown what it wrote, of which there is state.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from itertools import pairwise

from emberkeep.chat.messages import leaving_turns
from emberkeep.latest import Latest, drop_owners
from emberkeep.types.memory import Note, NoteKind
from emberkeep.types.request import Json, Message, Request, ToolCall
from emberkeep.values import dataclass

_SYSTEM = ("system", "developer")

_NAME_CHARS = 16

_LONGEST_ARGUMENTS = 1 << 16
"""Longer ones are not compared by what they mean."""


@dataclass(frozen=True, slots=True)
class History:
    messages: tuple[Message, ...]
    spoken: tuple[int, ...]
    """Indices of the messages that are not the system's: those may change with the time of day."""
    keys: tuple[bytes, ...]
    """One for each of them: everything that was said up to it."""
    conversation: str

    @property
    def last_user(self) -> int | None:
        """Which of the spoken messages is the user's latest."""
        users = [i for i, index in enumerate(self.spoken) if self.messages[index].role == "user"]
        return users[-1] if users else None


def read_history(messages: Sequence[Message], conversation_id: str | None) -> History:
    """`conversation_id`: as the client calls it; otherwise its first message and what follows that name it, since
    many conversations begin with the same greeting."""
    spoken = tuple(i for i, message in enumerate(messages) if message.role not in _SYSTEM)
    keys = tuple(_chain((messages[i] for i in spoken), conversation_id or ""))
    name = conversation_id or (keys[:2][-1].hex()[:_NAME_CHARS] if keys else "")
    return History(tuple(messages), spoken, keys, name)


def _chain(messages: Iterator[Message], seed: str) -> Iterator[bytes]:
    key = hashlib.blake2b(seed.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    ids: dict[str, int] = {}
    for message in messages:
        key = hashlib.blake2b(_packed_fields(message, ids), digest_size=16, key=key).digest()
        yield key


def _packed_fields(message: Message, ids: dict[str, int]) -> bytes:
    """Every field that clients send back, as far as it means something; each with its length, so that no two
    messages look alike. `ids`: of calls, numbered as they come; it grows."""
    called = str(ids.setdefault(message.tool_call_id, len(ids))) if message.tool_call_id else ""
    fields = [message.role, message.content, called, message.name or ""]
    for call in message.tool_calls:
        fields += [str(ids.setdefault(call.id, len(ids))), call.name, _meant(call.arguments)]
    fields += [image.url for image in message.images]
    encoded = [field.encode("utf-8", "surrogatepass") for field in fields]
    return b"".join(len(field).to_bytes(8, "little") + field for field in encoded)


def _meant(arguments: str) -> str:
    """The same for arguments that are written differently."""
    if len(arguments) > _LONGEST_ARGUMENTS:
        return arguments
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def as_written(sent: Message, written: Message) -> Message:
    """A message that a client sends back, as the model wrote it. Its ids stay, because results refer to them, and
    reasoning that it does send."""
    if len(sent.tool_calls) != len(written.tool_calls):
        return sent
    pairs = zip(sent.tool_calls, written.tool_calls, strict=True)
    calls = tuple(ToolCall(theirs.id, ours.name, ours.arguments) for theirs, ours in pairs)
    return replace(sent, reasoning=sent.reasoning or written.reasoning, tool_calls=calls)


def written_note(key: bytes, written: Message) -> Note:
    return Note(key, NoteKind.WRITTEN, _message_json(written))


@dataclass(frozen=True, slots=True)
class Gone:
    """What has left a conversation."""

    spoken: frozenset[int] = frozenset()
    """Which of the spoken messages."""
    tokens: int = 0
    """About how many more the prompt would have with them."""
    root: str = ""
    """The key of the first eviction: spliced state is only for the conversation in which it was spliced."""
    notice: str = ""

    def note(self, history: History) -> Note:
        data = {"out": _ranges(self.spoken), "tokens": self.tokens, "root": self.root, "notice": self.notice}
        return Note(history.keys[max(self.spoken)], NoteKind.EVICTED, data)


@dataclass(frozen=True, slots=True)
class Inserted:
    """What was inserted into a conversation without its client knowing."""

    before: str = ""
    """Before the text of a message."""
    turns: tuple[int, ...] = ()
    """The archived turns that are quoted in it."""
    after: tuple[Message, ...] = ()
    """After a message: what the model asked its memory, and what it was told."""
    said: str = ""
    """The part of it that the client has: the next message begins with it."""

    def note(self, key: bytes) -> Note:
        after = [_message_json(message) for message in self.after]
        data = {"before": self.before, "turns": list(self.turns), "after": after, "said": self.said}
        return Note(key, NoteKind.INSERTED, data)


@dataclass(frozen=True, slots=True)
class View:
    history: History
    gone: Gone = Gone()
    inserted: Mapping[int, Inserted] = field(default_factory=dict)
    """By the spoken message at which it stands."""
    written: Mapping[int, Message] = field(default_factory=dict)
    """Spoken messages that the model wrote otherwise."""
    as_of: int = 0
    """The last forgetting when its answer began: nothing of it is written down after a later one of its owner."""

    @property
    def messages(self) -> tuple[Message, ...]:
        spoken = {index: i for i, index in enumerate(self.history.spoken)}
        has_notice, known = False, ""
        shown: list[Message] = []
        for index, message in enumerate(self.history.messages):
            place = spoken.get(index)
            if place in self.gone.spoken:
                known = ""
                continue
            if place is not None and place in self.written:
                message = as_written(message, self.written[place])
            put = self.inserted.get(place, Inserted()) if place is not None else Inserted()
            before = put.before
            if message.role == "user" and not has_notice:
                has_notice, before = True, self.gone.notice + before
            text = before + message.content.removeprefix(known)
            shown.append(replace(message, content=text) if text != message.content else message)
            shown += put.after
            known = put.said
        return tuple(shown)

    def without(self, turns: Iterable[frozenset[int]]) -> View:
        """Without these of `leaving`, of which nothing is said."""
        return replace(self, gone=Gone(self.gone.spoken.union(*turns)))

    def unanswered(self) -> View:
        """Without what was asked and told after its last message."""
        place = len(self.history.spoken) - 1
        put = self.inserted.get(place, Inserted())
        if not put.after:
            return self
        kept = {i: one for i, one in self.inserted.items() if i != place}
        return replace(self, inserted={**kept, place: replace(put, after=(), said="")} if put.before else kept)

    def leaving(self) -> list[frozenset[int]]:
        """Which of the spoken messages may leave next, in groups that leave together."""
        kept = self.kept
        groups = leaving_turns([self.history.messages[self.history.spoken[i]] for i in kept])
        return [frozenset(kept[i] for i in group) for group in groups]

    @property
    def kept(self) -> list[int]:
        """Which of the spoken messages are still there."""
        return [i for i in range(len(self.history.spoken)) if i not in self.gone.spoken]

    def chars(self, spoken: Iterable[int]) -> int:
        """How much text these have, without what a template writes around it."""
        return sum(self._chars_at(i) for i in spoken)

    def _chars_at(self, place: int) -> int:
        put = self.inserted.get(place, Inserted())
        shown = [self.history.messages[self.history.spoken[place]], *put.after]
        calls = sum(len(call.name) + len(call.arguments) for message in shown for call in message.tool_calls)
        return len(put.before) + sum(len(message.content) for message in shown) + calls

    @property
    def recalled(self) -> int:
        """How many archived turns stand before its last message."""
        put = self.inserted.get(len(self.history.spoken) - 1)
        return len(put.turns) if put else 0

    @property
    def quoted(self) -> frozenset[int]:
        """Archived turns that stand in it already."""
        return frozenset(
            turn for place, put in self.inserted.items() if place not in self.gone.spoken for turn in put.turns
        )


def read_view(history: History, notes: Iterable[Note]) -> View:
    """`notes`: those of the history's keys."""
    place_of = {key: i for i, key in enumerate(history.keys)}
    gone, latest = Gone(), -1
    inserted: dict[int, Inserted] = {}
    written: dict[int, Message] = {}
    for note in notes:
        place = place_of[note.key]
        if note.kind is NoteKind.INSERTED:
            inserted[place] = _inserted(note.data)
        elif note.kind is NoteKind.WRITTEN:
            written[place] = _message(note.data)
        elif place > latest:
            gone, latest = read_gone(note.data), place
    return View(history, gone, inserted, written)


def read_gone(data: Mapping[str, Json]) -> Gone:
    out = frozenset(i for begin, end in data["out"] for i in range(begin, end))
    return Gone(out, data["tokens"], data["root"], data["notice"])


def _inserted(data: Mapping[str, Json]) -> Inserted:
    after = tuple(_message(message) for message in data["after"])
    return Inserted(data["before"], tuple(data["turns"]), after, data["said"])


def _ranges(numbers: Iterable[int]) -> list[list[int]]:
    """[1, 2, 3, 7] as [[1, 4], [7, 8]]."""
    ordered = sorted(numbers)
    breaks = [i for i, (a, b) in enumerate(pairwise(ordered), 1) if b != a + 1]
    return [[ordered[a], ordered[b - 1] + 1] for a, b in pairwise([0, *breaks, len(ordered)]) if b]


def _message_json(message: Message) -> Json:
    calls = [[call.id, call.name, call.arguments] for call in message.tool_calls]
    return [message.role, message.content, message.reasoning, calls, message.tool_call_id, message.name]


def _message(data: Sequence[Json]) -> Message:
    role, content, reasoning, calls, call_id, name = data
    return Message(role, content, reasoning, tuple(ToolCall(*call) for call in calls), call_id, name)


_MOST = 512

_MOST_CHARS = 1 << 16


class LatestAnswers:
    """Safe to use from several threads."""

    def __init__(self) -> None:
        self._answers = Latest[tuple[str, bytes], Message](_MOST)
        self._lock = threading.Lock()

    def add(self, request: Request, answer: Message) -> None:
        size = len(answer.reasoning) + sum(len(call.arguments) for call in answer.tool_calls)
        if not 0 < size <= _MOST_CHARS:
            return
        key = read_history((*request.messages, answer), request.conversation_id).keys[-1]
        with self._lock:
            self._answers[request.namespace, key] = answer

    def forget(self, owners: Container[str]) -> None:
        with self._lock:
            drop_owners(self._answers, owners)

    def changed_in(self, owner: str, view: View) -> dict[int, Message]:
        """Spoken messages that the client sends otherwise than they were written, where that is not known yet."""
        history = view.history
        with self._lock:
            answers = {place: self._answers.get((owner, key)) for place, key in enumerate(history.keys)}
        return {
            place: answer
            for place, answer in answers.items()
            if answer is not None
            and place not in view.written
            and as_written(history.messages[history.spoken[place]], answer)
            != history.messages[history.spoken[place]]
        }
