"""Texts as vectors, and documents by how well they answer a query: what is asked, and what comes back."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

from emberkeep.values import dataclass

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Vector: TypeAlias = "npt.NDArray[np.float32]"

EmbeddingInput = str | tuple[int, ...]
"""As it was written, or as the model's own token ids, to which nothing is added then."""


class Pooling(StrEnum):
    """How the states of an input's tokens become one vector."""

    MEAN = "mean"
    CLS = "cls"  # the state of the first token
    LAST = "last"  # the state of the last token
    RANK = "rank"  # a head on top of it gives one number: how well a document answers a query


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    inputs: tuple[EmbeddingInput, ...]
    dimensions: int | None = None
    """How many of the model's own to keep; None: all of them."""
    normalize: bool = True
    """Vectors get the length 1."""
    truncate: bool | None = None
    """The end of an input that is longer than the model's context is left out; otherwise it is refused. None: as
    configured."""
    user: str = ""
    namespace: str = ""
    """Vectors that were computed for others are not looked for; see `private_namespace`."""


@dataclass(frozen=True, slots=True)
class Embedded:
    vectors: tuple[Vector, ...]
    """One for each input, in their order."""
    prompt_tokens: int
    cached_tokens: int
    """Those of inputs whose vectors were known already."""


@dataclass(frozen=True, slots=True)
class RerankRequest:
    query: str
    documents: tuple[str, ...]
    truncate: bool = True
    """The end of a document that is too long beside the query is left out; otherwise it is refused."""
    user: str = ""
    namespace: str = ""
    """As in `EmbeddingRequest`."""


@dataclass(frozen=True, slots=True)
class Ranked:
    logits: tuple[float, ...]
    """One for each document, in their order: the more, the better it answers the query."""
    prompt_tokens: int
    cached_tokens: int
