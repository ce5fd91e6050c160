"""LoRA adapters in GGUF files, checked against the model they are for.

llama.cpp ends the process over a value of a type that it does not expect, and computes with some shapes unchecked;
so an adapter is looked at here before it gets to see it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from emberkeep.errors import ModelBroken
from emberkeep.models.gguf import GgufHeader, TensorInfo, read_header

_A, _B = ".lora_a", ".lora_b"
_UNUSED = "_norm.weight"
"""Tensors that llama.cpp leaves out."""
_FORMATS = frozenset({"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"})
_EMBEDDINGS = "token_embd.weight"


def is_adapter(header: GgufHeader) -> bool:
    return header.metadata.get("general.type") == "adapter"


def check_adapter(path: Path, model: GgufHeader) -> GgufHeader:
    """The header of the adapter at `path`, which fits `model`. Blocks for a read of it.

    Raises ModelNotFound when it cannot be read and ModelBroken when it is no LoRA adapter of this model.
    """
    header = read_header(path)
    if not is_adapter(header) or header.metadata.get("adapter.type") != "lora":
        raise ModelBroken(f"{path.name} is no LoRA adapter: --lora takes GGUF files of the type adapter.")
    if header.parts > 1:
        raise ModelBroken(f"{path.name} is one of several files, and adapters are used from one: merge them.")
    if "adapter.alora.invocation_tokens" in header.metadata:
        raise ModelBroken(
            f"{path.name} is an activated LoRA, which changes in the middle of a text and is not supported: "
            "take a plain LoRA adapter."
        )
    ours, theirs = (str(each.metadata.get("general.architecture")) for each in (model, header))
    if ours != theirs:
        raise ModelBroken(f"{path.name} is for models of the architecture {theirs}, and this one is {ours}.")
    _check_tensors(path.name, header, {tensor.name: tensor for tensor in model.tensors})
    return header


def _check_tensors(name: str, header: GgufHeader, model: Mapping[str, TensorInfo]) -> None:
    tensors = {tensor.name: tensor for tensor in header.tensors if not tensor.name.endswith(_UNUSED)}
    targets = {tensor.removesuffix(_A).removesuffix(_B) for tensor in tensors}
    for target in sorted(targets):
        first, second = tensors.pop(target + _A, None), tensors.pop(target + _B, None)
        if first is None or second is None or target in tensors:
            raise ModelBroken(f"{name} is broken: it has no pair of tensors for {target}; get it again.")
        if target not in model or not _fits(model[target], first, second):
            raise ModelBroken(
                f"{name} is for another model: {target} does not have the shape that it changes; "
                "use the model that it was trained with."
            )
        if {first.type.name, second.type.name} - _FORMATS:
            raise ModelBroken(
                f"{name} holds {target} in a format that adapters cannot be computed in: "
                "convert it to F16, F32 or Q8_0."
            )
    if not targets:
        raise ModelBroken(f"{name} is broken: it changes nothing; get it again.")


def _fits(weights: TensorInfo, first: TensorInfo, second: TensorInfo) -> bool:
    """Whether `second` x `first` has the shape of `weights`, for each of its experts."""
    shape, a, b = (_pad(tensor.shape) for tensor in (weights, first, second))
    # Embeddings are looked up by row: there `first` stands the other way round.
    inner, outer = (a[0], (b[1], a[1])) if weights.name == _EMBEDDINGS else (a[1], (a[0], b[1]))
    return outer == shape[:2] and inner == b[0] > 0 and a[2:] == b[2:] == shape[2:]


def _pad(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape, *[1] * (4 - len(shape)))
