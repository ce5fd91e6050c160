"""The Hugging Face engine. torch and transformers are imported here and nowhere else."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from emberkeep.engine.hf.embedding_engine import HfEmbeddingEngine, HfEmbeddingSettings
    from emberkeep.engine.hf.engine import HfEngine, open_engine
    from emberkeep.engine.hf.footprint import affordable_batch, cells_of_share
    from emberkeep.engine.hf.model_loader import HfModel, HfSettings, HfSource, load_model
    from emberkeep.engine.hf.residency import Placing
    from emberkeep.engine.hf.whole_engine import HfWholeEngine

__all__ = [
    "HfEmbeddingEngine",
    "HfEmbeddingSettings",
    "HfEngine",
    "HfModel",
    "HfSettings",
    "HfSource",
    "HfWholeEngine",
    "Placing",
    "affordable_batch",
    "cells_of_share",
    "load_model",
    "open_engine",
]

_HOMES = {
    "HfEmbeddingEngine": "embedding_engine",
    "HfEmbeddingSettings": "embedding_engine",
    "HfEngine": "engine",
    "HfModel": "model_loader",
    "HfSettings": "model_loader",
    "HfSource": "model_loader",
    "HfWholeEngine": "whole_engine",
    "Placing": "residency",
    "affordable_batch": "footprint",
    "cells_of_share": "footprint",
    "load_model": "model_loader",
    "open_engine": "engine",
}


def __getattr__(name: str) -> Any:
    # Lazy: a command that only asks for a device's name does not wait for all of transformers.
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
