"""A prompt that fits: into the context, and into memory as far as that can be predicted."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from time import monotonic
from typing import TypeVar

from emberkeep.chat.prompt import Prompt
from emberkeep.errors import ContextExceeded, TooLarge
from emberkeep.kv.lookups import Arrival
from emberkeep.sched.admission import Admission, Lineages
from emberkeep.sched.scheduler import Scheduler
from emberkeep.session.conversation import Conversation, Conversations
from emberkeep.types.events import Fit, LookupRecord
from emberkeep.types.lineage import Lineage
from emberkeep.types.request import Json, Request

log = logging.getLogger("emberkeep.backend")

T = TypeVar("T")
_SHORT_CHARS = 1 << 16
_AT_ONCE = 2


class PromptFitter:
    """Safe to use from several threads; all that is not awaited blocks for milliseconds."""

    def __init__(
        self,
        conversations: Conversations,
        scheduler: Scheduler,
        lineages: Lineages,
        admission: Admission | None,
        *,
        auto_truncate: bool,
    ) -> None:
        """`admission` None: memory is not planned. `auto_truncate`: what does not fit is cut, and not refused."""
        self._conversations = conversations
        self._store = scheduler.store
        self._has_snapshots = scheduler.engine.capabilities.kv_unit.has_snapshots
        self._context = scheduler.engine.capabilities.context
        self._lineages = lineages
        self._admission = admission
        self._auto_truncate = auto_truncate
        self._refused = self._truncated = 0
        self._counting = threading.Lock()
        self._shortly = ThreadPoolExecutor(_AT_ONCE, "prompts")

    async def in_turn(self, request: Request, work: Callable[[], T]) -> T:
        """Do the work for a request on a thread. Short prompts of a crowd take turns: many that compute would take
        the interpreter from the engine's thread."""
        chars = len(request.prompt or "") + sum(len(message.content) for message in request.messages)
        executor = self._shortly if chars < _SHORT_CHARS else None
        return await asyncio.get_running_loop().run_in_executor(executor, work)

    def close(self) -> None:
        self._shortly.shutdown(wait=False)

    def fit(self, request: Request, lineage: Lineage) -> Conversation:
        """What the model sees of a request. Raises RequestError: ContextExceeded or TooLarge for what does not
        fit."""
        try:
            return self._plan_memory(self._conversations.open(request, lineage))
        except (ContextExceeded, TooLarge) as error:
            return self._truncate(request, lineage, error)

    def bring_in(self, prompt: Prompt) -> Arrival | None:
        """Ask for what other hosts have computed of a prompt."""
        wanted = prompt.tokens[: prompt.reusable]
        return self._store.bring_in(prompt.lineage, wanted, snapshots=self._has_snapshots)

    async def wait_for(self, arrival: Arrival, conversation: Conversation) -> Conversation:
        """Add what came for its prompt in time."""
        coming = asyncio.wrap_future(arrival.done)
        while not coming.done() and (left := arrival.give_up - monotonic()) > 0:
            await asyncio.wait([coming], timeout=left)
        if not coming.done():
            self._store.shared.was_late(arrival)
            return conversation
        return replace(conversation, prompt=replace(conversation.prompt, from_remote=coming.result()))

    def stats(self) -> dict[str, Json]:
        admission = self._admission
        return {
            "enabled": admission is not None,
            "margin": admission.margin if admission else None,
            "footprint": admission.footprint.json() if admission else None,
            "refused": self._refused,
            "truncated": self._truncated,
        }

    def _plan_memory(self, conversation: Conversation) -> Conversation:
        """Add a plan for its memory. Raises TooLarge."""
        admission, prompt, lineage = self._admission, conversation.prompt, conversation.lineage
        if admission is None:
            return conversation
        admitted = admission.admit(
            len(prompt),
            prompt.max_new,
            bits=lineage.bits,
            most_slice=conversation.request.prefill_slice,
            is_kept=conversation.request.execution.is_kept,
            in_ram=lambda: self._tokens_in_ram(prompt),
        )
        bits = self._lineages.repacked(lineage, admitted.plan.kv_bits).bits
        prompt = replace(
            prompt, lineage=replace(prompt.lineage, bits=bits), max_new=admitted.max_new, admitted=admitted
        )
        fit = replace(conversation.fit, plan=admitted.plan, predicted_bytes=admitted.predicted)
        return replace(conversation, prompt=prompt, lineage=replace(lineage, bits=bits), fit=fit)

    def _truncate(self, request: Request, lineage: Lineage, error: ContextExceeded | TooLarge) -> Conversation:
        """The longest end of a request that fits. Raises `error` where there is none, or nothing is truncated."""
        if self._auto_truncate and not request.execution.is_prefix:
            limit = error.suggested_max_tokens if isinstance(error, TooLarge) else self._context
            for shorter in self._conversations.truncations(request, lineage, limit):
                with suppress(TooLarge):
                    return self._truncated_to(self._plan_memory(shorter), error.prompt_tokens)
        with self._counting:
            self._refused += isinstance(error, TooLarge)
        raise error

    def _truncated_to(self, conversation: Conversation, prompt_tokens: int) -> Conversation:
        """Count and note what was left out."""
        request, prompt = conversation.request, conversation.prompt
        tokens = prompt_tokens - len(prompt)
        messages = len(request.messages) - len(prompt.messages)
        with self._counting:
            self._truncated += 1
        log.info("%d tokens (%d messages) were left out of a prompt that does not fit", tokens, messages)
        fit = replace(conversation.fit, truncated_tokens=tokens, truncated_messages=messages)
        return replace(conversation, fit=fit)

    def _tokens_in_ram(self, prompt: Prompt) -> int:
        return self._store.peek(prompt.lineage, prompt.tokens, snapshots=self._has_snapshots).warm_tokens


def timed(fit: Fit, lookup: LookupRecord) -> Fit:
    """Add the time that the engine needed for what left the context."""
    if not fit.evictions:
        return fit
    latest = replace(fit.evictions[-1], engine_ms=lookup.cut_ms)
    return replace(fit, evictions=(*fit.evictions[:-1], latest))
