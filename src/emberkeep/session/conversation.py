"""A conversation as its model sees it: what of it fits into the context, what leaves, and what comes back.

One message's way from the context to the archive: `open` sees that the prompt is too long, `plan_eviction` says
which of the oldest turns leave, they are taken out of the view (`view.py`) and archived (`sessions.py`), and a
`Splice` describes how the state of the longer prompt becomes that of the shorter one (`sched/moved_state.py`). A
conversation that is truncated loses its oldest turns in the same way, without an archive.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import field, replace
from functools import partial
from time import perf_counter

from emberkeep.chat.prompt import Prompt, PromptBuilder, splice_between
from emberkeep.errors import ContextExceeded
from emberkeep.session.sessions import Sessions
from emberkeep.session.view import Gone, View, read_history
from emberkeep.types.events import Fit
from emberkeep.types.lineage import Lineage
from emberkeep.types.request import Message, Request
from emberkeep.values import dataclass

_CLOSE_ENOUGH = 1.15
"""Times the target: turns are chosen by the length of their text, which gives their tokens only roughly."""
_CHARS_PER_TOKEN = 8
"""More than any text has on the average: a conversation that is too long even so need not be tokenized to know."""
_WORTH_LEAVING = 16

Turns = list[frozenset[int]]
"""Groups of spoken messages that leave together, the oldest first."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A request as its model sees it."""

    request: Request
    lineage: Lineage
    """The request's; the prompt's own may have a splice besides."""
    prompt: Prompt
    fit: Fit = field(default_factory=Fit)
    """What was done to make it fit."""
    view: View | None = None
    """None: it is not tracked here, and nothing may leave it."""
    may_splice: bool = False
    """Where messages leave it, what follows is moved up and not evaluated again."""
    can_grow: bool = False
    """Its answer may go on when the context is full, because messages may leave while it is written."""


def plan_eviction(view: View, excess: float, size: Callable[[frozenset[int]], float]) -> Turns:
    """Which turns leave: the oldest, until about `excess` of what `size` counts has left. Pure."""
    turns: Turns = []
    for turn in view.leaving():
        if excess <= 0:
            break
        turns.append(turn)
        excess -= size(turn)
    return turns


def evict_until(
    fits: Callable[[View], bool], before: View, turns: Turns, without: Callable[[Turns], View]
) -> tuple[Turns, View]:
    """`before` without `turns`, and without one more of the oldest each time until it fits or none may leave."""
    view = without(turns) if turns else before
    while not fits(view) and (more := view.leaving()):
        turns = [*turns, more[0]]
        view = without(turns)
    return turns, view


class Conversations:
    """Safe to use from several threads; every method blocks for milliseconds."""

    def __init__(
        self,
        sessions: Sessions,
        prompts: PromptBuilder,
        may_splice: Callable[[Request], bool],
        *,
        auto_truncate: bool = False,
    ) -> None:
        """`auto_truncate`: what does not fit is truncated by the caller, and not refused before it is looked
        at."""
        self._sessions = sessions
        self._policy = sessions.policy
        self._prompts = prompts
        self._may_splice = may_splice
        self._auto_truncate = auto_truncate

    def open(self, request: Request, lineage: Lineage, *, is_dry_run: bool = False) -> Conversation:
        """`request` without what left it before, and without more if it is too long. Raises RequestError:
        ContextExceeded where it does not fit even so. In a dry run nothing is written or recalled."""
        is_conversation = self._sessions.applies(request)
        try:
            if not self._auto_truncate:
                self._prompts.check_size(request, may_evict=is_conversation)
            if is_conversation:
                return self._fitted(self._shown(request, lineage, is_dry_run=is_dry_run))
            return self._fitted(Conversation(request, lineage, self._prompts.build(request, lineage)))
        except ContextExceeded as error:
            is_chat = request.prompt is None and not request.execution.is_prefix
            if is_chat and not self._auto_truncate and not self._sessions.may_evict(request):
                raise ContextExceeded(
                    error.prompt_tokens, error.context, may_evict=False, is_counted=error.is_counted
                ) from error
            raise

    def make_room(self, now: Conversation) -> Conversation | None:
        """Let more messages leave while the answer is being written. None: none may."""
        assert now.view is not None
        begin = perf_counter()
        turns = self._enough(now, self._policy.context // 4)
        if not turns:
            return None
        view = self._sessions.without(now.view, now.request, turns)
        prompt = self._shorten(now, view)
        freed = len(now.prompt) - len(prompt)
        if freed < _WORTH_LEAVING:
            return None
        plan_ms = 1e3 * (perf_counter() - begin)
        view, eviction = self._sessions.left(now.request, view, turns, freed, plan_ms)
        splice = splice_between(now.prompt, prompt, may_shift=now.may_splice)
        prompt = self._prompts.fit(replace(prompt, splice=splice, admitted=now.prompt.admitted), now.request)
        # No more tokens in all than it was admitted for.
        max_new = min(prompt.max_new, len(now.prompt) + now.prompt.max_new - len(prompt))
        fit = replace(now.fit, evictions=(*now.fit.evictions, eviction))
        return replace(now, view=view, prompt=replace(prompt, max_new=max_new), fit=fit)

    def truncations(self, request: Request, lineage: Lineage, limit: int) -> Iterator[Conversation]:
        """Shorter and shorter ends of `request`, beginning with the longest of at most `limit` tokens, for as long
        as the caller asks: those that still do not fit are left out. Nothing is archived."""
        limit = min(limit, self._prompts.context - self._room_for_answer(request))
        if request.prompt is not None:
            if limit > 0 and request.infill is None:
                yield from self._if_it_fits(request, lineage, self._prompts.end_of(request, lineage, limit))
            return
        view = View(read_history(request.messages, request.conversation_id))
        turns = view.leaving()
        if not turns:
            return

        def keeping(count: int) -> tuple[Message, ...]:
            return view.without(turns[: len(turns) - count]).messages

        counts = range(1, len(turns))
        most = bisect_right(counts, limit, key=lambda count: self._prompts.count(request, keeping(count)))
        for count in range(most, -1, -1):
            yield from self._if_it_fits(request, lineage, self._prompts.build(request, lineage, keeping(count)))

    def _if_it_fits(self, request: Request, lineage: Lineage, prompt: Prompt) -> list[Conversation]:
        try:
            return [self._fitted(Conversation(request, lineage, prompt))]
        except ContextExceeded:
            return []

    def _room_for_answer(self, request: Request) -> int:
        """Tokens to keep free, so that a long prompt leaves room for an answer."""
        context = self._prompts.context
        wanted = context // 4 if request.max_tokens is None else request.max_tokens
        return min(wanted, context // 2)

    def _fitted(self, conversation: Conversation) -> Conversation:
        return replace(conversation, prompt=self._prompts.fit(conversation.prompt, conversation.request))

    # ── what leaves ──

    def _shown(self, request: Request, lineage: Lineage, *, is_dry_run: bool) -> Conversation:
        """The conversation that the model is shown. It may still be too long, if nothing else may leave."""
        view = self._sessions.view(request, is_dry_run=is_dry_run)
        if not self._sessions.may_evict(request):
            return self._seen(request, lineage, view)
        rough = self._far_too_long(view)
        now = self._seen(request, lineage, self._sessions.without(view, request, rough) if rough else view)
        assert now.view is not None
        if now.view.gone.spoken and not rough and len(now.prompt) + view.gone.tokens <= self._policy.comfortable:
            # Another branch of this conversation was longer than this one.
            whole = self._seen(request, lineage, replace(view, gone=Gone()))
            if len(whole.prompt) <= self._policy.comfortable:
                return whole
        turns = rough + self._too_long(now, now.view)
        if turns:
            return self._evicted(now, view, rough, turns, is_dry_run=is_dry_run)
        return now if is_dry_run else self._recalled(now, now.view)

    def _far_too_long(self, view: View) -> Turns:
        """What leaves a conversation that was never here before and is many contexts long."""
        excess = view.chars(view.kept) - _CHARS_PER_TOKEN * self._policy.context
        return plan_eviction(view, excess, view.chars)

    def _too_long(self, now: Conversation, view: View) -> Turns:
        length, limit = len(now.prompt), self._policy.limit(now.request)
        wanted = self._policy.recall_tokens if self._sessions.may_recall(now.request, view) else 0
        if length <= limit - wanted:
            return []
        target = self._target(now)
        if length <= min(limit, _CLOSE_ENOUGH * target):
            return []  # little would leave, and less may come back
        return self._enough(now, length - target)

    def _enough(self, now: Conversation, tokens: int) -> Turns:
        """The oldest that may leave, until about so many tokens have left."""
        view, prompt, fixed = now.view, now.prompt, self._fixed(now)
        assert view is not None
        chars = len(prompt.text) - len(self._prompts.detokenize(prompt.tokenized.ids[:fixed]))
        around = max(chars - view.chars(view.kept), 0) / max(len(view.kept), 1)
        per_token = chars / max(len(prompt) - fixed, 1)
        return plan_eviction(view, tokens * per_token, lambda turn: view.chars(turn) + len(turn) * around)

    def _target(self, now: Conversation) -> int:
        return self._policy.target(self._fixed(now))

    def _fixed(self, now: Conversation) -> int:
        """Tokens of the system's messages and of tools."""
        stable = self._prompts.stable(now.request, now.prompt)
        return stable.length if stable else 0

    def _evicted(
        self, now: Conversation, before: View, rough: Turns, turns: Turns, *, is_dry_run: bool
    ) -> Conversation:
        """`now` is `before` without `rough`, whose tokens are not known."""
        begin = perf_counter()
        request = now.request
        most = min(_CLOSE_ENOUGH * self._target(now), self._policy.limit(request))
        prompt = now.prompt

        def fits(view: View) -> bool:
            nonlocal prompt
            prompt = self._shorten(now, view)
            return len(prompt) <= most

        turns, view = evict_until(fits, before, turns, partial(self._sessions.without, before, request))
        if is_dry_run or len(prompt) >= self._policy.context:
            # Too long even so: nothing leaves for a request that cannot be answered.
            return replace(now, view=view, prompt=prompt)
        freed = max(len(now.prompt) - len(prompt), 0) + sum(map(before.chars, rough)) // _CHARS_PER_TOKEN
        plan_ms = 1e3 * (perf_counter() - begin)
        view, eviction = self._sessions.left(request, view, turns, freed, plan_ms)
        source, recalled = now, self._sessions.recalled(request, view, self._count, self._room(prompt))
        if recalled is not view:
            # What is recalled stands in the longer prompt too, so that both end alike.
            source = self._seen(request, now.lineage, replace(before, inserted=recalled.inserted))
            view = recalled
            prompt = self._shorten(source, view)
        may_splice = not rough and now.may_splice
        splice = splice_between(source.prompt, prompt, may_shift=True) if may_splice else None
        fit = Fit(evictions=(eviction,), recalled=view.recalled)
        return replace(now, view=view, prompt=replace(prompt, splice=splice), fit=fit)

    def _recalled(self, now: Conversation, view: View) -> Conversation:
        recalled = self._sessions.recalled(now.request, view, self._count, self._room(now.prompt))
        return now if recalled is view else self._seen(now.request, now.lineage, recalled)

    # ── as a prompt ──

    def _seen(self, request: Request, lineage: Lineage, view: View) -> Conversation:
        may_splice = self._may_splice(request)
        prompt = self._prompts.build(request, _lineage_of(view, lineage, may_splice), view.messages)
        can_grow = request.n == 1 and self._sessions.may_evict(request)
        return Conversation(request, lineage, prompt, Fit(recalled=view.recalled), view, may_splice, can_grow)

    def _shorten(self, longer: Conversation, view: View) -> Prompt:
        lineage = _lineage_of(view, longer.lineage, longer.may_splice)
        return self._prompts.shorten(longer.request, lineage, view.messages, longer.prompt)

    def _room(self, prompt: Prompt) -> int:
        """For what comes back."""
        return self._policy.comfortable - len(prompt)

    def _count(self, text: str) -> int:
        return len(self._prompts.encode(text))


def _lineage_of(view: View, lineage: Lineage, may_splice: bool) -> Lineage:
    return replace(lineage, splice=view.gone.root) if may_splice and view.gone.spoken else lineage
