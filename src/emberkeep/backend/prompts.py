"""From a request to the tokens that are evaluated for it, and what is known about them before that."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from emberkeep.chat.grammar import Constraint, Grammars
from emberkeep.chat.messages import (
    CacheKeys,
    Place,
    cache_keys,
    head_of,
    message_ends,
    place_of,
    stable_hash,
    stable_head,
    stable_messages,
)
from emberkeep.chat.template import ChatTemplate, SeamedTemplate
from emberkeep.chat.tokens import PromptTokenizer, TokenizedText
from emberkeep.errors import ContextExceeded, InvalidField, Overloaded, TemplateFailed
from emberkeep.kv.entries import Label
from emberkeep.kv.store import KvStore
from emberkeep.kv.tree import ChunkKey, TokenArray, common_prefix
from emberkeep.sched.job import Stable
from emberkeep.sched.lookahead import Lookahead
from emberkeep.sched.recent import RecentAnswers
from emberkeep.types import EntryKind, Lineage, Message, Request, Tool, Vocab

_REMEMBERED_PREFIXES = 64
_BORDERS = 4
"""Ends of messages, counted from the last, where a conversation may be taken up again."""
_NOT_RENDERED = (TemplateFailed, Overloaded)
"""No failures where an answer can do without: it is there already, or on its way."""
_PROBES = ("1", "x")
"""First letters of a user's message that no tokenizer joins with each other."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A request as text and as tokens, however long."""

    text: str
    spelled: TokenizedText
    read_ahead: frozenset[ChunkKey]
    lineage: Lineage

    def __len__(self) -> int:
        return len(self.spelled.ids)


@dataclass(frozen=True, slots=True)
class Prompt:
    text: str
    tokens: TokenArray
    closing: tuple[int, ...]
    constraint: Constraint | None
    read_ahead: frozenset[ChunkKey]
    keys: CacheKeys
    label: Label
    borders: frozenset[int]
    spelled: TokenizedText
    lineage: Lineage


class PromptMaker:
    """Safe to use from several threads; every method blocks, for milliseconds."""

    def __init__(
        self,
        vocab: Vocab,
        template: ChatTemplate,
        store: KvStore,
        recent: RecentAnswers,
        *,
        context: int,
        wants_borders: bool,
    ) -> None:
        """`wants_borders`: the engine's state can be resumed only where it was stored as a whole."""
        self._vocab = vocab
        self._template = SeamedTemplate(template, vocab)
        self._store = store
        self._recent = recent
        self._context = context
        self._wants_borders = wants_borders
        self._tokenizer = PromptTokenizer(vocab)
        self._grammars = Grammars(vocab, template.writing)
        self._turn_end = tuple(self._tokenizer.encode(template.turn_end)) if template.turn_end else ()
        self._stable_ids: OrderedDict[str, TokenArray] = OrderedDict()

    def make(self, request: Request, lineage: Lineage, draft: Draft | None = None) -> Prompt:
        """Everything about a request that needs no engine. Raises RequestError."""
        draft = draft or self.draft(request, lineage)
        text, spelled = draft.text, draft.spelled
        self._check_length(request, len(draft))
        tokens = np.array(spelled.ids, np.int32)
        keys = cache_keys(request)
        return Prompt(
            text=text,
            tokens=tokens,
            closing=self._turn_end if request.prompt is None else (),
            constraint=self._grammars.constraint_for(request),
            read_ahead=draft.read_ahead,
            keys=keys,
            label=_label(request, keys),
            borders=self._borders(request, draft, tokens) if self._wants_borders else frozenset(),
            spelled=spelled,
            lineage=lineage,
        )

    def check_size(self, request: Request, *, may_evict: bool) -> None:
        """Raises ContextExceeded for what cannot fit, before it costs: a million characters take a second.

        `may_evict`: only the last message has to fit.
        """
        if request.prompt is not None:
            texts = [request.prompt] if isinstance(request.prompt, str) else []
        else:
            # Templates may leave out parts of answers.
            said = request.messages[-1:] if may_evict else request.messages
            texts = [message.content for message in said if message.role in ("user", "tool")]
        fewest = sum(map(self._tokenizer.fewest, texts))
        if fewest > self._context:
            raise ContextExceeded(fewest, self._context, is_counted=False)

    def draft(self, request: Request, lineage: Lineage) -> Draft:
        """Raises RequestError, but not for its length."""
        self._store.refresh()
        text, spelled, ahead = self._spell(request, lineage)
        return Draft(text, spelled, frozenset(ahead), lineage)

    def redraft(self, request: Request, lineage: Lineage, longer: Draft) -> Draft:
        """A chat of which `longer` is a longer version: what both end with is spelled as it is there."""
        text = self.render(request)
        common = _common_suffix(text, longer.text)
        ends = [end for end in longer.spelled.ends if end[0] >= len(longer.text) - common]
        at, position = min(ends, default=(len(longer.text), len(longer)))
        moved_up = len(longer.text) - len(text)
        look = self._lookahead(lineage)
        head = self._tokenizer.tokenize(text[: at - moved_up], replay=look.replay, before=self.lead(text))
        gone = position - len(head.ids)
        tail = [(end - moved_up, token - gone) for end, token in ends if end > at]
        spelled = TokenizedText(head.ids + longer.spelled.ids[position:], head.ends + tail)
        return Draft(text, spelled, longer.read_ahead, lineage)

    def count(self, request: Request) -> int:
        """How many tokens the messages of `request` have, however many. Nothing is read ahead for it."""
        text = self.render(request)
        return len(self._tokenizer.encode(text, before=self.lead(text)))

    def end_of(self, request: Request, limit: int) -> tuple[int, ...]:
        """The last `limit` tokens of a raw prompt, the first of which stays what the model wants there."""
        assert request.prompt is not None
        ids = request.prompt
        if isinstance(ids, str):
            ids = tuple(self._tokenizer.encode(ids, before=self.lead(ids)))
        if limit > 1 and ids[0] == self._vocab.bos:
            return (ids[0], *ids[1:][1 - limit :])
        return ids[-limit:]

    def named(self, prompt: Prompt, request: Request) -> Prompt:
        """`prompt` under the names of `request`, which it is a part of."""
        keys = cache_keys(request)
        return replace(prompt, keys=keys, label=_label(request, keys))

    def stable(self, request: Request, lineage: Lineage, tokens: TokenArray) -> Stable | None:
        """The stable beginning of a prompt. Nothing waits for it: call it when the prompt is on its way."""
        key = stable_hash(request)
        if key is None or request.is_prefix:
            return None
        try:
            ids = self._stable_prefix(request, lineage)
        except _NOT_RENDERED:
            return None
        is_there = 0 < len(ids) < len(tokens) and common_prefix(ids, tokens) == len(ids)
        return Stable(_stable_label(request, key), len(ids)) if is_there else None

    def label(self, request: Request) -> Label:
        """What the state that `request` leaves behind is called."""
        return _label(request, cache_keys(request))

    def render(self, request: Request) -> str:
        if not request.messages and not (request.is_prefix and request.tools):
            raise InvalidField("messages", "at least one message is needed.")
        return self._template.render(
            request.messages,
            request.tools,
            add_generation_prompt=not request.is_prefix,
            args=request.template_args,
        )

    def place_of(self, request: Request, prompt: Prompt, token_index: int) -> Place | None:
        """Which part of a chat stands at a token; None where that cannot be told."""
        if request.prompt is not None:
            return None
        offset = prompt.spelled.offset_of(token_index, self.detokenize)
        with suppress(*_NOT_RENDERED):
            return place_of(self._ender(request), request, prompt.text, offset)
        return None

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def detokenize(self, tokens: Sequence[int]) -> str:
        return b"".join(self._vocab.pieces[token] for token in tokens).decode("utf-8", "replace")

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        if any(not 0 <= token < self._vocab.size for token in ids):
            raise InvalidField(param, f"token ids must be between 0 and {self._vocab.size - 1}.")

    def lead(self, text: str) -> tuple[int, ...]:
        """The token that the model wants before any text, unless the text writes it itself."""
        bos = self._vocab.bos
        if not self._vocab.adds_bos or bos is None:
            return ()
        return () if text.startswith(self.detokenize([bos])) else (bos,)

    def _spell(self, request: Request, lineage: Lineage) -> tuple[str, TokenizedText, set[ChunkKey]]:
        """Text and ids of a request, and what it began to read from disk."""
        if isinstance(request.prompt, tuple):
            self.check_ids(request.prompt, "prompt")
            return self.detokenize(request.prompt), TokenizedText(list(request.prompt), []), set()
        if request.is_prefix and request.prompt is None and _is_stable(request):
            ids = self._stable_prefix(request, lineage).tolist()
            return self.detokenize(ids), TokenizedText(ids, []), set()
        text = request.prompt if request.prompt is not None else self.render(request)
        look = self._lookahead(lineage)
        lead = self.lead(text)
        ahead = look.read_ahead(self.detokenize(lead) + text) if request.use_cache else set()
        return text, self._tokenizer.tokenize(text, replay=look.replay, before=lead), ahead

    def _check_length(self, request: Request, length: int) -> None:
        if length == 0:
            raise InvalidField("prompt", "the prompt is empty: send at least one token.")
        if length + (request.max_tokens != 0) > self._context:
            raise ContextExceeded(length, self._context)
        bad = [token for token in request.sampling.logit_bias if not 0 <= token < self._vocab.size]
        if bad:
            raise InvalidField("logit_bias", f"{bad[0]} is not a token of this model.")

    # ── the stable beginning ──

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
        spelled = []
        for probe in _PROBES:
            messages = [*stable, Message("user", probe)]
            text = self._template.render(messages, request.tools, args=request.template_args)
            look = self._lookahead(lineage)
            ids = self._tokenizer.encode(text, replay=look.replay, before=self.lead(text))
            spelled.append(np.array(ids, np.int32))
        return spelled[0][: common_prefix(*spelled)]

    def _lookahead(self, lineage: Lineage) -> Lookahead:
        return Lookahead(self._store, self._recent, self._vocab, lineage)

    # ── borders ──

    def _borders(self, request: Request, draft: Draft, tokens: TokenArray) -> frozenset[int]:
        """Token positions at which the stable beginning and the last messages end."""
        ends: list[int] = []
        stable = self.stable(request, draft.lineage, tokens)
        if request.prompt is None:
            with suppress(*_NOT_RENDERED):
                ends = message_ends(self._ender(request), request, draft.text, _BORDERS)
        position_at = dict(draft.spelled.ends)
        found = [position_at[end] for end in ends if end in position_at]
        return frozenset([*found, stable.length] if stable else found) - {len(tokens)}

    def _ender(self, request: Request) -> _Ender:
        return _Ender(self._template, request)


def _common_suffix(a: str, b: str) -> int:
    """In characters; found by halving, because comparing slices is quick and comparing characters is not."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[len(a) - middle :] == b[len(b) - middle :]:
            low = middle
        else:
            high = middle - 1
    return low


class _Ender:
    """Renders the beginning of a conversation as `segments` wants it."""

    def __init__(self, template: SeamedTemplate, request: Request) -> None:
        self._template = template
        self._args = request.template_args

    def __call__(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        return self._template.render(messages, tools, add_generation_prompt=False, args=self._args)


def _is_stable(request: Request) -> bool:
    return len(stable_messages(request.messages)) == len(request.messages)


def _label(request: Request, keys: CacheKeys) -> Label:
    if request.is_prefix and request.prompt is None and keys.stable and _is_stable(request):
        return _stable_label(request, keys.stable)
    kind = EntryKind.PREFIX if request.is_prefix and not request.conversation_id else EntryKind.CONVERSATION
    return Label(
        kind=kind,
        key=keys.entry,
        head=head_of(request),
        ttl=request.ttl,
        name=request.conversation_id or request.cache_key or "",
        source=keys.stable or keys.prefix or "",
    )


def _stable_label(request: Request, key: str) -> Label:
    ttl = request.ttl if request.is_prefix else None
    return Label(EntryKind.PREFIX, key, stable_head(request), ttl, source=key)
