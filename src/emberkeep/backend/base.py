"""The backend seam: takes a request, yields events.

What not every backend can do are attributes that may be None; `tokenizer_of` and its kind raise the sentence that
tells a user what is missing then.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import field
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol

from emberkeep.errors import NoSuchEntry, RequestError
from emberkeep.types.cache import CacheEntry, CacheTree, EntryText, Explanation, Removed, Verified, Warmed
from emberkeep.types.events import Completed, Events, TextDelta, Usage
from emberkeep.types.models import AttentionTier, ExpertStats, SpeculationStats, TimelineRecord
from emberkeep.types.request import (
    Embedded,
    EmbeddingRequest,
    Json,
    Message,
    Pooling,
    Ranked,
    Request,
    RerankRequest,
    Tool,
)
from emberkeep.values import dataclass

if TYPE_CHECKING:
    from emberkeep.backend.server_tools import ToolDesk
    from emberkeep.errors import EmberkeepError
    from emberkeep.kv.forgetting import Holders
    from emberkeep.memory.memory import Memory


@dataclass(frozen=True, slots=True)
class ModelCard:
    id: str
    created: int
    """Unix seconds."""
    context: int
    owned_by: str = "emberkeep"
    details: Mapping[str, Json] | None = None
    calls_tools: bool = True
    """The model was trained to call tools."""
    also: tuple[str, ...] = ()
    """Other names by which clients may ask for it."""
    remote: str = field(default="", repr=False)
    """How the configuration calls the service that runs it; empty: it runs here. Not in the repr, of which clients
    get a hash as `system_fingerprint`."""


class Cache(Protocol):
    """What a backend keeps. Every method but `verify` blocks: call it outside the event loop."""

    def entries(self) -> list[CacheEntry]:
        """Everything that is stored, the latest used first."""

    def tree(self, limit: int, at: str = "") -> CacheTree:
        """What is stored for anyone, by where texts part: at most `limit` nodes for everything at and below the
        node `at` (empty: for all). Raises NoSuchEntry."""

    def show(self, entry_id: str) -> EntryText:
        """Raises NoSuchEntry, as all that take an id."""

    def pin(self, entry_id: str, pinned: bool) -> CacheEntry:
        """A pinned entry is never evicted and does not expire."""

    def remove(self, entry_id: str) -> Removed:
        """Remove an entry and what only it uses, pinned or not."""

    def remove_user(self, user: str) -> Removed:
        """Remove everything of one user; "" stands for all requests without a user."""

    def gc(self) -> Removed:
        """Remove everything that has outlived its TTL and is not pinned."""

    def explain(self, request: Request) -> Explanation:
        """What `request` would reuse if it came now, and why not more: for the operator, because it tells about
        other users. Raises RequestError."""

    async def verify(self, entry_id: str, tokens: int) -> Verified:
        """Continue an entry's stored state greedily by so many tokens, and do the same without stored state. Does
        not block. Raises Overloaded, EngineError.
        """


NO_ARGS: Mapping[str, Json] = {}


@dataclass(frozen=True, slots=True)
class ModelTexts:
    """Texts that a model was trained with."""

    chat_template: str
    bos: str
    eos: str


class Tokenizer(Protocol):
    """Every method blocks, for milliseconds."""

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]: ...

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Raises RequestError for what is no token."""

    def pieces(self, tokens: Sequence[int]) -> list[bytes]:
        """The bytes of each. Raises RequestError for what is no token."""

    def texts(self) -> ModelTexts: ...

    def apply_template(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        args: Mapping[str, Json] = NO_ARGS,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Raises RequestError for what the template refuses."""

    def count(self, request: Request) -> int:
        """How many tokens the prompt of a chat has, also where it would not fit. Raises RequestError."""


class Warmer(Protocol):
    async def warm(self, request: Request) -> Warmed:
        """Evaluate a prefix (messages without an answer, or a text) so that later requests find it.

        Raises RequestError for what is wrong with the request; any other failure is a line in the log and the
        result's `error`.
        """

    def keep_warm(self, prefixes: Sequence[Request]) -> None:
        """Warm these, now and before they fall out, for as long as the backend lives. Returns at once."""


@dataclass(frozen=True, slots=True)
class EmbeddingShape:
    dimension: int
    """A vector has so many numbers; what a model gives that ranks has 1."""
    context: int
    """Longest input in tokens, with the tokens that the model wants around it."""
    pooling: Pooling

    @property
    def ranks(self) -> bool:
        """The model compares documents with queries, and gives no vectors. Others do not rank."""
        return self.pooling is Pooling.RANK


class Embedder(Protocol):
    @property
    def shape(self) -> EmbeddingShape: ...

    async def embed(self, request: EmbeddingRequest) -> Embedded:
        """A vector for each input. Cancelling it gives up what was not computed yet.

        Raises RequestError (ContextExceeded for an input that is too long), Overloaded, RateLimited, EngineError.
        """

    async def rerank(self, request: RerankRequest) -> Ranked:
        """How well each document answers the query. Raises as `embed` does."""


class Experts(Protocol):
    def stats(self) -> ExpertStats:
        """Which experts were chosen while they were counted."""

    async def track(self, enabled: bool | None, *, reset: bool) -> ExpertStats:
        """Count experts or stop counting (None: as before), and with `reset` begin anew.

        Switching waits for running requests, and new ones wait for it. Raises Overloaded, EngineError.
        """


class AttentionSwitch(Protocol):
    @property
    def tier(self) -> AttentionTier:
        """Which code computes attention."""

    async def switch(self, tier: AttentionTier) -> None:
        """Use another one when what runs now has finished. Its state has a fingerprint of its own: until the first
        tier is back, nothing is stored or loaded. Raises RequestError for one that is not there.
        """


class Backend(Protocol):
    @property
    def card(self) -> ModelCard: ...

    def generate(self, request: Request) -> Events:
        """Events of one request, ending with `Completed`.

        Raises an `EmberkeepError`: before the first event for everything that is wrong with the request
        itself. Closing the iterator (or cancelling the task that reads it) stops the work within one step.
        """

    def stats(self) -> dict[str, Json]:
        """Counters and gauges, cheap enough to be polled."""

    def timeline(self) -> Sequence[TimelineRecord]:
        """Those that it answers now and the latest that it has, the newest first. None of a model that runs
        elsewhere."""

    def health(self) -> dict[str, Json]:
        """Which backend answers, and why the others do not."""

    def failure(self) -> EmberkeepError | None:
        """Why it can never answer again; None while it can."""

    async def start(self) -> None:
        """Connect to what tools need, which takes the event loop. Never raises."""

    async def close(self) -> None:
        """Take no new work, finish or fail what runs, and write what is not yet on disk."""

    # ── what some can do ──

    @property
    def cache(self) -> Cache | None:
        """None: the model runs elsewhere, as for the tokenizer and the warmer."""

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def warmer(self) -> Warmer | None: ...

    @property
    def embedder(self) -> Embedder | None:
        """None: it gives no vectors, and does not rank."""

    @property
    def experts(self) -> Experts | None:
        """None for a model without experts too."""

    @property
    def attention(self) -> AttentionSwitch | None:
        """None where there is one way to compute attention too."""

    @property
    def host_tools(self) -> ToolDesk | None:
        """That run for clients which send none. None where there are none, and before it is loaded."""

    @property
    def holders(self) -> Holders:
        """Everything that holds what its users sent."""

    def speculation_stats(self) -> SpeculationStats | None:
        """How much was drafted and accepted. None: the model runs elsewhere."""

    @property
    def memory(self) -> Memory | None:
        """What has left conversations, and facts. None: nothing is remembered."""


class Extras:
    """Nothing of what only some backends can do, for a Backend to derive from."""

    cache: Cache | None = None
    tokenizer: Tokenizer | None = None
    warmer: Warmer | None = None
    embedder: Embedder | None = None
    experts: Experts | None = None
    attention: AttentionSwitch | None = None
    host_tools: ToolDesk | None = None
    memory: Memory | None = None

    def timeline(self) -> Sequence[TimelineRecord]:
        return ()

    def speculation_stats(self) -> SpeculationStats | None:
        return None

    def failure(self) -> EmberkeepError | None:
        return None

    async def start(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    text: str
    usage: Usage
    first_ms: float
    """Until its first event."""
    ms: float


async def read_answer(events: Events) -> WholeAnswer:
    """A whole answer at once, for a caller that does not watch it being written. Raises what `events` raises."""
    begin, first, text, usage = perf_counter(), 0.0, "", Usage()
    async with aclosing(events):
        async for event in events:
            first = first or perf_counter() - begin
            if isinstance(event, TextDelta):
                text += event.text
            elif isinstance(event, Completed):
                usage = event.usage
    return WholeAnswer(text, usage, 1e3 * first, 1e3 * (perf_counter() - begin))


log = logging.getLogger("emberkeep.remote")


# ── what a backend cannot do, said to the user ──


def tokenizer_of(backend: Backend, wanted: Literal["tokens", "template"] = "tokens") -> Tokenizer:
    """Raises RequestError where there is none."""
    return backend.tokenizer or _refuse(backend.card, f"does not tell its {wanted}")


def embedder_of(backend: Backend) -> Embedder:
    """For vectors. Raises RequestError for a model that gives none."""
    return backend.embedder or _refuse(backend.card, _NO_EMBEDDER, no_embeddings(backend.card.id))


def ranker_of(backend: Backend) -> Embedder:
    """For ranking. Raises RequestError for a model that does not."""
    return backend.embedder or _refuse(backend.card, _NO_EMBEDDER, no_ranks(backend.card.id))


_NO_EMBEDDER = "neither embeds nor ranks for clients of this server"


def no_embeddings(name: str) -> RequestError:
    return RequestError(
        f"{name} gives no embeddings: name a model that does (`emberkeep models pull "
        "hf:nomic-ai/nomic-embed-text-v1.5-GGUF:Q8_0` fetches one), or set pooling for a chat model's own states.",
        "model",
    )


def no_ranks(name: str) -> RequestError:
    return RequestError(
        f"{name} does not rank documents: name a model that does (`emberkeep models pull "
        "hf:gpustack/bge-reranker-v2-m3-GGUF:Q8_0` fetches one).",
        "model",
    )


def experts_of(backend: Backend) -> Experts:
    """Raises RequestError for a model without experts."""
    here = RequestError(f"{backend.card.id} is not a mixture of experts: load a model that is one.")
    return backend.experts or _refuse(backend.card, "does not tell its experts", here)


def attention_of(backend: Backend) -> AttentionSwitch:
    """Raises RequestError where there is no choice."""
    here = RequestError(f"{backend.card.id} has one way to compute attention: tiers are for --engine hf.")
    return backend.attention or _refuse(backend.card, "computes attention as it likes", here)


def _refuse(card: ModelCard, elsewhere: str, here: RequestError | None = None) -> NoReturn:
    """Raises RequestError: what a model does that runs elsewhere, or `here` for one that runs here."""
    if here is not None and not card.remote:
        raise here
    raise RequestError(f"{card.remote} runs elsewhere and {elsewhere}: use a model that runs here.")


def speculation_of(backend: Backend) -> SpeculationStats:
    """How much was drafted and accepted; nothing for a model that runs elsewhere."""
    return backend.speculation_stats() or SpeculationStats(
        False, f"{_why_not(backend.card)}: nothing is drafted here."
    )


async def warm_prefix(backend: Backend, request: Request) -> Warmed:
    """As `Warmer.warm`. A remote model cannot be warmed: then the result's `error` says so."""
    if backend.warmer is not None:
        return await backend.warmer.warm(request)
    error = f"{_why_not(backend.card)}: its prompts cannot be warmed from here."
    return Warmed(0, 0, 0.0, "", None, error)


def keep_warm(backend: Backend, prefixes: Sequence[Request]) -> None:
    """As `Warmer.keep_warm`; what cannot be warmed is a line in the log."""
    if backend.warmer is not None:
        backend.warmer.keep_warm(prefixes)
    elif prefixes:
        log.info("%s: nothing is warmed.", _why_not(backend.card))


def _why_not(card: ModelCard) -> str:
    return f"{card.remote} runs elsewhere" if card.remote else f"{card.id} writes no answers"


def cache_of(backend: Backend) -> Cache:
    """Its cache; an empty one for a model that runs elsewhere."""
    why = f"{backend.card.remote} runs elsewhere: nothing of it is stored here."
    return backend.cache or EmptyCache(why, backend.holders)


class EmptyCache:
    """A Cache in which nothing can be found, but whose users can be forgotten."""

    def __init__(self, why: str, holders: Holders) -> None:
        """`why`: what is said to those who look for something."""
        self._why = why
        self.remove_user = holders.forget

    def entries(self) -> list[CacheEntry]:
        return []

    def tree(self, limit: int, at: str = "") -> CacheTree:
        return CacheTree()

    def gc(self) -> Removed:
        return Removed(0, 0)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise NoSuchEntry(self._why)

    show = pin = remove = explain = _refuse

    async def verify(self, entry_id: str, tokens: int) -> Verified:
        self._refuse()
