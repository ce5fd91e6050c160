"""What a backend cannot do, said to the user: one sentence for each capability that may be None."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Literal

from emberkeep.backend.base import AttentionSwitch, Backend, Cache, Embedder, Experts, ModelCard, Tokenizer
from emberkeep.errors import NoSuchEntry, RequestError
from emberkeep.types.cache import CacheEntry, CacheTree, EntryText, Explanation, Removed, Verified, Warmed
from emberkeep.types.request import Request
from emberkeep.types.speculation import SpeculationStats
from emberkeep.values import dataclass

log = logging.getLogger("emberkeep.remote")


def tokenizer_of(backend: Backend, wanted: Literal["tokens", "template"] = "tokens") -> Tokenizer:
    """Raises RequestError where there is none."""
    if backend.tokenizer is None:
        raise _only_here(backend.card.remote, f"does not tell its {wanted}")
    return backend.tokenizer


def embedder_of(backend: Backend) -> Embedder:
    """For vectors. Raises RequestError for a model that gives none."""
    if backend.embedder is None:
        raise _has_no_embedder(backend.card, no_embeddings)
    return backend.embedder


def ranker_of(backend: Backend) -> Embedder:
    """For ranking. Raises RequestError for a model that does not."""
    if backend.embedder is None:
        raise _has_no_embedder(backend.card, no_ranks)
    return backend.embedder


def _has_no_embedder(card: ModelCard, otherwise: Callable[[str], RequestError]) -> RequestError:
    if card.remote:
        return _only_here(card.remote, "neither embeds nor ranks for clients of this server")
    return otherwise(card.id)


def no_embeddings(name: str) -> RequestError:
    return RequestError(
        f"{name} gives no embeddings: name a model that does (`emberkeep models pull "
        "hf:nomic-ai/nomic-embed-text-v1.5-GGUF:Q8_0` fetches one), or set pooling for a chat model's own states.",
        "model",
    )


def no_ranks(name: str) -> RequestError:
    return RequestError(
        f"{name} does not rank documents: name a model that does (`emberkeep models pull "
        "hf:gpustack/bge-reranker-v2-m3-GGUF:Q8_0` fetches one).",
        "model",
    )


def experts_of(backend: Backend) -> Experts:
    """Raises RequestError for a model without experts."""
    if backend.experts is not None:
        return backend.experts
    if backend.card.remote:
        raise _only_here(backend.card.remote, "does not tell its experts")
    raise RequestError(f"{backend.card.id} is not a mixture of experts: load a model that is one.")


def attention_of(backend: Backend) -> AttentionSwitch:
    """Raises RequestError where there is no choice."""
    if backend.attention is not None:
        return backend.attention
    if backend.card.remote:
        raise _only_here(backend.card.remote, "computes attention as it likes")
    raise RequestError(f"{backend.card.id} has one way to compute attention: tiers are for --engine hf.")


def speculation_of(backend: Backend) -> SpeculationStats:
    """How much was drafted and accepted; nothing for a model that runs elsewhere."""
    told = backend.speculation_stats()
    return told or SpeculationStats(False, f"{_why_not(backend.card)}: nothing is drafted here.")


async def warm_prefix(backend: Backend, request: Request) -> Warmed:
    """As `Warmer.warm`. A remote model cannot be warmed: then the result's `error` says so."""
    if backend.warmer is not None:
        return await backend.warmer.warm(request)
    error = f"{_why_not(backend.card)}: its prompts cannot be warmed from here."
    return Warmed(0, 0, 0.0, "", None, error)


def keep_warm(backend: Backend, prefixes: Sequence[Request]) -> None:
    """As `Warmer.keep_warm`; what cannot be warmed is a line in the log."""
    if backend.warmer is not None:
        backend.warmer.keep_warm(prefixes)
    elif prefixes:
        log.info("%s: nothing is warmed.", _why_not(backend.card))


def _why_not(card: ModelCard) -> str:
    return f"{card.remote} runs elsewhere" if card.remote else f"{card.id} writes no answers"


def cache_of(backend: Backend) -> Cache:
    """Its cache; an empty one for a model that runs elsewhere."""
    return backend.cache or _NoCache(backend.card.remote)


@dataclass(frozen=True, slots=True)
class _NoCache:
    remote: str

    def entries(self) -> list[CacheEntry]:
        return []

    def tree(self, limit: int, at: str = "") -> CacheTree:
        return CacheTree()

    def show(self, entry_id: str) -> EntryText:
        raise self._nothing()

    def pin(self, entry_id: str, pinned: bool) -> CacheEntry:
        raise self._nothing()

    def remove(self, entry_id: str) -> Removed:
        raise self._nothing()

    def remove_user(self, user: str) -> Removed:
        return Removed(0, 0)

    def gc(self) -> Removed:
        return Removed(0, 0)

    def explain(self, request: Request) -> Explanation:
        raise RequestError(f"{self.remote} runs elsewhere: what it reuses is not known here.")

    async def verify(self, entry_id: str, tokens: int) -> Verified:
        raise _only_here(self.remote, "has no stored state to verify")

    def _nothing(self) -> NoSuchEntry:
        return NoSuchEntry(f"{self.remote} runs elsewhere: nothing of it is stored here.")


def _only_here(remote: str, reason: str) -> RequestError:
    return RequestError(f"{remote} runs elsewhere and {reason}: use a model that runs here.")
