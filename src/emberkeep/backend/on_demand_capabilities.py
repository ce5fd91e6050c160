"""What a model that is loaded on demand can do besides answering. Being asked for it loads it, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Protocol

from emberkeep.backend.base import NO_ARGS, Backend, EmbeddingShape, ModelTexts
from emberkeep.backend.capabilities import cache_of, embedder_of, ranker_of, tokenizer_of
from emberkeep.types.cache import CacheEntry, CacheTree, EntryText, Explanation, Removed, Verified
from emberkeep.types.embedding import Embedded, EmbeddingRequest, Ranked, RerankRequest
from emberkeep.types.request import Json, Message, Request, Tool


class OnDemand(Protocol):
    def used(self) -> AbstractAsyncContextManager[Backend]:
        """Loaded, and not unloaded in the block."""

    def used_in_thread(self) -> AbstractContextManager[Backend]:
        """The same where blocking is allowed."""


class TokenizerOnDemand:
    """The model cannot be unloaded in the middle of a call."""

    def __init__(self, model: OnDemand) -> None:
        self._model = model

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        with self._model.used_in_thread() as backend:
            return tokenizer_of(backend).tokenize(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, tokens: Sequence[int]) -> str:
        with self._model.used_in_thread() as backend:
            return tokenizer_of(backend).detokenize(tokens)

    def pieces(self, tokens: Sequence[int]) -> list[bytes]:
        with self._model.used_in_thread() as backend:
            return tokenizer_of(backend).pieces(tokens)

    def texts(self) -> ModelTexts:
        with self._model.used_in_thread() as backend:
            return tokenizer_of(backend).texts()

    def apply_template(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        args: Mapping[str, Json] = NO_ARGS,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        with self._model.used_in_thread() as backend:
            template = tokenizer_of(backend, "template")
            return template.apply_template(messages, tools, args, add_generation_prompt=add_generation_prompt)

    def count(self, request: Request) -> int:
        with self._model.used_in_thread() as backend:
            return tokenizer_of(backend).count(request)


class CacheOnDemand:
    """The model cannot be unloaded in the middle of a call."""

    def __init__(self, model: OnDemand) -> None:
        self._model = model

    def entries(self) -> list[CacheEntry]:
        with self._model.used_in_thread() as backend:
            return cache_of(backend).entries()

    def tree(self, limit: int, at: str = "") -> CacheTree:
        with self._model.used_in_thread() as backend:
            return cache_of(backend).tree(limit, at)

    def show(self, entry_id: str) -> EntryText:
        with self._model.used_in_thread() as backend:
            return cache_of(backend).show(entry_id)

    def pin(self, entry_id: str, pinned: bool) -> CacheEntry:
        with self._model.used_in_thread() as backend:
            return cache_of(backend).pin(entry_id, pinned)

    def remove(self, entry_id: str) -> Removed:
        with self._model.used_in_thread() as backend:
            return cache_of(backend).remove(entry_id)

    def remove_user(self, user: str) -> Removed:
        with self._model.used_in_thread() as backend:
            return cache_of(backend).remove_user(user)

    def gc(self) -> Removed:
        with self._model.used_in_thread() as backend:
            return cache_of(backend).gc()

    def explain(self, request: Request) -> Explanation:
        with self._model.used_in_thread() as backend:
            return cache_of(backend).explain(request)

    async def verify(self, entry_id: str, tokens: int) -> Verified:
        async with self._model.used() as backend:
            return await cache_of(backend).verify(entry_id, tokens)


class EmbedderOnDemand:
    """What it does is known once the model was loaded; it cannot be unloaded in the middle of a call."""

    def __init__(self, model: OnDemand, shape: EmbeddingShape) -> None:
        self._model = model
        self.shape = shape

    async def embed(self, request: EmbeddingRequest) -> Embedded:
        async with self._model.used() as backend:
            return await embedder_of(backend).embed(request)

    async def rerank(self, request: RerankRequest) -> Ranked:
        async with self._model.used() as backend:
            return await ranker_of(backend).rerank(request)
