"""Whether stored state is right: it is continued, and so is a fresh evaluation of the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from emberkeep.types.cache import CacheEntry, Verified
from emberkeep.types.events import Completed, Events, LookupRecord, TextDelta
from emberkeep.types.lineage import SHARED, Lineage
from emberkeep.types.models import Vocab
from emberkeep.types.request import Execution, Request
from emberkeep.types.sampling import Sampling
from emberkeep.values import dataclass


@dataclass(frozen=True, slots=True)
class Verifier:
    generate: Callable[[Request], Events]
    vocab: Vocab
    context: int

    async def verify(self, entry: CacheEntry, ids: list[int], lineage: Lineage, tokens: int) -> Verified:
        """Verify `entry`, whose latest state has these `ids`. Raises Overloaded, EngineError."""
        # At the end of a turn a model has nothing to add: without this there would be nothing to compare.
        text_only = dict.fromkeys(self.vocab.controls | self.vocab.eog, -100.0)
        greedy = Request(
            prompt=tuple(ids[: max(self.context - tokens, 1)]),
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
        async for event in self.generate(request):
            if isinstance(event, TextDelta):
                ids += event.tokens
            elif isinstance(event, Completed):
                lookup = event.lookup
        return ids, lookup
