"""What a model has and does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


@dataclass(frozen=True, slots=True)
class LayerExperts:
    layer: int
    tokens: int
    """How many were evaluated here; at least one."""
    counts: tuple[int, ...]
    """Per expert how many of these tokens were sent to it."""

    @property
    def frequencies(self) -> tuple[float, ...]:
        """Per expert the share of the tokens that were sent to it."""
        return tuple(count / self.tokens for count in self.counts)


@dataclass(frozen=True, slots=True)
class ExpertStats:
    enabled: bool
    """Whether anything is being counted now."""
    experts: int
    experts_used: int | None
    """By each token, in each layer; None where layers differ."""
    layers: tuple[LayerExperts, ...]
    """Those that have counted something."""


class AttentionTier(StrEnum):
    """Which code computes attention in the Hugging Face engine."""

    OWN = "own"  # Emberkeep's kernel over the paged pool
    FLASH = "flash"  # torch's fused kernels
    PLAIN = "plain"  # matrix products and a softmax: any device, any model


class Vocab(Protocol):
    """Immutable after construction; every method may be called from any thread."""

    @property
    def size(self) -> int: ...

    @property
    def pieces(self) -> Sequence[bytes]:
        """The bytes of every token id; special tokens as the text a template writes for them."""

    @property
    def specials(self) -> Mapping[str, int]:
        """Text to id of every token that tokenisation recognises as a whole (control, user-defined)."""

    @property
    def controls(self) -> frozenset[int]:
        """Ids that never stand for visible text."""

    @property
    def eog(self) -> frozenset[int]:
        """Every token that ends a generation."""

    @property
    def bos(self) -> int | None: ...

    @property
    def eos(self) -> int | None: ...

    @property
    def adds_bos(self) -> bool:
        """The model wants `bos` before raw text (chat templates write their own)."""

    @property
    def splits_at_specials(self) -> bool:
        """Tokenising the pieces between special tokens one by one equals tokenising the whole text."""

    def tokenize(self, text: str, *, parse_special: bool = True) -> list[int]:
        """Token ids of `text`, with nothing added."""
