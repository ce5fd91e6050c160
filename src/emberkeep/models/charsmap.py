"""The table by which unigram vocabularies rewrite texts: checked node by node before llama.cpp walks it.

    length of the trie  trie: a 32-bit number per node  replacements: texts that end in a zero

The trie is a double array, XOR-compressed. From a node with the base `b` the byte `c` leads to the node `b ^ c`,
if that belongs to `c`. A leaf leads to a node that holds the offset of a replacement. llama.cpp ends the
process where a walk leaves the array, so every walk has to stay inside, whatever text it follows.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from emberkeep.errors import ModelBroken
from emberkeep.models.gguf import CHARSMAP, GgufHeader

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
