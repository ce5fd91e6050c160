"""Speculation: tokens that are evaluated before they are sampled, because they are likely to be.

A draft is evaluated in the same step as the token before it, and each of its tokens is accepted only if the
sequence's own sampler draws it: text is that of plain decoding, whatever is drafted. A step with more rows takes
longer, so as many tokens are drafted as make the most of it: by what steps take on this machine, and by how often
drafts of the same kind were accepted.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field

from emberkeep.engine.base import Capabilities
from emberkeep.sched.draft_length import CERTAIN, Chosen, ModelDrafts, Seconds, StepCost, expected_tokens, share
from emberkeep.sched.drafts import Acceptance, Corpus, Draft, SequenceDrafts
from emberkeep.sched.sequence import Sequence as Running
from emberkeep.types.models import Vocab
from emberkeep.types.speculation import LENGTH_BUCKETS, DraftSource, SourceStats, SpeculationStats
from emberkeep.values import dataclass

log = logging.getLogger("emberkeep.sched")

_PRIOR = 8.0
"""As many expected tokens count as if they had been accepted."""


_Kind = tuple[DraftSource, bool, int, bool]
"""Tokens whose acceptance is counted together: after about as long a match, the first ones and the others."""


class Speculation:
    """Belongs to the engine's thread; `stats` may be called from any."""

    def __init__(
        self,
        corpus: Corpus,
        vocab: Vocab,
        seconds: Seconds,
        *,
        most: int,
        able: Capabilities,
        model: ModelDrafts | None = None,
        reason: str = "",
    ) -> None:
        """`most`: drafted tokens per sequence and step. `able`: the engine's. `reason`: why nothing is drafted;
        empty: it is."""
        self._corpus = corpus
        self._vocab = vocab
        self._seconds = seconds
        self._most = most
        self._rows = able.outputs - able.max_sequences
        self._model = model
        self._reason = reason
        self._rates: defaultdict[_Kind, Acceptance] = defaultdict(lambda: Acceptance(_PRIOR, _PRIOR))
        self._tallies: dict[DraftSource, _Tally] = {}
        self._steps = 0

    def prepare(self, sequence: Running) -> None:
        """A request has come, for which something may be drafted soon. Never raises."""
        if not self._reason and sequence.request.may_speculate and sequence.max_new:
            with _logged("nothing was prepared for drafts"):
                self._corpus.prepare(sequence.prompt.lineage)

    def turn_ended(self, sequence: Running) -> None:
        """What was new in it may come again. Never raises."""
        if not self._reason and sequence.is_kept:
            with _logged("an answer was not noted for drafts"):
                tokens = sequence.tokens[: sequence.computed]
                self._corpus.add(sequence.prompt.lineage, tokens, sequence.reuse.in_place)

    def draft(self, decoding: Sequence[Running], *, beside: int, room: int) -> dict[Running, Chosen]:
        """What each of these sequences evaluates besides its latest token, in a step that has `beside` other rows
        and `room` for more. Never raises."""
        room = min(room, self._rows)
        if self._reason or not decoding or room < 1:
            return {}
        drafts = {s: chosen for s in decoding if (chosen := self._propose(s, room)) is not None}
        depth = sum(s.computed for s in decoding) // len(decoding)
        step = StepCost(self._seconds, len(decoding), beside, room, depth)
        if self._model is not None:
            with _logged("the draft model was not asked"):
                limits = {s: limit for s in decoding if (limit := self._limit(s, room)) > 0}
                drafts |= self._model.ask(limits, drafts, step)
        if not drafts:
            return {}
        counts, _ = share(drafts, step)
        for sequence in drafts.keys() - counts.keys():
            if sequence.drafts is not None:
                sequence.drafts.was_used(False)
        kept = {s: Chosen(drafts[s].draft, count, drafts[s].chances[:count]) for s, count in counts.items()}
        self._steps += bool(kept)
        return kept

    def settle(self, sequence: Running, chosen: Chosen, accepted: int) -> None:
        """A draft was evaluated, and so many of its tokens were accepted."""
        tried = min(accepted + 1, chosen.count)
        source = chosen.draft.source
        self._tallies.setdefault(source, _Tally()).add(chosen.count, accepted)
        if self._model is not None and source is DraftSource.MODEL:
            self._model.settle(sequence, chosen, accepted)
            return
        for place, chance in enumerate(chosen.chances[:tried]):
            rate = self._rates[_kind(chosen.draft, place)]
            rate.add(chance / rate.value, place < accepted)
        if sequence.drafts is not None:
            sequence.drafts.was_used(accepted > 0)
            sequence.drafts.trust.settle(chosen.chances, accepted)

    def stats(self) -> SpeculationStats:
        sources = {source.value: tally.stats() for source, tally in list(self._tallies.items())}
        return SpeculationStats(
            enabled=not self._reason,
            reason=self._reason,
            steps=self._steps,
            drafted_tokens=sum(each.drafted_tokens for each in sources.values()),
            accepted_tokens=sum(each.accepted_tokens for each in sources.values()),
            sources=sources,
            draft_model=self._model.stats() if self._model else None,
        )

    def _limit(self, sequence: Running, room: int) -> int:
        if not sequence.request.may_speculate or not sequence.sampled_count:
            return 0
        return min(self._most, room, sequence.max_new - sequence.sampled_count - 1)

    def _propose(self, sequence: Running, room: int) -> Chosen | None:
        """The best draft for a sequence that needs no model, as long as it can be."""
        limit = self._limit(sequence, room)
        if limit < 1:
            return None
        try:
            if sequence.drafts is None:
                asked = sequence.tokens[: sequence.prompt_length]
                sequence.drafts = SequenceDrafts(
                    sequence.prompt, asked, sequence.sampler, self._corpus, self._vocab
                )
            trust = sequence.drafts.trust
            trust.rest()
            proposed = sequence.drafts.propose(sequence.tokens[:], sequence.sampled_count, limit)
            options = [self._weighed(draft, trust.value) for draft in proposed]
        except Exception:
            log.exception("nothing could be drafted for a request")
            return None
        return max(options, key=expected_tokens, default=None)

    def _weighed(self, draft: Draft, trust: float) -> Chosen:
        chances, before = [], 1.0
        for place, agreement in enumerate(draft.agreement):
            usual = self._rates[_kind(draft, place)].value
            chances.append(min(usual * trust * agreement / before, CERTAIN))
            before = agreement
        return Chosen(draft, len(chances), chances)


@dataclass(slots=True)
class _Tally:
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    lengths: list[int] = field(default_factory=lambda: [0] * LENGTH_BUCKETS)

    def add(self, drafted: int, accepted: int) -> None:
        self.drafts += 1
        self.drafted += drafted
        self.accepted += accepted
        self.lengths[min(accepted, LENGTH_BUCKETS - 1)] += 1

    def stats(self) -> SourceStats:
        return SourceStats(self.drafts, self.drafted, self.accepted, tuple(self.lengths))


@contextmanager
def _logged(failure: str) -> Iterator[None]:
    """What goes wrong in it makes answers slower, and nothing else."""
    try:
        yield
    except Exception:
        log.exception(failure)


def _kind(draft: Draft, place: int) -> _Kind:
    return draft.source, draft.is_rewriting, draft.matched.bit_length(), place > 0
