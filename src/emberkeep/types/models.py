"""What a model has and does, here or somewhere else: its experts, its drafts, and how its requests go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, field
from enum import StrEnum
from typing import Protocol

from emberkeep.types.events import LookupRecord
from emberkeep.types.request import Json
from emberkeep.values import dataclass


@dataclass(frozen=True, slots=True)
class LayerExperts:
    layer: int
    tokens: int
    """How many were evaluated here; at least one."""
    counts: tuple[int, ...]
    """Per expert how many of these tokens were sent to it."""

    @property
    def frequencies(self) -> tuple[float, ...]:
        """Per expert the share of the tokens that were sent to it: together they are the experts per token."""
        return tuple(count / self.tokens for count in self.counts)

    @property
    def shares(self) -> tuple[float, ...]:
        """Per expert its share of everything that was sent to one: together they are 1."""
        activations = max(sum(self.counts), 1)
        return tuple(count / activations for count in self.counts)


@dataclass(frozen=True, slots=True)
class ExpertStats:
    enabled: bool
    """Whether anything is being counted now."""
    experts: int
    experts_used: int | None
    """How many each token uses in each layer; None where layers differ."""
    layers: tuple[LayerExperts, ...]
    """Those that have counted something."""

    @property
    def tokens(self) -> int:
        """How many were evaluated while it was counted: those of the layer that saw most of them."""
        return max((layer.tokens for layer in self.layers), default=0)


class AttentionTier(StrEnum):
    """Which code computes attention in the Hugging Face engine."""

    OWN = "own"  # Emberkeep's kernel over the paged pool
    FLASH = "flash"  # torch's fused kernels
    PLAIN = "plain"  # matrix products and a softmax: any device, any model


class Residency(StrEnum):
    """Which weights of a Hugging Face model stay on its GPU; others wait in RAM, and pass through it in every
    step."""

    AUTO = "auto"  # full if it fits, else as much as does
    FULL = "full"
    PARTIAL = "partial"  # the first layers and the last ones
    FFN = "ffn"  # everything but the feed-forward parts
    STREAM = "stream"  # what is no layer


class Quantization(StrEnum):
    """How many bits the weights of a Hugging Face model are rounded to when they are loaded."""

    NONE = "none"
    INT8 = "int8"
    INT4 = "int4"


class ModelState(StrEnum):
    """How far a model is that is loaded on demand."""

    UNLOADED = "unloaded"
    LOADING = "loading"  # or waiting for its turn, or for memory
    LOADED = "loaded"
    FAILED = "failed"  # it could not be loaded: the next request tries again


@dataclass(frozen=True, slots=True)
class ModelStatus:
    state: ModelState = ModelState.LOADED
    error: str = ""
    """Why it could not be loaded."""
    memory_bytes: int = 0
    """What it takes, as far as that can be told beforehand; 0: not known, or it runs elsewhere."""
    running: int = 0
    """Requests that it answers now."""
    waiting: int = 0
    """Requests that wait until it is loaded."""
    idle_s: float = 0.0
    """Since its latest request."""
    expires_s: float | None = None
    """Until it is unloaded if no request comes; None: it stays."""
    is_pinned: bool = False
    """It is not unloaded when its memory is needed."""


class Vocab(Protocol):
    """Immutable after construction; every method may be called from any thread."""

    @property
    def size(self) -> int: ...

    @property
    def pieces(self) -> Sequence[bytes]:
        """The bytes of every token id; special tokens as the text a template writes for them."""

    @property
    def specials(self) -> Mapping[str, int]:
        """Text to id of every token that tokenisation recognises as a whole (control, user-defined)."""

    @property
    def controls(self) -> frozenset[int]:
        """Ids that never stand for visible text."""

    @property
    def eog(self) -> frozenset[int]:
        """Every token that ends a generation."""

    @property
    def bos(self) -> int | None: ...

    @property
    def eos(self) -> int | None: ...

    @property
    def adds_bos(self) -> bool:
        """The model wants `bos` before raw text (chat templates write their own)."""

    @property
    def splits_at_specials(self) -> bool:
        """Tokenising the pieces between special tokens one by one equals tokenising the whole text."""

    def tokenize(self, text: str, *, parse_special: bool = True) -> list[int]:
        """Token ids of `text`, with nothing added."""


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """One of them, as its user has named it. Keys are never part of it: only the variable that holds one."""

    name: str
    backend: str
    """The vendor: `openai`, `anthropic`, ... or the name of an entry point."""
    model: str = ""
    """Its name at the service; empty takes the first that is served."""
    base_url: str | None = None
    """None: the vendor's own."""
    api_key_env: str | None = None
    """The variable that holds the key; None: the vendor's usual one."""
    max_tokens: int | None = None
    """Longest answer, unless a request says."""
    ctx: int | None = None
    """Longest conversation in tokens; None: as the service says, or the usual of such services."""
    description: str = ""
    """What it is good at, for the models that may ask it."""


DEPTH_HEADER = "X-Emberkeep-Depth"
"""Sent between Emberkeep servers: how many models have asked each other already."""

HOPS_HEADER = "X-Emberkeep-Hops"
"""How many Emberkeeps have passed a request on."""

# ── drafts ──

LENGTH_BUCKETS = 17
"""`SourceStats.accepted_lengths` has one for each of 0 to 15 tokens, and one for 16 and more."""


class DraftSource(StrEnum):
    """Where the tokens of a draft come from."""

    CONTEXT = "context"  # the prompt and the answer so far
    CORPUS = "corpus"  # the same user's earlier prompts and answers
    PATH = "path"  # how exactly this text went on before
    PREDICTION = "prediction"  # what the request says that the answer will be like
    GRAMMAR = "grammar"  # the only tokens that a schema or grammar allows
    MODEL = "model"  # a draft model


@dataclass(frozen=True, slots=True)
class SourceStats:
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    accepted_lengths: tuple[int, ...] = (0,) * LENGTH_BUCKETS
    """How many drafts had 0, 1, 2, ... tokens accepted; the last one: 16 and more."""

    @property
    def acceptance(self) -> float:
        """The share of the drafted tokens that was accepted; 0 where nothing was drafted."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0

    def json(self) -> dict[str, Json]:
        return {**asdict(self), "acceptance": self.acceptance, "accepted_lengths": list(self.accepted_lengths)}


@dataclass(frozen=True, slots=True)
class DraftModelStats:
    name: str
    reason: str = ""
    """Why it drafts no more, in one sentence; empty where it does."""
    steps: int = 0
    """Steps of its own engine."""
    evaluated_tokens: int = 0
    step_ms: float = 0.0
    """What one more drafted token takes."""
    resident_tokens: int = 0
    """Whose state is in its engine."""

    def json(self) -> dict[str, Json]:
        return {**asdict(self), "reason": self.reason or None}


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    enabled: bool
    reason: str = ""
    """Why not, in one sentence; empty where it is enabled."""
    steps: int = 0
    """Steps of the engine with a draft in them."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    sources: Mapping[str, SourceStats] = field(default_factory=dict)
    """Those that have drafted something, by the name of their `DraftSource`."""
    draft_model: DraftModelStats | None = None
    """None: none is loaded."""

    def json(self) -> dict[str, Json]:
        return {
            **asdict(self),
            "reason": self.reason or None,
            "sources": {name: source.json() for name, source in self.sources.items()},
            "draft_model": self.draft_model.json() if self.draft_model else None,
        }


# ── requests ──


class RequestState(StrEnum):
    WAITING = "waiting"
    LOADING = "loading"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class TimelineRecord:
    """One answer of one request, without its texts. Times are on the monotonic clock; None: not yet, or never."""

    number: int
    namespace: str
    user: str
    conversation_id: str | None
    is_prefix: bool
    """It was only to be ready: nothing is sampled."""
    state: RequestState
    slot: int
    """-1: it has, or had, none."""
    asked_at: float
    started_at: float | None
    loaded_at: float | None
    """Where something was loaded."""
    first_token_at: float | None
    ended_at: float | None
    computed_tokens: int
    """How much of the prompt is in the engine now, reused or evaluated."""
    sampled_tokens: int
    lookup: LookupRecord
