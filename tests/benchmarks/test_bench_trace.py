from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.trace import found_by_belady, found_by_lru, found_by_the_store
from benchmarks.trace_file import BLOCK, Visit
from helpers.benchmarks import measure, prompts_in_turns, written

pytestmark = pytest.mark.slow


def asking(*prompts: tuple[int, ...]) -> list[Visit]:
    """Requests of whole blocks."""
    return [Visit(blocks, len(blocks) * BLOCK) for blocks in prompts]


def by_lru(visits: list[Visit], capacity: int) -> int:
    return max(found_by_lru(visits, capacity, leaf_first=leaf_first) for leaf_first in (False, True))


CONVERSATION = asking((1,), (9,), (1, 2), (1, 2, 3), (9, 8), (1, 2, 3, 4))


# ── what is found ──


def test_where_everything_fits_all_find_what_was_there_before():
    reused = (1 + 2 + 1 + 3) * BLOCK
    assert found_by_the_store(CONVERSATION, 100) == reused
    assert by_lru(CONVERSATION, 100) == reused
    assert found_by_belady(CONVERSATION, 100) == reused


def test_a_prompt_that_ends_inside_a_block_counts_its_own_tokens():
    visits = [Visit((1, 2), BLOCK + 100)] * 2
    assert found_by_the_store(visits, 10) == by_lru(visits, 10) == found_by_belady(visits, 10) == BLOCK + 100


def test_lru_keeps_the_latest():
    visits = asking((1,), (2,), (3,), (2,), (1,))
    assert by_lru(visits, 2) == BLOCK
    assert by_lru(visits, 3) == 2 * BLOCK


def test_by_leaf_the_beginning_of_a_prompt_outlives_its_end():
    visits = asking((1, 2, 3), (4,), (1, 2, 3))
    assert found_by_lru(visits, 3, leaf_first=True) == 2 * BLOCK
    assert found_by_lru(visits, 3, leaf_first=False) == 0


def test_belady_gives_up_what_is_needed_last():
    assert found_by_belady(asking((1,), (2,), (3,), (2,), (1,)), 2) == 2 * BLOCK


def test_what_is_asked_for_again_and_again_survives_a_stream_of_prompts_that_are_not():
    """The document comes back later than LRU can wait, each time, until the store has learned the rhythm."""
    document, others = tuple(range(40)), count(100)
    rounds = [[document, *((next(others),) for _ in range(50))] for _ in range(40)]
    visits = asking(*(prompt for part in rounds for prompt in part))
    assert by_lru(visits, 50) == 0
    assert found_by_the_store(visits, 50) > 20 * len(document) * BLOCK


def test_a_conversation_that_goes_on_alone_is_never_lost():
    visits = asking(*(tuple(range(turn)) for turn in range(1, 40)))
    assert found_by_the_store(visits, 40) == found_by_belady(visits, 40)


@given(prompts_in_turns(), st.integers(1, 20))
def test_no_policy_finds_more_than_belady(prompts, capacity):
    visits = asking(*prompts)
    best = found_by_belady(visits, capacity)
    assert found_by_the_store(visits, capacity) <= best
    assert by_lru(visits, capacity) <= best


# ── the command ──


def test_the_command_compares_the_store_with_lru_and_belady(tmp_path):
    path = str(written(tmp_path / "talk.jsonl", CONVERSATION))
    first, second = measure(tmp_path, "trace", "--trace", path, path)["tables"]
    assert first == second
    assert first["title"] == "talk"
    assert [row["label"] for row in first["rows"]] == ["1%", "3%", "10%", "30%"]
    assert all(row["ours"]["median"] <= row["Belady"]["median"] for row in first["rows"])
