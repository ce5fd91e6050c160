"""From a request to its prompt: template, token ids, and what is known about them before they are evaluated."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from emberkeep.chat.infill import infill_text
from emberkeep.chat.messages import (
    CacheKeys,
    RequestPart,
    cache_keys,
    is_stable,
    message_ends,
    place_of,
    stable_hash,
    stable_label,
    stable_messages,
    with_moved,
)
from emberkeep.chat.prompt_tokens import PromptTokenizer, SeamedTemplate, SeamedText, TokenizedText
from emberkeep.chat.template import ChatTemplate
from emberkeep.errors import ContextExceeded, InvalidField, Overloaded, TemplateFailed
from emberkeep.text import common_start
from emberkeep.token_arrays import TokenArray, common_prefix
from emberkeep.types.cache import Label
from emberkeep.types.events import Admitted, Marked
from emberkeep.types.lineage import EXACT, Lineage
from emberkeep.types.models import Vocab
from emberkeep.types.request import Breakpoint, Message, Request, Tool, Ttl
from emberkeep.values import dataclass

if TYPE_CHECKING:  # its library is loaded when a request wants it
    from emberkeep.chat.grammar import Constraint, Grammars

_REMEMBERED_PREFIXES = 64
_BORDERS = 4
"""Ends of messages, counted from the last, where a conversation may be taken up again."""
_NOT_RENDERED = (TemplateFailed, Overloaded)
"""No failures where an answer can do without: it is there already, or on its way."""
_PROBES = ("1", "x")
"""First letters of a user's message that no tokenizer joins with each other."""


@dataclass(frozen=True, slots=True)
class Splice:
    """How the state of a longer prompt, of which there may be some, becomes that of a shorter one.

    the longer    [ 0 ......... start ][ leaves ][ end .......... reached ]
    the shorter   [ 0 ......... start ][ insert ][ ..... computed ]
    """

    source: TokenArray
    """The longer one."""
    start: int
    end: int
    """What leaves it."""
    insert: TokenArray
    """What stands there instead: one token or more."""
    may_shift: bool
    """What follows is moved up. False: it is evaluated again."""

    def length(self, reached: int) -> int:
        """How much of the shorter prompt there is when so many tokens of the longer one have been computed."""
        return self.start + len(self.insert) + reached - self.end

    @property
    def saved(self) -> int:
        return self.end - self.start - len(self.insert)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model is given for a request: token ids, whose state they may reuse, and how they are evaluated."""

    messages: tuple[Message, ...]
    """Those of the request that are in it, with what was put in between. Empty for a raw prompt."""
    written: SeamedText
    """As the model reads them."""
    tokenized: TokenizedText
    tokens: TokenArray
    lineage: Lineage
    keys: CacheKeys
    """Those of the whole request, also where only a part of it is in here."""
    read_ahead: Set[bytes] = frozenset()
    """Chunks whose reading from disk has begun for it."""
    from_remote: Set[bytes] = frozenset()
    """Chunks that came for it from a server which other hosts share."""
    borders: frozenset[int] = frozenset()
    """Positions where others will go on: what cannot be cut by token is stored there."""
    closing: tuple[int, ...] = ()
    """What the template writes after the answer: evaluated after the end, for the next turn."""
    max_new: int = 0
    """How long the answer may become. 0: the prompt is evaluated, and nothing is sampled."""
    admitted: Admitted | None = None
    """None: nothing was planned for it."""
    splice: Splice | None = None
    """How to come by its state from that of a longer one."""
    prediction: tuple[int, ...] = ()
    """What the client expects the answer to be like."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def text(self) -> str:
        return self.written.text

    @property
    def reusable(self) -> int:
        """The last prompt token is always evaluated, because its logits start the answer. Where there is no answer
        it is like the others."""
        return len(self.tokens) - (self.max_new > 0)


@dataclass(frozen=True, slots=True)
class Stable:
    """The beginning of a prompt that stays while conversations come and go: system message and tools."""

    label: Label
    length: int
    """In tokens."""


def prompt_of_ids(ids: TokenArray, lineage: Lineage = EXACT, max_new: int = 0) -> Prompt:
    """One that is nothing but token ids, without any text or name."""
    tokenized = TokenizedText(ids.tolist(), [], is_given=True)
    return Prompt((), SeamedText(""), tokenized, ids, lineage, CacheKeys(None, None, None, None), max_new=max_new)


class TokenReplay(Protocol):
    """What is stored of one lineage, for a prompt that is still text. Used by one thread."""

    def read_ahead(self, text: str) -> Set[bytes]:
        """Begin to read from disk what is probably stored for `text`; returns the keys of it."""

    def replay(
        self, ids: Sequence[int], text: bytes, start: int, borders: Set[int]
    ) -> tuple[tuple[int, ...], int]:
        """A `Replay`."""


class PromptBuilder:
    """Safe to use from several threads; every method blocks, for milliseconds."""

    def __init__(
        self,
        vocab: Vocab,
        template: ChatTemplate,
        stored: Callable[[Lineage], TokenReplay],
        *,
        context: int,
        wants_borders: bool,
    ) -> None:
        """`wants_borders`: the engine's state can be resumed only where it was stored as a whole."""
        self._vocab = vocab
        self._template = SeamedTemplate(template, vocab)
        self._stored = stored
        self.context = context
        self._wants_borders = wants_borders
        self._tokenizer = PromptTokenizer(vocab)
        self._writing = template.traits.writing
        self._grammars: Grammars | None = None
        self._turn_end = tuple(self._tokenizer.encode(template.traits.turn_end))
        self._stable_ids: OrderedDict[str, TokenArray] = OrderedDict()

    def forget(self, owners: Container[str]) -> None:
        """Drop all texts that are remembered with their tokens, and all grammars: whose they are is not known."""
        self._stable_ids.clear()
        self._tokenizer.forget_texts()
        self._grammars = None

    # ── a prompt, however long ──

    def build(self, request: Request, lineage: Lineage, messages: tuple[Message, ...] | None = None) -> Prompt:
        """`messages`: those of the request that the model sees; None: all of them. Raises RequestError, but not
        for its length."""
        messages = request.messages if messages is None else messages
        stored = self._stored(lineage)
        written, tokenized, ahead = self._tokenize(request, messages, lineage, stored)
        return Prompt(messages, written, tokenized, tokenized.as_array(), lineage, cache_keys(request), ahead)

    def shorten(self, request: Request, lineage: Lineage, messages: tuple[Message, ...], longer: Prompt) -> Prompt:
        """A chat of which `longer` is a longer version: what both end with has the tokens that it has there."""
        written = self._render(request, messages)
        common = written.common_suffix(longer.written)
        ids, ends = longer.tokenized.ids, longer.tokenized.ends
        ends = [end for end in ends if end[0] >= len(longer.text) - common]
        at, position = min(ends, default=(len(longer.text), len(longer)))
        moved_up = len(longer.text) - len(written.text)
        replay = self._stored(lineage).replay
        before = self.lead(written)
        head = self._tokenizer.tokenize(written.up_to(at - moved_up), replay=replay, before=before)
        gone = position - len(head.ids)
        tail = [(end - moved_up, token - gone) for end, token in ends if end > at]
        tokenized = TokenizedText(head.ids + ids[position:], head.ends + tail)
        return Prompt(messages, written, tokenized, tokenized.as_array(), lineage, longer.keys, longer.read_ahead)

    def end_of(self, request: Request, lineage: Lineage, limit: int) -> Prompt:
        """The last `limit` tokens of a raw prompt, the first of which stays what the model wants there."""
        assert request.prompt is not None
        ids = request.prompt
        if isinstance(ids, str):
            ids = tuple(self._tokenizer.encode(ids, before=self.lead(SeamedText(ids))))
        has_lead = limit > 1 and ids[0] == self._vocab.bos
        ids = (ids[0], *ids[1:][1 - limit :]) if has_lead else ids[-limit:]
        tokenized = TokenizedText(list(ids), [], is_given=True)
        written = SeamedText(self.detokenize(ids))
        return Prompt((), written, tokenized, tokenized.as_array(), lineage, cache_keys(request))

    # ── one that fits ──

    def fit(self, prompt: Prompt, request: Request) -> Prompt:
        """With how long its answer may become. Raises ContextExceeded, InvalidField."""
        self._check_length(request, len(prompt))
        closing = self._turn_end if request.prompt is None else ()
        room = self.context - len(prompt)
        closing = closing if room > len(closing) else ()
        limit = room - len(closing)
        max_new = limit if request.max_tokens is None else min(request.max_tokens, limit)
        borders = self._borders(request, prompt) if self._wants_borders else frozenset()
        # No answer is longer than the context, and the engine's thread indexes all of it.
        prediction = tuple(self._vocab.tokenize(request.prediction, parse_special=False)[: self.context])
        return replace(prompt, closing=closing, max_new=max_new, borders=borders, prediction=prediction)

    def check_size(self, request: Request, *, may_evict: bool) -> None:
        """Raises ContextExceeded for what cannot fit, before it costs: a million characters take a second.

        `may_evict`: only the last message has to fit.
        """
        if request.prompt is not None:
            texts = [request.prompt] if isinstance(request.prompt, str) else []
            texts += [request.infill.suffix] if request.infill else []
        else:
            # Templates may leave out parts of answers.
            counted = request.messages[-1:] if may_evict else request.messages
            texts = [message.content for message in counted if message.role in ("user", "tool")]
        fewest = sum(map(self._tokenizer.fewest, texts))
        if fewest > self.context:
            raise ContextExceeded(fewest, self.context, is_counted=False)

    def count(self, request: Request, messages: tuple[Message, ...]) -> int:
        """How many tokens a chat with these messages has, however many. Nothing is read ahead for it."""
        written = self._render(request, messages)
        return len(self._tokenizer.tokenize(written, before=self.lead(written)).ids)

    def constraint(self, request: Request) -> Constraint | None:
        """What the answer must look like; None when anything goes. Raises RequestError."""
        if request.format is None and request.tool_choice.mode in ("auto", "none"):
            return None
        grammars = self._grammars
        if grammars is None:
            from emberkeep.chat.grammar import Grammars

            grammars = self._grammars = Grammars(self._vocab, self._writing)
        return grammars.constraint_for(request)

    # ── its parts ──

    def stable(self, request: Request, prompt: Prompt) -> Stable | None:
        """The stable beginning of a prompt. Nothing waits for it: call it when the prompt is on its way."""
        key = stable_hash(request)
        if key is None or request.execution.is_prefix:
            return None
        try:
            ids = self._stable_prefix(request, prompt.lineage)
        except _NOT_RENDERED:
            return None
        is_there = 0 < len(ids) < len(prompt) and common_prefix(ids, prompt.tokens) == len(ids)
        return Stable(stable_label(request, key), len(ids)) if is_there else None

    def marked(self, request: Request, prompt: Prompt) -> Marked:
        """How much of a prompt lies before its breakpoints. Nothing waits for it, as for its stable beginning."""
        long = [one for one in request.breakpoints if one.ttl is not Ttl.SHORT]
        last, last_long = (
            max(self._break_positions(request, prompt, breakpoints[-1:]), default=0)
            for breakpoints in (request.breakpoints, long)
        )
        return Marked(max(last, last_long), last_long)

    def place_of(self, request: Request, prompt: Prompt, token_index: int) -> RequestPart | None:
        """Which part of a chat stands at a token; None where that cannot be told."""
        if request.prompt is not None:
            return None
        offset = prompt.tokenized.offset_of(token_index, self.detokenize)
        with suppress(*_NOT_RENDERED):
            shown = replace(request, messages=prompt.messages)
            return place_of(self._renderer(request), shown, prompt.text, offset)
        return None

    def warmup(self, text: str) -> None:
        """Go through the motions once, so that the first request does not pay for lazy imports and cold caches."""
        with suppress(TemplateFailed):
            self._render(Request(), (Message("user", "Hello."),))
        self.encode(text)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def detokenize(self, tokens: Sequence[int]) -> str:
        return b"".join(self._vocab.pieces[token] for token in tokens).decode("utf-8", "replace")

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        if any(not 0 <= token < self._vocab.size for token in ids):
            raise InvalidField(param, f"token ids must be between 0 and {self._vocab.size - 1}.")

    def lead(self, written: SeamedText) -> tuple[int, ...]:
        """The token that the model wants before any text, unless the text writes it itself."""
        bos = self._vocab.bos
        if not self._vocab.adds_bos or bos is None:
            return ()
        return () if written.starts_with(self.detokenize([bos])) else (bos,)

    # ── inside ──

    def _tokenize(
        self, request: Request, messages: tuple[Message, ...], lineage: Lineage, stored: TokenReplay
    ) -> tuple[SeamedText, TokenizedText, Set[bytes]]:
        """Text and tokens, and what it began to read from disk."""
        if isinstance(request.prompt, tuple):
            self.check_ids(request.prompt, "prompt")
            tokenized = TokenizedText(list(request.prompt), [], is_given=True)
            return SeamedText(self.detokenize(request.prompt)), tokenized, frozenset()
        if request.execution.is_prefix and request.prompt is None and is_stable(request):
            ids = self._stable_prefix(request, lineage).tolist()
            return SeamedText(self.detokenize(ids)), TokenizedText(ids, []), frozenset()
        written = self._raw_text(request) if request.prompt is not None else self._render(request, messages)
        lead = self.lead(written)
        ahead = stored.read_ahead(self.detokenize(lead) + written.text) if request.use_cache else frozenset()
        return written, self._tokenizer.tokenize(written, replay=stored.replay, before=lead), ahead

    def _raw_text(self, request: Request) -> SeamedText:
        assert isinstance(request.prompt, str)
        if request.infill is None:
            return SeamedText(request.prompt)
        return infill_text(self._vocab, request.prompt, request.infill, self._template.quote)

    def _render(self, request: Request, messages: tuple[Message, ...]) -> SeamedText:
        execution = request.execution
        if not messages and not (execution.is_prefix and request.tools):
            raise InvalidField("messages", "at least one message is needed.")
        messages = messages if execution.is_prefix else with_moved(messages, execution.tidied.moved)
        tools, args = request.tools, request.template_args
        if not (request.continues and messages[-1].role == "assistant"):
            return self._template.render(messages, tools, add_generation_prompt=not execution.is_prefix, args=args)
        beginning = self._template.render_beginning(messages, tools, args=args)
        if beginning is None:
            raise InvalidField("messages", "this model cannot go on with an answer: end with the user's message.")
        return beginning

    def _check_length(self, request: Request, length: int) -> None:
        if length == 0:
            raise InvalidField("prompt", "the prompt is empty: send at least one token.")
        if length + (request.max_tokens != 0) > self.context:
            raise ContextExceeded(length, self.context)
        bad = [token for token in request.sampling.logit_bias if not 0 <= token < self._vocab.size]
        if bad:
            raise InvalidField("logit_bias", f"{bad[0]} is not a token of this model.")

    def _stable_prefix(self, request: Request, lineage: Lineage) -> TokenArray:
        """What prompts with these system messages and tools have in common. Raises TemplateFailed."""
        key = stable_hash(request)
        assert key is not None
        known = self._stable_ids.get(key)
        if known is None:
            known = self._stable_ids[key] = self._find_stable_prefix(request, lineage)
            while len(self._stable_ids) > _REMEMBERED_PREFIXES:
                with suppress(KeyError):
                    self._stable_ids.popitem(last=False)
        return known

    def _find_stable_prefix(self, request: Request, lineage: Lineage) -> TokenArray:
        """Found by trying: two questions, and where their prompts part."""
        stable = stable_messages(request.messages)
        tokenized = []
        for probe in _PROBES:
            messages = [*stable, Message("user", probe)]
            written = self._template.render(messages, request.tools, args=request.template_args)
            replay, before = self._stored(lineage).replay, self.lead(written)
            tokenized.append(self._tokenizer.tokenize(written, replay=replay, before=before).as_array())
        return tokenized[0][: common_prefix(*tokenized)]

    def _borders(self, request: Request, prompt: Prompt) -> frozenset[int]:
        """Token positions at which the stable beginning and the last messages end."""
        ends: list[int] = []
        stable = self.stable(request, prompt)
        if request.prompt is None:
            with suppress(*_NOT_RENDERED):
                shown = replace(request, messages=prompt.messages)
                ends = message_ends(self._renderer(request), shown, prompt.text, _BORDERS)
        position_at = dict(prompt.tokenized.ends)
        borders = [position_at[end] for end in ends if end in position_at]
        borders += self._break_positions(request, prompt, request.breakpoints[-_BORDERS:])
        return frozenset([*borders, stable.length] if stable else borders) - {0, len(prompt)}

    def _break_positions(
        self, request: Request, prompt: Prompt, breakpoints: Sequence[Breakpoint]
    ) -> Iterator[int]:
        """In tokens; of those that can be found."""
        count = len(stable_messages(request.messages))
        for one in breakpoints:
            if one.messages == 0 or (one.messages == count and one.chars is None):
                stable = self.stable(request, prompt)
                yield stable.length if stable else 0
                continue
            with suppress(*_NOT_RENDERED):
                beginning = _up_to(one, request.messages, prompt.messages, count)
                offset = common_start(self._renderer(request)(beginning, request.tools), prompt.text)
                yield prompt.tokenized.position_at(prompt.text, offset, self._vocab.pieces)

    def _renderer(self, request: Request) -> Callable[[Sequence[Message], Sequence[Tool]], str]:
        """Renders the beginning of a conversation."""

        def render(messages: Sequence[Message], tools: Sequence[Tool]) -> str:
            args = request.template_args
            return self._template.render(messages, tools, add_generation_prompt=False, args=args).text

        return render


def _up_to(
    end: Breakpoint, messages: Sequence[Message], shown: Sequence[Message], stable: int
) -> Sequence[Message]:
    """The part of `shown` before `end`. Of `messages`, some that follow the `stable` ones may not be in it."""
    gone = len(messages) - len(shown) if end.messages > stable else 0
    beginning = shown[: max(end.messages - gone, 0)]
    if end.chars is None or not beginning:
        return beginning
    return (*beginning[:-1], replace(beginning[-1], content=beginning[-1].content[: end.chars]))


def splice_between(longer: Prompt, shorter: Prompt, *, may_shift: bool) -> Splice:
    """What has to leave the longer one, and stands there instead. Pure."""
    source, tokens = longer.tokens, shorter.tokens
    start = common_prefix(source, tokens)
    most = min(len(source), len(tokens)) - start
    # Something is always put there: evaluating it is what moves the rest.
    same = min(common_prefix(source[::-1], tokens[::-1]), most, len(tokens) - start - 1)
    end, at = len(source) - same, len(tokens) - same
    return Splice(source, start, end, tokens[start:at], may_shift)
