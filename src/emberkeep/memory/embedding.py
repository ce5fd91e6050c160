"""Texts as vectors: what means the same lies close together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt

from emberkeep.errors import MemoryFailed

Embed = Callable[[Sequence[str]], npt.NDArray[np.float32]]
"""One row for each text, a unit vector; a text without any known word has a row of zeros."""

_MODEL = "l2_supercat"
_MOST_CHARS = 4000
"""Of a text: a vector is an average, in which longer texts all look alike."""


def open_embedder() -> Embed:
    """Loads the word vectors that come with the package, about 16 MB. Raises MemoryFailed without it."""
    if find_spec("wordllama") is None:
        raise MemoryFailed("Searching by meaning needs wordllama: pip install 'emberkeep[embeddings]'.")
    from wordllama import WordLlama

    model = WordLlama.load(_MODEL, disable_download=True)

    def embed(texts: Sequence[str]) -> npt.NDArray[np.float32]:
        vectors = model.embed([text[:_MOST_CHARS] for text in texts])
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        return np.asarray(vectors / np.where(lengths > 0, lengths, 1), np.float32)

    return embed
