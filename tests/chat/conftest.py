from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from emberkeep.types import Vocab


@pytest.fixture(scope="session")
def real_vocab() -> Iterator[Vocab]:
    """The vocabulary of the model that TEST_MODEL names."""
    path = Path(os.environ.get("TEST_MODEL", ""))
    if not path.is_file():
        pytest.skip("set TEST_MODEL to a GGUF file")
    import llama_cpp

    from emberkeep.engine.llamacpp.vocab import LlamaVocab

    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    yield LlamaVocab(llama_cpp.llama_model_get_vocab(model))
    llama_cpp.llama_model_free(model)
