from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from emberkeep.types.models import Vocab


@pytest.fixture(scope="session")
def real_vocab(smollm2: Path) -> Iterator[Vocab]:
    """The default model's vocabulary."""
    from emberkeep.engine.llamacpp.model import LlamaModel

    model = LlamaModel(smollm2)
    yield model.vocab
    model.close()
