"""What changes the bytes of this engine's state."""

from __future__ import annotations

import hashlib
import json

import torch
import transformers

from emberkeep.engine.hf.loading import HfModel
from emberkeep.types import Json

_VERSION = 1
"""Of the payloads: raise it when their bytes change."""


def fingerprint(model: HfModel, layout: Json, weights_digest: str) -> bytes:
    config = model.network.config.get_text_config()
    fields = {
        "engine": "hf",
        "version": _VERSION,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "weights": weights_digest,
        "architecture": type(model.network).__name__,
        "dtype": str(model.network.dtype),
        "layout": layout,
        "rope": getattr(config, "rope_parameters", None),
    }
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).digest()
