"""Tables for rewriting texts: sound ones pass, and no text can lead out of those that pass."""

from __future__ import annotations

import numpy as np
import pytest

from emberkeep.errors import ModelBroken
from emberkeep.models.checks import check_charsmap
from emberkeep.models.gguf import CHARSMAP, GgufHeader, Value
from helpers.chance import seed, times
from helpers.gguf_builders import charsmap

SIZE = 512


def check(value: Value) -> None:
    check_charsmap(GgufHeader(3, {CHARSMAP: value}, (), 0, 0))


def changed(node: int, value: int) -> bytes:
    """The table with another node."""
    data = bytearray(charsmap())
    data[4 + 4 * node : 8 + 4 * node] = value.to_bytes(4, "little")
    return bytes(data)


def test_a_sound_table_passes() -> None:
    check(charsmap())


def test_a_model_without_one_passes() -> None:
    check_charsmap(GgufHeader(3, {}, (), 0, 0))
    check(b"")


@pytest.mark.parametrize(
    "data",
    [
        b"\x04",
        b"\xff\xff\xff\xff" + bytes(64),
        charsmap()[:-1] + b"a",
        (SIZE * 4 + 2).to_bytes(4, "little") + charsmap()[4:],
        (SIZE * 4).to_bytes(4, "little") + bytes(SIZE * 4),
    ],
)
def test_one_whose_parts_do_not_fit_is_refused(data: bytes) -> None:
    with pytest.raises(ModelBroken, match="table for rewriting texts is damaged"):
        check(data)


@pytest.mark.parametrize(
    ("node", "value"),
    [
        (0, 4000 << 10),  # the root's children are outside
        (256 ^ ord("A"), (1 << 20) << 10 | 1 << 8 | ord("A")),  # so are those of a letter
        (256 ^ ord("A") ^ 3, 1 << 31 | 77),  # a replacement is behind the last one
    ],
)
def test_one_that_a_text_leads_out_of_is_refused(node: int, value: int) -> None:
    with pytest.raises(ModelBroken, match="choose another file of this model"):
        check(changed(node, value))


def test_one_of_another_type_is_refused() -> None:
    with pytest.raises(ModelBroken):
        check("a text")


def test_walks_in_a_circle_end() -> None:
    letter = 256 ^ ord("A")
    check(changed(letter, (letter ^ 256) << 10 | ord("A")))


def test_random_tables_that_pass_keep_every_walk_inside() -> None:
    random = np.random.default_rng(seed(0))
    for _ in range(times(300)):
        nodes = random.integers(0, 1 << 20, SIZE).astype("<u4")
        nodes[0] = int(random.integers(0, 600)) << 10
        data = (4 * SIZE).to_bytes(4, "little") + nodes.tobytes() + bytes(4)
        try:
            check(data)
        except ModelBroken:
            continue
        walk_everywhere(nodes.tolist())


def walk_everywhere(nodes: list[int]) -> None:
    """As llama.cpp walks; raises IndexError outside."""

    def base(node: int) -> int:
        return (nodes[node] >> 10) << ((nodes[node] & (1 << 9)) >> 6)

    ahead, seen = [base(0)], set[int]()
    while ahead:
        here = ahead.pop()
        if here in seen:
            continue
        seen.add(here)
        for letter in range(1, 256):
            place = here ^ letter
            if nodes[place] & (1 << 31 | 0xFF) == letter:
                further = place ^ base(place)
                if nodes[place] >> 8 & 1:
                    assert nodes[further] & (1 << 31) - 1 < 4
                ahead.append(further)
