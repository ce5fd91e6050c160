"""What changes the bytes of this engine's state."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping

import torch
import transformers

from emberkeep.config.machine import cpu_facts
from emberkeep.engine.facts import Stored, known_as
from emberkeep.engine.hf.model_loader import HfModel
from emberkeep.engine.hf.quantize import int4_count
from emberkeep.types.models import Quantization
from emberkeep.types.request import Json

_VERSION = 1
"""Of the payloads: raise it when their bytes change."""
_RECORDED = 3
"""Of the kernels that steps are recorded with."""
_INT4 = 1
"""Of those for weights in four bits."""
_ROUNDED = 1
"""Of what weights become that are rounded when they are loaded."""


def fingerprint(
    model: HfModel,
    layout: Json,
    weights_digest: str,
    attention: str,
    *,
    layers: str | None = None,
    stored: Stored | None = None,
) -> bytes:
    """`attention`: which code computes it. `layers`: which code computes recorded steps; None: none are
    recorded. The number of threads is left out: they round as the shapes of steps do."""
    config = model.network.config.get_text_config()
    has_int4 = model.network.device.type == "cuda" and int4_count(model.network) > 0
    fields = {
        "engine": "hf",
        "version": _VERSION,
        "torch": [torch.__version__, torch.__config__.show()],
        "transformers": transformers.__version__,
        "weights": weights_digest,
        "architecture": type(model.network).__name__,
        "dtype": str(model.network.dtype),
        "layout": layout,
        "rope": getattr(config, "rope_parameters", None),
        "device": _device(model.network.device),
        "switches": _switches(),
        "attention": attention,
        "recorded": [_RECORDED, layers] if layers else False,
    }
    if model.quantization is not Quantization.NONE:
        fields["quantization"] = [model.quantization, _ROUNDED]
    if has_int4:
        fields["int4"] = _INT4

    def with_threads(threads: int) -> bytes:
        return _digest({**fields, "device": [*fields["device"], threads]})

    # On a GPU the number of threads was never a part of it.
    return known_as(_digest(fields), with_threads, stored if model.network.device.type == "cpu" else None)


def _digest(fields: Mapping[str, Json]) -> bytes:
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).digest()


def _device(device: torch.device) -> Json:
    """Libraries choose their kernels by what they run on."""
    if device.type == "cuda":
        name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        return ["cuda", name, capability, torch.version.cuda, torch.backends.cudnn.version()]
    if device.type == "mps":
        return ["mps", platform.machine(), platform.mac_ver()[0]]
    return [device.type, *cpu_facts(), torch.backends.cpu.get_cpu_capability()]


def _switches() -> Json:
    """What is set for the whole process: it may have been changed before the model was opened."""
    cuda = torch.backends.cuda
    return {
        "float32": torch.get_float32_matmul_precision(),
        "tf32": [cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32],
        "short sums": [
            cuda.matmul.allow_fp16_reduced_precision_reduction,
            cuda.matmul.allow_bf16_reduced_precision_reduction,
        ],
        "attention": [
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
        ],
        "mkldnn": torch.backends.mkldnn.enabled,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
