"""TensorRT-LLM: its server's OpenAI endpoint, and its feed of what happens to KV blocks.

`TurnTracker` finds out from the events which messages have lost their state. The server names no request in them,
and its tokens are only numbers to us. But every turn leaves one chain of new blocks behind, as long as its prompt
and answer together, which begins with the chain of the turn before it. Where two turns could have left the same
chain, neither gets it: then nothing is said about them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import field, replace
from typing import Any

import openai

from emberkeep.backend.remote.fitter import OnRemoved
from emberkeep.backend.remote.openai import OpenAIProvider
from emberkeep.latest import Latest, drop_owners
from emberkeep.types.events import Completed, Event, Events, TextDelta, ToolCallDelta, Usage
from emberkeep.types.models import RemoteModel
from emberkeep.types.request import Json, Message, Request, ToolCall
from emberkeep.values import dataclass

log = logging.getLogger("emberkeep.remote")

_POLL_S = 1.0

_LONGEST_WAIT_S = 30.0

_ANSWER_S = 30.0
"""A server without events may take seconds to say so."""


class TrtllmProvider(OpenAIProvider):
    """From its first answer to `close` it polls the server's events, which are taken from the server by that: two
    that poll one server each see only some of them."""

    def __init__(self, remote: RemoteModel, key: str | None) -> None:
        super().__init__(remote, key)
        self.on_removed: OnRemoved | None = None
        """Called with the messages of a conversation that have lost their state."""
        self._turns = TurnTracker(self._report)
        self.forget = self._turns.forget
        self._poller: asyncio.Task[None] | None = None
        self._polling = asyncio.Lock()  # events are worth something only in their order

    async def answer(self, request: Request) -> Events:
        if self._poller is None:
            self._poller = asyncio.create_task(self._keep_polling(), name="trtllm-events")
        events: list[Event] = []
        self._turns.begin(request)
        try:
            async with aclosing(super().answer(request)) as answer:
                async for event in answer:
                    events.append(event)
                    yield event
        finally:
            self._turns.end(request, *_whole(events))

    async def close(self) -> None:
        if self._poller is not None:
            self._poller.cancel()
            with suppress(asyncio.CancelledError):
                await self._poller
        await super().close()

    async def poll(self) -> bool:
        """Take the events since the last time. False: this server has none. Raises openai.APIError and
        ValueError."""
        options: Any = {"headers": self._headers, "timeout": _ANSWER_S}
        async with self._polling:
            try:
                events: Any = await self._client.post(
                    self._beside("/kv_cache_events"), cast_to=object, options=options
                )
            except openai.APIStatusError as error:
                if error.status_code >= 500:
                    raise
                log.info("TensorRT-LLM tells nothing of its KV cache (%s).", error.status_code)
                return False
            self._turns.read_events(events if isinstance(events, list) else ())
            return True

    async def _keep_polling(self) -> None:
        wait_s = _POLL_S
        while True:
            try:
                if not await self.poll():
                    return
                wait_s = _POLL_S
            except (openai.APIError, ValueError) as error:
                log.debug("The events of TensorRT-LLM's KV cache could not be read: %s", error)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            await asyncio.sleep(wait_s)

    def _report(self, request: Request, places: Sequence[int]) -> None:
        try:
            if self.on_removed is not None:
                self.on_removed(request, places)
        except Exception:
            log.exception("What TensorRT-LLM has evicted could not be archived.")


def _whole(events: Sequence[Event]) -> tuple[Message | None, Usage]:
    """The answer and its usage; no answer if it did not come to its end."""
    if not events or not isinstance(events[-1], Completed):
        return None, Usage()
    calls: dict[int, ToolCall] = {}
    for event in events:
        if isinstance(event, ToolCallDelta):
            calls[event.call_index] = event.added_to(calls.get(event.call_index))
    text = "".join(event.text for event in events if isinstance(event, TextDelta))
    return Message("assistant", text, tool_calls=tuple(calls.values())), events[-1].usage


_MOST_CONVERSATIONS = 1024

_MOST_BLOCKS = 1_000_000
"""More blocks than a server has: they can add up only if events were lost."""

_OVERHEAD = 16
"""What a template writes around a message, in characters."""

_IMAGE = 2000

ConversationKey = tuple[str, str]

BlockKey = tuple[int, int | str]
"""The rank that holds a block, and the block's hash."""


# ── which messages have lost their state ──


@dataclass(slots=True)
class _Conversation:
    request: Request
    anchors: tuple[tuple[int, int], ...] = ()
    """So many messages are so many tokens: what the server has counted, turn by turn."""
    tokens: int = 0
    """All of the last turn, with its answer."""
    blocks: dict[BlockKey, KvBlock] = field(default_factory=dict)
    running: int = 0
    waits: bool = False
    """Its last turn's blocks are not yet known."""
    since: int = 0
    """How many blocks had been stored when that turn began."""
    lost: set[int] = field(default_factory=set)
    """Its messages whose state is gone, since the last report."""
    reported: set[int] = field(default_factory=set)

    def end_turn(self, request: Request, answer: Message, usage: Usage) -> None:
        """Note the end of a turn. If the history was edited, what is known of the part before the edit is kept."""
        same = _shared(self.request.messages, request.messages)
        kept = [one for one in self.anchors if one[0] <= same and one[1] < usage.prompt_tokens]
        self.anchors = (*kept, (len(request.messages), usage.prompt_tokens))
        self.reported = {place for place in self.reported if place < same}
        self.request = replace(request, messages=(*request.messages, answer))
        self.tokens = usage.prompt_tokens + usage.completion_tokens
        self.waits = True

    def lose(self, key: BlockKey) -> None:
        """Note which messages are no longer complete without a block. What follows it is lost with it: state is
        found from the beginning on, and of blocks whose beginning is gone the server does not always tell."""
        if key not in self.blocks:
            return
        start = self.blocks[key].start
        self.blocks = {one.key: one for one in self.blocks.values() if one.start < start}
        # A turn that is running brings its state back, and then has blocks of its own.
        if not self.running and not self.waits:
            spans = _spans(self.request, (*self.anchors, (len(self.request.messages), self.tokens)))
            self.lost |= {place for place, (_, end) in enumerate(spans) if end > start}


class TurnTracker:
    """Which conversation's messages are in which blocks. Belongs to the event loop."""

    def __init__(self, on_removed: OnRemoved) -> None:
        self._on_removed = on_removed
        self._tree = BlockTree()
        self._conversations = Latest[ConversationKey, _Conversation](_MOST_CONVERSATIONS)
        self._window = 0

    def forget(self, owners: Container[str]) -> None:
        drop_owners(self._conversations, owners)

    def begin(self, request: Request) -> None:
        key = _key(request)
        self._conversations[key] = conversation = self._conversations.get(key) or _Conversation(request)
        conversation.running += 1
        conversation.since = self._tree.stored

    def end(self, request: Request, answer: Message | None, usage: Usage) -> None:
        """`answer` is None where there was none: everything stays as it was."""
        conversation = self._conversations.get(_key(request))
        if conversation is None:
            return
        conversation.running -= 1
        if answer is not None:
            conversation.end_turn(request, answer, usage)

    def read_events(self, events: Iterable[Json]) -> None:
        """Events in the order they happened. What is not understood is passed over."""
        for event in events:
            with suppress(AttributeError, KeyError, TypeError):
                if self._is_widest(event.get("window_size")):
                    self._read_event(event["data"], event.get("attention_dp_rank") or 0)
        self._assign()
        for conversation in self._conversations.values():
            if new := conversation.lost - conversation.reported:
                conversation.reported |= new
                self._on_removed(conversation.request, sorted(new))
            conversation.lost.clear()

    def _is_widest(self, window: Json) -> bool:
        """Layers with a shorter attention window drop their blocks although the conversation is still there."""
        if not isinstance(window, int) or window == self._window:
            return True
        if window > self._window:
            self._window = window
            self._tree.clear()
            return True
        return False

    def _read_event(self, data: Mapping[str, Json], rank: int) -> None:
        match data:
            case {"type": "created"}:  # the server has started anew
                self._remove({key for one in self._conversations.values() for key in one.blocks})
                self._tree.clear()
            case {"type": "stored", "parent_hash": parent, "blocks": [*blocks]}:
                chain = [((rank, block["block_hash"]), len(block["tokens"])) for block in blocks]
                self._tree.store(None if parent is None else (rank, parent), chain)
            case {"type": "removed", "block_hashes": [*hashes]}:
                # A small cache may store and remove between two polls.
                self._assign()
                self._remove((rank, one) for one in hashes)

    def _remove(self, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            self._tree.remove(key)
            for conversation in self._conversations.values():
                conversation.lose(key)

    def _assign(self) -> None:
        for conversation in self._conversations.values():
            last = next(reversed(conversation.blocks), None)
            # The blocks of an answer's end may be told of later than the others.
            has_grown = last is not None and self._tree.is_followed(last)
            if not conversation.running and (conversation.waits or has_grown):
                end = self._end_of(conversation)
                if end is not None:
                    conversation.blocks = self._tree.path(end)
                    conversation.waits = False

    def _end_of(self, conversation: _Conversation) -> KvBlock | None:
        """The last block of a conversation's last turn. The last token's state is never stored, so the chain may
        be one block shorter than the turn."""
        shortest = conversation.tokens - 2 * self._tree.block_tokens
        taken = {key for one in self._conversations.values() if one is not conversation for key in one.blocks}
        ends = [
            (len(self._tree.path(end).keys() & conversation.blocks.keys()), end)
            for end in self._tree.ends(conversation.since)
            if shortest < end.end <= conversation.tokens and end.key not in taken
        ]
        ends.sort(key=lambda end: end[0], reverse=True)
        is_clear = len(ends) == 1 or (len(ends) > 1 and ends[0][0] > ends[1][0])
        return ends[0][1] if is_clear else None


def _key(request: Request) -> ConversationKey:
    first = next((message.content for message in request.messages if message.role == "user"), "")
    return request.namespace, request.conversation_id or request.cache_key or first


def _shared(before: Sequence[Message], now: Sequence[Message]) -> int:
    """How many messages both begin with."""
    pairs = enumerate(zip(before, now, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(before), len(now)))


def _spans(request: Request, anchors: Sequence[tuple[int, int]]) -> list[tuple[float, float]]:
    """The token range of each message: exact at anchors, estimated by the length of the text between them."""
    spans: list[tuple[float, float]] = []
    at, tokens = 0, 0
    for until, upto in anchors:
        sizes = [_size(request, place) for place in range(at, until)]
        reached = float(tokens)
        for size in sizes:
            share = (upto - tokens) * size / sum(sizes)
            spans.append((reached, reached + share))
            reached += share
        at, tokens = until, upto
    return spans


def _size(request: Request, place: int) -> int:
    message = request.messages[place]
    calls = sum(len(call.name) + len(call.arguments) for call in message.tool_calls)
    # Templates write the tools into the first message.
    tools = sum(len(f"{tool.name}{tool.description}{tool.parameters}") for tool in request.tools)
    images = _IMAGE * len(message.images)
    return _OVERHEAD + len(message.content) + calls + images + (tools if place == 0 else 0)


# ── which blocks are there ──


@dataclass(frozen=True, slots=True)
class KvBlock:
    key: BlockKey
    parent: BlockKey | None
    start: int
    end: int
    """Its tokens, counted from the beginning of the prompt."""
    order: int
    """Its number in the order of storing."""


class BlockTree:
    """A block's hash covers everything before it, so that equal beginnings are the same blocks."""

    def __init__(self) -> None:
        self._blocks: dict[BlockKey, KvBlock] = {}  # in the order of storing
        self._children: Counter[BlockKey] = Counter()
        self.stored = 0
        """How many have been stored so far."""
        self.block_tokens = 0
        """The most that one has held."""

    def is_followed(self, key: BlockKey) -> bool:
        return self._children[key] > 0

    def store(self, parent: BlockKey | None, blocks: Iterable[tuple[BlockKey, int]]) -> None:
        """A chain of keys with their token counts. Where it hangs on is unknown if an event went missing: it is
        left out then."""
        if parent is not None and parent not in self._blocks:
            return
        for key, tokens in blocks:
            if key not in self._blocks:
                start = self._blocks[parent].end if parent is not None else 0
                self.stored += 1
                self.block_tokens = max(self.block_tokens, tokens)
                self._blocks[key] = KvBlock(key, parent, start, start + tokens, self.stored)
                if parent is not None:
                    self._children[parent] += 1
            parent = key
        while len(self._blocks) > _MOST_BLOCKS:
            self.remove(next(iter(self._blocks)))

    def remove(self, key: BlockKey) -> None:
        block = self._blocks.pop(key, None)
        if block is not None and block.parent is not None:
            self._children[block.parent] -= 1

    def clear(self) -> None:
        self._blocks.clear()
        self._children.clear()

    def ends(self, after: int) -> Iterator[KvBlock]:
        """Leaves of the tree among the blocks that were stored after the first `after`."""
        for block in reversed(self._blocks.values()):
            if block.order <= after:
                return
            if not self.is_followed(block.key):
                yield block

    def path(self, end: KvBlock) -> dict[BlockKey, KvBlock]:
        """From the first block to this one, as far back as they are there."""
        blocks: list[KvBlock] = []
        block: KvBlock | None = end
        while block is not None:
            blocks.append(block)
            block = self._blocks.get(block.parent) if block.parent is not None else None
        return {block.key: block for block in reversed(blocks)}
