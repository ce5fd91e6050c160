"""Which engine a model gets."""

from __future__ import annotations

import logging

from emberkeep.engine.hf.engine import HfEngine
from emberkeep.engine.hf.loading import HfModel
from emberkeep.engine.hf.settings import HfSettings
from emberkeep.engine.hf.whole import HfWholeEngine
from emberkeep.errors import EngineError

log = logging.getLogger("emberkeep.engine")


def open_engine(model: HfModel, settings: HfSettings, weights_digest: str) -> HfEngine | HfWholeEngine:
    """Paged and batched where the model's code allows it; else one sequence at a time, with state as a whole.

    Raises EngineError for a model that neither can run.
    """
    try:
        return HfEngine(model, settings, weights_digest)
    except EngineError as reason:
        log.info("sequences are evaluated one by one: %s", reason)
    model.network.set_attn_implementation(_own_attention(model))
    return HfWholeEngine(model, settings, weights_digest)


def _own_attention(model: HfModel) -> str:
    return "sdpa" if getattr(model.network, "_supports_sdpa", False) else "eager"
