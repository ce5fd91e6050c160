"""The request story over our own scheduler and engine: messages to text to tokens to jobs to events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Container
from concurrent.futures import Future
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from time import monotonic

import numpy as np

from emberkeep.backend.base import ModelCard, closable
from emberkeep.backend.cache import StoreCache
from emberkeep.backend.channel import Channel, Outbox
from emberkeep.backend.choices import Choice, Full, Item, until_completed
from emberkeep.backend.evicting import Evictor
from emberkeep.backend.fitting import Fitted, Fitter, Planning
from emberkeep.backend.forgotten import ForgottenUsers
from emberkeep.backend.lineages import Lineages
from emberkeep.backend.local_capabilities import LocalAttention, LocalExperts, LocalTokenizer
from emberkeep.backend.lookups import RecentLookups
from emberkeep.backend.places import Place, Places
from emberkeep.backend.precache import KeepAlive, Precache
from emberkeep.backend.prompts import Prompt, PromptMaker
from emberkeep.backend.server_tools import HostTools, ServerTools
from emberkeep.backend.verify import Verifier
from emberkeep.chat.dialects.table import Reasoning
from emberkeep.chat.output import TextStream, open_reasoning
from emberkeep.chat.template import ChatTemplate
from emberkeep.errors import EmberkeepError, EngineError, Overloaded, RequestError, TemplateFailed
from emberkeep.kv.store import KvStore
from emberkeep.kv.tree import TokenArray
from emberkeep.memory.memory import Memory
from emberkeep.sched.job import Job, Notes
from emberkeep.sched.loop import EngineLoop
from emberkeep.sched.probe import Machine
from emberkeep.sched.sampling import Sampler
from emberkeep.session.sessions import Sessions
from emberkeep.types import (
    Approximation,
    Completed,
    Event,
    Fit,
    Json,
    Lineage,
    Message,
    MissReason,
    ReasoningFormat,
    Request,
    Sampling,
    TextDelta,
    Vocab,
)

log = logging.getLogger("emberkeep.backend")

_REHEARSAL = " ".join(f"{word} {number}" for number, word in enumerate(["state", "token", "prompt", "cache"] * 64))


class LocalBackend:
    """Owns the loop, which flushes `outbox`, and the store."""

    def __init__(
        self,
        card: ModelCard,
        vocab: Vocab,
        template: ChatTemplate,
        loop: EngineLoop,
        store: KvStore,
        outbox: Outbox,
        places: Places,
        *,
        context: int,
        lineages: Lineages,
        keep_alive: KeepAlive,
        planning: Planning,
        machine: Machine,
        sessions: Sessions,
        memory: Memory | None = None,
        tools: HostTools | None = None,
        tool_rounds: int = 1,
        raw_tools: bool = False,
        reasoning: ReasoningFormat = ReasoningFormat.SEPARATE,
        deadline_s: float | None = None,
        drain_s: float = 0.0,
    ) -> None:
        self.card = replace(card, calls_tools=template.supports_tools)
        self._vocab = vocab
        self.loop = loop
        self._store = store
        self._outbox = outbox
        self._places = places
        self._lineages = lineages
        self._deadline_s = deadline_s
        self._drain_s = drain_s
        self._lookups = RecentLookups()
        self._forgotten = ForgottenUsers()
        self._prompts = PromptMaker(
            vocab, template, store, loop.recent, context=context, wants_borders=loop.kv_unit.has_snapshots
        )
        self._sessions = sessions
        self._server_tools = ServerTools(sessions, tools, tool_rounds, deadline_s)
        self.memory = memory
        self._raw_tools = raw_tools
        self._reasoning = reasoning
        evictor = Evictor(self._prompts, sessions)
        self._fitter = Fitter(
            self._prompts,
            planning,
            context=context,
            lineages=lineages,
            evictor=evictor,
            in_ram=self._tokens_in_ram,
        )
        self._machine = machine
        self._rehearse()
        self.warmer = Precache(self.generate, self._prepare_prefix, self._prompts, store, loop, keep_alive)
        self.tokenizer = LocalTokenizer(vocab, template, self._prompts)
        self.experts = LocalExperts(loop.experts, loop) if loop.experts else None
        self.attention = LocalAttention(loop.attention, loop) if loop.attention else None
        self.cache = StoreCache(
            store,
            loop,
            self._prompts,
            lineages,
            self._fitter,
            verifier=Verifier(self.generate, vocab, context),
            equipped=self._server_tools.equip,
            forget_beside=self._forget,
        )
        store.on_forget(self._forget_quietly)

    def generate(self, request: Request) -> AsyncIterator[Event]:
        if any(message.images for message in request.messages):
            raise RequestError(f"{self.card.id} reads text only: leave the images out.", "messages")
        request = replace(
            request, raw_tools=request.raw_tools or self._raw_tools, reasoning=request.reasoning or self._reasoning
        )
        return self._asked(request) if self._server_tools.applies(request) else self._answer(request)

    async def _asked(self, request: Request) -> AsyncGenerator[Event, None]:
        """With the tools that run here. It has one place: an answer is not refused in the middle."""
        place = self._places.take(request.user)
        try:
            answer = self._server_tools.run(request, partial(self._answer, held=place, asked_at=monotonic()))
            async with aclosing(closable(answer)) as events:
                async for event in events:
                    yield event
        finally:
            place.leave()

    async def _answer(
        self, request: Request, held: Place | None = None, asked_at: float | None = None
    ) -> AsyncGenerator[Event, None]:
        """In its own place, or in one that is `held` for more than this, which began at `asked_at`."""
        arrived = monotonic()
        asked_at = asked_at or arrived
        approximation, lineage = self._lineages.approximation(request), self._lineages.of(request)
        place = held or self._places.take(request.user, request.n)
        jobs: list[tuple[Job, Choice]] = []
        try:
            fitted = await asyncio.to_thread(self._fitter.fit, request, lineage)
            if self._forgotten.since(asked_at, request.namespace):
                fitted = replace(fitted, request=replace(fitted.request, is_kept=False))
            request, prompt = fitted.request, fitted.prompt
            channel: Channel[Item] = Channel(self._outbox)
            notes = Notes(prompt.label if request.is_kept else None)
            jobs = self._jobs(fitted, approximation, channel, place, notes, arrived)
            for job, _ in jobs:
                self.loop.submit(job)
            if self._forgotten.since(asked_at, request.namespace):
                self.loop.forget({request.namespace})
            if request.echo:
                for index in range(request.n):
                    yield TextDelta(index, prompt.text)
            if prompt.keys.stable and request.is_kept:
                await asyncio.to_thread(self._note_stable, request, prompt, notes, asked_at)
            async for event in until_completed(channel, len(jobs)):
                if isinstance(event, Full):
                    fitted = await asyncio.to_thread(self._make_room, jobs[event.index][0], fitted)
                    continue
                if isinstance(event, Completed):
                    event = replace(
                        await self._explained(request, prompt, event, asked_at), fit=_timed(fitted.fit, event)
                    )
                yield event
        finally:
            for job, choice in jobs:
                if not choice.is_over:
                    self.loop.cancel(job)
            if held is None:
                place.leave()

    def _make_room(self, job: Job, fitted: Fitted) -> Fitted:
        """More messages leave, or the answer ends where it is."""
        try:
            more = self._fitter.more_room(fitted)
        except Exception:
            self.loop.make_room(job, None)
            raise
        self.loop.make_room(job, more[1] if more else None)
        return more[0] if more else fitted

    def stats(self) -> dict[str, Json]:
        self._store.notice_forgotten()
        costs = self._store.costs
        return {
            "model": self.card.id,
            "scheduler": self.loop.stats(),
            "store": self._store.stats(),
            "engine": {"attention": self.attention.tier if self.attention else None, **self.loop.engine_stats()},
            "planning": self._fitter.stats(),
            "sessions": self._sessions.stats(),
            "memory": self.memory.stats() if self.memory else None,
            "machine": self._machine.json(),
            "recent_lookups": self._lookups.json(),
            "measured": {
                "evaluate_tokens_per_s": costs.evaluate.value,
                "import_bytes_per_s": costs.import_.value,
                "read_bytes_per_s": costs.read.value,
            },
        }

    def health(self) -> dict[str, Json]:
        failure = self.loop.failure()
        return {"backend": "local", "model": self.card.id, **({"error": str(failure)} if failure else {})}

    def failure(self) -> EmberkeepError | None:
        return self.loop.failure()

    async def start(self) -> None:
        await self._server_tools.start()

    async def close(self) -> None:
        await self._server_tools.close()
        self.warmer.stop()
        await asyncio.to_thread(self.loop.close, self._drain_s)
        await asyncio.to_thread(self.warmer.join)
        await asyncio.to_thread(self._store.close)
        if self.memory is not None:
            await asyncio.to_thread(self.memory.close)

    def _rehearse(self) -> None:
        """Go through the motions once, so that the first request does not pay for lazy imports and cold caches."""
        with suppress(TemplateFailed):
            self._prompts.render(Request(messages=(Message("user", "Hello."),)))
        self._prompts.encode(_REHEARSAL)
        request = Request(prompt=(0,), sampling=Sampling(seed=0))
        TextStream.for_request(self._vocab, request, index=0, prompt="").push(0)
        Sampler(request.sampling).sample(np.zeros(self._vocab.size, np.float32), self._vocab.pieces)

    # ── beside the request ──

    def _prepare_prefix(self, prefix: Request) -> tuple[Request, Lineage]:
        """With the tools that its model gets besides, and whose state it may share."""
        equipped = self._server_tools.equip(prefix)
        return equipped, self._lineages.of(equipped)

    def _tokens_in_ram(self, lineage: Lineage, tokens: TokenArray) -> int:
        return self._store.peek(lineage, tokens, snapshots=self.loop.kv_unit.has_snapshots).warm_tokens

    def _note_stable(self, request: Request, prompt: Prompt, notes: Notes, asked_at: float) -> None:
        """Off the critical path: the prompt is being evaluated meanwhile."""
        notes.stable = self._prompts.stable(request, prompt.lineage, prompt.tokens)
        self.warmer.seen(request, prompt.lineage.stored, prompt.keys)
        if self._forgotten.since(asked_at, request.namespace):
            self.warmer.forget({request.namespace})

    def _forget(self, owners: Container[str]) -> Future[None]:
        """Leave nothing of these beside the store: what rests in the engine, answers, prefixes, figures."""
        self._forgotten.add(owners)
        self.warmer.forget(owners)
        self._lookups.forget(owners)
        return self.loop.forget(owners)

    def _forget_quietly(self, owners: Container[str]) -> None:
        """Another process has forgotten them. Nobody waits for it."""
        with suppress(Overloaded, EngineError):  # the engine is being closed, or has failed
            self._forget(owners)

    async def _explained(self, request: Request, prompt: Prompt, bill: Completed, asked_at: float) -> Completed:
        """The bill, with the part of the request in which it left what was stored."""
        lookup = bill.lookup
        if lookup.reason is MissReason.DIVERGED and request.prompt is None:
            lookup = await asyncio.to_thread(self.cache.located, request, prompt, lookup)
        self._lookups.add(request, lookup)
        if self._forgotten.since(asked_at, request.namespace):
            self._lookups.forget({request.namespace})
        return replace(bill, lookup=lookup)

    # ── jobs ──

    def _jobs(
        self,
        fitted: Fitted,
        approximation: Approximation | None,
        channel: Channel[Item],
        place: Place,
        notes: Notes,
        arrived: float,
    ) -> list[tuple[Job, Choice]]:
        request, prompt = fitted.request, fitted.prompt
        reasoning = open_reasoning(prompt.text) if request.prompt is None else None
        jobs = []
        for index in range(request.n):
            choice = Choice(
                index,
                TextStream.for_request(self._vocab, request, index=index, prompt=prompt.text),
                channel,
                place,
                in_pieces=request.in_pieces,
                grows_to=request.max_tokens if fitted.can_grow else 0,
            )
            job = self._job(fitted, choice, index, reasoning, arrived)
            job.notes, job.approximate = notes, approximation
            jobs.append((job, choice))
        return jobs

    def _job(self, fitted: Fitted, choice: Choice, index: int, reasoning: Reasoning | None, arrived: float) -> Job:
        request, prompt = fitted.request, fitted.prompt
        matcher = prompt.constraint.matcher(reasoning) if prompt.constraint else None
        deadline_s = request.deadline_s or self._deadline_s
        return Job(
            tokens=prompt.tokens,
            sampler=Sampler(_for_choice(request, index), matcher, request.top_logprobs, request.forced),
            consumer=choice,
            max_new=fitted.max_new,
            closing=fitted.closing,
            given=isinstance(request.prompt, tuple),
            user=request.user,
            lineage=prompt.lineage,
            cut=fitted.cut,
            on_full=choice.full,
            use_cache=request.use_cache,
            is_kept=request.is_kept,
            from_store=request.from_store,
            want_progress=request.want_progress,
            deadline=arrived + deadline_s if deadline_s is not None else None,
            borders=prompt.borders,
            affinity=prompt.keys.affinity,
            wanted_slot=request.slot,
            read_ahead=prompt.read_ahead,
            admitted=fitted.admitted,
            submitted=arrived,
        )


def _timed(fit: Fit, bill: Completed) -> Fit:
    """With what the engine needed for what left the context."""
    if not fit.evictions:
        return fit
    latest = replace(fit.evictions[-1], engine_ms=bill.lookup.cut_ms)
    return replace(fit, evictions=(*fit.evictions[:-1], latest))


def _for_choice(request: Request, index: int) -> Sampling:
    """Choices of one request draw differently even when the request has a seed."""
    sampling = request.sampling
    return sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + index)
