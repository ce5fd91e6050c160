"""How much was drafted, by which source, and how much of it was accepted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, field
from enum import StrEnum

from emberkeep.types.request import Json
from emberkeep.values import dataclass

LENGTH_BUCKETS = 17
"""`SourceStats.accepted_lengths` has one for each of 0 to 15 tokens, and one for 16 and more."""


class DraftSource(StrEnum):
    """Where the tokens of a draft come from."""

    CONTEXT = "context"  # the prompt and the answer so far
    CORPUS = "corpus"  # the same user's earlier prompts and answers
    PATH = "path"  # how exactly this text went on before
    PREDICTION = "prediction"  # what the request says that the answer will be like
    GRAMMAR = "grammar"  # the only tokens that a schema or grammar allows
    MODEL = "model"  # a draft model


@dataclass(frozen=True, slots=True)
class SourceStats:
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    accepted_lengths: tuple[int, ...] = (0,) * LENGTH_BUCKETS
    """How many drafts had 0, 1, 2, ... tokens accepted; the last one: 16 and more."""

    @property
    def acceptance(self) -> float:
        """The share of the drafted tokens that was accepted; 0 where nothing was drafted."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0

    def json(self) -> dict[str, Json]:
        return {**asdict(self), "acceptance": self.acceptance, "accepted_lengths": list(self.accepted_lengths)}


@dataclass(frozen=True, slots=True)
class DraftModelStats:
    name: str
    reason: str = ""
    """Why it drafts no more, in one sentence; empty where it does."""
    steps: int = 0
    """Steps of its own engine."""
    evaluated_tokens: int = 0
    step_ms: float = 0.0
    """What one more drafted token takes."""
    resident_tokens: int = 0
    """Whose state is in its engine."""

    def json(self) -> dict[str, Json]:
        return {**asdict(self), "reason": self.reason or None}


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    enabled: bool
    reason: str = ""
    """Why not, in one sentence; empty where it is enabled."""
    steps: int = 0
    """Steps of the engine with a draft in them."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    sources: Mapping[str, SourceStats] = field(default_factory=dict)
    """Those that have drafted something, by the name of their `DraftSource`."""
    draft_model: DraftModelStats | None = None
    """None: none is loaded."""

    def json(self) -> dict[str, Json]:
        return {
            **asdict(self),
            "reason": self.reason or None,
            "sources": {name: source.json() for name, source in self.sources.items()},
            "draft_model": self.draft_model.json() if self.draft_model else None,
        }
