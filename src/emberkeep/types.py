"""Pure values that travel between the layers: what is asked, what happens, what it cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol

Json = Any
"""Anything that `json.loads` returns."""

Role = Literal["system", "developer", "user", "assistant", "tool"]


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
    echo: bool = False
    template_args: Mapping[str, Json] = field(default_factory=dict)
    """Extra variables for the chat template (`enable_thinking`, ...)."""
    namespace: str = ""
    """Requests share stored state only within one namespace."""
    use_cache: bool = True
    """False: evaluate everything afresh; what is computed is still kept."""
    conversation_id: str | None = None
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
class Divergence:
    """Where a prompt left what was stored: the token index and the text on both sides."""

    token_index: int
    stored_text: str
    prompt_text: str


class MissReason(StrEnum):
    """Why no more was reused."""

    NONE = "none"  # everything stored for this prompt was reused
    NEW = "new"  # nothing is stored for what follows
    DIVERGED = "diverged"  # stored text goes on differently
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
    load_ms: float = 0.0
    reason: MissReason = MissReason.NEW
    divergence: Divergence | None = None

    @property
    def reused_tokens(self) -> int:
        return self.hot_tokens + self.warm_tokens + self.cold_tokens


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


Event = Progress | TextDelta | ReasoningDelta | ToolCallDelta | Finished | Completed


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
