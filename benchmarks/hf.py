"""A model in the Hugging Face engine with the product around it, and what transformers makes of it beside it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TypeVar

import numpy as np

from benchmarks.baseline import PlainModel
from benchmarks.model_under_test import ModelUnderTest, open_under_test
from emberkeep.backend.local import LocalBackend
from emberkeep.bench.workspace import Words, Workspace
from emberkeep.config.settings import Config
from emberkeep.engine.hf.model_loader import HfSource

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BlendedSoFar:
    """What the engine did in steps into which state was moved."""

    tokens: int
    token_layers: int

    def __sub__(self, before: BlendedSoFar) -> BlendedSoFar:
        return BlendedSoFar(self.tokens - before.tokens, self.token_layers - before.token_layers)


class HfModelUnderTest(ModelUnderTest):
    """One request at a time."""

    def __init__(self, backend: LocalBackend) -> None:
        super().__init__(backend)
        self.words = Words.of(self.tokenize)

    @property
    def layers(self) -> int:
        return int((self.backend.card.details or {})["layers"])

    @property
    def blended(self) -> BlendedSoFar:
        counters = self.backend.scheduler.counters
        return BlendedSoFar(counters.blended_tokens, counters.blended_token_layers)

    @property
    def evaluated_tokens(self) -> int:
        """In all, by the scheduler's count."""
        return self.backend.scheduler.counters.evaluated_tokens

    async def beside(self, action: Callable[[], T]) -> T:
        """Something on the engine's thread, between two steps: torch's workers belong to the thread that calls."""
        return await asyncio.wrap_future(self.backend.scheduler.call(action))


@asynccontextmanager
async def open_model(workspace: Workspace, context: int) -> AsyncIterator[HfModelUnderTest]:
    """Raises EngineError, ModelError, and EmberkeepError for a model whose context is shorter than that."""
    config = Config(
        model=str(workspace.model), data_dir=workspace.new_data_dir(), engine="hf", parallel=1, ctx=context
    )
    async with open_under_test(config) as model:
        yield HfModelUnderTest(model.backend)


def open_plain(model: HfModelUnderTest, workspace: Workspace) -> PlainModel:
    """The same file in transformers alone, on the same device. On the engine's thread. Raises ModelBroken."""
    details = model.backend.card.details or {}
    path = workspace.model
    source = HfSource(path) if path.is_dir() else HfSource(path.parent, path.name)
    return PlainModel.load(source, device=details["device"], dtype=details["dtype"])


def plain_ttft_ms(plain: PlainModel, ids: Sequence[int]) -> float:
    """`transformers.generate` up to its first token."""
    prompt = np.array(ids, np.int32)
    begin = perf_counter()
    plain.generate(prompt, 1)
    return 1e3 * (perf_counter() - begin)
