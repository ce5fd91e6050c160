"""What has left each conversation, and what of it comes back.

The state of a conversation is a handful of notes at places of its history, in the archive and (until they are
there) in RAM. A client that sends the whole history again finds them by what the history says.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Container, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from time import perf_counter

from emberkeep.chat.messages import leaving_turns
from emberkeep.errors import MemoryFailed
from emberkeep.latest import Latest
from emberkeep.memory.memory import Memory
from emberkeep.session.recall import (
    NOTHING,
    archived,
    exchange_messages,
    fit_results,
    fitting,
    notice,
    quoted,
    room_for_results,
    search,
    shorten_results,
)
from emberkeep.session.view import (
    Gone,
    Inserted,
    LatestAnswers,
    View,
    read_gone,
    read_history,
    read_view,
    written_note,
)
from emberkeep.types.events import Eviction, Usage
from emberkeep.types.memory import Note, NoteKind, Recollection, Turn
from emberkeep.types.request import Json, Message, Recall, Request, ToolCall
from emberkeep.values import dataclass

log = logging.getLogger("emberkeep.session")

_REMEMBERED = 4096
"""Places whose notes are kept in RAM because they are not in the archive."""
_CLOSING = 8
"""Tokens, at most, that templates write after an answer."""
_WINDOW = 512
"""Places of a conversation that are looked at together."""
_QUERY_CHARS = 2000
_RECALLED = 3
_SCORE = 0.3
"""What scores less shares only common words with the question: small talk scores 0.2 to 0.3 against other small
talk, a question more than 0.5 against what answers it, and everything that is quoted stays."""


def about_tokens(text: str) -> int:
    """Where it is not known: by bytes, of which scripts with more characters have more for each."""
    return len(text.encode("utf-8", "surrogatepass")) // 3


@dataclass(frozen=True, slots=True)
class Policy:
    context: int
    evict: bool = True
    low_water: float = 0.5
    """The share of the context that is filled after messages have left."""
    recall: Recall = Recall.AUTO
    recall_tokens: int = 512

    def target(self, fixed: int) -> int:
        """How long a prompt may be after messages have left it, of which so many tokens can never leave."""
        return int(max(self.low_water * self.context, fixed + self.low_water * (self.comfortable - fixed)))

    @property
    def comfortable(self) -> int:
        """The longest prompt that leaves enough room for an answer: longer ones are cut while they are written."""
        return self.context - max(self.context // 8, 1)

    def limit(self, request: Request) -> int:
        """The same where it is known how long the answer may become."""
        if request.max_tokens is None:
            return self.comfortable
        return max(self.comfortable, self.context - max(request.max_tokens, 1) - _CLOSING)


@dataclass(slots=True)
class _SessionCounters:
    evictions: int = 0
    evicted_messages: int = 0
    evicted_tokens: int = 0
    archived_turns: int = 0
    archive_failures: int = 0
    recalls: int = 0
    recalled_turns: int = 0
    searches: int = 0
    calls: int = 0


@dataclass(frozen=True, slots=True)
class _Unwritten:
    turns: tuple[Turn, ...]
    note: Note
    as_of: int


class Sessions:
    """Safe to use from several threads; methods that read or write the archive block for milliseconds."""

    def __init__(self, memory: Memory | None, policy: Policy, count: Callable[[str], int] = about_tokens) -> None:
        """Without a memory what leaves is gone, and is out again on the next turn as long as this lives.

        `count`: of a text's tokens.
        """
        self._count = count
        self._memory = memory
        self.policy = policy
        self._lock = threading.Lock()
        self._unwritten = Latest[tuple[str, bytes, NoteKind], _Unwritten](_REMEMBERED)
        self._counters = _SessionCounters()
        self._answering: Counter[tuple[str, bytes]] = Counter()
        self._told: set[tuple[str, bytes]] = set()
        """The places among those where tools have answered since."""
        self._begun = Latest[tuple[str, bytes], int](_REMEMBERED)
        """What was the last forgetting when the latest answer began at a place."""
        self._last_forgetting = 0
        """As far as it is known."""
        self._answers = LatestAnswers()

    @property
    def memory(self) -> Memory | None:
        return self._memory

    def applies(self, request: Request) -> bool:
        """Whether the request is a conversation that is tracked here."""
        is_chat = request.prompt is None and not request.execution.is_prefix
        return is_chat and (self.may_evict(request) or self._memory is not None or bool(self._unwritten))

    def may_evict(self, request: Request) -> bool:
        return self.policy.evict if request.evict is None else request.evict

    def recall_of(self, request: Request) -> Recall:
        if self._memory is None:
            return Recall.OFF
        return self.policy.recall if request.recall is None else request.recall

    def view(self, request: Request, *, is_dry_run: bool = False) -> View:
        """The conversation as its last turn left it. What could not be written then is tried again, but not in a
        dry run."""
        history = read_history(request.messages, request.conversation_id)
        owner = request.namespace
        as_of = self._began(owner, history.keys, is_dry_run=is_dry_run)
        with self._lock:
            places = [(owner, key, kind) for key in history.keys for kind in NoteKind] if self._unwritten else []
            waiting = [self._unwritten[place] for place in places if place in self._unwritten]
        waiting = [one for one in waiting if not self._is_forgotten(owner, history.conversation, one)]
        notes = [unwritten.note for unwritten in waiting]
        if self._memory is not None:
            try:
                notes += _latest_notes(self._memory, owner, history.keys)
            except MemoryFailed as error:
                log.warning("what left a conversation earlier is not known: %s", error)
        view = replace(read_view(history, notes), as_of=as_of)
        view = self._with_answers(owner, view, is_dry_run=is_dry_run)
        if not is_dry_run:
            self._write_again(owner, view, waiting)
        if history.keys and (owner, history.keys[-1]) not in self._told:
            view = view.unanswered()
        return view if self.may_evict(request) else replace(view, gone=Gone())

    # ── answers that come back otherwise ──

    def answered(self, request: Request, answer: Message) -> None:
        """Remember what the model wrote for `request`, whose client may send it back in other words. Blocks for
        milliseconds where it is a long conversation."""
        self._answers.add(request, answer)

    def forget(self, owners: Container[str]) -> None:
        """Drop what is remembered of these beside the archive."""
        self._answers.forget(owners)
        with self._lock:
            for place in [place for place in self._begun if place[0] in owners and place not in self._answering]:
                del self._begun[place]

    def _with_answers(self, owner: str, view: View, *, is_dry_run: bool) -> View:
        """Show the latest answers as the model wrote them, where the client sends them otherwise. That is noted:
        after a restart the prompt has to be the same."""
        changed = self._answers.changed_in(owner, view)
        for place, answer in {} if is_dry_run else changed.items():
            self._written(owner, view, [], written_note(view.history.keys[place], answer))
        return replace(view, written={**view.written, **changed})

    # ── leaving ──

    def without(self, view: View, request: Request, groups: Sequence[frozenset[int]]) -> View:
        """The conversation without these, oldest first, of `view.leaving()`. Nothing is written."""
        out = view.gone.spoken.union(*groups)
        root = view.gone.root or view.history.keys[max(out)].hex()[:16]
        text = notice(len(out), self.recall_of(request), is_archived=self._memory is not None)
        return replace(view, gone=Gone(out, view.gone.tokens, root, text))

    def left(
        self, request: Request, view: View, groups: Sequence[frozenset[int]], tokens: int, plan_ms: float
    ) -> tuple[View, Eviction]:
        """Archive what has just left `view`, which were `groups` and about `tokens`. Never raises.

        Without an archive they are out all the same: the conversation goes on.
        """
        view = replace(view, gone=replace(view.gone, tokens=view.gone.tokens + tokens))
        begin = perf_counter()
        error = self._written(request.namespace, view, archived(view, groups), view.gone.note(view.history))
        eviction = Eviction(
            messages=sum(len(group) for group in groups),
            tokens=tokens,
            out=len(view.gone.spoken),
            archived=self._memory is not None and not error,
            error=error,
            plan_ms=plan_ms,
            archive_ms=1e3 * (perf_counter() - begin),
        )
        log.info(
            "%d messages (%d tokens) left the context, %s",
            eviction.messages,
            tokens,
            "archived" if eviction.archived else "not archived",
        )
        with self._lock:
            self._counters.evictions += 1
            self._counters.evicted_messages += eviction.messages
            self._counters.evicted_tokens += tokens
        return view, eviction

    def lost(self, request: Request, places: frozenset[int]) -> None:
        """Archive the turns of which a message's state is gone elsewhere; they stay in the conversation.

        `places`: of its messages. Turns that are in the archive already are not archived again. Never raises.
        """
        if self._memory is None:
            return
        view = self.view(request, is_dry_run=True)
        history = view.history
        where = {index: i for i, index in enumerate(history.spoken)}
        spoken = {where[place] for place in places if place in where}
        turns = leaving_turns([history.messages[index] for index in history.spoken])
        groups = [turn for turn in turns if turn & spoken]
        try:
            new = self._memory.archive(
                request.namespace,
                archived(view, groups),
                conversation=history.conversation,
                as_of=self._begun_before(request.namespace, history.keys),
            )
            with self._lock:
                self._counters.archived_turns += new
        except MemoryFailed as error:
            log.warning("%d turns that a server has dropped are not archived: %s", len(groups), error)

    # ── coming back ──

    def may_recall(self, request: Request, view: View) -> bool:
        """Something may still be put before the user's message."""
        place = len(view.history.spoken) - 1
        is_asked = place >= 0 and view.history.last_user == place and place not in view.inserted
        return is_asked and bool(view.gone.spoken) and self.recall_of(request) is Recall.AUTO

    def recalled(self, request: Request, view: View, count: Callable[[str], int], room: int) -> View:
        """Put the best of what has left before the user's message, where the conversation ends with one.

        It stays there on later turns, so that their prompts begin as this one does. `count`: of the tokens of a
        text; `room`: for how many there is. Never raises.
        """
        if not self.may_recall(request, view):
            return view
        place = len(view.history.spoken) - 1
        found = self._found(request, view, count, room)
        if not found:
            return view
        put = Inserted(quoted(found), tuple(one.id for one in found))
        self._written(request.namespace, view, [], put.note(view.history.keys[place]))
        with self._lock:
            self._counters.recalls += 1
            self._counters.recalled_turns += len(found)
        return replace(view, inserted={**view.inserted, place: put})

    def _found(self, request: Request, view: View, count: Callable[[str], int], room: int) -> list[Recollection]:
        assert self._memory is not None
        query = view.history.messages[view.history.spoken[-1]].content[-_QUERY_CHARS:]
        try:
            found = self._memory.search(
                request.namespace,
                query,
                max_results=2 * _RECALLED,
                conversation=view.history.conversation,
                exclude=view.quoted,
            )
        except MemoryFailed as error:
            log.warning("nothing was recalled: %s", error)
            return []
        room = min(room, self.policy.recall_tokens)
        spoken = set(view.history.keys)
        # What was said in a branch that the user has left is not quoted.
        good = [one for one in found if one.score >= _SCORE and one.key in spoken]
        return fitting(good[:_RECALLED], room, count)

    def search(self, request: Request, call: ToolCall) -> str:
        """What the model is told that asked its memory. Never raises."""
        with self._lock:
            self._counters.searches += 1
        return search(self._memory, request.namespace, call.arguments) if self._memory else NOTHING

    @contextmanager
    def answering(self, request: Request) -> Generator[None, None, None]:
        """Inside the block, the conversation ends with what was `exchanged`. Outside of it, that belongs to an
        earlier answer to the same words, and the world may have changed since."""
        keys = read_history(request.messages, request.conversation_id).keys
        place = request.namespace, keys[-1] if keys else b""
        self._began(request.namespace, keys, is_dry_run=False)
        with self._lock:
            self._answering[place] += 1
        try:
            yield
        finally:
            with self._lock:
                self._answering[place] -= 1
                if not self._answering[place]:
                    del self._answering[place]
                    self._told.discard(place)

    def exchanged(
        self, request: Request, usage: Usage, text: str, calls: Sequence[ToolCall], results: Sequence[str]
    ) -> None:
        """From now on the conversation has these calls and their results, which its client does not know of.

        `usage`: of the answer that made them; `text`: what the client has of what the model said in the same
        breath. Only within `answering`. Never raises.
        """
        view = self.view(request)
        place = len(view.history.spoken) - 1
        known = view.inserted.get(place, Inserted())
        more = exchange_messages(text.rstrip(), calls, results)
        given = len(view.messages) - len(known.after)
        room = room_for_results(view.messages, given, usage, self.policy.context, self._count)
        after = fit_results((*known.after, *more), room, self._count)
        put = replace(known, after=after, said=known.said + text)
        self._written(request.namespace, view, [], put.note(view.history.keys[place]))
        with self._lock:
            self._told.add((request.namespace, view.history.keys[place]))
            self._counters.calls += len(calls)

    def shortened(self, request: Request) -> bool:
        """Make results of the latest calls shorter, because they do not fit. False: they cannot be."""
        view = self.view(request)
        place = len(view.history.spoken) - 1
        known = view.inserted.get(place, Inserted())
        after = shorten_results(known.after)
        if after is None:
            return False
        self._written(request.namespace, view, [], replace(known, after=after).note(view.history.keys[place]))
        return True

    # ── about itself ──

    def stats(self) -> dict[str, Json]:
        return asdict(self._counters)

    # ── writing ──

    def _began(self, owner: str, keys: Sequence[bytes], *, is_dry_run: bool) -> int:
        """What the last forgetting was when the answer at this place began, which may be now."""
        place = owner, keys[-1] if keys else b""
        with self._lock:
            if place in self._answering and place in self._begun:
                return self._begun[place]
        if self._memory is not None:
            with suppress(MemoryFailed):
                self._last_forgetting = self._memory.last_forgetting()
        as_of = self._last_forgetting
        if not is_dry_run:
            with self._lock:
                self._begun[place] = as_of
        return as_of

    def _begun_before(self, owner: str, keys: Sequence[bytes]) -> int:
        """The same where the conversation has gone on since."""
        with self._lock:
            places = [(owner, key) for key in reversed(keys) if (owner, key) in self._begun]
            return self._begun[places[0]] if places else 0

    def _is_forgotten(self, owner: str, conversation: str, unwritten: _Unwritten) -> bool:
        """Whether its owner or conversation was forgotten since: then it is dropped and not written."""
        if self._memory is None:
            return False
        try:
            if not self._memory.forgotten_since(unwritten.as_of, owner, conversation):
                return False
        except MemoryFailed:
            return False
        with self._lock:
            self._unwritten.pop((owner, unwritten.note.key, unwritten.note.kind), None)
        return True

    def _written(self, owner: str, view: View, turns: Sequence[Turn], note: Note, as_of: int | None = None) -> str:
        """Write it; returns why that failed, or "". It then stays in RAM, and is tried again on the next turn.

        `as_of`: of something that is tried again.
        """
        error, as_of = "", view.as_of if as_of is None else as_of
        if self._memory is not None:
            try:
                new = self._memory.archive(
                    owner, turns, [note], conversation=view.history.conversation, as_of=as_of
                )
                with self._lock:
                    self._counters.archived_turns += new
                return ""
            except MemoryFailed as failure:
                log.warning("%d turns that left a conversation are not archived: %s", len(turns), failure)
                error = str(failure)
        with self._lock:
            self._counters.archive_failures += bool(error)
            kept = () if self._memory is None else tuple(turns)
            self._unwritten[owner, note.key, note.kind] = _Unwritten(kept, note, as_of)
        return error

    def _write_again(self, owner: str, view: View, waiting: Sequence[_Unwritten]) -> None:
        for unwritten in waiting:
            if self._memory is None:
                return
            if self._written(owner, view, unwritten.turns, unwritten.note, unwritten.as_of):
                return
            with self._lock:
                self._unwritten.pop((owner, unwritten.note.key, unwritten.note.kind), None)


def _latest_notes(memory: Memory, owner: str, keys: Sequence[bytes]) -> list[Note]:
    """Back to where something left, which is never far, and of what is kept from before."""
    notes: list[Note] = []
    for end in range(len(keys), 0, -_WINDOW):
        begin = max(end - _WINDOW, 0)
        notes += memory.notes(owner, keys[begin:end])
        if left := [note for note in notes if note.kind is NoteKind.EVICTED]:
            out = frozenset[int]().union(*(read_gone(note.data).spoken for note in left))
            return notes + memory.notes(owner, [key for i, key in enumerate(keys[:begin]) if i not in out])
    return notes
