"""What llama.cpp would end the process over in a GGUF file is looked at here first.

LoRA adapters: it does not survive a value of an unexpected type, and computes with some shapes unchecked. The
table by which unigram vocabularies rewrite texts: every walk in it has to stay inside, whatever text it follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from emberkeep.errors import ModelBroken
from emberkeep.models.gguf import CHARSMAP, GgufHeader, TensorInfo, read_header

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


# ── the table for rewriting texts ──
#
#     length of the trie  trie: a 32-bit number per node  replacements: texts that end in a zero
#
# The trie is a double array, XOR-compressed. From a node with the base `b` the byte `c` leads to the node `b ^ c`,
# if that belongs to `c`. A leaf leads to a node that holds the offset of a replacement.

_LEAF, _IS_OFFSET, _LETTER = 1 << 8, 1 << 31, 0xFF
_LETTERS = np.arange(1, 256, dtype=np.int64)
_SOME = 4096
"""Nodes whose children are looked at together."""

_Nodes = npt.NDArray[np.int64]


def check_charsmap(header: GgufHeader) -> None:
    """Raises ModelBroken where llama.cpp would not survive the table. Models without one pass."""
    data = header.metadata.get(CHARSMAP, b"")
    if data and not (isinstance(data, bytes) and _is_sound(data)):
        raise ModelBroken("The model's table for rewriting texts is damaged: choose another file of this model.")


def _is_sound(data: bytes) -> bool:
    size = int.from_bytes(data[:4], "little")
    if size < 4 or size % 4 or 4 + size >= len(data) or data[-1]:
        return False  # the last replacement must end
    nodes = np.frombuffer(data, "<u4", size // 4, 4).astype(np.int64)
    return _walks_stay_inside(nodes, len(data) - 4 - size)


def _walks_stay_inside(nodes: _Nodes, replacements: int) -> bool:
    seen = np.zeros(len(nodes), bool)
    ahead = _bases(nodes[:1])
    while len(ahead):
        # Every byte leads somewhere into the same 256 nodes.
        if ((ahead | _LETTER) >= len(nodes)).any():
            return False
        ahead = np.unique(ahead[~seen[ahead]])
        seen[ahead] = True
        parts = [_children(nodes, ahead[begin : begin + _SOME]) for begin in range(0, len(ahead), _SOME)]
        leaves, ahead = (np.concatenate([part[side] for part in parts] or [ahead]) for side in (0, 1))
        if (leaves >= len(nodes)).any() or ((nodes[leaves] & (_IS_OFFSET - 1)) >= replacements).any():
            return False
    return True


def _children(nodes: _Nodes, ahead: _Nodes) -> tuple[_Nodes, _Nodes]:
    """Where the offsets of those that are leaves are, and where walks go on from all of them."""
    places = ahead[:, np.newaxis] ^ _LETTERS
    children = places[(nodes[places] & (_IS_OFFSET | _LETTER)) == _LETTERS]
    further = children ^ _bases(nodes[children])
    return further[(nodes[children] & _LEAF) != 0], further


def _bases(nodes: _Nodes) -> _Nodes:
    return (nodes >> 10) << ((nodes & (1 << 9)) >> 6)
