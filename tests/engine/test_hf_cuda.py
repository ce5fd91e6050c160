"""What only a GPU does: own kernels, recorded steps, prepared memory. Skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from emberkeep.engine.base import Piece, Rows
from emberkeep.engine.hf.engine import HfEngine
from emberkeep.engine.hf.network import Network
from emberkeep.engine.hf.residency import Placing
from emberkeep.engine.hf.whole_engine import open_engine
from emberkeep.errors import EngineError
from emberkeep.sched.sampling import Sampler, tell
from emberkeep.types.models import AttentionTier, Residency
from emberkeep.types.request import Sampling
from helpers import tiny_hf

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TOKENS = np.random.default_rng(3).integers(40, 120, 1000, dtype=np.int32)
MIXTURES = ("gpt_oss", "deepseek_v3", "qwen3_moe")
FAMILIES = ("llama", "mistral", "gemma2", "glm4", "gpt2", *MIXTURES)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {family: tiny_hf.write(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


@pytest.fixture
def opened(folders):
    engines = []

    def make(
        family: str = "llama",
        dtype: str = "float32",
        *,
        context: int = 1024,
        batch: int = 512,
        placing: Placing | None = None,
        facts: Path | None = None,
        is_improved: bool = True,
        sequences: int = 4,
    ) -> HfEngine:
        model = tiny_hf.load(folders[family], device="cuda", dtype=dtype, placing=placing)
        settings = tiny_hf.settings(context, 4096, sequences, batch, facts=facts, threads=None)
        engines.append(HfEngine(model, settings, "digest"))
        assert engines[-1].stats()["recorded_steps"]["replayed"] == 0
        if is_improved:
            assert engines[-1].improve(lambda: False)
            assert are_all_replayed(engines[-1])
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def are_all_replayed(engine: HfEngine) -> bool:
    recorded = engine.stats()["recorded_steps"]
    return recorded["replayed"] == recorded["sizes"]


def fill(engine: HfEngine, sequence: int, end: int, tokens: np.ndarray = TOKENS) -> np.ndarray:
    engine.evaluate([Rows(sequence, 0, tokens[:end], outputs=1)])
    return engine.logits(0).copy()


def decode(engine: HfEngine, sequences: list[int], at: int, tokens: np.ndarray = TOKENS) -> np.ndarray:
    rows = [Rows(s, at, tokens[at : at + 1], outputs=1) for s in sequences]
    engine.evaluate(rows)
    return np.stack([engine.logits(index).copy() for index in range(len(rows))])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_recorded_step_gives_what_plain_attention_gives(opened, family):
    # Products of several experts at once are there in half precision only.
    is_mixture = family in MIXTURES
    engine = opened(family, "bfloat16" if is_mixture else "float32")
    assert engine.attention.tier is AttentionTier.OWN
    for count in (1, 3, 4):
        for sequence in range(count):
            fill(engine, sequence, 100)
        recorded = decode(engine, list(range(count)), 100)
        engine.attention.switch(AttentionTier.PLAIN)
        for sequence in range(count):
            engine.trim(sequence, 100)
        plain = decode(engine, list(range(count)), 100)
        engine.attention.switch(AttentionTier.OWN)
        for sequence in range(count):
            engine.trim(sequence, 0)
        if is_mixture:
            assert min(np.corrcoef(a, b)[0, 1] for a, b in zip(recorded, plain, strict=True)) > 0.99
        else:
            np.testing.assert_allclose(recorded, plain, rtol=1e-3, atol=2e-2)


def test_many_that_decode_in_a_step_get_what_each_gets_alone(opened):
    engine = opened(sequences=40)
    lengths = [20 + 2 * sequence for sequence in range(40)]
    expected = []
    for length in lengths:
        fill(engine, 0, length)
        expected.append(decode(engine, [0], length)[0])
        engine.trim(0, 0)
    for sequence, length in enumerate(lengths):
        fill(engine, sequence, length)
    engine.evaluate([Rows(s, n, TOKENS[n : n + 1], outputs=1) for s, n in enumerate(lengths)])
    together = np.stack([engine.logits(index).copy() for index in range(40)])
    np.testing.assert_allclose(together, np.stack(expected), rtol=1e-3, atol=2e-2)


def test_an_assembler_that_gets_our_kernels_wrong_is_not_used(tmp_path, monkeypatch):
    from emberkeep.engine.hf.kernels import check_assembler

    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("only Hopper's instructions are assembled wrongly")
    old = tmp_path / "ptxas"
    old.write_text('#!/bin/sh\necho "Cuda compilation tools, release 12.8, V12.8.93"\n')
    old.chmod(0o755)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(old))
    with pytest.raises(EngineError, match="install torch"):
        check_assembler(torch.device("cuda"))


def work(engine: HfEngine) -> list[bytes]:
    """Logits and state of prompts of every size, of answers beside each other, and of both in one step."""
    seen = []
    for rows in (1, 2, 5, 20, 64, 100, 150, 250, 300, 512):
        seen.append(fill(engine, 0, rows).tobytes())
        seen += [bytes(payload) for payload in engine.export_kv(0, [0, rows]).payloads()]
        engine.trim(0, 0)
    for sequence, length in enumerate((1, 31, 32, 400)):
        fill(engine, sequence, length)
    for step in range(3):
        lengths = [length + step for length in (1, 31, 32, 400)]
        engine.evaluate([Rows(s, n, TOKENS[n : n + 1], outputs=1) for s, n in enumerate(lengths)])
        seen += [engine.logits(index).tobytes() for index in range(4)]
    engine.trim(3, 0)
    engine.evaluate([Rows(0, 4, TOKENS[4:5], outputs=1), Rows(3, 0, TOKENS[:200], outputs=1)])
    seen += [engine.logits(index).tobytes() for index in range(2)]
    for sequence, end in enumerate((5, 34, 35, 200)):
        seen += [bytes(payload) for payload in engine.export_kv(sequence, [0, end]).payloads()]
        engine.trim(sequence, 0)
    return seen


@pytest.mark.parametrize(
    ("family", "placing"),
    [
        *((family, None) for family in FAMILIES),
        *(("llama", Placing(mode)) for mode in (Residency.STREAM, Residency.FFN)),
    ],
)
def test_steps_compute_the_same_bits_before_and_after_they_are_recorded(opened, family, placing):
    engine = opened(family, "bfloat16", placing=placing, is_improved=False)
    fingerprint, launched = engine.fingerprint, work(engine)
    assert engine.improve(lambda: False)
    assert are_all_replayed(engine)
    assert work(engine) == launched
    assert engine.fingerprint == fingerprint


def test_while_some_sizes_are_recorded_the_bits_are_the_same(opened):
    engine = opened(dtype="bfloat16", is_improved=False)
    launched, sizes = work(engine), engine.stats()["recorded_steps"]["sizes"]
    for count in range(1, sizes + 1):
        while engine.stats()["recorded_steps"]["replayed"] < count:
            before = engine.stats()["recorded_steps"]["replayed"]
            assert not engine.improve(lambda b=before: engine.stats()["recorded_steps"]["replayed"] > b)
        assert engine.stats()["recorded_steps"]["replayed"] == count
        assert work(engine) == launched


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_next_start_compares_nothing_and_computes_the_same_bits(opened, tmp_path, monkeypatch, family):
    first = opened(family, "bfloat16", facts=tmp_path)
    expected = work(first)
    monkeypatch.setattr(Network, "reference", None)
    second = opened(family, "bfloat16", facts=tmp_path, is_improved=False)
    assert second.fingerprint == first.fingerprint
    assert second.step_seconds(1, 0, 1) is not None
    assert work(second) == expected


def test_experts_are_counted_launched_and_replayed(opened):
    engine = opened("qwen3_moe", "bfloat16", is_improved=False)
    engine.experts.track(True)
    counts = []
    for _ in range(2):
        engine.experts.reset()
        fill(engine, 0, 100)
        decode(engine, [0], 100)
        engine.trim(0, 0)
        counts.append(engine.experts.stats())
        assert engine.improve(lambda: False)
    assert are_all_replayed(engine)
    assert counts[0] == counts[1]
    engine.experts.track(False)
    assert are_all_replayed(engine)


def test_recorded_steps_of_every_size_give_what_plain_attention_gives(opened):
    engine = opened()
    for rows in (1, 2, 5, 20, 64, 100, 150, 250, 300, 512):
        recorded = fill(engine, 0, rows)
        engine.trim(0, 0)
        engine.attention.switch(AttentionTier.PLAIN)
        plain = fill(engine, 0, rows)
        engine.attention.switch(AttentionTier.OWN)
        engine.trim(0, 0)
        np.testing.assert_allclose(recorded, plain, rtol=1e-3, atol=2e-2)


def test_recorded_steps_follow_sequences_of_different_lengths(opened):
    """Answers beside each other, and beside a prompt."""
    engine = opened()
    lengths = {0: 1, 1: 31, 2: 32}
    for sequence, length in lengths.items():
        fill(engine, sequence, length)
    rows = [Rows(s, n, TOKENS[n : n + 1], outputs=1) for s, n in lengths.items()]
    engine.evaluate([*rows, Rows(3, 0, TOKENS[:500], outputs=1)])
    together = [engine.logits(index).copy() for index in range(4)]
    for (sequence, end), logits in zip(enumerate((2, 32, 33, 500)), together, strict=True):
        engine.trim(sequence, 0)
        np.testing.assert_allclose(logits, fill(engine, sequence, end), rtol=1e-3, atol=2e-2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_state_comes_back_bit_by_bit(opened, dtype):
    engine = opened(dtype=dtype)
    fill(engine, 0, 300)
    borders = [0, 128, 256, 300]
    payloads = engine.export_kv(0, borders).payloads()
    for start, end, payload in zip(borders, borders[1:], payloads, strict=False):
        engine.import_kv(1, start, end, [payload], start)
    assert [bytes(p) for p in engine.export_kv(1, borders).payloads()] == [bytes(p) for p in payloads]
    np.testing.assert_array_equal(*decode(engine, [0, 1], 300))


def test_memory_that_is_not_held_is_used_again(opened):
    engine = opened()
    fill(engine, 0, 128)
    addresses = set()
    for _ in range(3):
        (payload,) = engine.export_kv(0, [0, 128]).payloads()
        addresses.add(np.frombuffer(payload, np.uint8).ctypes.data)
        del payload
    held = [engine.export_kv(0, [0, 128]).payloads()[0] for _ in range(3)]
    assert len({np.frombuffer(p, np.uint8).ctypes.data for p in held}) == 3


def test_what_is_still_being_copied_is_not_overwritten(opened):
    """Neither by steps nor by what is loaded; and what is dropped on its way does no harm."""
    engine, borders = opened(), [*range(0, 897, 128), 1000]
    for tokens in (TOKENS, TOKENS[::-1].copy()):
        fill(engine, 0, 500, tokens)
        engine.evaluate([Rows(0, 500, tokens[500:], outputs=1)])
        expected = [bytes(payload) for payload in engine.export_kv(0, borders).payloads()]
        for _ in range(20):
            export = engine.export_kv(0, borders)
            engine.trim(0, 0)
            for sequence in range(4):
                fill(engine, sequence, 500, TOKENS[100:])
            for sequence in range(4):
                engine.trim(sequence, 0)
            payloads = export.payloads()
            assert [bytes(payload) for payload in payloads] == expected
            engine.import_kv(0, 0, 1000, payloads, 0)
            engine.export_kv(0, borders)
        engine.trim(0, 0)


def test_a_load_beside_steps_of_others_changes_neither(opened):
    engine, borders = opened(), [*range(0, 897, 128), 1000]
    fill(engine, 0, 500)
    engine.evaluate([Rows(0, 500, TOKENS[500:], outputs=1)])
    payloads = engine.export_kv(0, borders).payloads()
    expected = [bytes(payload) for payload in payloads]
    fill(engine, 1, 100)
    alone = decode(engine, [1], 100)
    for _ in range(20):
        engine.trim(1, 100)
        engine.import_kv(2, 0, 1000, payloads, 0)
        np.testing.assert_array_equal(decode(engine, [1], 100), alone)
        assert [bytes(payload) for payload in engine.export_kv(2, borders).payloads()] == expected
        engine.trim(2, 0)


@pytest.mark.parametrize("bits", [8, 4])
def test_packed_state_is_nearly_the_same(opened, bits):
    engine = opened()
    fill(engine, 0, 256)
    exact = decode(engine, [0], 256)[0]
    for start, payload in zip((0, 128), engine.export_kv(0, [0, 128, 256], bits).payloads(), strict=True):
        engine.import_kv(1, start, start + 128, [payload], start)
    packed = decode(engine, [1], 256)[0]
    assert np.corrcoef(exact, packed)[0, 1] > (0.999 if bits == 8 else 0.9)


@pytest.mark.parametrize("ratio", [0.0, 0.2, 1.0])
def test_blending_works_as_on_a_cpu(opened, folders, ratio):
    on_gpu = opened()
    settings = tiny_hf.settings(1024, 4096, batch=512, threads=None)
    on_cpu = open_engine(tiny_hf.load(folders["llama"]), settings, "digest")
    answers = []
    for engine in (on_gpu, on_cpu):
        fill(engine, 0, 300)
        (payload,) = engine.export_kv(0, [0, 300]).payloads()
        prompt = np.concatenate([TOKENS[500:540], TOKENS[100:260], TOKENS[600:640]])
        engine.blend(Rows(1, 0, prompt[:239], False), [Piece(40, 200, payload, 0, 100)], ratio)
        engine.evaluate([Rows(1, 239, prompt[239:], True)])
        answers.append(engine.logits(0).copy())
    assert np.corrcoef(*answers)[0, 1] > 0.999


def test_the_peak_of_a_step_is_predicted(opened):
    engine = opened(dtype="bfloat16")
    footprint = engine.footprint
    assert footprint is not None and footprint.device.startswith("cuda")
    for tokens in (64, 200, 512):
        engine.peak_bytes()
        fill(engine, 0, tokens)
        actual = engine.peak_bytes()
        engine.trim(0, 0)
        predicted = (
            footprint.fixed
            + tokens * (footprint.per_step_token + footprint.per_context_token)
            + tokens * tokens * footprint.per_pair
            + footprint.per_logits_row
        )
        assert actual is not None and actual <= 1.1 * predicted


@pytest.mark.parametrize("has_grammar", [False, True])
@pytest.mark.parametrize("is_improved", [False, True])
@pytest.mark.parametrize("how", [{"temperature": 0.0}, {"temperature": 1.2, "top_k": 50, "top_p": 0.95}], ids=str)
def test_penalties_logprobs_and_grammars_give_on_the_device_what_they_give_on_the_host(
    opened, how, is_improved, has_grammar
):
    engine = opened(is_improved=is_improved)
    pieces, answers = engine.vocab.pieces, []
    settings = Sampling(seed=3, frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=1.2, **how)
    for draws in (False, True):
        sampler = Sampler(settings, EveryThird(engine.vocab.size) if has_grammar else None, top_logprobs=5)
        answer, were_ahead = [sampler.sample(fill(engine, 0, 20), pieces)], []
        for at in range(20, 40):
            choosing = sampler.choosing(draws=draws)
            assert (choosing is not None) == draws
            engine.evaluate([Rows(0, at, np.array([answer[-1][0]], np.int32), 1, choosing, goes_on=30)])
            were_ahead.append(engine.is_ahead)
            if draws:
                token = engine.likeliest(0)
                sampler.chose(token)
                answer.append((token, tell(token, engine.logprobs(0, 0), pieces)))
            else:
                answer.append(sampler.sample(engine.logits(0), pieces))
        engine.trim(0, 0)
        answers.append(answer)
        assert were_ahead == [draws and not has_grammar] * 20
    assert [token for token, _ in answers[0]] == [token for token, _ in answers[1]]
    for (_, found), (_, expected) in zip(*answers, strict=True):
        assert [one.token_id for one in found.top] == [one.token_id for one in expected.top]
        values = [[one.logprob for one in (each, *each.top)] for each in (found, expected)]
        np.testing.assert_allclose(*values, rtol=1e-5, atol=1e-5)


class EveryThird:
    """A grammar."""

    def __init__(self, tokens: int) -> None:
        self.allowed = np.arange(-(-tokens // 32) * 32) % 3 == 0

    def mask(self) -> np.ndarray:
        return np.packbits(self.allowed, bitorder="little").view(np.uint32)

    def advance(self, token: int) -> None:
        assert self.allowed[token]
        self.allowed = np.roll(self.allowed, token % 3 + 1)


def test_steps_may_have_room_for_more_than_a_context(opened):
    assert len(fill(opened(context=320, batch=4096), 0, 300))
