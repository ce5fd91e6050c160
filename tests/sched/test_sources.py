"""Where the state of each part of a prompt came from, in the order of the prompt."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.sched.sequence_state import Reuse
from emberkeep.types.events import LookupRecord, Source
from helpers.scheduling import PATIENCE, Rig, text

PROMPT = text(700)


def told(lookup: LookupRecord) -> list[tuple[str, int]]:
    return [(part.source.value, part.tokens) for part in lookup.sources]


@pytest.fixture
def rig(tmp_path: Path):
    with Rig(tmp_path) as rig:
        yield rig


def test_a_new_prompt_is_evaluated_and_the_next_one_is_in_the_engine(rig):
    assert told(rig.run(PROMPT).lookup) == [("evaluated", 700)]
    assert told(rig.run(PROMPT).lookup) == [("hot", 699), ("evaluated", 1)]


def test_what_left_the_engine_comes_from_ram_and_after_a_restart_from_disk(rig, tmp_path):
    rig.run(PROMPT)
    rig.scheduler.forget({""}).result(PATIENCE)
    assert told(rig.run([*PROMPT, *text(50, seed=9)]).lookup) == [("warm", 700), ("evaluated", 50)]
    rig.close()
    with Rig(tmp_path) as again:
        assert told(again.run(PROMPT).lookup) == [("cold", 699), ("evaluated", 1)]


def test_a_part_in_the_engine_and_a_part_in_ram_are_told_apart(rig):
    rig.run(PROMPT)
    rig.scheduler.forget({""}).result(PATIENCE)
    rig.run(PROMPT[:256], max_new=0)
    parts = told(rig.run(PROMPT).lookup)
    assert sum(tokens for _, tokens in parts) == 700
    assert [source for source, _ in parts] == ["hot", "warm", "evaluated"]


SPANS = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9), st.sampled_from(list(Source)[:4])), max_size=8)


@given(SPANS, st.integers(0, 80), st.integers(0, 80), st.integers(0, 10))
def test_every_token_of_a_prompt_has_one_source(spans, length, only, moved):
    reuse, at = Reuse(), 0
    for gap, tokens, source in spans:
        reuse.add(at + gap, at + gap + tokens, source)
        at += gap + tokens
    for each in (reuse, _only(reuse, only, moved)):
        parts = each.sources(length)
        assert sum(part.tokens for part in parts) == length
        assert all(part.tokens > 0 for part in parts)
        assert all(a.source is not b.source for a, b in pairwise(parts))
        positions = [part.source for part in parts for _ in range(part.tokens)]
        expected = [Source.EVALUATED] * length
        for start, end, source in each.spans:
            expected[start:end] = [source] * (min(end, length) - start) if start < length else []
        assert positions == expected[:length]


def _only(reuse: Reuse, length: int, moved: int) -> Reuse:
    shorter = Reuse(list(reuse.spans))
    shorter.only(length, moved)
    assert shorter.moved >= moved
    return shorter
