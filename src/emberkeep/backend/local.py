"""The request story over our own scheduler and engine.

    request -> conversation -> prompt -> plan -> sequences -> events

`generate` is that line from top to bottom. What it calls returns: which messages the model sees
(`session/conversation`), the token ids of them (`chat/prompt`), whether they fit into memory (`sched/admission`),
what is computed and reused (`sched/scheduler`), and what the sampled tokens mean (`chat/output`).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Container
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from time import monotonic

import numpy as np

from emberkeep.backend.base import ModelCard
from emberkeep.backend.cache import Explainer, StoreCache
from emberkeep.backend.choices import (
    Channel,
    Choice,
    Full,
    Item,
    MakeSampler,
    Outbox,
    Samplers,
    ScoredEcho,
    until_completed,
)
from emberkeep.backend.embedder import LocalEmbedder
from emberkeep.backend.limits import Permit, Permits
from emberkeep.backend.local_capabilities import LocalAttention, LocalExperts, LocalTokenizer
from emberkeep.backend.precache import KeepAlive, Precache
from emberkeep.backend.prompt_fitter import PromptFitter, timed
from emberkeep.backend.recent_requests import ForgottenUsers, RecentLookups
from emberkeep.backend.server_tools import HostTools, ServerTools, without_tools
from emberkeep.chat.output import TextStream, read_answer
from emberkeep.chat.prompt import Prompt, PromptBuilder
from emberkeep.chat.template import ChatTemplate
from emberkeep.errors import (
    EmberkeepError,
    EngineError,
    Overloaded,
    RequestError,
)
from emberkeep.kv.forgetting import Forget
from emberkeep.kv.lookups import Arrival
from emberkeep.kv.store import KvStore
from emberkeep.memory.memory import Memory
from emberkeep.sched.admission import Admission, Lineages
from emberkeep.sched.sampling import Sampler
from emberkeep.sched.scheduler import Scheduler
from emberkeep.sched.sequence import Sequence
from emberkeep.session.conversation import Conversation, Conversations
from emberkeep.session.hygiene import Hygiene
from emberkeep.session.sessions import Sessions
from emberkeep.types.events import (
    Accepted,
    Completed,
    Events,
    LookupRecord,
    Marked,
    MissReason,
    TextDelta,
    TokenLogprob,
)
from emberkeep.types.lineage import Lineage
from emberkeep.types.models import SpeculationStats, TimelineRecord
from emberkeep.types.request import Json, ReasoningFormat, Request, Sampling
from emberkeep.values import dataclass

log = logging.getLogger("emberkeep.backend")

_WARMUP = " ".join(f"{word} {number}" for number, word in enumerate(["state", "token", "prompt", "cache"] * 64))


@dataclass(frozen=True, slots=True)
class LocalSettings:
    lineages: Lineages
    permits: Permits
    keep_alive: KeepAlive
    hygiene: Hygiene
    """What is done to the parts of prompts that change with every call. What it keeps may outlive the model."""
    admission: Admission | None = None
    """None: requests are not planned."""
    auto_truncate: bool = False
    """What does not fit is truncated, and not refused."""
    no_tools: bool = False
    """Models are told of no tools, and what they write is no call."""
    reasoning: ReasoningFormat = ReasoningFormat.SEPARATE
    deadline_s: float | None = None
    """For requests that do not say."""
    most_tokens: int | None = None
    """An answer is not longer, whatever a request says. None: as long as it asks for."""
    close_store: Callable[[KvStore], None] = KvStore.close
    close_memory: Callable[[Memory], None] = Memory.close
    """How it lets go of them at its end: they may outlive it."""


class LocalBackend:
    """Owns the scheduler, its store, and the memory of the sessions."""

    embedder: LocalEmbedder | None = None

    def __init__(
        self,
        card: ModelCard,
        template: ChatTemplate,
        scheduler: Scheduler,
        sessions: Sessions,
        settings: LocalSettings,
        tools: HostTools | None = None,
    ) -> None:
        self.card = replace(card, calls_tools=template.traits.supports_tools and not settings.no_tools)
        self.scheduler = scheduler
        self.memory = sessions.memory
        self._store = scheduler.store
        self._sessions = sessions
        self._settings = settings
        self._lineages = settings.lineages
        self._permits = settings.permits
        self._vocab = scheduler.engine.vocab
        self._outbox = Outbox()
        scheduler.flush = self._outbox.flush
        self._prompts = PromptBuilder(
            scheduler.engine.vocab,
            template,
            scheduler.stored_text,
            context=scheduler.engine.capabilities.context,
            wants_borders=scheduler.engine.capabilities.kv_unit.has_snapshots,
        )
        self._samplers = Samplers(scheduler.engine.vocab)
        self._conversations = Conversations(
            sessions, self._prompts, settings.lineages.may_splice, auto_truncate=settings.auto_truncate
        )
        self._fitter = PromptFitter(
            self._conversations,
            scheduler,
            self._lineages,
            settings.admission,
            auto_truncate=settings.auto_truncate,
        )
        self.host_tools = tools
        self._server_tools = ServerTools(sessions, tools)
        self._hygiene = settings.hygiene
        self._lookups = RecentLookups()
        self._forgotten = ForgottenUsers()
        self._warmup()
        self.warmer = Precache(self.generate, self._prepare_prefix, self._prompts, scheduler, settings.keep_alive)
        self.tokenizer = LocalTokenizer(self._vocab, template, self._prompts, self._equip)
        self.experts = LocalExperts(scheduler.engine.experts, scheduler) if scheduler.engine.experts else None
        attention = scheduler.engine.attention
        self.attention = LocalAttention(attention, scheduler) if attention else None
        self._explainer = Explainer(scheduler, self._prompts, self._conversations, self._lineages, self._equip)
        self.cache = StoreCache(scheduler, self._prompts, self._explainer, self.generate)
        self._join_holders(sessions)

    def _join_holders(self, sessions: Sessions) -> None:
        """Everything that holds what users sent is told who is forgotten."""
        self.holders = self._store.holders
        self._kept_of_requests: tuple[tuple[str, Forget], ...] = (
            ("prefixes that are kept warm", self.warmer.forget),
            ("latest lookups", self._lookups.forget),
            ("answers that come back otherwise", sessions.forget),
            ("parts of prompts that change", self._explainer.volatility.forget),
            ("texts with their tokens", self._prompts.forget),
            ("engine", self._forget_in_engine),
        )
        # First: what requests that are under way leave behind is dropped when they end.
        self.holders.join("requests under way", self, self._forgotten.add)
        for name, forget in self._kept_of_requests:
            self.holders.join(name, self, forget)

    def embed_with(self, embedder: LocalEmbedder) -> None:
        """Its model gives embeddings, too. The embedder belongs to it from now on."""
        self.embedder = embedder
        self.holders.join("vectors", self, embedder.forget)

    # ── the line ──

    def generate(self, request: Request) -> Events:
        self._check_readable(request)
        request = self._hygiene.apply(self._with_defaults(request))
        return self._use_tools(request) if self._server_tools.applies(request) else self._answer(request)

    async def _use_tools(self, request: Request) -> Events:
        """Answer with the tools that run here, under one permit: an answer is not refused in the middle."""
        with self._permits.acquire(request.user) as permit:
            answer = partial(self._answer, held=permit, asked_at=monotonic())
            async with aclosing(self._server_tools.run(request, answer)) as events:
                async for event in events:
                    yield event

    async def _answer(self, request: Request, held: Permit | None = None, asked_at: float | None = None) -> Events:
        """Answer under its own permit, or one that is `held` for more than this, which began at `asked_at`."""
        arrived = monotonic()
        asked_at = asked_at or arrived
        lineage = self._lineages.of(request)
        permit = held or self._permits.acquire(request.user, request.n)
        sequences: list[tuple[Sequence, Choice]] = []
        try:
            conversation, sampler_of, arrival = await self._fitter.in_turn(
                request, partial(self._prepare, request, lineage)
            )
            if arrival is not None:
                conversation = await self._fitter.wait_for(arrival, conversation)
            if self._forgotten.since(asked_at, request.namespace):
                request = request.decided(is_kept=False)
            prompt, channel = conversation.prompt, Channel[Item](self._outbox)
            for index in range(request.n):
                choice = self._choice(request, conversation, index, channel, permit)
                sampler = sampler_of(index, prompt)
                approximation = self._lineages.approximation(request)
                sequence = Sequence(prompt, request, sampler, choice, approximation=approximation, arrived=arrived)
                sequences.append((sequence, choice))
            for sequence, _ in sequences:
                self.scheduler.submit(sequence)
            if self._forgotten.since(asked_at, request.namespace):
                self.scheduler.forget({request.namespace})
            yield Accepted(len(prompt), prompt.text)
            if request.echo and not request.scores_prompt:
                for index in range(request.n):
                    yield TextDelta(index, prompt.text)
            noting = self._start_noting(request, prompt, [sequence for sequence, _ in sequences], asked_at)
            async for event in until_completed(channel, [choice for _, choice in sequences]):
                if isinstance(event, Full):
                    sequence, _ = sequences[event.index]
                    conversation = await asyncio.to_thread(self._make_room, sequence, conversation)
                elif isinstance(event, Completed):
                    lookup = await self._note_answer(request, prompt, event.lookup)
                    if request.tools or event.usage.reasoning_tokens:
                        await asyncio.to_thread(self._note_written, request, sequences)
                    usage = replace(event.usage, marked=await noting) if request.breakpoints else event.usage
                    done = request.execution
                    fit = replace(timed(conversation.fit, lookup), clamped_to=done.clamped_to)
                    yield replace(event, usage=usage, lookup=lookup, fit=fit, hygiene=done.tidied.rules)
                else:
                    yield event
        finally:
            for sequence, choice in sequences:
                if not choice.is_over:
                    self.scheduler.cancel(sequence)
            if held is None:
                permit.release()
            self._leave_nothing(request, asked_at)

    def _check_readable(self, request: Request) -> None:
        if any(message.images for message in request.messages):
            raise RequestError(f"{self.card.id} reads text only: leave the images out.", "messages")

    def _equip(self, request: Request) -> Request:
        """As its prompt is made of it, with the tools that run here. Raises RequestError."""
        self._check_readable(request)
        return self._server_tools.equip(self._hygiene.apply(self._with_defaults(request), learn=False))

    def _with_defaults(self, request: Request) -> Request:
        """Fill in what the configuration says where it says nothing. Raises InvalidField."""
        if request.scores_prompt:
            request = replace(request, use_cache=False, approximate=False)
        if self._settings.no_tools:
            request = without_tools(request)
        spared = {"enable_thinking": False} if request.thinks_if_asked else {}
        return replace(
            request.clamped(self._settings.most_tokens),
            template_args={**spared, **request.template_args},
            reasoning=request.reasoning or self._settings.reasoning,
            deadline_s=request.deadline_s or self._settings.deadline_s,
        )

    def _prepare(self, request: Request, lineage: Lineage) -> tuple[Conversation, MakeSampler, Arrival | None]:
        """What the model sees of a request, as a prompt that fits into its context and into memory, how its
        answer is sampled, and what comes from other hosts for it. Blocks for milliseconds. Raises RequestError:
        ContextExceeded or TooLarge for what does not fit."""
        conversation = self._fitter.fit(request, lineage)
        arrival = self._fitter.bring_in(conversation.prompt) if request.use_cache else None
        return conversation, self._samplers.of_request(request, self._prompts.constraint(request)), arrival

    def _choice(
        self, request: Request, conversation: Conversation, index: int, channel: Channel[Item], permit: Permit
    ) -> Choice:
        return Choice(
            index,
            TextStream.for_request(self._vocab, request, index=index, prompt=conversation.prompt.written.tail),
            channel,
            permit,
            in_pieces=request.execution.in_pieces,
            grows_to=request.max_tokens if conversation.can_grow else 0,
            echo=self._scored_echo(conversation.prompt) if request.scores_prompt else None,
        )

    def _scored_echo(self, prompt: Prompt) -> ScoredEcho:
        first = int(prompt.tokens[0])
        piece = b"" if self._prompts.lead(prompt.written) == (first,) else self._vocab.pieces[first]
        return ScoredEcho(prompt.text, [TokenLogprob(first, piece, math.nan)])

    def _make_room(self, sequence: Sequence, conversation: Conversation) -> Conversation:
        """More messages leave, or the answer ends where it is."""
        try:
            shorter = self._conversations.make_room(conversation)
        except Exception:
            self.scheduler.make_room(sequence, None)
            raise
        self.scheduler.make_room(sequence, shorter.prompt if shorter else None)
        return shorter or conversation

    # ── beside the request ──

    def _prepare_prefix(self, prefix: Request) -> tuple[Request, Lineage]:
        """Add the tools that its model gets besides; with whose state it may share."""
        equipped = self._server_tools.equip(self._hygiene.apply(self._with_defaults(prefix)))
        return equipped, self._lineages.of(equipped)

    def _leave_nothing(self, request: Request, asked_at: float) -> None:
        """Drop what a request left behind, if its user was forgotten after it came."""
        if self._forgotten.since(asked_at, request.namespace):
            for _, forget in self._kept_of_requests:
                forget({request.namespace})

    def _start_noting(
        self, request: Request, prompt: Prompt, sequences: list[Sequence], asked_at: float
    ) -> asyncio.Future[Marked]:
        """Off the critical path: the prompt is being evaluated meanwhile, and nothing waits for it."""
        loop = asyncio.get_running_loop()
        if request.breakpoints or (prompt.keys.stable and request.execution.is_kept):
            return loop.run_in_executor(None, self._note_prefixes, request, prompt, sequences, asked_at)
        return loop.create_future()

    def _note_prefixes(
        self, request: Request, prompt: Prompt, sequences: list[Sequence], asked_at: float
    ) -> Marked:
        """Never raises."""
        try:
            if request.execution.is_kept:
                self._explainer.volatility.learn(request)
            stable = self._prompts.stable(request, prompt) if request.execution.is_kept else None
            marked = self._prompts.marked(request, prompt)
        except EngineError:  # the model was unloaded meanwhile
            return Marked()
        except Exception:
            log.exception("the beginnings of a prompt were not noted")
            return Marked()
        finally:
            self._leave_nothing(request, asked_at)
        for sequence in sequences:
            sequence.stable, sequence.marked = stable, marked
        return marked

    async def _note_answer(self, request: Request, prompt: Prompt, lookup: LookupRecord) -> LookupRecord:
        """Remember a request that was answered; returns its lookup with the part of the request in which it left
        what was stored."""
        if lookup.reason is MissReason.DIVERGED and request.prompt is None:
            lookup = await asyncio.to_thread(self._locate, request, prompt, lookup)
        self._lookups.add(request, lookup)
        if prompt.keys.stable and request.execution.is_kept:
            self.warmer.seen(request, prompt.lineage.in_place, prompt.keys)
        return lookup

    def _locate(self, request: Request, prompt: Prompt, lookup: LookupRecord) -> LookupRecord:
        """Add in which part the request left what was stored. Never raises: the answer is there, and does not fail
        because nobody can say why it took so long."""
        try:
            lookup = self._explainer.located(request, prompt, lookup)
            if (found := lookup.divergence) and found.volatile:
                lost = lookup.prompt_tokens - found.token_index
                self._explainer.volatility.tell(request, found.where, found.volatile, lost)
        except EngineError:  # the model was unloaded meanwhile
            pass
        except Exception:
            log.exception("where a prompt left what was stored was not found")
        return lookup

    def _note_written(self, request: Request, sequences: list[tuple[Sequence, Choice]]) -> None:
        """Remember an answer whose client may send it back in other words."""
        if request.prompt is not None or not request.execution.is_kept or len(sequences) != 1:
            return
        ((sequence, _),) = sequences
        ids = sequence.tokens[sequence.prompt_length : sequence.answer_end].tolist()
        self._sessions.answered(request, read_answer(self._vocab, request, sequence.prompt.written.tail, ids))

    def _forget_in_engine(self, owners: Container[str]) -> Future[None] | None:
        try:
            return self.scheduler.forget(owners)
        except Overloaded:  # it is being closed, with all that it holds
            return None

    # ── about itself ──

    def stats(self) -> dict[str, Json]:
        self._store.notice_forgotten()
        tier = self.attention.tier if self.attention else None
        return {
            "model": self.card.id,
            "scheduler": self.scheduler.stats(),
            "store": self._store.stats(),
            "engine": {"attention": tier, **self.scheduler.engine.stats()},
            "speculation": self.speculation_stats().json(),
            "planning": {**self._fitter.stats(), **self.scheduler.calibration.stats()},
            "sessions": self._sessions.stats(),
            "memory": self.memory.stats() if self.memory else None,
            "embeddings": self.embedder.stats() if self.embedder else None,
            "recent_lookups": self._lookups.json(),
            "measured": self._store.costs.json(),
        }

    def timeline(self) -> list[TimelineRecord]:
        return self.scheduler.timeline()

    def speculation_stats(self) -> SpeculationStats:
        return self.scheduler.speculation_stats()

    def health(self) -> dict[str, Json]:
        failure = self.failure()
        return {"backend": "local", "model": self.card.id, **({"error": str(failure)} if failure else {})}

    def failure(self) -> EmberkeepError | None:
        return self.scheduler.failure()

    async def start(self) -> None:
        await self._server_tools.start()

    async def close(self) -> None:
        await self._server_tools.close()
        self.warmer.stop()
        self._fitter.close()
        if self.embedder is not None:
            await self.embedder.close()
        await asyncio.to_thread(self.scheduler.close)
        await asyncio.to_thread(self.warmer.join)
        self.holders.leave(self)
        for store in self.scheduler.stores:
            await asyncio.to_thread(self._settings.close_store, store)
        if self.memory is not None:
            await asyncio.to_thread(self._settings.close_memory, self.memory)

    def _warmup(self) -> None:
        """Go through the motions once, so that the first request does not pay for lazy imports and cold caches."""
        self._prompts.warmup(_WARMUP)
        request = Request(prompt=(0,), sampling=Sampling(seed=0))
        TextStream.for_request(self._vocab, request, index=0, prompt="").push(0)
        Sampler(request.sampling).sample(np.zeros(self._vocab.size, np.float32), self._vocab.pieces)
