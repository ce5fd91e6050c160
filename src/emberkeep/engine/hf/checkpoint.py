"""The weights of a folder, brought into a network part by part: a model need not fit into RAM.

The network is built on the meta device, where tensors have shapes and no memory; so it is known what goes where
before anything is read. Weights in AWQ's four bits are read here too: transformers would want another package
for them, and would keep the checkpoint's layout. Which weights stay on the device is planned before (`residency`);
those that pass are taken by a `LayerStream`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig

from emberkeep.engine.hf.device import kv_bytes_per_token, state_reserve, weights_budget
from emberkeep.engine.hf.quantize import AwqFormat, Int4Linear, Int8Linear, from_awq, round_layers, round_linear
from emberkeep.engine.hf.residency import LayerBytes, Placing, plan_residency
from emberkeep.engine.hf.streaming import LayerStream, feed_forward_of, flat_bytes, tensors_of
from emberkeep.errors import ModelBroken
from emberkeep.types.models import Quantization

_CODES = ".qweight"
_PARTS = ("qweight", "qzeros", "scales")
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
}


def awq_format(config: Any) -> AwqFormat | None:
    """None for a model that is not quantised so. Raises ModelBroken."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    fields = found if isinstance(found, dict) else found.to_dict()
    return AwqFormat.read(fields) if fields.get("quant_method") == "awq" else None


class Checkpoint:
    """Tensors of the safetensors files in a folder, by name; each is read when it is wanted."""

    def __init__(self, folder: Path, form: AwqFormat | None = None) -> None:
        """`form`: of weights in four bits, where there are such."""
        self._folder, self._form = folder, form
        self._rounding = Quantization.NONE
        self._files: dict[str, Any] = {}
        for path in _files(folder):
            opened: Any = safe_open(path, framework="pt", device="cpu")
            self._files |= dict.fromkeys(opened.keys(), opened)

    def size(self, dtype: torch.dtype) -> int:
        """Bytes of everything in it, where numbers with a fraction become `dtype`."""
        empty = (self._empty(name) for name in self._files)
        return sum(t.numel() * (dtype if _has_fraction(t) else t.dtype).itemsize for t in empty)

    # ── the network without its weights ──

    def build(
        self, config: Any, dtype: torch.dtype, attention: str, rounding: Quantization = Quantization.NONE
    ) -> Any:
        """A causal LM for inference whose parameters are on the meta device, and whose buffers are real.

        `rounding`: what the weights of its layers become when they are filled. Changes `config`. Raises
        ModelBroken where this checkpoint has not what the network needs.
        """
        if self._form is not None:
            del config.quantization_config  # transformers would not go on without a package for it
        elif getattr(config, "quantization_config", None) is not None:
            raise self._has_to_fit("its weights are quantised")
        with init_empty_weights(include_buffers=False):
            network = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
        if (self._folder / "generation_config.json").is_file():
            network.generation_config = GenerationConfig.from_pretrained(self._folder, local_files_only=True)
        network.tie_weights(recompute_mapping=False)
        _keep_wide(network, dtype)
        for name in [name.removesuffix(_CODES) for name in self._files if name.endswith(_CODES)]:
            self._place_int4(network, name, dtype)
        self._check_names(network)
        if rounding is not Quantization.NONE:
            round_layers(network, rounding)
            self._rounding = rounding
        return network.eval().requires_grad_(False)

    def _place_int4(self, network: nn.Module, name: str, dtype: torch.dtype) -> None:
        owner, _, own_name = name.rpartition(".")
        try:
            holder = network.get_submodule(owner)
            bias = getattr(getattr(holder, own_name), "bias", None)
        except AttributeError as error:
            raise ModelBroken(f"There is no {name} in a model of this kind: choose another file of it.") from error
        parts = {part: self._empty(f"{name}.{part}") for part in _PARTS}
        has_bias = bias is not None or f"{name}.bias" in self._files
        setattr(holder, own_name, self._int4(parts, self._empty(f"{name}.bias") if has_bias else None, dtype))

    def _check_names(self, network: Any) -> None:
        """Raises ModelBroken where weights are not here, neither themselves nor what they are tied to."""
        wanted = {name for name, _ in network.named_parameters(remove_duplicate=False)}
        missing = wanted - self._files.keys()
        for pair in network.all_tied_weights_keys.items():
            if not self._files.keys().isdisjoint(pair):
                missing.difference_update(pair)
        if not missing:
            return
        if self._form is None and self._files.keys() - wanted:
            raise self._has_to_fit(f"its files have other names for {min(missing)} and others")
        raise ModelBroken(f"{self._folder.name} lacks weights ({min(missing)}): pull a complete model.")

    def _has_to_fit(self, reason: str) -> ModelBroken:
        return ModelBroken(
            f"{self._folder.name} has to fit into RAM, because {reason}, and it does not: "
            "close other programs, or choose a smaller model."
        )

    # ── its weights ──

    def fill(self, modules: Iterable[tuple[str, nn.Module]], converting: torch.device) -> None:
        """Give these modules of the network, which come with their names in it, their own weights.

        They are in RAM then, and may be pages of the files; those in few bits are on `converting`. Blocks.
        """
        for name, module in modules:
            if isinstance(module, Int8Linear | Int4Linear) and self._rounding is not Quantization.NONE:
                self._fill_rounded(name, module, converting)
            elif isinstance(module, Int4Linear):
                self._fill_int4(name, module, converting)
            else:
                self._fill_plain(name, module)

    def tie(self, network: Any) -> None:
        """Once everything is filled: what is not in the files is the same as something that is."""
        missing = {n for n, weight in network.named_parameters(remove_duplicate=False) if weight.is_meta}
        network.tie_weights(missing_keys=missing, recompute_mapping=False)

    def _fill_int4(self, name: str, module: Int4Linear, converting: torch.device) -> None:
        parts = {part: self._take(f"{name}.{part}").to(converting) for part in _PARTS}
        bias = None if module.bias is None else self._take(f"{name}.bias").to(converting)
        module._buffers.update(self._int4(parts, bias, module.scales.dtype)._buffers)

    def _fill_rounded(self, name: str, module: Int8Linear | Int4Linear, converting: torch.device) -> None:
        shape = torch.empty((module.out_features, module.in_features), dtype=module.scales.dtype, device="meta")
        weight = self._take_like(f"{name}.weight", shape).to(converting)
        bias = None if module.bias is None else self._take(f"{name}.bias").to(converting)
        rounded = round_linear(weight, bias, self._rounding, module.scales.dtype)
        module._buffers.update(rounded._buffers)

    def _int4(self, parts: dict[str, torch.Tensor], bias: torch.Tensor | None, dtype: torch.dtype) -> Int4Linear:
        if self._form is None:
            raise ModelBroken("Some weights are in four bits, and config.json does not say how: pull it again.")
        return from_awq(parts, bias, self._form, dtype)

    def _fill_plain(self, name: str, module: nn.Module) -> None:
        prefix = f"{name}." if name else ""
        for own_name, weight in module._parameters.items():
            if weight is not None and prefix + own_name in self._files:
                found = self._take_like(prefix + own_name, weight)
                module._parameters[own_name] = nn.Parameter(found, requires_grad=False)
        for own_name, buffer in module._buffers.items():
            if buffer is not None and prefix + own_name in self._files:
                module._buffers[own_name] = self._take_like(prefix + own_name, buffer)

    def _take_like(self, name: str, like: torch.Tensor) -> torch.Tensor:
        found = self._take(name)
        if found.shape != like.shape:
            raise ModelBroken(f"The weight {name} has another shape than its model says: pull it again.")
        return found.to(like.dtype)

    def _take(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file(name).get_tensor(name)
        return tensor

    def _empty(self, name: str) -> torch.Tensor:
        """Its type and shape, from the header of its file."""
        found = self._file(name).get_slice(name)
        return torch.empty(found.get_shape(), dtype=_DTYPES.get(found.get_dtype(), torch.uint8), device="meta")

    def _file(self, name: str) -> Any:
        if name not in self._files:
            raise ModelBroken(f"The weight {name} is missing: pull a complete model.")
        return self._files[name]


def _has_fraction(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point


def _keep_wide(network: Any, dtype: torch.dtype) -> None:
    """A few weights are in 32 bits whatever the others are in: transformers knows which."""
    wide = tuple(network._get_dtype_plan(dtype))
    for name, module in network.named_modules():
        for own_name, weight in module._parameters.items():
            if weight is not None and any(part in f"{name}.{own_name}" for part in wide):
                module._parameters[own_name] = nn.Parameter(weight.to(torch.float32), requires_grad=False)
        for own_name, buffer in module._buffers.items():
            if buffer is not None and any(part in f"{name}.{own_name}" for part in wide):
                module._buffers[own_name] = buffer.to(torch.float32)


def _files(folder: Path) -> Iterator[Path]:
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        named = set(json.loads(index.read_text())["weight_map"].values())
        return (folder / Path(name).name for name in sorted(named))
    return iter([single] if single.is_file() else sorted(folder.glob("*.safetensors")))


# ── from where they are to where they belong ──


def place_layers(
    network: Any, device: torch.device, placing: Placing, weights: Checkpoint | None = None
) -> LayerStream | None:
    """Bring a network to its device, as much of it as may be there.

    With `weights` nothing of the network is in RAM yet: it comes layer by layer. Blocks. Raises EngineError.
    """
    prefix, layers = _layers(network)
    budget = weights_budget(device, placing.gpu_memory)
    text = network.config.get_text_config(decoder=True)
    context = min(placing.context, getattr(text, "max_position_embeddings", None) or placing.context)
    reserve = state_reserve(device, placing.gpu_memory, context * kv_bytes_per_token(text, network.dtype))
    plan = plan_residency(layer_bytes(layers), _rest_bytes(network, layers), budget, placing, reserve)
    stream = LayerStream(plan, device, placing) if plan.streamed else None
    try:
        for index, layer in enumerate(layers):
            if weights is not None:
                weights.fill(layer.named_modules(prefix=f"{prefix}.{index}"), device)
            if stream is not None and index in plan.streamed:
                stream.take(layer)
            layer.to(device)
        if weights is not None:
            # Last: until then the device has room for what is in hand while weights are converted.
            inside = f"{prefix}."
            weights.fill(((n, m) for n, m in network.named_modules() if not n.startswith(inside)), device)
            weights.tie(network)
        network.to(device)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # others look at what is free
        if stream is not None:
            stream.start()
    except BaseException:
        if stream is not None:
            stream.close()
        raise
    return stream


def _layers(network: Any) -> tuple[str, list[nn.Module]]:
    """And what their names begin with."""
    count = network.config.get_text_config(decoder=True).num_hidden_layers
    for name, module in network.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return name, list(module)
    return "", []


def layer_bytes(layers: Sequence[nn.Module]) -> list[LayerBytes]:
    inner = [feed_forward_of(layer) for layer in layers]
    within = [0 if part is None else _module_bytes(part) for part in inner]
    return [LayerBytes(_module_bytes(layer) - part, part) for layer, part in zip(layers, within, strict=True)]


def _module_bytes(module: nn.Module) -> int:
    return sum(flat_bytes(tensor) for *_, tensor in tensors_of(module))


def _rest_bytes(network: nn.Module, layers: Sequence[nn.Module]) -> int:
    """Bytes of what is no layer; what is tied counts once."""
    inside = {id(tensor) for layer in layers for *_, tensor in tensors_of(layer)}
    sizes = {id(tensor): flat_bytes(tensor) for *_, tensor in tensors_of(network)}
    return sum(size for tensor, size in sizes.items() if tensor not in inside)
