"""Which engine a model gets."""

from __future__ import annotations

import logging

from emberkeep.engine.hf.engine import HfEngine
from emberkeep.engine.hf.loading import HfModel
from emberkeep.engine.hf.network import has_choice
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
    try:
        return _opened_whole("sdpa", model, settings, weights_digest)
    except (EngineError, ValueError):  # it cannot, or says so
        return _opened_whole("eager", model, settings, weights_digest)


def _opened_whole(attention: str, model: HfModel, settings: HfSettings, weights_digest: str) -> HfWholeEngine:
    if has_choice(model.network):
        model.network.set_attn_implementation(attention)
    return HfWholeEngine(model, settings, weights_digest)
