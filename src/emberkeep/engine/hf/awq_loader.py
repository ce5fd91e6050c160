"""A model whose weights are in AWQ's four bits, from its folder into RAM.

transformers would want another package for it, and would keep the checkpoint's layout; so the tensors are read
here, by their names, into the model that transformers builds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM

from emberkeep.engine.hf.int4 import AwqFormat, from_awq
from emberkeep.errors import ModelBroken

_CODES = ".qweight"


def awq_format(config: Any) -> AwqFormat | None:
    """None for a model that is not quantised so. Raises ModelBroken."""
    said = getattr(config, "quantization_config", None)
    if said is None:
        return None
    fields = said if isinstance(said, dict) else said.to_dict()
    return AwqFormat.read(fields) if fields.get("quant_method") == "awq" else None


def load_awq(
    folder: Path, config: Any, form: AwqFormat, dtype: torch.dtype, attention: str, converting: torch.device
) -> Any:
    """The network, in RAM. `converting`: the device that changes the layout of weights. Blocks.

    Raises ModelBroken for what is missing or does not fit.
    """
    del config.quantization_config  # transformers would not go on without a package for it
    with init_empty_weights(include_buffers=False):
        network = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    tensors = _Tensors(folder)
    for name in [name.removesuffix(_CODES) for name in tensors if name.endswith(_CODES)]:
        parts = {part: tensors.take(f"{name}.{part}").to(converting) for part in ("qweight", "qzeros", "scales")}
        bias = tensors.take(f"{name}.bias") if f"{name}.bias" in tensors else None
        owner, _, own_name = name.rpartition(".")
        setattr(_submodule(network, owner), own_name, from_awq(parts, bias, form, dtype).to("cpu"))
    _fill(network, tensors, dtype)
    network.tie_weights()
    missing = [name for name, weight in network.named_parameters() if weight.is_meta]
    if missing:
        raise ModelBroken(f"{folder.name} lacks weights ({min(missing)}): pull a complete model.")
    network.eval()
    network.requires_grad_(False)
    return network


def _fill(network: nn.Module, tensors: _Tensors, dtype: torch.dtype) -> None:
    for name, weight in list(network.named_parameters()):
        if not weight.is_meta or name not in tensors:
            continue
        found = tensors.take(name)
        if found.shape != weight.shape:
            raise ModelBroken(f"The weight {name} has another shape than its model says: pull it again.")
        owner, _, own_name = name.rpartition(".")
        given = nn.Parameter(found.to(dtype), requires_grad=False)
        _submodule(network, owner)._parameters[own_name] = given


def _submodule(network: nn.Module, name: str) -> nn.Module:
    try:
        return network.get_submodule(name)
    except AttributeError as error:
        raise ModelBroken(f"There is no {name} in a model of this kind: choose another file of it.") from error


class _Tensors:
    """Of the safetensors files in a folder, by name; each is read when it is taken."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Any] = {}
        for path in _files(folder):
            opened: Any = safe_open(path, framework="pt", device="cpu")
            self._files |= dict.fromkeys(opened.keys(), opened)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def take(self, name: str) -> torch.Tensor:
        """Raises ModelBroken."""
        if name not in self._files:
            raise ModelBroken(f"The weight {name} is missing: pull a complete model.")
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        named = set(json.loads(index.read_text())["weight_map"].values())
        return [folder / Path(name).name for name in sorted(named)]
    return sorted(folder.glob("*.safetensors"))
