from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.cluster import ClusterPlan, played, replica_counts
from benchmarks.cluster_model import (
    Events,
    Machine,
    Outcome,
    RemoteSettings,
    RemoteTier,
    SimulatedReplica,
    simulate,
)
from benchmarks.policies import POLICIES, LeastLoaded, RoundRobin
from benchmarks.trace_file import BLOCK, Visit
from emberkeep.errors import EmberkeepError
from emberkeep.routing import Affinity
from helpers.benchmarks import measure, prompts_in_turns

MACHINE = Machine(slots=1, prefill=BLOCK, decode=1.0, import_=1e18, ram=1000 * BLOCK, token_bytes=1)
"""Evaluates a block in a second, imports in no time, and has room for a thousand blocks."""
ALONE = RemoteSettings(budget=0, link=1.0, round_trip=0.0)
SHARED = RemoteSettings(budget=1000 * BLOCK, link=1e18, round_trip=0.0)


def asked(*blocks: int, at: float = 0.0, answer: int = 0) -> Visit:
    return Visit(blocks, len(blocks) * BLOCK, answer, at)


CONVERSATION = [asked(0, at=0), asked(0, 1, at=100), asked(0, 1, 2, at=200)]


def blocks_of(outcome: Outcome) -> tuple[float, float, float]:
    """Own, from the remote tier, evaluated."""
    return outcome.own / BLOCK, outcome.remote / BLOCK, outcome.evaluated / BLOCK


# ── what is reused ──


def test_one_replica_evaluates_each_turn_of_a_conversation_once():
    outcome = simulate(CONVERSATION, 1, RoundRobin(), MACHINE, ALONE)
    assert blocks_of(outcome) == (3, 0, 3)
    assert outcome.ttfts == (1, 1, 1)
    assert outcome.seconds == 201


def test_with_affinity_three_replicas_reuse_as_much_as_one():
    outcome = simulate(CONVERSATION, 3, Affinity(), MACHINE, ALONE)
    assert blocks_of(outcome) == (3, 0, 3)
    assert sorted(outcome.busy) == pytest.approx([0, 0, 3])


def test_in_turns_three_replicas_that_share_nothing_evaluate_everything():
    outcome = simulate(CONVERSATION, 3, RoundRobin(), MACHINE, ALONE)
    assert blocks_of(outcome) == (0, 0, 6)
    assert outcome.ttfts == (1, 2, 3)
    assert (outcome.read_bytes, outcome.written_bytes) == (0, 0)


def test_in_turns_what_others_evaluated_comes_from_the_remote_tier():
    outcome = simulate(CONVERSATION, 3, RoundRobin(), MACHINE, SHARED)
    assert blocks_of(outcome) == (0, 3, 3)
    assert (outcome.read_bytes, outcome.written_bytes) == (3 * BLOCK, 3 * BLOCK)


def test_what_was_loaded_is_the_replicas_own_from_then_on():
    again = [asked(0, at=0), asked(0, at=100), asked(0, at=200), asked(0, at=300)]
    assert blocks_of(simulate(again, 2, RoundRobin(), MACHINE, SHARED)) == (2, 1, 1)


def test_many_conversations_reuse_more_with_affinity_than_in_turns():
    turns = [
        asked(*range(100 * talk, 100 * talk + turn), at=100 * turn + talk)
        for turn in range(1, 6)
        for talk in range(7)
    ]
    kept = {name: simulate(turns, 3, POLICIES[name](), MACHINE, ALONE).own for name in ("affinity", "round_robin")}
    assert kept["affinity"] == 7 * (1 + 2 + 3 + 4) * BLOCK
    assert kept["round_robin"] < kept["affinity"] / 2


def test_a_part_of_a_block_at_the_end_counts_its_own_tokens():
    visits = [Visit((0, 1), BLOCK + 100, at=at) for at in (0.0, 100.0, 200.0)]
    outcome = simulate(visits, 2, RoundRobin(), MACHINE, SHARED)
    assert (outcome.own, outcome.remote, outcome.evaluated) == (BLOCK + 100,) * 3


def test_two_equal_prompts_at_once_are_evaluated_once():
    outcome = simulate([asked(0, 1), asked(0, 1)], 1, RoundRobin(), replace(MACHINE, slots=2), ALONE)
    assert blocks_of(outcome) == (2, 0, 2)


# ── what takes time ──


def test_a_request_waits_for_a_slot_until_the_answer_before_it_has_ended():
    outcome = simulate([asked(0, answer=5), asked(1)], 1, RoundRobin(), MACHINE, ALONE)
    assert outcome.ttfts == (1, 7)
    assert outcome.seconds == 7


def test_slots_decode_side_by_side_and_evaluate_one_after_the_other():
    visits = [asked(0, answer=5), asked(1, answer=5)]
    outcome = simulate(visits, 1, RoundRobin(), replace(MACHINE, slots=2), ALONE)
    assert outcome.ttfts == (1, 2)
    assert outcome.seconds == 7
    assert outcome.busy == (2 + 2 * 5 / 2,)


def test_importing_takes_the_engines_time():
    outcome = simulate(CONVERSATION[:2], 1, RoundRobin(), replace(MACHINE, import_=BLOCK * 4), ALONE)
    assert outcome.ttfts == (1, 1.25)


def test_the_link_and_the_round_trips_take_time():
    shared = replace(SHARED, link=BLOCK * 4, round_trip=0.125)
    outcome = simulate(CONVERSATION[:2], 2, RoundRobin(), MACHINE, shared)
    # To ask for the first, in vain; then to ask, to load a block of which a second has four, and to evaluate one.
    assert outcome.ttfts == (1.125, 0.125 + 0.125 + 0.25 + 1)


def test_what_would_take_longer_to_load_than_to_evaluate_is_evaluated():
    outcome = simulate(CONVERSATION, 3, RoundRobin(), MACHINE, replace(SHARED, link=BLOCK * 0.9))
    assert blocks_of(outcome) == (0, 0, 6)
    assert outcome.read_bytes == 0


def test_what_would_wait_too_long_for_a_busy_link_is_evaluated():
    """Each of three replicas wants nine blocks at the same time, which are two seconds of the link's."""
    long = tuple(range(9))
    visits = [asked(*long, at=0), *(asked(*long, at=100) for _ in range(3))]
    outcome = simulate(visits, 4, RoundRobin(), MACHINE, replace(SHARED, link=9 * BLOCK / 4.0))
    assert blocks_of(outcome) == (0, 18, 18)
    assert outcome.ttfts == (9, 4, 8, 9)


def test_what_the_link_has_no_time_for_is_not_written():
    visits = [asked(block, at=block) for block in range(8)]
    outcome = simulate(visits, 1, RoundRobin(), MACHINE, replace(SHARED, link=BLOCK / 10))
    assert (outcome.written_bytes, outcome.unwritten_bytes) == (BLOCK, 7 * BLOCK)


# ── what fits ──


@st.composite
def traces(draw: st.DrawFn) -> list[Visit]:
    prompts = draw(prompts_in_turns(20))
    return [asked(*blocks, at=draw(st.integers(0, 30)), answer=draw(st.integers(0, 9))) for blocks in prompts]


@given(traces(), st.integers(1, 8), st.integers(1, 3), st.integers(1, 8))
def test_no_budget_is_exceeded_and_every_request_is_answered(visits, room, slots, remote_room):
    events, remote = Events(), RemoteTier(replace(SHARED, budget=remote_room * BLOCK))
    answered: list[int] = []
    machine = replace(MACHINE, ram=room * BLOCK, slots=slots)
    replica = SimulatedReplica(machine, remote, events, lambda: answered.append(1))
    for visit in visits:
        events.at(visit.at, lambda visit=visit: replica.take(visit))
    events.run()
    assert replica.store.held_bytes()[0] <= machine.ram
    assert remote.bytes <= remote_room * BLOCK
    assert len(answered) == len(visits) and replica.running == 0
    assert replica.own + replica.remote + replica.evaluated == sum(visit.tokens for visit in visits)


def test_a_replica_forgets_what_has_no_room():
    visits = [*(asked(block, at=10 * block) for block in range(5)), asked(0, at=100)]
    assert blocks_of(simulate(visits, 1, RoundRobin(), replace(MACHINE, ram=2 * BLOCK), ALONE)) == (0, 0, 6)
    assert blocks_of(simulate(visits, 1, RoundRobin(), replace(MACHINE, ram=9 * BLOCK), ALONE)) == (1, 0, 5)


def test_the_remote_tier_forgets_what_was_read_or_written_longest_ago():
    events, remote = Events(), RemoteTier(replace(SHARED, budget=2))
    for block in (1, 2):
        remote.write(events, {block: 1})
    events.run()
    remote.read(events.now, [1])
    remote.write(events, {3: 1})
    events.run()
    assert [block for block in (1, 2, 3) if remote.leading([block])] == [1, 3]
    assert remote.leading([1, 2, 3]) == 1


# ── load ──


def test_imbalance_is_the_busiest_replica_by_the_mean():
    outcome = simulate([asked(0), asked(1, 2, 3)], 2, LeastLoaded(), MACHINE, ALONE)
    assert sorted(outcome.busy) == [1, 3]
    assert outcome.imbalance == 1.5
    assert replace(outcome, busy=(2.0, 2.0)).imbalance == 1
    assert replace(outcome, busy=(0.0, 4.0)).imbalance == 2
    assert replace(outcome, busy=(0.0, 0.0)).imbalance == 1


def test_a_trace_is_played_faster():
    assert [visit.at for visit in played(CONVERSATION, ClusterPlan((), speedup=4), 8)] == [0, 25, 50]


def test_per_replica_each_has_a_copy_of_the_trace_that_shares_nothing_with_the_others():
    load = played(CONVERSATION, ClusterPlan((), per_replica=True), 3)
    assert [visit.blocks for visit in load if len(visit.blocks) == 3] == [(0, 1, 2), (3, 4, 5), (6, 7, 8)]
    assert [visit.at for visit in load if len(visit.blocks) == 1] == [0, 20, 40]
    assert blocks_of(simulate(load, 3, Affinity(), MACHINE, SHARED)) == (9, 0, 9)


def test_ids_that_leave_no_room_for_copies_are_refused():
    with pytest.raises(EmberkeepError, match="number its blocks from 0"):
        played([asked(2**31 - 2)], ClusterPlan((), per_replica=True), 2)


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("1..64", (1, 2, 4, 8, 16, 32, 64)),
        ("3..20", (3, 4, 8, 16, 20)),
        ("5..5", (5,)),
        ("8", (8,)),
        ("8,1,3,3", (1, 3, 8)),
    ],
)
def test_numbers_of_replicas(text, counts):
    assert replica_counts(text) == counts


@pytest.mark.parametrize(
    "text", ["", "0", "0..4", "8..4", "1..", "..8", "1..2..3", "many", "1,", "5000", "1..5000"]
)
def test_what_is_no_number_of_replicas_is_explained(text):
    with pytest.raises(EmberkeepError, match=r"give 1\.\.64, or some such as 1,3,8"):
        replica_counts(text)


# ── the command ──


def written(path: Path) -> Path:
    fields = [
        {"timestamp": visit.at * 1000, "input_length": visit.tokens, "output_length": 1, "hash_ids": visit.blocks}
        for visit in CONVERSATION
    ]
    path.write_text("".join(f"{json.dumps(one)}\n" for one in fields))
    return path


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("EMBERKEEP_DATA_DIR", str(tmp_path / "kept"))
    return str(written(tmp_path / "talk.jsonl"))


def test_the_command_has_a_row_for_each_number_and_policy(trace: str, tmp_path: Path):
    result = measure(tmp_path, "cluster", "--trace", trace, "--replicas", "1,3")
    rows = {row["label"]: row for row in result["tables"][0]["rows"]}
    of_three = [f"3 replicas, {name}" for name in ("affinity", "least_loaded", "round_robin")]
    assert list(rows) == ["1 replica", *of_three]
    assert [round(rows[name]["own"]["median"]) for name in ("1 replica", of_three[0], of_three[2])] == [50, 50, 0]
    assert rows[of_three[2]]["remote"]["median"] == 50
    assert result["notes"][0].startswith("A replica: 8 slots, prefill 8000 tokens/s")


def test_flags_change_what_is_simulated(trace: str, tmp_path: Path):
    flags = ["--replicas", "3", "--policies", "round_robin", "--no-remote", "--prefill", "512", "--slots", "2"]
    result = measure(tmp_path, "cluster", "--trace", trace, *flags)
    (row,) = result["tables"][0]["rows"]
    assert (row["evaluated"]["median"], row["network"]["median"]) == (100, 0)
    assert (row["TTFT p50"]["median"], row["TTFT p95"]["median"]) == (2, 3)
    assert any(note.startswith("Remote tier: none.") for note in result["notes"])


def test_a_bad_line_is_named_before_anything_is_simulated(trace: str, tmp_path: Path):
    with Path(trace).open("a") as file:
        file.write('{"input_length": 10}\n')
    with pytest.raises(EmberkeepError, match=r"^talk\.jsonl, line 4 is not a request of a trace"):
        measure(tmp_path, "cluster", "--trace", trace)
