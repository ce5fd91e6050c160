"""What is asked for: an answer, with how its tokens are drawn; vectors of texts; or a ranking of documents."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from emberkeep.types.hygiene import NOT_TIDIED, Tidied
from emberkeep.types.lineage import Approximation, Lineage
from emberkeep.values import dataclass

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Json = Any
"""Anything that `json.loads` returns."""

Role = Literal["system", "developer", "user", "assistant", "tool"]


class Ttl(StrEnum):
    """How long state is kept ready after its last use; how many seconds each stands for is a setting."""

    SHORT = "short"
    LONG = "long"
    EXTENDED = "extended"


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """Where the beginning of a prompt ends that the client is going to send again."""

    messages: int
    """So many of them are in it, after the tools; 0: nothing but the tools."""
    chars: int | None = None
    """Only so many characters of the last one's text. None: all of it."""
    ttl: Ttl = Ttl.SHORT
    """It is kept at least so long."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str
    """JSON text, exactly as the model wrote it."""


def new_call_id() -> str:
    return f"call_{os.urandom(12).hex()}"


@dataclass(frozen=True, slots=True)
class Image:
    url: str
    """`https:` or `data:`, as the client wrote it."""


@dataclass(frozen=True, slots=True)
class Message:
    role: Role
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    images: tuple[Image, ...] = ()
    """After the text; only some models can look at them."""


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
    allowed: tuple[str, ...] | None = None
    """The only functions that may be called of those that the model is told of. None: all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    param: str = field(default="response_format", compare=False)
    """The client's name for it, where it cannot be used."""


@dataclass(frozen=True, slots=True)
class JsonFormat(_Wanted):
    """The answer must be JSON; with a schema, JSON that fits it."""

    schema: Mapping[str, Json] | None = None


@dataclass(frozen=True, slots=True)
class GrammarFormat(_Wanted):
    """The answer must be a text of this grammar, in GBNF or in Lark's notation."""

    grammar: str


@dataclass(frozen=True, slots=True)
class RegexFormat(_Wanted):
    """The whole answer must match."""

    pattern: str


@dataclass(frozen=True, slots=True)
class ChoiceFormat(_Wanted):
    """The answer must be one of these."""

    texts: tuple[str, ...]


AnswerFormat = JsonFormat | GrammarFormat | RegexFormat | ChoiceFormat


@dataclass(frozen=True, slots=True)
class SourceFile:
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Infill:
    """What is asked for is the text between the prompt and this."""

    suffix: str
    files: tuple[SourceFile, ...] = ()
    """Others of the same repository, for the model to know."""
    begun: str = ""
    """What the text in the middle begins with."""
    param: str = field(default="suffix", compare=False)
    """The client's name for it, where the model cannot fill in."""


class Recall(StrEnum):
    """How messages that left a context come back into it."""

    OFF = "off"
    TOOL = "tool"  # the model asks: it has a tool `search_memory`
    AUTO = "auto"  # the best finds stand before the user's message


class ReasoningFormat(StrEnum):
    """Where a model's reasoning goes."""

    SEPARATE = "separate"  # beside the answer
    STRIP = "strip"  # nowhere
    INLINE = "inline"  # it stays in the text, as the model wrote it


DEFAULT_SAMPLERS = (
    "penalties",
    "dry",
    "top_n_sigma",
    "top_k",
    "typ_p",
    "top_p",
    "min_p",
    "xtc",
    "temperature",
)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn. `temperature == 0` is greedy. Names and meanings are llama.cpp's."""

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
    text_bias: tuple[tuple[str, float], ...] = ()
    """The same for every token of a text."""
    ignore_eos: bool = False
    """Nothing that ends a generation is drawn."""
    repeat_last_n: int | None = None
    """Penalties look at so many tokens, those of the prompt included. None: at all of the answer, and no more."""
    dry_multiplier: float = 0.0
    """Above 0: a token that would go on with a repetition is penalised, the more the longer that is."""
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    top_n_sigma: float = -1.0
    """Above 0: only logits within so many standard deviations of the highest."""
    xtc_probability: float = 0.0
    """How often all but the least likely of the tokens above `xtc_threshold` are left out."""
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    """The temperature is up to so much lower or higher, by how sure the model is."""
    dynatemp_exponent: float = 1.0
    mirostat: Literal[0, 1, 2] = 0
    """1 and 2 take the place of every other sampler but the temperature."""
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    samplers: tuple[str, ...] = DEFAULT_SAMPLERS
    """Which are used, and in which order."""
    min_keep: int = 0
    """So many tokens at least are left to draw from by top-p, min-p, typical-p and XTC."""

    @property
    def penalises(self) -> bool:
        """Tokens that came before are less likely, or more."""
        return bool(self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0)

    @property
    def uses_dry(self) -> bool:
        return self.dry_multiplier != 0 and self.dry_base >= 1 and self.dry_penalty_last_n > 0

    @property
    def uses_xtc(self) -> bool:
        return self.xtc_probability > 0 and self.xtc_threshold <= 0.5

    @property
    def needs_chain(self) -> bool:
        """Whether something is asked for besides bias, penalties on the answer, top-k, typical-p, top-p, min-p and
        temperature in their usual order."""
        return bool(
            self.samplers != DEFAULT_SAMPLERS
            or self.mirostat
            or self.min_keep
            or self.dynatemp_range > 0
            or self.top_n_sigma > 0
            or self.uses_xtc
            or self.uses_dry
            or (self.repeat_last_n is not None and self.penalises)
        )


@dataclass(frozen=True, slots=True)
class Execution:
    """What was decided about a request where it is answered. Its client says none of it."""

    lineage: Lineage | None = None
    """Reuse the state of this one, whatever the request says: to check it. None: as the request says."""
    is_kept: bool = True
    """False: nothing of what is computed is kept."""
    from_store: bool = False
    """Load what is stored even where the engine has it too, or would be faster: to check it."""
    is_prefix: bool = False
    """No client waits for an answer: it is evaluated so that others find it, and ends where its messages end."""
    in_pieces: bool = True
    """False: the answer is read when it is whole, so its events may come late and all together."""
    clamped_to: int | None = None
    """The longest answer that the configuration allows, where more was asked for."""
    depth: int = 0
    """How many models stand between the user and this request."""
    hops: int = 0
    """How many servers have passed it on."""
    tidied: Tidied = NOT_TIDIED
    """What rules of prefix hygiene have done to it."""


@dataclass(frozen=True, slots=True)
class Request:
    """One generation, as its client wants it. Exactly one of `messages` and `prompt` is set."""

    messages: tuple[Message, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    infill: Infill | None = None
    """With a prompt that is a text: the text behind it is known, too."""
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    reasoning: ReasoningFormat | None = None
    """None: as configured."""
    format: AnswerFormat | None = None
    """What the answer must look like. None: anything goes."""
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    line_seconds: float | None = None
    """The answer ends with the first line that is complete later than this after its first token."""
    indent: int = 0
    """The answer ends before a line, the first one excepted, that begins with fewer blanks."""
    n: int = 1
    top_logprobs: int | None = None
    """None: no logprobs. 0: the chosen token's only."""
    logprobs_as_drawn: bool = False
    """They are those that tokens were drawn with, after everything that `sampling` says. False: the model's."""
    forced: tuple[int, ...] = ()
    """Tokens that the answer is made to begin with, to learn their probabilities (`top_logprobs`)."""
    echo: bool = False
    """A raw prompt comes before the text, with `top_logprobs` as tokens with theirs."""
    template_args: Mapping[str, Json] = field(default_factory=dict)
    """Extra variables for the chat template (`enable_thinking`, ...)."""
    thinks_if_asked: bool = False
    """A model that runs here, and whose template can do without reasoning, reasons only where `template_args` ask
    for it. Services elsewhere have defaults of their own."""
    continues: bool = False
    """The last message, the assistant's, is the beginning of the answer: it goes on where that ends."""
    user: str = ""
    """Who asks: limits and fairness are per user."""
    namespace: str = ""
    """Requests share stored state only within one namespace, and what is in `SHARED`."""
    use_cache: bool = True
    """False: evaluate everything afresh; what is computed is still kept."""
    approximate: Approximation | Literal[False] | None = None
    """False: only state that was computed for exactly these tokens at exactly this place is reused. None: as
    configured."""
    evict: bool | None = None
    """Old messages may leave a conversation that is too long. None: as configured."""
    recall: Recall | None = None
    """How they come back. None: as configured."""
    kv_bits: int | None = None
    """In how many bits the state is stored: 16 is exact, 8 and 4 are not. None: as configured."""
    prefill_slice: int | None = None
    """Most prompt tokens in a step, where that is fewer than configured."""
    asks_permission: bool = False
    """Its client can ask a person before a dangerous tool of the server runs."""
    conversation_id: str | None = None
    cache_key: str | None = None
    """OpenAI's `prompt_cache_key`: names a conversation when nothing else does."""
    prefix_hash: str | None = None
    """What the client calls the beginning of its prompt: a name, on which no reuse depends."""
    ttl: Ttl | None = None
    """None: the usual one."""
    breakpoints: tuple[Breakpoint, ...] = ()
    """Where beginnings end that are sent again: in this order, each longer than the one before."""
    slot: int | None = None
    """The engine's slot that the client prefers."""
    want_progress: bool = False
    deadline_s: float | None = None
    keep_alive_s: float | None = None
    """How long its model stays loaded after it, where models are loaded on demand. 0: it is unloaded at once;
    negative: it stays. None: as configured."""
    speculation: bool | None = None
    """False: one token per step, nothing is drafted. None: as configured, but not with a seed: engines round
    differently in steps with drafts, and a seed is to give the same text again."""
    prediction: str = ""
    """What the client expects the answer to be like: OpenAI's `prediction`."""
    execution: Execution = Execution()

    def decided(self, **decisions: Any) -> Request:
        """The same request with other values for these fields of `Execution`."""
        return replace(self, execution=replace(self.execution, **decisions))

    def clamped(self, most: int | None) -> Request:
        """With an answer of at most so many tokens. None: as it is."""
        if most is None or (self.max_tokens is not None and self.max_tokens <= most):
            return self
        return replace(self, max_tokens=most).decided(clamped_to=most)

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that may be called, of those that the model is told of."""
        choice = self.tool_choice
        if choice.mode == "none":
            return ()
        names = (choice.name,) if choice.mode == "named" else choice.allowed
        return self.tools if names is None else tuple(tool for tool in self.tools if tool.name in names)

    @property
    def scores_prompt(self) -> bool:
        """The log probabilities of the prompt's own tokens are wanted: all of it is evaluated, for stored state
        has none."""
        return self.echo and self.top_logprobs is not None

    @property
    def limits_lines(self) -> bool:
        """Where the answer ends depends on its lines."""
        return self.line_seconds is not None or bool(self.indent)

    @property
    def may_speculate(self) -> bool:
        return self.speculation if self.speculation is not None else self.sampling.seed is None


# ── vectors, and documents by how well they answer a query ──

Vector: TypeAlias = "npt.NDArray[np.float32]"

EmbeddingInput = str | tuple[int, ...]
"""As it was written, or as the model's own token ids, to which nothing is added then."""


class Pooling(StrEnum):
    """How the states of an input's tokens become one vector."""

    MEAN = "mean"
    CLS = "cls"  # the state of the first token
    LAST = "last"  # the state of the last token
    RANK = "rank"  # a head on top of it gives one number: how well a document answers a query


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    inputs: tuple[EmbeddingInput, ...]
    dimensions: int | None = None
    """How many of the model's own to keep; None: all of them."""
    normalize: bool = True
    """Vectors get the length 1."""
    truncate: bool | None = None
    """The end of an input that is longer than the model's context is left out; otherwise it is refused. None: as
    configured."""
    user: str = ""
    namespace: str = ""
    """Vectors that were computed for others are not looked for; see `private_namespace`."""


@dataclass(frozen=True, slots=True)
class Embedded:
    vectors: tuple[Vector, ...]
    """One for each input, in their order."""
    prompt_tokens: int
    cached_tokens: int
    """Those of inputs whose vectors were known already."""


@dataclass(frozen=True, slots=True)
class RerankRequest:
    query: str
    documents: tuple[str, ...]
    truncate: bool = True
    """The end of a document that is too long beside the query is left out; otherwise it is refused."""
    user: str = ""
    namespace: str = ""
    """As in `EmbeddingRequest`."""


@dataclass(frozen=True, slots=True)
class Ranked:
    logits: tuple[float, ...]
    """One for each document, in their order: the more, the better it answers the query."""
    prompt_tokens: int
    cached_tokens: int
