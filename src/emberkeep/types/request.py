"""A request, and the lineage of the state that it may reuse."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import field, replace
from enum import StrEnum
from typing import Any, Literal

from emberkeep.errors import ConfigError, InvalidField
from emberkeep.types.hygiene import NOT_TIDIED, Tidied
from emberkeep.types.lineage import EXACT_BITS, Approximation, Lineage
from emberkeep.types.sampling import Sampling
from emberkeep.values import dataclass

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


def exceeds_depth(value: Json, levels: int) -> bool:
    """Whether objects and lists are nested deeper than `levels`. Not recursive."""
    level = [value]
    for _ in range(levels):
        level = [child for parent in level for child in _containers(parent)]
        if not level:
            return False
    return True


def _containers(value: Json) -> list[Json]:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [child for child in children if isinstance(child, (dict, list))]


# ── which lineage a request has ──

_CANNOT_MOVE = "needs an engine that can move stored state: use --engine hf, or ask for exact answers."


@dataclass(frozen=True, slots=True)
class Lineages:
    default_bits: int
    """In how many bits state is stored, unless a request says otherwise."""
    packs: frozenset[int]
    """What the engine can do."""
    approximation_by_default: Approximation | None = None
    """For requests that do not say whether state may be moved."""
    can_move: bool = False
    """The engine can move state."""
    exact: bool = False
    """Nothing is approximate, and who asks for it is refused."""
    can_splice: bool = False
    """The engine can splice its state."""

    def check(self) -> None:
        """Raises ConfigError unless the engine can do the default."""
        if self.exact and self.default_bits != EXACT_BITS:
            raise ConfigError(
                f"approximate = never wants exact state, and kv_bits = {self.default_bits} is not: leave one out."
            )
        if self.approximation_by_default is not None and not self.can_move:
            raise ConfigError(f"approximate = {self.approximation_by_default.repair} {_CANNOT_MOVE}")
        if self.default_bits not in self.packs:
            raise ConfigError(f"kv_bits {self.default_bits} is nothing for this model: {_possible(self.packs)}.")

    def of(self, request: Request) -> Lineage:
        """What `request` may reuse and may leave behind. Raises InvalidField for what the engine cannot do."""
        if request.execution.lineage is not None:
            return request.execution.lineage
        if self.exact:
            self._check_exact(request)
            return Lineage(request.namespace)
        if request.kv_bits is not None and request.kv_bits not in self.packs:
            raise InvalidField("kv_bits", f"this model cannot do {request.kv_bits}: {_possible(self.packs)}.")
        bits = self.default_bits if request.kv_bits is None else request.kv_bits
        approximation = self.approximation(request)
        return Lineage(request.namespace, bits, approximation.repair if approximation else None)

    def _check_exact(self, request: Request) -> None:
        """Raises InvalidField for a request that wants anything else."""
        wanted = {"approximate": bool(request.approximate), "kv_bits": request.kv_bits not in (None, EXACT_BITS)}
        for name, is_wanted in wanted.items():
            if is_wanted:
                raise InvalidField(name, "this server answers exactly only (approximate = never): leave it out.")

    def approximation(self, request: Request) -> Approximation | None:
        """How state from other places may be reused for `request`. None: it may not.

        Prefixes are made for others, who may want them exact. Raises InvalidField for what the engine cannot do.
        """
        if self.exact or request.execution.is_prefix or request.approximate is False:
            return None
        if request.approximate is not None and not self.can_move:
            raise InvalidField("approximate", _CANNOT_MOVE)
        return request.approximate or self.approximation_by_default

    def may_splice(self, request: Request) -> bool:
        """Where messages leave its context, its state may be spliced, and not be evaluated again."""
        return self.can_splice and not self.exact and request.approximate is not False

    def repacked(self, lineage: Lineage, bits: int) -> Lineage:
        """The same, stored in other bits."""
        return lineage if self.exact else replace(lineage, bits=bits)


def _possible(packs: frozenset[int]) -> str:
    return f"use {' or '.join(str(bits) for bits in sorted(packs, reverse=True))}"
