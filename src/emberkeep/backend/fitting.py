"""From a request to a prompt that fits: into the context, and with a plan into memory."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from emberkeep.backend.evicting import Conversation, Evictor
from emberkeep.backend.lineages import Lineages
from emberkeep.backend.prompts import Draft, Prompt, PromptMaker
from emberkeep.chat.messages import leaving_turns, without
from emberkeep.errors import ContextExceeded, TooLarge
from emberkeep.kv.tree import TokenArray
from emberkeep.sched.admission import Admission, Admitted, largest
from emberkeep.sched.calibration import Calibration
from emberkeep.sched.job import Cut, Room
from emberkeep.types import Fit, Json, Lineage, Request

log = logging.getLogger("emberkeep.backend")


@dataclass(frozen=True, slots=True)
class Fitted:
    request: Request
    """What is answered: all that was asked, or what of it fits."""
    prompt: Prompt
    closing: tuple[int, ...]
    max_new: int
    admitted: Admitted | None
    fit: Fit
    conversation: Conversation | None = None
    """What messages may leave, while it is answered."""

    @property
    def cut(self) -> Cut | None:
        """How to come by its state from that of the turn before."""
        cut = self.conversation.cut if self.conversation else None
        return replace(cut, lineage=self.prompt.lineage) if cut else None

    @property
    def can_grow(self) -> bool:
        """Its answer may go on when the context is full."""
        return self.conversation is not None and self.conversation.may_grow


@dataclass(frozen=True, slots=True)
class Planning:
    """What is known about memory, and what may be done when there is too little."""

    admission: Admission | None
    """None: requests are not planned."""
    calibration: Calibration
    auto_truncate: bool


class Fitter:
    """Safe to use from several threads; `fit` blocks for milliseconds."""

    def __init__(
        self,
        prompts: PromptMaker,
        planning: Planning,
        *,
        context: int,
        lineages: Lineages,
        evictor: Evictor,
        in_ram: Callable[[Lineage, TokenArray], int],
    ) -> None:
        """`in_ram`: how many tokens of a prompt of a lineage the store holds in RAM."""
        self._prompts = prompts
        self._planning = planning
        self._context = context
        self._lineages = lineages
        self._evictor = evictor
        self._in_ram = in_ram
        self._counting = threading.Lock()
        self._refused = 0
        self._truncated = 0

    def fit(self, request: Request, lineage: Lineage) -> Fitted:
        """Raises RequestError: ContextExceeded or TooLarge for what does not fit."""
        try:
            try:
                may_evict = self._evictor.applies(request)
                if not self._planning.auto_truncate:
                    self._prompts.check_size(request, may_evict=may_evict)
                return self._conversation(request, lineage) if may_evict else self._whole(request, lineage)
            except (ContextExceeded, TooLarge) as error:
                if self._planning.auto_truncate and not request.is_prefix:
                    return self._cut(request, lineage, error)
                if isinstance(error, ContextExceeded) and self._evictor.keeps_whole(request):
                    raise ContextExceeded(
                        error.prompt_tokens, error.context, may_evict=False, is_counted=error.is_counted
                    ) from error
                raise
        except TooLarge:
            with self._counting:
                self._refused += 1
            raise

    def stats(self) -> dict[str, Json]:
        admission = self._planning.admission
        return {
            "enabled": admission is not None,
            "margin": admission.margin if admission else None,
            "refused": self._refused,
            "truncated": self._truncated,
            **self._planning.calibration.stats(),
        }

    def rehearsed(self, request: Request, lineage: Lineage) -> tuple[Request, Prompt]:
        """What `fit` would make of it, with nothing written. Raises RequestError."""
        if not self._evictor.applies(request):
            return request, self._prompts.make(request, lineage)
        may_cut = self._lineages.may_splice(request)
        conversation = self._evictor.fit(request, lineage, may_cut=may_cut, is_rehearsal=True)
        prompt = self._prompts.make(conversation.shown, conversation.draft.lineage, conversation.draft)
        return conversation.shown, self._prompts.named(prompt, request)

    def more_room(self, fitted: Fitted) -> tuple[Fitted, Room] | None:
        """Let more messages leave a conversation whose answer has filled the context. None: none may."""
        assert fitted.conversation is not None
        shorter = self._evictor.shorter(fitted.conversation)
        if shorter is None:
            return None
        request = shorter.shown
        prompt = self._prompts.make(request, shorter.draft.lineage, shorter.draft)
        prompt = self._prompts.named(prompt, shorter.request)
        _, max_new = self._room(request, prompt)
        # No more tokens in all than it was admitted for.
        max_new = min(max_new, len(fitted.prompt.tokens) + fitted.max_new - len(prompt.tokens))
        fit = replace(fitted.fit, evictions=shorter.evictions)
        assert shorter.cut is not None
        room = Room(prompt.tokens, shorter.cut, max_new)
        fitted = replace(fitted, request=request, prompt=prompt, max_new=max_new, fit=fit, conversation=shorter)
        return fitted, room

    def _conversation(self, request: Request, lineage: Lineage) -> Fitted:
        conversation = self._evictor.fit(request, lineage, may_cut=self._lineages.may_splice(request))
        fitted = self._whole(conversation.shown, conversation.draft.lineage, conversation.draft)
        fit = replace(fitted.fit, evictions=conversation.evictions, recalled=conversation.recalled)
        prompt = self._prompts.named(fitted.prompt, request)
        return replace(fitted, prompt=prompt, fit=fit, conversation=conversation)

    def _whole(self, request: Request, lineage: Lineage, draft: Draft | None = None) -> Fitted:
        prompt = self._prompts.make(request, lineage, draft)
        closing, max_new = self._room(request, prompt)
        admission = self._planning.admission
        if admission is None:
            return Fitted(request, prompt, closing, max_new, None, Fit())
        admitted = admission.admit(
            len(prompt.tokens),
            max_new,
            bits=lineage.bits,
            is_kept=request.is_kept,
            in_ram=lambda: self._in_ram(lineage, prompt.tokens),
        )
        if admitted.plan.kv_bits != lineage.bits:
            prompt = self._prompts.make(request, self._lineages.repacked(lineage, admitted.plan.kv_bits), draft)
        fit = Fit(admitted.plan, admitted.predicted)
        return Fitted(request, prompt, closing, admitted.max_new, admitted, fit)

    def _room(self, request: Request, prompt: Prompt) -> tuple[tuple[int, ...], int]:
        """What is evaluated after the answer, and how long the answer may become."""
        room = self._context - len(prompt.tokens)
        closing = prompt.closing if room > len(prompt.closing) else ()
        limit = room - len(closing)
        return closing, limit if request.max_tokens is None else min(request.max_tokens, limit)

    # ── truncation ──

    def _cut(self, request: Request, lineage: Lineage, error: ContextExceeded | TooLarge) -> Fitted:
        """The longest end of the request that fits. Raises `error` if none does."""
        limit = self._context - self._answer_room(request)
        if isinstance(error, TooLarge):
            limit = min(limit, error.suggested_max_tokens)
        for shorter in self._shorter(request, limit):
            try:
                fitted = self._whole(shorter, lineage)
            except (ContextExceeded, TooLarge):
                continue
            return self._told(request, fitted, error.prompt_tokens)
        raise error

    def _answer_room(self, request: Request) -> int:
        """A prompt that fills the context would leave one token for the answer."""
        wanted = self._context // 4 if request.max_tokens is None else request.max_tokens
        return min(wanted, self._context // 2)

    def _shorter(self, request: Request, limit: int) -> Iterator[Request]:
        """Shorter and shorter versions of `request`, beginning with the longest of at most `limit` tokens."""
        if request.prompt is not None:
            if limit > 0:
                yield replace(request, prompt=self._prompts.end_of(request, limit))
            return
        turns = leaving_turns(request.messages)

        def keeping(count: int) -> Request:
            gone = turns[: len(turns) - count]
            return replace(request, messages=without(request.messages, gone))

        most = len(turns) - 1
        begin = largest(lambda count: self._prompts.count(keeping(count)) <= limit, most) if turns else -1
        yield from (keeping(count) for count in range(begin, -1, -1))

    def _told(self, request: Request, fitted: Fitted, prompt_tokens: int) -> Fitted:
        """With what was left out, and under the name that the whole request would have."""
        tokens = prompt_tokens - len(fitted.prompt.tokens)
        messages = len(request.messages) - len(fitted.request.messages)
        with self._counting:
            self._truncated += 1
        log.info("%d tokens (%d messages) were left out of a prompt that does not fit", tokens, messages)
        return replace(
            fitted,
            prompt=self._prompts.named(fitted.prompt, request),
            fit=replace(fitted.fit, truncated_tokens=tokens, truncated_messages=messages),
        )
