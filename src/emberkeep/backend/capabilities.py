"""What a backend cannot do, said to the user: one sentence for each capability that may be None."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Literal, NoReturn

from emberkeep.backend.base import AttentionSwitch, Backend, Cache, Embedder, Experts, ModelCard, Tokenizer
from emberkeep.errors import NoSuchEntry, RequestError
from emberkeep.kv.forgetting import Holders
from emberkeep.types.cache import CacheEntry, CacheTree, Removed, Verified, Warmed
from emberkeep.types.models import SpeculationStats
from emberkeep.types.request import Request

log = logging.getLogger("emberkeep.remote")


def tokenizer_of(backend: Backend, wanted: Literal["tokens", "template"] = "tokens") -> Tokenizer:
    """Raises RequestError where there is none."""
    return backend.tokenizer or _refuse(backend.card, f"does not tell its {wanted}")


def embedder_of(backend: Backend) -> Embedder:
    """For vectors. Raises RequestError for a model that gives none."""
    return backend.embedder or _refuse(backend.card, _NO_EMBEDDER, no_embeddings(backend.card.id))


def ranker_of(backend: Backend) -> Embedder:
    """For ranking. Raises RequestError for a model that does not."""
    return backend.embedder or _refuse(backend.card, _NO_EMBEDDER, no_ranks(backend.card.id))


_NO_EMBEDDER = "neither embeds nor ranks for clients of this server"


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
    here = RequestError(f"{backend.card.id} is not a mixture of experts: load a model that is one.")
    return backend.experts or _refuse(backend.card, "does not tell its experts", here)


def attention_of(backend: Backend) -> AttentionSwitch:
    """Raises RequestError where there is no choice."""
    here = RequestError(f"{backend.card.id} has one way to compute attention: tiers are for --engine hf.")
    return backend.attention or _refuse(backend.card, "computes attention as it likes", here)


def _refuse(card: ModelCard, elsewhere: str, here: RequestError | None = None) -> NoReturn:
    """Raises RequestError: what a model does that runs elsewhere, or `here` for one that runs here."""
    if here is not None and not card.remote:
        raise here
    raise RequestError(f"{card.remote} runs elsewhere and {elsewhere}: use a model that runs here.")


def speculation_of(backend: Backend) -> SpeculationStats:
    """How much was drafted and accepted; nothing for a model that runs elsewhere."""
    return backend.speculation_stats() or SpeculationStats(
        False, f"{_why_not(backend.card)}: nothing is drafted here."
    )


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
    why = f"{backend.card.remote} runs elsewhere: nothing of it is stored here."
    return backend.cache or EmptyCache(why, backend.holders)


class EmptyCache:
    """A Cache in which nothing can be found, but whose users can be forgotten."""

    def __init__(self, why: str, holders: Holders) -> None:
        """`why`: what is said to those who look for something."""
        self._why = why
        self.remove_user = holders.forget

    def entries(self) -> list[CacheEntry]:
        return []

    def tree(self, limit: int, at: str = "") -> CacheTree:
        return CacheTree()

    def gc(self) -> Removed:
        return Removed(0, 0)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise NoSuchEntry(self._why)

    show = pin = remove = explain = _refuse

    async def verify(self, entry_id: str, tokens: int) -> Verified:
        self._refuse()
