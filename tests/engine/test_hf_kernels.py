"""Own kernels against plain code: on a GPU, or by Triton's interpreter. Skipped where there is no Triton."""

# ruff: noqa: E402 (how Triton runs is decided before it is imported)

from __future__ import annotations

import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
pytest.importorskip("triton", reason="needs Triton")

from emberkeep.engine.hf.attention import AttentionOptions, Span, attend_plain
from emberkeep.engine.hf.fused_layers import HeadNorms, add_norm, fuse, rms_norm, rotate_and_store, silu_gate
from emberkeep.engine.hf.kernels import (
    PagedKv,
    TileShape,
    choose_splits,
    choose_tiles,
    paged_attention,
    store_rows,
)
from emberkeep.engine.hf.model_loader import HfSource, load_model
from emberkeep.engine.hf.network import Network, Step, learn
from emberkeep.engine.hf.own_steps import agree
from emberkeep.engine.hf.pool import BLOCK, BlockTable, KvMemory
from emberkeep.engine.hf.product_kernels import ProductParts, dequantise, int4_product, join, product
from emberkeep.engine.hf.quantize import Int4Linear
from emberkeep.types.models import AttentionTier
from helpers import tiny_hf

pytestmark = pytest.mark.slow

DECODING, FILLING = (16, 32), (64, 64)
"""Rows and keys of a tile."""


@pytest.fixture(autouse=True)
def on_device():
    torch.manual_seed(0)
    with torch.device(DEVICE):
        yield


def tile_shape(rows: int, keys: int, group: int) -> TileShape:
    return TileShape(rows // group, rows, keys, 4, 2)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(
    ("heads", "group", "widths", "spans", "tile"),
    [
        (2, 8, (64, 64), [(1, 100), (1, 31), (1, 0)], DECODING),
        (2, 3, (64, 64), [(40, 100), (70, 0), (5, 33)], FILLING),
        (1, 7, (80, 48), [(40, 100), (70, 0)], FILLING),
        (4, 1, (24, 16), [(3, 62)], FILLING),
    ],
)
@pytest.mark.parametrize(
    "asked", [{}, {"window": 20}, {"softcap": 5.0}, {"sinks": True}, {"window": 20, "sinks": True}]
)
def test_attention_over_blocks_is_attention(heads, group, widths, spans, tile, splits, asked):
    width, value_width = widths
    queries, shape = heads * group, tile_shape(*tile, group)
    options = AttentionOptions(
        width**-0.5,
        asked.get("window"),
        asked.get("softcap"),
        torch.randn(queries) if "sinks" in asked else None,
    )
    keys, values = torch.randn(64 * BLOCK, heads, width), torch.randn(64 * BLOCK, heads, value_width)
    query = torch.randn(sum(count for count, _ in spans), queries, width)
    free = (torch.randperm(63) + 1).tolist()
    tables, tiles, expected, row = torch.zeros(len(spans), 20, dtype=torch.int32), [], [], 0
    for index, (count, start) in enumerate(spans):
        blocks = [free.pop() for _ in range(-(-(start + count) // BLOCK))]
        tables[index, : len(blocks)] = torch.tensor(blocks)
        tiles += [
            [row + begin, min(shape.tokens, count - begin), index, start + begin]
            for begin in range(0, count, shape.tokens)
        ]
        cells = torch.from_numpy(BlockTable(blocks).cells(0, start + count)).to(DEVICE)
        at, behind = torch.arange(start, start + count)[:, None], torch.arange(start + count)[None]
        seen = (behind <= at) & (behind > at - (options.window or 1 << 30))
        own = query[row : row + count].transpose(0, 1)[None]
        expected.append(attend_plain(own, keys[cells], values[cells], seen, options))
        row += count
    tiles.append([0, 0, 0, 0])  # not used
    paged = PagedKv(keys, values, tables, torch.tensor(tiles))
    result = paged_attention(query, paged, options, shape, splits)
    torch.testing.assert_close(result, torch.cat(expected), rtol=1e-4, atol=1e-4)


def test_rows_go_into_their_cells():
    k, v, cells = torch.randn(2, 5, 24), torch.randn(2, 5, 16), torch.tensor([7, 3, 40, 41, 0])
    keys, values = torch.zeros(64, 2, 24), torch.zeros(64, 2, 16)
    store_rows(k, v, cells, keys, values)
    torch.testing.assert_close(keys[cells], k.transpose(0, 1))
    torch.testing.assert_close(values[cells], v.transpose(0, 1))
    assert keys.count_nonzero() == k.count_nonzero()


@pytest.mark.parametrize(("splits", "has_bias"), [(1, False), (3, True)])
@pytest.mark.parametrize("width", [64, 100])
def test_norms_and_gates(width, splits, has_bias):
    x, weight = torch.randn(3, width), torch.randn(width)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), _normal(x) * weight)
    added = ProductParts(torch.randn(splits, 3, width), torch.randn(width) if has_bias else None)
    residual = x.clone()
    normed = add_norm(residual, added, weight, 1e-6)
    torch.testing.assert_close(residual, x + _whole(added))
    torch.testing.assert_close(normed, _normal(x + _whole(added)) * weight)
    pairs = ProductParts(torch.randn(splits, 3, 2 * width), torch.randn(2 * width) if has_bias else None)
    gate, up = _whole(pairs).split(width, 1)
    torch.testing.assert_close(silu_gate(pairs, torch.float32), torch.nn.functional.silu(gate) * up)
    torch.testing.assert_close(join(pairs, torch.float32), _whole(pairs))


def _normal(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def _whole(given: ProductParts) -> torch.Tensor:
    return given.parts.sum(0) + (0 if given.bias is None else given.bias)


@pytest.mark.parametrize(("outputs", "inputs"), [(100, 200), (64, 1024), (200, 72)])
@pytest.mark.parametrize("rows", [1, 2, 16])
@pytest.mark.parametrize("has_bias", [True, False])
def test_products_of_few_rows(rows, outputs, inputs, has_bias):
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    bias = torch.randn(outputs) if has_bias else None
    found = join(product(x, weight, bias), torch.float32)
    torch.testing.assert_close(found, torch.nn.functional.linear(x, weight, bias), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("outputs", "groups", "group"), [(100, 3, 64), (64, 2, 128), (72, 5, 32)])
@pytest.mark.parametrize("rows", [1, 7, 33])
def test_products_with_weights_in_four_bits(rows, outputs, groups, group):
    codes = torch.randint(0, 256, (outputs, groups * group // 2), dtype=torch.uint8)
    scales, zeros = torch.rand(groups, outputs) + 0.1, torch.randint(0, 16, (groups, outputs)).float()
    module = Int4Linear(codes, scales, zeros, torch.randn(outputs))
    weight = module.dequantized()
    torch.testing.assert_close(dequantise(codes, scales, zeros), weight)
    x = torch.randn(rows, groups * group)
    found = join(int4_product(x, codes, scales, zeros, module.bias), torch.float32)
    torch.testing.assert_close(found, torch.nn.functional.linear(x, weight, module.bias), rtol=1e-4, atol=2e-3)


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter has no bfloat16 as a GPU has it")
@pytest.mark.parametrize("rows", [1, 16, 64, 65])
def test_four_bits_in_half_precision_are_the_same_numbers(rows):
    codes = torch.randint(0, 256, (192, 256), dtype=torch.uint8)
    scales, zeros = torch.rand(4, 192).bfloat16() * 0.01, torch.randint(0, 16, (4, 192)).bfloat16()
    module = Int4Linear(codes, scales, zeros, None)
    assert torch.equal(dequantise(codes, scales, zeros), module.dequantized())
    x = torch.randn(rows, 512).bfloat16()
    expected = x.float() @ module.dequantized().float().T
    torch.testing.assert_close(module(x).float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("rotated", [32, 16])
@pytest.mark.parametrize(("splits", "has_norms"), [(1, True), (3, False)])
def test_queries_and_keys_are_rotated_and_stored(rotated, splits, has_norms):
    rows, queries, heads, width = 5, 3, 2, 32
    channels = (queries + 2 * heads) * width
    given = ProductParts(torch.randn(splits, rows, channels), torch.randn(channels) if splits > 1 else None)
    angles = torch.randn(rows, rotated // 2)
    cos, sin = (torch.cat([part, part], -1) for part in (angles.cos(), angles.sin()))
    norms = HeadNorms(torch.randn(width), torch.randn(width), 1e-6) if has_norms else None
    q, k, v = _whole(given).view(rows, -1, width).split([queries, heads, heads], 1)
    if norms:
        q, k = (
            rms_norm(x.reshape(-1, width), w, 1e-6).view_as(x) for x, w in ((q, norms.queries), (k, norms.keys))
        )
    q, k = (_rotate(x, cos[:, None], sin[:, None]) for x in (q, k))
    cells = torch.tensor([7, 3, 40, 41, 0])
    keys, values = torch.zeros(64, heads, width), torch.zeros(64, heads, width)
    query = rotate_and_store(given, (cos, sin), norms, cells, keys, values)
    torch.testing.assert_close(query, q)
    torch.testing.assert_close(keys[cells], k)
    torch.testing.assert_close(values[cells], v)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, -1)
    return torch.cat([turned * cos + torch.cat([-second, first], -1) * sin, rest], -1)


@pytest.mark.parametrize(
    ("family", "is_usual"), [("llama", True), ("qwen2", True), ("qwen3", True), ("gemma2", False)]
)
@pytest.mark.parametrize("count", [16, 17])
def test_fused_layers_compute_what_layers_of_the_usual_make_compute(family, is_usual, count, tmp_path):
    with torch.device("cpu"):
        source = HfSource(tiny_hf.write(tmp_path, family))
    network = Network(load_model(source, device=DEVICE, dtype="float32", attention="emberkeep").network)
    with torch.no_grad():
        learned = learn(network)
        memory = KvMemory(learned.layers, 64, learned.dtype, network.device)
        fused = fuse(network.layers, [learned.options[i] for i in sorted(learned.options)])
        assert bool(fused) is is_usual
        if fused is None:
            return
        rows = torch.arange(count)
        step = Step(memory, [Span(0, count, BlockTable([0], count), 0)], rows, tier=AttentionTier.PLAIN)
        assert agree(network.layers, fused, lambda: network.run(step, rows, rows, rows[:1]))
        before = network.layers[0].mlp.down_proj.forward
        network.layers[0].mlp.down_proj.forward = lambda x: -before(x)
        assert agree(network.layers, fused, lambda: network.run(step, rows, rows, rows[:1])) is False


@pytest.mark.parametrize("shared", [64 << 10, 99 << 10, 227 << 10])
@pytest.mark.parametrize("group", [1, 7, 8, 16, 71])
@pytest.mark.parametrize("tokens", [1, 32, 64, 4096])
def test_tiles_hold_what_they_must_and_fit(tokens, group, shared):
    shape = choose_tiles(tokens, group, 2 * 128 * 2, shared)
    if group > 64 and shared < 80 << 10:
        return  # such a model's steps are not recorded there
    assert shape.tokens >= 1
    assert shape.tokens * group <= shape.rows
    assert (shape.rows + shape.stages * shape.keys) * 512 <= shared


def test_splits_fill_a_device_and_not_more():
    assert choose_splits(2, 132) == 64
    assert choose_splits(32, 132) == 4
    assert choose_splits(128, 132) == 1
    assert choose_splits(4096, 132) == 1
