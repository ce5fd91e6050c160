"""The cache as users see it: what is kept, for which user, and why a prompt was not reused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace

from emberkeep.chat.prompt import Prompt, PromptBuilder
from emberkeep.errors import NoSuchEntry
from emberkeep.kv.lookups import Peek
from emberkeep.kv.store import KvStore
from emberkeep.kv.tree import Cursor, tokens_to
from emberkeep.sched.admission import Lineages
from emberkeep.sched.scheduler import Scheduler
from emberkeep.sched.sequence_state import Reuse
from emberkeep.session.conversation import Conversations
from emberkeep.session.hygiene import Volatility, in_words, remedy
from emberkeep.token_arrays import TokenArray
from emberkeep.types.cache import CacheEntry, CacheTree, EntryText, Explanation, Removed, Verified
from emberkeep.types.events import (
    Completed,
    Divergence,
    Events,
    LookupRecord,
    MissReason,
    Source,
    Sourced,
    TextDelta,
)
from emberkeep.types.lineage import SHARED, Approximation, Lineage
from emberkeep.types.request import Execution, Request, Sampling

_EXCERPT_TOKENS = 12
_SHOWN_CHARS = 64
_WORTH_TELLING = 64
"""The fewest tokens that are evaluated again because of a place that changes with every call, to say so."""
_NOTICEABLE = 16
"""The fewest tokens shared with another user that an explanation mentions."""


class StoreCache:
    """Every method but `verify` may block for milliseconds, removing for longer: not for the event loop."""

    def __init__(
        self,
        scheduler: Scheduler,
        prompts: PromptBuilder,
        explainer: Explainer,
        generate: Callable[[Request], Events],
    ) -> None:
        self._scheduler = scheduler
        self._store = scheduler.store
        self._prompts = prompts
        self._generate = generate
        self.explain = explainer.explain
        self.remove_user = self._store.holders.forget

    def entries(self) -> list[CacheEntry]:
        self._store.notice_forgotten()
        hot = self._scheduler.idle_entries()
        return [_with_hot(entry, hot) for entry in self._store.catalogue.entries()]

    def tree(self, limit: int, at: str = "") -> CacheTree:
        self._store.notice_forgotten()
        tree = self._store.catalogue.tree(self._scheduler.idle_entries(), limit, at)
        if tree is None:
            raise NoSuchEntry("That part of the tree is not there any more: look at the whole of it.", "at")
        return tree

    def show(self, entry_id: str) -> EntryText:
        entry, tokens, _ = self.stored(entry_id)
        return EntryText(entry, self._prompts.detokenize(tokens))

    def stored(self, entry_id: str) -> tuple[CacheEntry, list[int], Lineage]:
        """An entry, the tokens of its latest state, and whose they are."""
        entry, tail = self._entry(entry_id), self._store.catalogue.tail(entry_id)
        if tail is None:
            raise _unknown(entry_id)
        return entry, tokens_to(tail).tolist(), tail.lineage

    def pin(self, entry_id: str, pinned: bool) -> CacheEntry:
        if not self._store.catalogue.pin(self._entry(entry_id).id, pinned):
            raise NoSuchEntry(f"{entry_id} has no name that could be pinned: use it once, then pin it.", "id")
        return self._entry(entry_id)

    def remove(self, entry_id: str) -> Removed:
        self._scheduler.drop_idle([entry_id]).result()
        for store in self._drafts:
            store.catalogue.remove(entry_id)
        removed = self._store.catalogue.remove(entry_id)
        if removed is None:
            raise _unknown(entry_id)
        return removed

    def gc(self) -> Removed:
        self._scheduler.drop_idle(self._store.catalogue.expired(self._scheduler.idle_entries())).result()
        for store in self._drafts:
            store.catalogue.gc()
        return self._store.catalogue.gc()

    @property
    def _drafts(self) -> list[KvStore]:
        """Stores of a draft model: what they hold is of the same texts, under the same names, and not shown."""
        return self._scheduler.stores[1:]

    def _entry(self, entry_id: str) -> CacheEntry:
        self._store.notice_forgotten()
        entry = self._store.catalogue.entry(entry_id)
        if entry is None:
            raise _unknown(entry_id)
        return _with_hot(entry, self._scheduler.idle_entries())

    async def verify(self, entry_id: str, tokens: int) -> Verified:
        """Compare stored state with a fresh evaluation of the same tokens: both are continued greedily. Does not
        block. Raises NoSuchEntry, Overloaded, EngineError."""
        entry, ids, lineage = await asyncio.to_thread(self.stored, entry_id)
        engine = self._scheduler.engine
        # At the end of a turn a model has nothing to add: without this there would be nothing to compare.
        text_only = dict.fromkeys(engine.vocab.controls | engine.vocab.eog, -100.0)
        greedy = Request(
            prompt=tuple(ids[: max(engine.capabilities.context - tokens, 1)]),
            sampling=Sampling(temperature=0.0, logit_bias=text_only),
            max_tokens=tokens,
            user=SHARED,  # it counts against no user's limit
            namespace=lineage.owner,
            approximate=False,
            speculation=False,  # steps of another shape round differently
            execution=Execution(lineage, is_kept=False, from_store=True),
        )
        stored, lookup = await self._continue(greedy)
        fresh, _ = await self._continue(replace(greedy, use_cache=False))
        pairs = zip(stored, fresh, strict=False)
        agreed = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(stored), len(fresh)))
        return Verified(
            entry,
            lookup.reused_tokens,
            max(len(stored), len(fresh)),
            agreed,
            lookup.wide_tokens,
            lookup.reproducible_tokens,
        )

    async def _continue(self, request: Request) -> tuple[list[int], LookupRecord]:
        """The ids of the continuation, and what was reused of the prompt."""
        ids: list[int] = []
        lookup = LookupRecord()
        async for event in self._generate(request):
            if isinstance(event, TextDelta):
                ids += event.tokens
            elif isinstance(event, Completed):
                lookup = event.lookup
        return ids, lookup


class Explainer:
    """What of a request is stored, and why not more. Every method may block for milliseconds."""

    def __init__(
        self,
        scheduler: Scheduler,
        prompts: PromptBuilder,
        conversations: Conversations,
        lineages: Lineages,
        equip: Callable[[Request], Request],
    ) -> None:
        """`equip`: a request as its prompt is made of it. Raises RequestError."""
        self._scheduler = scheduler
        self._store = scheduler.store
        self._prompts = prompts
        self._conversations = conversations
        self._lineages = lineages
        self._equip = equip
        self.volatility = Volatility()

    def explain(self, request: Request) -> Explanation:
        """What `request` would reuse if it came now, and why not more. Raises RequestError."""
        request = self._equip(request)
        approximation = self._lineages.approximation(request)
        prompt = self._conversations.open(request, self._lineages.of(request), is_dry_run=True).prompt
        pieces = self._scheduler.engine.vocab.pieces
        found = self._explain(request, prompt, approximation)
        return replace(found, pieces=[pieces[token] for token in prompt.tokens.tolist()])

    def _explain(self, request: Request, prompt: Prompt, approximation: Approximation | None) -> Explanation:
        if not request.use_cache:
            fresh = LookupRecord(
                prompt_tokens=len(prompt.tokens),
                reason=MissReason.DISABLED,
                sources=(Sourced(Source.EVALUATED, len(prompt.tokens)),),
            )
            return Explanation(fresh, "Nothing is reused: the request asks for everything to be evaluated afresh.")
        wanted = prompt.tokens[:-1]
        hot = self._scheduler.hot_tokens(prompt.lineage, wanted).result()
        peek = self._store.peek(
            prompt.lineage, wanted, snapshots=self._scheduler.engine.capabilities.kv_unit.has_snapshots
        )
        warm = max(peek.warm_tokens - hot, 0) if hot < peek.tokens else 0
        cold, reused = max(peek.tokens - max(peek.warm_tokens, hot), 0), max(hot, peek.tokens)
        lookup = LookupRecord(
            prompt_tokens=len(prompt.tokens),
            hot_tokens=hot,
            warm_tokens=warm,
            cold_tokens=cold,
            reason=MissReason.NEW,
            sources=self._sources(peek, hot, len(prompt.tokens)),
        )
        if reused >= len(wanted):
            return Explanation(
                replace(lookup, reason=MissReason.NONE),
                f"All {reused:,} tokens that can be are stored; the last one is always evaluated.",
            )
        moved = self._store.peek_elsewhere(prompt.lineage, wanted, reused, approximation) if approximation else 0
        found = self._why(request, prompt, replace(lookup, moved_tokens=moved), peek.cursor, reused)
        also = f" {moved:,} tokens of what follows are stored at other places and would be moved."
        return replace(found, sentence=found.sentence + also) if moved else found

    def _sources(self, peek: Peek, hot: int, length: int) -> tuple[Sourced, ...]:
        """What would be moved is not told apart from what would be evaluated."""
        if self._scheduler.engine.capabilities.kv_unit.has_snapshots and hot < peek.tokens:
            hot = 0  # a snapshot is restored as a whole
        reuse = Reuse()
        reuse.add(0, hot, Source.HOT)
        for start, end, is_warm in peek.spans:
            reuse.add(max(start, hot), end, Source.WARM if is_warm else Source.COLD)
        return reuse.sources(length)

    def _why(
        self, request: Request, prompt: Prompt, lookup: LookupRecord, cursor: Cursor, reused: int
    ) -> Explanation:
        def because(reason: MissReason, sentence: str) -> Explanation:
            return Explanation(replace(lookup, reason=reason), f"{_so_far(reused, prompt)} {sentence}")

        if not self._store.fits_engine:
            sentence = "Attention is computed in another way than when the store was opened, with other bytes."
            return because(MissReason.OTHER_MODEL, sentence)
        if gone := self._store.why_gone(cursor, prompt.tokens):
            return because(gone, _GONE[gone].format(at=cursor.position))
        other = self._store.catalogue.elsewhere(prompt.lineage.owner, prompt.tokens)
        if other and other.tokens >= cursor.position + _NOTICEABLE:
            whose = f"the user {other.user}" if other.user else "requests without a user"
            sentence = f"{other.tokens:,} tokens of it are stored for {whose}, and users do not share state."
            return because(MissReason.OTHER_USER, sentence)
        if cursor.position < _NOTICEABLE and (model := self._store.other_model(_sources(prompt))):
            sentence = f"Its beginning is stored for {model}, whose state fits no other model or engine."
            return because(MissReason.OTHER_MODEL, sentence)
        stored = self._store.stored_after(cursor)
        if len(stored) and cursor.position < len(prompt.tokens) - 1:
            found = replace(
                lookup, reason=MissReason.DIVERGED, divergence=self._divergence(cursor, prompt, stored)
            )
            return self._diverged(request, prompt, found, reused)
        if reused < cursor.position:
            sentence = f"{cursor.position:,} are known, but this model's state can be resumed only at snapshots."
            return because(MissReason.NO_SNAPSHOT, sentence)
        return because(MissReason.NEW, "Nothing was ever stored for what follows.")

    def _diverged(self, request: Request, prompt: Prompt, lookup: LookupRecord, reused: int) -> Explanation:
        lookup = self.located(request, prompt, lookup)
        d = lookup.divergence
        assert d is not None
        sides = f"stored is {d.stored_text!r}, the prompt has {d.prompt_text!r}"
        where = d.where[:1].upper() + d.where[1:] if d.where else "The prompt"
        what = {
            MissReason.TOOLS: f"{where} was changed, added or moved",
            MissReason.EDITED: f"{where} was edited",
            MissReason.VOLATILE: f"{where} differs from an earlier request only in {in_words(d.volatile)}",
        }.get(lookup.reason, f"{where} goes on differently")
        sentence = f"{_so_far(reused, prompt)} {what} at token {d.token_index:,}: {sides}."
        return Explanation(lookup, f"{sentence} {remedy(d.volatile)}" if d.volatile else sentence)

    def located(self, request: Request, prompt: Prompt, lookup: LookupRecord) -> LookupRecord:
        """A lookup that diverged, with the part of the request where it did."""
        divergence = lookup.divergence
        if divergence is None:
            return lookup
        place = self._prompts.place_of(request, prompt, divergence.token_index)
        if place is None:
            return lookup
        reason = MissReason.EDITED
        if place.in_tools:
            reason = MissReason.TOOLS
        elif place.is_last:
            reason = MissReason.DIVERGED
        divergence = replace(divergence, where=place.sentence)
        if lookup.prompt_tokens - divergence.token_index >= _WORTH_TELLING and not place.is_last:
            divergence = replace(divergence, volatile=self.volatility.compare(request, place))
        return replace(
            lookup, reason=MissReason.VOLATILE if divergence.volatile else reason, divergence=divergence
        )

    def _divergence(self, cursor: Cursor, prompt: Prompt, stored: TokenArray) -> Divergence:
        at = cursor.position
        return Divergence(
            token_index=at,
            stored_text=self._prompts.detokenize(stored[:_EXCERPT_TOKENS].tolist()),
            prompt_text=self._prompts.detokenize(prompt.tokens[at : at + _EXCERPT_TOKENS].tolist()),
        )


_GONE = {
    MissReason.EVICTED: "What followed token {at:,} was stored and evicted: its room was needed.",
    MissReason.EXPIRED: "What followed token {at:,} was stored, outlived its TTL and was removed.",
    MissReason.REMOVED: "What followed token {at:,} was stored and removed by request.",
}


def _with_hot(entry: CacheEntry, hot: Mapping[str, int]) -> CacheEntry:
    return replace(entry, hot_tokens=min(hot.get(entry.id, 0), entry.tokens))


def _sources(prompt: Prompt) -> list[str]:
    return [key for key in (prompt.keys.stable, prompt.keys.prefix) if key]


def _so_far(reused: int, prompt: Prompt) -> str:
    return f"{reused:,} of {len(prompt.tokens):,} tokens can be reused."


def _unknown(entry_id: str) -> NoSuchEntry:
    return NoSuchEntry(f"There is no entry {entry_id[:_SHOWN_CHARS]!r}: `emberkeep cache ls` lists them.", "id")
