"""Conversations that do not fit: which messages leave, and how the state of what stays is kept.

One message's way from the context to the archive: `fit` sees that the prompt is too long, takes the oldest turns
out of the view (`session/view.py`), has them archived (`session/sessions.py`), and describes as a `Cut` how the
state of the longer prompt becomes that of the shorter one (`sched/cutter.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from emberkeep.backend.prompts import Draft, PromptMaker
from emberkeep.kv.tree import common_prefix
from emberkeep.sched.job import Cut
from emberkeep.session.sessions import Sessions
from emberkeep.session.view import Gone, View
from emberkeep.types import Eviction, Lineage, Request

_CLOSE_ENOUGH = 1.15
"""Times the target: what leaves is chosen by the length of its text, which tells its tokens only roughly."""
_CHARS_PER_TOKEN = 8
"""More than any text has on the average: a conversation that is too long even so need not be tokenised to know."""
_WORTH_LEAVING = 16


@dataclass(frozen=True, slots=True)
class Conversation:
    """A request as its model sees it."""

    request: Request
    """As it was asked."""
    lineage: Lineage
    """Of the request; `shown` may have another one."""
    shown: Request
    view: View
    draft: Draft
    may_cut: bool
    """Where messages leave it, what follows is moved up and not evaluated again."""
    may_grow: bool
    """Messages may leave while it is answered."""
    cut: Cut | None = None
    """How to come by its state from that of the turn before."""
    evictions: tuple[Eviction, ...] = ()

    @property
    def is_shortened(self) -> bool:
        return bool(self.view.gone.spoken)

    @property
    def recalled(self) -> int:
        put = self.view.inserted.get(len(self.view.history.spoken) - 1)
        return len(put.turns) if put else 0


class Evictor:
    """Safe to use from several threads; every method blocks for milliseconds."""

    def __init__(self, prompts: PromptMaker, sessions: Sessions) -> None:
        self._prompts = prompts
        self._sessions = sessions
        self._policy = sessions.policy

    def applies(self, request: Request) -> bool:
        return self._sessions.applies(request)

    def keeps_whole(self, request: Request) -> bool:
        """It is a conversation that nothing may leave."""
        return request.prompt is None and not request.is_prefix and not self._sessions.may_evict(request)

    def fit(
        self, request: Request, lineage: Lineage, *, may_cut: bool, is_rehearsal: bool = False
    ) -> Conversation:
        """`request` without what left it before, and without more if it is too long.

        May still be too long: then nothing else may leave. In a rehearsal nothing is written or recalled. Raises
        RequestError.
        """
        view = self._sessions.view(request, is_rehearsal=is_rehearsal)
        if not self._sessions.may_evict(request):
            return self._seen(request, lineage, view, may_cut)
        rough = self._far_too_long(view)
        now = self._seen(request, lineage, self._without(view, request, rough), may_cut)
        if now.is_shortened and not rough and len(now.draft) + view.gone.tokens <= self._policy.comfortable:
            # Another branch of this conversation was longer than this one.
            whole = self._seen(request, lineage, replace(view, gone=Gone()), may_cut)
            if len(whole.draft) <= self._policy.comfortable:
                return whole
        groups = rough + self._too_long(now)
        if groups:
            return self._evicted(now, view, rough, groups, is_rehearsal=is_rehearsal)
        return now if is_rehearsal else self._recalled(now)

    def shorter(self, now: Conversation) -> Conversation | None:
        """Let more leave while the answer is being written. None: nothing may."""
        begin = perf_counter()
        groups = self._enough(now, self._policy.context // 4)
        if not groups:
            return None
        view = self._sessions.without(now.view, now.request, groups)
        shown, draft = self._redrafted(now, view)
        freed = len(now.draft) - len(draft)
        if freed < _WORTH_LEAVING:
            return None
        plan_ms = 1e3 * (perf_counter() - begin)
        view, eviction = self._sessions.left(now.request, view, groups, freed, plan_ms)
        cut = _cut(now.draft, draft, draft.lineage if now.may_cut else None)
        return replace(now, shown=shown, view=view, draft=draft, cut=cut, evictions=(*now.evictions, eviction))

    # ── what leaves ──

    def _far_too_long(self, view: View) -> list[frozenset[int]]:
        """What leaves a conversation that was never here before and is many contexts long."""
        left = view.chars(view.kept)
        groups: list[frozenset[int]] = []
        for group in view.leaving():
            if left <= _CHARS_PER_TOKEN * self._policy.context:
                break
            groups.append(group)
            left -= view.chars(group)
        return groups

    def _too_long(self, now: Conversation) -> list[frozenset[int]]:
        length, limit = len(now.draft), self._policy.limit(now.request)
        wanted = self._policy.recall_tokens if self._sessions.may_recall(now.request, now.view) else 0
        if length <= limit - wanted:
            return []
        target = self._target(now)
        if length <= min(limit, _CLOSE_ENOUGH * target):
            return []  # little would leave, and less may come back
        return self._enough(now, length - target)

    def _target(self, now: Conversation) -> int:
        return self._policy.target(self._fixed(now))

    def _fixed(self, now: Conversation) -> int:
        """Tokens of the system's messages and of tools."""
        stable = self._prompts.stable(now.shown, now.draft.lineage, np.array(now.draft.spelled.ids, np.int32))
        return stable.length if stable else 0

    def _enough(self, now: Conversation, tokens: int) -> list[frozenset[int]]:
        """The oldest that may leave, until about so many tokens have left."""
        view, fixed = now.view, self._fixed(now)
        chars = len(now.draft.text) - len(self._prompts.detokenize(now.draft.spelled.ids[:fixed]))
        around = max(chars - view.chars(view.kept), 0) / max(len(view.kept), 1)
        left = tokens * chars / max(len(now.draft) - fixed, 1)
        groups: list[frozenset[int]] = []
        for group in view.leaving():
            if left <= 0:
                break
            groups.append(group)
            left -= view.chars(group) + len(group) * around
        return groups

    def _evicted(
        self,
        now: Conversation,
        before: View,
        rough: list[frozenset[int]],
        groups: list[frozenset[int]],
        *,
        is_rehearsal: bool,
    ) -> Conversation:
        """`now` is `before` without `rough`, of which nobody knows the tokens."""
        begin = perf_counter()
        request = now.request
        most = min(_CLOSE_ENOUGH * self._target(now), self._policy.limit(request))
        view = self._sessions.without(before, request, groups)
        shown, draft = self._redrafted(now, view)
        while len(draft) > most and (more := view.leaving()):
            groups = [*groups, more[0]]
            view = self._sessions.without(before, request, groups)
            shown, draft = self._redrafted(now, view)
        if is_rehearsal or len(draft) >= self._policy.context:
            # Too long even so: nothing leaves for a request that cannot be answered.
            return replace(now, shown=shown, view=view, draft=draft)
        freed = max(len(now.draft) - len(draft), 0) + sum(map(before.chars, rough)) // _CHARS_PER_TOKEN
        plan_ms = 1e3 * (perf_counter() - begin)
        view, eviction = self._sessions.left(request, view, groups, freed, plan_ms)
        source, recalled = now, self._sessions.recalled(request, view, self._count, self._room(draft))
        if recalled is not view:
            # What is recalled stands in the longer prompt too, so that both end alike.
            longer = replace(before, inserted=recalled.inserted)
            source = self._seen(request, now.lineage, longer, now.may_cut)
            view = recalled
            shown, draft = self._redrafted(source, view)
        cut = _cut(source.draft, draft, draft.lineage) if not rough and now.may_cut else None
        return replace(now, shown=shown, view=view, draft=draft, cut=cut, evictions=(eviction,))

    def _recalled(self, now: Conversation) -> Conversation:
        view = self._sessions.recalled(now.request, now.view, self._count, self._room(now.draft))
        return now if view is now.view else self._seen(now.request, now.lineage, view, now.may_cut)

    # ── as text and tokens ──

    def _without(self, view: View, request: Request, groups: list[frozenset[int]]) -> View:
        return self._sessions.without(view, request, groups) if groups else view

    def _seen(self, request: Request, lineage: Lineage, view: View, may_cut: bool) -> Conversation:
        shown = replace(request, messages=view.messages)
        draft = self._prompts.draft(shown, _lineage_of(view, lineage, may_cut))
        may_grow = request.n == 1 and self._sessions.may_evict(request)
        return Conversation(request, lineage, shown, view, draft, may_cut, may_grow)

    def _redrafted(self, longer: Conversation, view: View) -> tuple[Request, Draft]:
        shown = replace(longer.request, messages=view.messages)
        lineage = _lineage_of(view, longer.lineage, longer.may_cut)
        return shown, self._prompts.redraft(shown, lineage, longer.draft)

    def _room(self, draft: Draft) -> int:
        """For what comes back."""
        return self._policy.comfortable - len(draft)

    def _count(self, text: str) -> int:
        return len(self._prompts.encode(text))


def _lineage_of(view: View, lineage: Lineage, may_cut: bool) -> Lineage:
    return replace(lineage, splice=view.gone.root) if may_cut and view.gone.spoken else lineage


def _cut(longer: Draft, shorter: Draft, lineage: Lineage | None) -> Cut:
    """What has to be cut out of the longer one, and put there instead."""
    source, tokens = (np.array(draft.spelled.ids, np.int32) for draft in (longer, shorter))
    start = common_prefix(source, tokens)
    most = min(len(source), len(tokens)) - start
    # Something is always put there: evaluating it is what moves the rest.
    same = min(common_prefix(source[::-1], tokens[::-1]), most, len(tokens) - start - 1)
    end, at = len(source) - same, len(tokens) - same
    return Cut(source, start, end, tokens[start:at], lineage)
