from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.bench.bare import decode_seconds
from emberkeep.bench.disk import chunk_files, drop_from_page_cache, folder_bytes, read_bandwidth
from emberkeep.bench.http_client import Reply
from emberkeep.bench.shared import distinct_prefixes, grown_tokens
from emberkeep.bench.turns import MeasuredTurn
from emberkeep.bench.words import Words
from helpers.engines import RecordingEngine

pytestmark = pytest.mark.slow

REPLY = Reply(
    ttft_ms=1.0,
    text="",
    prompt_tokens=100,
    completion_tokens=10,
    cached_tokens=0,
    tier="-",
    prepare_ms=0.0,
    load_ms=0.0,
    decode_step_ms=1.0,
)


# ── shared, turns ──


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=8))
def test_unique_tokens_are_the_different_prefixes(sequences: list[list[int]]) -> None:
    prefixes = {tuple(s[:end]) for s in sequences for end in range(1, len(s) + 1)}
    assert distinct_prefixes(sequences) == len(prefixes)


def test_a_conversation_grows_by_its_answers_its_ends_of_turn_and_its_later_questions() -> None:
    # 100 prompt + 10 answer + 2 closing, then 28 new tokens of a question, 7 of an answer, 2 closing.
    later = replace(REPLY, prompt_tokens=140, completion_tokens=7, cached_tokens=112)
    assert grown_tokens([REPLY], closing=2) == 12
    assert grown_tokens([REPLY, later], closing=2) == 12 + 28 + 7 + 2


def test_reuse_is_measured_against_the_state_before_the_turn() -> None:
    turn = MeasuredTurn(replace(REPLY, prompt_tokens=140, cached_tokens=112), state_before=112)
    assert turn.reuse == 1.0
    assert turn.new_tokens == 28


# ── prompts ──


def test_a_text_costs_the_tokens_asked_for() -> None:
    costs = {"a": 1, "bb": 2}
    words = Words(costs).text(50, "seed").split(" ")
    assert 50 <= sum(costs[word] for word in words) <= 51


def test_texts_are_equal_for_equal_seeds_only() -> None:
    words = Words(dict.fromkeys("abcdefgh", 1))
    assert words.text(40, 1) == words.text(40, 1) != words.text(40, 2)


# ── the disk ──


def test_the_files_of_a_store_are_found_read_and_unharmed_by_dropping_them(tmp_path: Path) -> None:
    folder = tmp_path / "kv" / "fingerprint" / "chunks" / "ab"
    folder.mkdir(parents=True)
    (folder / "ab12.kv").write_bytes(b"x" * 5000)
    (tmp_path / "kv" / "fingerprint" / "index.db").write_bytes(b"y" * 100)
    files = chunk_files(tmp_path)
    drop_from_page_cache(files)
    assert [path.name for path in files] == ["ab12.kv"]
    assert files[0].read_bytes() == b"x" * 5000
    assert read_bandwidth(files) > 0
    assert folder_bytes(tmp_path / "kv") == 5100


# ── the bare engine does the product's work ──


def test_the_bare_decode_gives_every_sequence_its_length_and_then_forgets_it() -> None:
    engine = RecordingEngine()
    prompts = [np.arange(40, 45, dtype=np.int32), np.arange(50, 53, dtype=np.int32)]
    decode_seconds(engine, prompts, [4, 2])
    first, *steps = engine.shapes
    assert first == [(0, 0, 5, True), (1, 0, 3, True)]
    assert steps == [[(0, 5, 1, True), (1, 3, 1, True)], [(0, 6, 1, True)], [(0, 7, 1, True)]]
    decode_seconds(engine, prompts, [1, 1])  # would not start at 0 if anything were left
