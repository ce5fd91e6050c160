from __future__ import annotations

import pytest

from emberkeep.kv.policy import Rate
from emberkeep.kv.tree import Cursor, new_root
from emberkeep.sched.sampling import Sampler
from emberkeep.sched.sequence import Sequence
from emberkeep.sched.sequence_state import Phase
from emberkeep.sched.slots import Planner
from emberkeep.types.lineage import EXACT
from emberkeep.types.request import Request
from helpers.scheduling import GREEDY, Recorder, prompt_of


def sequence(slot: int, prompt: int, *, computed: int = 0) -> Sequence:
    made = Sequence(prompt_of([0] * prompt, max_new=10), Request(), Sampler(GREEDY), Recorder())
    made.occupy(slot, Cursor(new_root(""), 0, EXACT), None, computed)
    return made


def planned(planner: Planner, *sequences: Sequence) -> dict[int, int]:
    """Slot to the number of tokens in the next step."""
    return {each.rows.sequence: len(each.rows.tokens) for each in planner.plan(list(sequences))}


@pytest.fixture
def planner() -> Planner:
    return Planner(batch=512, largest_slice=512, speed=Rate(1e6))


def test_a_prompt_alone_gets_the_largest_slice(planner):
    assert planned(planner, sequence(0, 2000)) == {0: 512}


def test_the_last_prompt_token_is_evaluated_alone(planner):
    assert planned(planner, sequence(0, 100)) == {0: 99}
    assert planned(planner, sequence(0, 100, computed=99)) == {0: 1}


def test_only_the_last_token_wants_logits(planner):
    (first,) = planner.plan([sequence(0, 100)])
    (last,) = planner.plan([sequence(0, 100, computed=99)])
    assert not first.rows.outputs
    assert last.rows.outputs


def test_short_prompts_go_first_and_the_oldest_keeps_a_quarter(planner):
    plan = planned(planner, sequence(0, 3000), sequence(1, 51), sequence(2, 2000))
    assert plan == {0: 128, 1: 50, 2: 334}


def test_no_prompt_ends_in_a_tiny_slice(planner):
    assert planned(planner, sequence(0, 541)) == {0: 270}
    assert planned(planner, sequence(0, 541, computed=270)) == {0: 270}
    assert planned(planner, sequence(0, 700)) == {0: 512}


def test_every_answer_gets_its_token_beside_prompts(planner):
    plan = planned(planner, sequence(0, 50, computed=49), sequence(1, 2000), sequence(2, 60, computed=59))
    assert plan == {0: 1, 2: 1, 1: 510}


def test_slices_follow_the_measured_speed():
    planner = Planner(batch=512, largest_slice=512, speed=Rate(150.0))
    assert planned(planner, sequence(0, 2000)) == {0: 256}
    assert planned(planner, sequence(0, 50, computed=49), sequence(1, 2000)) == {0: 1, 1: 32}
    assert [planner.slice_within(seconds, least=128) for seconds in (0.1, 2.0, 60.0)] == [128, 256, 512]


def test_steps_with_few_tokens_say_nothing_about_the_speed():
    speed = Rate()
    planner = Planner(batch=512, largest_slice=512, speed=speed)
    planner.measure(3, 1.0)
    assert speed.value is None
    planner.measure(200, 2.0)
    assert speed.value == 100


def test_what_loads_or_is_idle_has_no_part_in_a_step(planner):
    loading, idle = sequence(0, 100), sequence(1, 100, computed=100)
    loading.phase = Phase.LOADING
    idle.become_idle()
    assert planned(planner, loading, idle) == {}


def test_a_closing_turn_is_evaluated_without_logits(planner):
    closing = sequence(0, 100, computed=100)
    closing.phase = Phase.CLOSING
    closing.tokens.extend((7, 8))
    (last,) = planner.plan([closing])
    assert (len(last.rows.tokens), last.rows.outputs) == (2, False)
