"""A model that only embeds or ranks, as a backend like any other."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import NoReturn

from emberkeep.backend.base import NO_ARGS, Extras, ModelCard
from emberkeep.backend.capabilities import EmptyCache
from emberkeep.backend.embedder import LocalEmbedder
from emberkeep.engine.embedding import EmbeddingEngine
from emberkeep.errors import InvalidField, RequestError
from emberkeep.kv.forgetting import Holders
from emberkeep.sched.engine_thread import EngineThread
from emberkeep.types.events import Events
from emberkeep.types.request import Json, Message, Request, Tool


class EmbeddingBackend(Extras):
    """Owns the embedder, and the thread of its engine."""

    embedder: LocalEmbedder

    def __init__(
        self,
        card: ModelCard,
        engine: EmbeddingEngine,
        thread: EngineThread,
        embedder: LocalEmbedder,
        holders: Holders | None = None,
    ) -> None:
        self.card = card
        self.holders = holders or Holders()
        self.holders.join("vectors", self, embedder.forget)
        self.embedder = embedder
        self.tokenizer = EmbeddingTokenizer(card.id, engine)
        self.cache = EmptyCache(f"{card.id} keeps vectors, and no entries that have a name.", self.holders)
        self._thread = thread
        self._is_closed = False

    def generate(self, request: Request) -> Events:
        does = "ranks documents (/v1/rerank)" if self.embedder.shape.ranks else "gives embeddings (/v1/embeddings)"
        raise RequestError(f"{self.card.id} {does} and writes no answers: name a model that does.", "model")

    def stats(self) -> dict[str, Json]:
        return {"model": self.card.id, "embeddings": self.embedder.stats()}

    def health(self) -> dict[str, Json]:
        return {"backend": "local", "model": self.card.id}

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.holders.leave(self)
            await self.embedder.close()
            await asyncio.to_thread(self._thread.end)


class EmbeddingTokenizer:
    def __init__(self, name: str, engine: EmbeddingEngine) -> None:
        self._name = name
        self._engine = engine

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        ids = self._engine.vocab.tokenize(text, parse_special=parse_special)
        framing = self._engine.framing
        return [*framing.head, *ids, *framing.tail] if add_special else ids

    def detokenize(self, tokens: Sequence[int]) -> str:
        return b"".join(self.pieces(tokens)).decode("utf-8", "replace")

    def pieces(self, tokens: Sequence[int]) -> list[bytes]:
        pieces = self._engine.vocab.pieces
        if any(token >= len(pieces) for token in tokens):
            raise InvalidField("tokens", f"{max(tokens)} is no token of {self._name}, which has {len(pieces)}.")
        return [pieces[token] for token in tokens]

    def texts(self) -> NoReturn:
        raise self._no_chats()

    def apply_template(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        args: Mapping[str, Json] = NO_ARGS,
        *,
        add_generation_prompt: bool = True,
    ) -> NoReturn:
        raise self._no_chats()

    def count(self, request: Request) -> NoReturn:
        raise self._no_chats()

    def _no_chats(self) -> RequestError:
        return RequestError(f"{self._name} writes no answers: name a model that does.", "model")
