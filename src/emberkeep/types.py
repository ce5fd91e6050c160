"""Pure values that travel between the layers: what is asked, what happens, what it cost."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from itertools import combinations
from typing import Any, Literal, Protocol

Json = Any
"""Anything that `json.loads` returns."""

Role = Literal["system", "developer", "user", "assistant", "tool"]

SHARED = "*"
"""The namespace of what an operator declared shareable: everybody reads it, only `--warm` writes it. No
user's namespace looks like this (see `private_namespace`)."""


def private_namespace(user: str, salt: str = "") -> str:
    """Where one user's state lives. A JSON list: no user and salt can be chosen to look like another pair."""
    return json.dumps([user, salt]) if user or salt else ""


def user_of(namespace: str) -> str:
    """The inverse of `private_namespace`, without the salt. Lineages belong to whom their state belongs to."""
    owner = exact_namespace(namespace)
    return str(json.loads(owner)[0]) if owner.startswith("[") else ""


# State that was moved or quantised is approximate: it lives under a namespace of its own, `~MARKS~NAMESPACE`,
# which an exact lookup never sees. A lookup that allows some marks sees what has no other ones.


def marked_namespace(namespace: str, marks: Sequence[str]) -> str:
    """Where state of an exact `namespace` lives that is approximate in the ways that `marks` name."""
    return f"~{'+'.join(sorted(marks))}~{namespace}" if marks else namespace


EXACT_BITS = 16
"""As the engine has it, whatever its own type is."""


def bits_of(namespace: str) -> int:
    """In how many bits the state of a namespace is stored."""
    return next((int(mark) for mark in _split_marks(namespace)[0] if mark.isdigit()), EXACT_BITS)


def repair_of(namespace: str) -> Repair | None:
    """How what was moved in the state of a namespace was repaired; None where nothing was moved."""
    return next((Repair(mark) for mark in _split_marks(namespace)[0] if not mark.isdigit()), None)


def without_mark(namespace: str, mark: str) -> str:
    """Where state lives that is approximate in the other ways of `namespace` only."""
    marks, owner = _split_marks(namespace)
    return marked_namespace(owner, [other for other in marks if other != mark])


def exact_namespace(namespace: str) -> str:
    """Whose namespace it is, without its marks."""
    return _split_marks(namespace)[1]


@lru_cache(maxsize=1024)
def visible_to(namespace: str) -> frozenset[str]:
    """Every namespace whose state may be reused for a request that belongs to `namespace`."""
    marks, owner = _split_marks(namespace)
    allowed = [some for count in range(len(marks) + 1) for some in combinations(marks, count)]
    return frozenset(marked_namespace(base, some) for base in (owner, SHARED) for some in allowed)


def _split_marks(namespace: str) -> tuple[list[str], str]:
    if not namespace.startswith("~"):
        return [], namespace
    marks, _, owner = namespace[1:].partition("~")
    return marks.split("+"), owner


class Ttl(StrEnum):
    """How long state is kept ready after its last use; how many seconds each stands for is a setting."""

    SHORT = "short"
    LONG = "long"
    EXTENDED = "extended"


# ── what is asked ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str
    """JSON text, exactly as the model wrote it."""


@dataclass(frozen=True, slots=True)
class Message:
    role: Role
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: str = ""
    parameters: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ToolChoice:
    mode: Literal["none", "auto", "required", "named"] = "auto"
    name: str | None = None
    """The function's name; set exactly when mode is `named`."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn. `temperature == 0` is greedy."""

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JsonFormat:
    """The answer must be JSON; with a schema, JSON that fits it."""

    schema: Mapping[str, Json] | None = None


class Repair(StrEnum):
    """What is evaluated again of state that was taken from another place."""

    NONE = "none"  # nothing: its keys are rotated to where they stand now
    SELECTIVE = "selective"  # the tokens next to each seam
    CACHEBLEND = "cacheblend"  # the tokens that differ most after the first layers


@dataclass(frozen=True, slots=True)
class Approximation:
    """Stored state may be reused at other places than where it was computed. The result is not exact."""

    repair: Repair = Repair.CACHEBLEND
    ratio: float = 0.15
    """`cacheblend`: the share of the moved tokens that is evaluated again."""
    boundary: int = 16
    """`selective`: how many tokens at a seam are evaluated again."""
    side: Literal["first", "last", "both"] = "first"
    """`selective`: at which end of what was moved they are."""
    overlap: int = 0
    """Where two matches overlap, at most so many of the tokens that both know are evaluated again."""
    sinks: int = 4
    """The first tokens of any sequence: attention leans on them, so they are neither moved nor replaced."""


@dataclass(frozen=True, slots=True)
class Request:
    """One generation. Exactly one of `messages` and `prompt` is set."""

    messages: tuple[Message, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    format: JsonFormat | None = None
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    top_logprobs: int | None = None
    """None: no logprobs. 0: the chosen token's only."""
    forced: tuple[int, ...] = ()
    """What the answer begins with, whatever is likely: to learn what the model thinks of it (`top_logprobs`)."""
    echo: bool = False
    template_args: Mapping[str, Json] = field(default_factory=dict)
    """Extra variables for the chat template (`enable_thinking`, ...)."""
    user: str = ""
    """Who asks: limits and fairness are per user."""
    namespace: str = ""
    """Requests share stored state only within one namespace, and what is in `SHARED`."""
    use_cache: bool = True
    """False: evaluate everything afresh; what is computed is still kept."""
    is_kept: bool = True
    """False: nothing of what is computed is kept."""
    from_store: bool = False
    """Load what is stored even where the engine has it too, or would be faster: to check it."""
    approximate: Approximation | Literal[False] | None = None
    """False: only state that was computed for exactly these tokens at exactly this place is reused. None: as
    configured."""
    kv_bits: int | None = None
    """In how many bits the state is stored: 16 is exact, 8 and 4 are not. None: as configured."""
    is_prefix: bool = False
    """Nobody waits for an answer: it is evaluated so that others find it, and ends where its messages end."""
    conversation_id: str | None = None
    cache_key: str | None = None
    """OpenAI's `prompt_cache_key`: names a conversation when nothing else does."""
    ttl: Ttl | None = None
    """None: the usual one."""
    slot: int | None = None
    """The engine's slot that the client would like best."""
    want_progress: bool = False
    in_pieces: bool = True
    """False: nobody looks at an answer before its end, so its events may come late and all together."""
    deadline_s: float | None = None


# ── what it cost ─────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """llama.cpp's vocabulary. `prompt_n` excludes reused tokens."""

    cache_n: int = 0
    prompt_n: int = 0
    prompt_ms: float = 0.0
    predicted_n: int = 0
    predicted_ms: float = 0.0
    ttft_ms: float = 0.0
    queue_ms: float = 0.0

    @property
    def prompt_per_second(self) -> float:
        return 1e3 * self.prompt_n / self.prompt_ms if self.prompt_ms else 0.0

    @property
    def predicted_per_second(self) -> float:
        return 1e3 * self.predicted_n / self.predicted_ms if self.predicted_ms else 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How a request is evaluated so that it fits into memory."""

    prefill_slice: int
    """Most of its prompt tokens in one step."""
    kv_bits: int
    """In how many bits its state is stored."""


@dataclass(frozen=True, slots=True)
class Fit:
    """What was done to make a request fit."""

    plan: Plan | None = None
    """None: nothing was planned."""
    predicted_bytes: int = 0
    """The peak of memory that was predicted with the plan."""
    truncated_tokens: int = 0
    truncated_messages: int = 0
    """How much was left out of the prompt."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a prompt left what was stored: the token index and the text on both sides."""

    token_index: int
    stored_text: str
    prompt_text: str
    where: str = ""
    """The part of the request that stands there (`message 3 (user)`), where that is known."""


class MissReason(StrEnum):
    """Why no more was reused."""

    NONE = "none"  # everything stored for this prompt was reused
    NEW = "new"  # nothing is stored for what follows
    DIVERGED = "diverged"  # stored text goes on differently
    EDITED = "edited_message"  # the same, inside a message that was stored with another text
    TOOLS = "changed_tools"  # the same, inside the definitions of tools
    EVICTED = "evicted"  # it was stored, and its room was needed
    EXPIRED = "expired"  # it was stored, outlived its TTL, and was removed
    REMOVED = "removed"  # somebody removed it
    OTHER_USER = "other_user"  # it is stored, for another user
    OTHER_MODEL = "other_model"  # it is stored, for another model or engine
    NO_SNAPSHOT = "no_snapshot"  # this model's state can be resumed only where it was snapshotted
    CORRUPT = "corrupt"  # a stored chunk failed verification
    GONE = "gone"  # a stored chunk disappeared between lookup and load
    CHEAPER = "cheaper_to_recompute"  # loading was predicted to take longer
    DISABLED = "disabled"  # the request asked for fresh evaluation


@dataclass(frozen=True, slots=True)
class LookupRecord:
    """What one request reused, from where, and why not more."""

    prompt_tokens: int = 0
    hot_tokens: int = 0
    warm_tokens: int = 0
    cold_tokens: int = 0
    moved_tokens: int = 0
    """Taken from other places: approximate."""
    repaired_tokens: int = 0
    """How many of them were evaluated again, through most of the layers."""
    is_approximate: bool = False
    """The answer rests on state that was moved or quantised, by this request or before it."""
    load_ms: float = 0.0
    reason: MissReason = MissReason.NEW
    divergence: Divergence | None = None

    @property
    def reused_tokens(self) -> int:
        return self.hot_tokens + self.warm_tokens + self.cold_tokens

    @property
    def cached_tokens(self) -> int:
        """Reused where they were computed, or moved."""
        return self.reused_tokens + self.moved_tokens


# ── what is kept ─────────────────────────────────────────────────────────────────────────────────


class EntryKind(StrEnum):
    CONVERSATION = "conversation"
    PREFIX = "prefix"


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """A conversation or a prefix in the store."""

    id: str
    kind: EntryKind
    name: str
    """The conversation id, if a client gave one."""
    head: str
    """Its first words; empty where they are not known any more."""
    user: str
    is_shared: bool
    """Declared shareable by the operator: everybody may reuse it."""
    tokens: int
    bytes: int
    """Including what it shares with others."""
    warm_tokens: int
    cold_tokens: int
    """How many of `tokens` are in RAM and on disk; often both."""
    idle_s: float
    """Seconds since it was last used."""
    hits: int
    turns: int
    branches: int
    ttl: Ttl
    expires_in_s: float
    """Negative: it is not wanted any more, and goes first when room is needed."""
    is_pinned: bool
    hot_tokens: int = 0
    """How many of `tokens` rest in the engine."""
    kv_bits: int = EXACT_BITS
    repair: Repair | None = None
    """Of state that was moved; None where all is where it was computed."""


@dataclass(frozen=True, slots=True)
class EntryText:
    entry: CacheEntry
    text: str
    """The whole of its latest state, as the model reads it."""


@dataclass(frozen=True, slots=True)
class Removed:
    entries: int = 0
    tokens: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Warmed:
    """A prefix that is ready."""

    tokens: int
    cached_tokens: int
    """How many of them were stored before."""
    seconds: float
    entry_id: str
    """Its entry in the cache."""
    ttl: Ttl | None = None
    """How long it is kept ready after its last use; None where it is not stored."""
    error: str | None = None
    """Why it is not ready after all. Nobody has to care: the next request evaluates it."""


@dataclass(frozen=True, slots=True)
class Verified:
    """A stored state, continued greedily beside a fresh evaluation of the same tokens."""

    entry: CacheEntry
    reused_tokens: int
    compared: int
    agreed: int
    """Tokens of the continuation, and how many were equal before the first difference."""

    @property
    def is_equal(self) -> bool:
        return self.agreed == self.compared


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a request would reuse now, and why not more."""

    lookup: LookupRecord
    sentence: str


# ── what happens ─────────────────────────────────────────────────────────────────────────────────


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    piece: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """Prompt evaluation so far; `processed` includes `cached`."""

    total: int
    cached: int
    processed: int
    elapsed_ms: float


@dataclass(frozen=True, slots=True)
class TextDelta:
    index: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    tokens: tuple[int, ...] = ()
    """The sampled ids behind the text, where the text is passed on as it was sampled."""


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The first delta of a call carries `id` and `name`; arguments may follow in pieces."""

    index: int
    call_index: int
    id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class Finished:
    """Choice `index` has ended."""

    index: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Completed:
    """The last event of a request that succeeded."""

    usage: Usage
    timings: Timings
    lookup: LookupRecord
    fit: Fit = Fit()


Event = Progress | TextDelta | ReasoningDelta | ToolCallDelta | Finished | Completed


# ── which experts a mixture chose ────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class LayerExperts:
    layer: int
    tokens: int
    """How many were evaluated here; at least one."""
    counts: tuple[int, ...]
    """Per expert how many of these tokens were sent to it."""

    @property
    def frequencies(self) -> tuple[float, ...]:
        """Per expert the share of the tokens that were sent to it."""
        return tuple(count / self.tokens for count in self.counts)


@dataclass(frozen=True, slots=True)
class ExpertStats:
    enabled: bool
    """Whether anything is being counted now."""
    experts: int
    experts_used: int | None
    """By each token, in each layer; None where layers differ."""
    layers: tuple[LayerExperts, ...]
    """Those that have counted something."""


class AttentionTier(StrEnum):
    """Which code computes attention in the Hugging Face engine."""

    OWN = "own"  # Emberkeep's kernel over the paged pool
    FLASH = "flash"  # torch's fused kernels
    PLAIN = "plain"  # matrix products and a softmax: any device, any model


# ── what a model's vocabulary offers ─────────────────────────────────────────────────────────────


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
