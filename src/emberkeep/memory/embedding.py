"""Texts as vectors: what means the same lies close together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt

from emberkeep.errors import MemoryFailed
from emberkeep.memory.terms import telling_words

Floats = npt.NDArray[np.float32]
Embed = Callable[[Sequence[str]], Floats]
"""One row for each text, a unit vector; a text without any known word has a row of zeros."""

_MODEL = "l2_supercat"
_MOST_CHARS = 4000
"""Of a text: a vector is an average, in which longer texts all look alike."""


def open_embedder() -> Embed:
    """Loads word vectors, about 16 MB that come with a package. Raises MemoryFailed without it."""
    if find_spec("wordllama") is None:
        raise MemoryFailed("Searching by meaning needs wordllama: pip install 'emberkeep[embeddings]'.")
    import wordllama

    # Its own folder is where its files are; anywhere else it would download them.
    model = wordllama.WordLlama.load(_MODEL, cache_dir=Path(wordllama.__file__).parent, disable_download=True)

    def embed(texts: Sequence[str]) -> Floats:
        # The words of every sentence would draw all vectors together.
        vectors = np.asarray(model.embed([telling_words(text[:_MOST_CHARS]) for text in texts]), np.float32)
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        unit: Floats = np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths > 0)
        return unit

    return embed
