"""Steps of ours that are launched until they are recorded: by Triton's interpreter, and with recordings that are
none. Skipped where there is no Triton; `test_hf_cuda` has real ones."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("there is a GPU", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
pytest.importorskip("triton", reason="needs Triton")

from transformers.models.llama import modeling_llama

from emberkeep.engine.base import Choosing, Logprobs, Penalties, Rows
from emberkeep.engine.hf import cuda_graphs, flights
from emberkeep.engine.hf.cuda_graphs import StepGraphs
from emberkeep.engine.hf.flights import Flights
from emberkeep.engine.hf.fused_layers import fuse
from emberkeep.engine.hf.model_loader import HfModel
from emberkeep.engine.hf.network import Network, learn
from emberkeep.engine.hf.pool import BLOCK, BlockTable, KvMemory
from emberkeep.engine.hf.step_batch import MOST_STEPS, StepBatch, StepSize

pytestmark = pytest.mark.slow

TOKENS = np.arange(40, 80, dtype=np.int32)
SIZES = 6
"""1, 2, 4, 8, 16 and 24 rows."""


class Recording:
    """Computes again what it was made of."""

    def __init__(self, compute: Callable[[], None]) -> None:
        self.replay = compute


class Passed:
    """An event of a device that has done everything at once."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of the steps that were recorded."""
    device = SimpleNamespace(shared_memory_per_block_optin=1 << 17, multi_processor_count=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(torch.cuda, "Event", Passed)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    rows: list[int] = []

    def capture(self: StepGraphs, batch: StepBatch) -> Recording:
        rows.append(batch.size.rows)
        return Recording(lambda: self._compute(batch))

    monkeypatch.setattr(StepGraphs, "_capture", capture)
    return rows


class Opened:
    def __init__(self, model: HfModel, *, is_fused: bool = True) -> None:
        self.network = Network(model.network)
        learned = learn(self.network)
        layers = learned.layers
        self.memory = KvMemory(layers, 8 * BLOCK, learned.dtype, self.network.device)
        fused = fuse(self.network.layers, [learned.options[index] for index in range(len(layers))])
        self.graphs = StepGraphs(
            self.network, self.memory, StepSize(24, 4, 4, 4), learned.group, fused if is_fused else None, None
        )

    def run(self, count: int, block: int) -> np.ndarray:
        """Logits after so many tokens, whose state begins with that block."""
        table = BlockTable([block], count)
        logits, likeliest, _ = self.graphs.run([Rows(0, 0, TOKENS[:count], outputs=1)], [table])
        assert int(likeliest[0]) == int(logits[0].argmax())
        return logits[0].numpy().copy()

    def state(self, count: int, block: int) -> list[bytes]:
        cells = slice(block * BLOCK, block * BLOCK + count)
        return [part[cells].numpy().tobytes() for part in (*self.memory.keys, *self.memory.values)]

    @property
    def replayed(self) -> int:
        return self.graphs.stats()["replayed"]


@pytest.fixture
def opened(hf_model, recordings: list[int]) -> Opened:
    with torch.no_grad():
        return Opened(hf_model("llama"))


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("count", [1, 3, 11, 24])
def test_a_step_that_is_not_recorded_gives_what_the_model_gives(opened: Opened, count: int) -> None:
    expected = opened.network.reference(torch.from_numpy(TOKENS[:count].astype(np.int64)))[-1]
    np.testing.assert_allclose(opened.run(count, block=2), expected.numpy(), rtol=1e-3, atol=1e-3)


def test_the_state_of_a_step_is_the_same_launched_and_replayed(opened: Opened) -> None:
    counts = (1, 3, 24)
    launched = [(opened.run(count, block=2), opened.state(count, block=2)) for count in counts]
    while not opened.graphs.is_recorded:
        opened.graphs.record_next()
    assert opened.replayed == SIZES
    for count, (logits, state) in zip(counts, launched, strict=True):
        np.testing.assert_array_equal(opened.run(count, block=5), logits)
        assert opened.state(count, block=5) == state


def test_one_size_is_recorded_at_a_time_and_answers_come_first(opened: Opened, recordings: list[int]) -> None:
    opened.graphs.record_next()
    assert opened.replayed == 1
    opened.graphs.record_next()
    opened.graphs.record_anew()  # what was recorded, and no more
    assert recordings == [1, 2, 1, 2]
    while not opened.graphs.is_recorded:
        opened.graphs.record_next()
    assert recordings[4:] == [4, 8, 16, 24]


def test_a_size_that_differs_when_it_is_replayed_is_launched(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def capture(self: StepGraphs, batch: StepBatch) -> Recording:
        def compute() -> None:
            self._compute(batch)
            if batch.size.rows == 8:
                self._memory.keys[-1][batch.cells] += 1

        return Recording(compute)

    monkeypatch.setattr(StepGraphs, "_capture", capture)
    expected = opened.run(7, block=2)
    while not opened.graphs.is_recorded:
        opened.graphs.record_next()
    assert opened.replayed == SIZES - 1
    assert "of 8 tokens is not recorded" in caplog.text
    np.testing.assert_array_equal(opened.run(7, block=3), expected)
    assert opened.state(7, block=3) == opened.state(7, block=2)


def test_where_recording_fails_steps_are_launched(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: StepGraphs, batch: StepBatch) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    opened.graphs.record_next()
    monkeypatch.setattr(StepGraphs, "_capture", fail)
    opened.graphs.record_next()
    assert opened.graphs.is_recorded
    assert opened.replayed == 1
    assert "will be slower: operation not permitted when stream is capturing" in caplog.messages[-1]
    np.testing.assert_array_equal(opened.run(2, block=2), opened.run(2, block=3))


def test_a_step_that_failed_leaves_the_model_as_it_was_and_nothing_to_the_next(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, attend, calls = opened.run(3, block=2), StepBatch.attend, []

    def fail_in_the_second_layer(self: StepBatch, *given: object) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return attend(self, *given)

    assert not any("forward" in vars(layer) for layer in opened.network.layers)
    monkeypatch.setattr(StepBatch, "attend", fail_in_the_second_layer)
    with pytest.raises(RuntimeError, match="memory"):
        opened.run(3, block=2)
    assert not any("forward" in vars(layer) for layer in opened.network.layers)
    np.testing.assert_array_equal(opened.run(3, block=2), expected)


def test_parts_are_compiled_for_such_steps_and_on_their_thread_only(
    hf_model, recordings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[str] = []

    def compile_(function: Callable[..., object]) -> Callable[..., object]:
        return lambda *given, **named: (used.append(function.__name__), function(*given, **named))[1]

    rotate = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", rotate)  # put back at the end
    monkeypatch.setattr(cuda_graphs, "_compile", compile_)
    opened = Opened(hf_model("llama"), is_fused=False)
    assert used, "the largest step comes first"
    used.clear()
    expected = opened.network.reference(torch.from_numpy(TOKENS[:11].astype(np.int64)))[-1]
    assert not used
    np.testing.assert_allclose(opened.run(11, block=2), expected.numpy(), rtol=1e-3, atol=1e-3)
    assert {"forward", rotate.__name__} == set(used)

    used.clear()
    attend, elsewhere = StepBatch.attend, []
    given = [torch.ones(1, 2, 3, 16)] * 2 + [torch.ones(1, 3, 16)] * 2

    def rotate_elsewhere() -> None:
        before = len(used)
        modeling_llama.apply_rotary_pos_emb(*given)
        elsewhere.append(len(used) - before)

    def attend_beside_others(self: StepBatch, *given: object) -> torch.Tensor:
        other = threading.Thread(target=rotate_elsewhere)
        other.start()
        other.join()
        return attend(self, *given)

    monkeypatch.setattr(StepBatch, "attend", attend_beside_others)
    opened.run(11, block=3)
    assert elsewhere and not any(elsewhere)


# ── launched ahead ──


class Talk:
    """Some sequences that go on by one token a step, launched ahead or not."""

    def __init__(self, opened: Opened, *, goes_on: int, frequency: float = 0.0, **how: object) -> None:
        self.opened, self.flights = opened, Flights(8, lambda tables, counts: True)
        self.goes_on, self.frequency, self.how = goes_on, frequency, how
        self.penalties: dict[int, Penalties] = {}
        self.told: list[Logprobs] = []
        self.tables = {s: BlockTable([1 + 2 * s, 2 + 2 * s], 0) for s in range(3)}
        self.tokens: dict[int, list[int]] = {}
        self.were_ahead: list[bool] = []
        self.steps: list[int] = []
        """That the first of each batch took."""

    def begin(self, sequence: int, prompt: list[int]) -> Rows:
        self.tokens[sequence] = list(prompt)
        self.change(sequence, 0)
        self.penalties[sequence] = Penalties(object(), 1.0, self.frequency, 0.0, [], Counter())
        return Rows(sequence, 0, np.array(prompt, np.int32), 1)

    def change(self, sequence: int, length: int) -> None:
        """As an engine does where a sequence is trimmed."""
        self.tables[sequence].length = length
        self.flights.forget(sequence)

    def next_of(self, sequence: int, *, mask: np.ndarray | None = None, left: int | None = None) -> Rows:
        tokens, goes_on = self.tokens[sequence], self.goes_on if left is None else min(left, self.goes_on)
        penalties = self.penalties[sequence] if self.frequency else None
        uniform = [0.1 + 0.8 * (7 * at % 10) / 10 for at in range(len(tokens), len(tokens) + 20)].__getitem__
        choosing = Choosing(uniform=uniform, penalties=penalties, mask=mask, **self.how)
        return Rows(sequence, len(tokens) - 1, np.array(tokens[-1:], np.int32), 1, choosing, goes_on)

    def step(self, *batch: Rows) -> None:
        known = self.flights.known(batch)
        for index, rows in enumerate(batch):
            further = known[index].steps - 1 if index in known else 0
            self.tables[rows.sequence].length = rows.start + len(rows.tokens) + further
        self.were_ahead.append(self.flights.is_ahead)
        tables = [self.tables[rows.sequence] for rows in batch]
        graphs = self.opened.graphs
        found, _ = self.flights.run(graphs, list(batch), tables, known, lambda: None, may_run_ahead=True)
        self.steps.append(found[0].steps)
        for rows, each in zip(batch, found, strict=True):
            for token in each.chosen.tokens[each.first : each.first + each.steps]:
                self.tokens[rows.sequence].append(token)
                self.penalties[rows.sequence].said.append(token)
                self.penalties[rows.sequence].counts[token] += 1
            if rows.choosing is not None and rows.choosing.top_logprobs is not None:
                self.told.append(each.chosen.logprobs(each.first))


HOW = [
    {},
    {"temperature": 1.5, "top_p": 0.9},
    {"bias": ((7, 60.0),)},
    {"bias": ((7, 60.0), (9, 59.5)), "frequency": 2.0, "top_logprobs": 2},
]


@pytest.mark.parametrize("how", HOW, ids=str)
def test_what_is_launched_ahead_gives_the_same_tokens(opened: Opened, how: dict[str, object]) -> None:
    tokens, told = [], []
    for goes_on in (0, 30):
        talk = Talk(opened, goes_on=goes_on, **how)
        talk.step(talk.begin(0, [40, 41, 42]), talk.begin(1, [50, 51]))
        for _ in range(4):
            talk.step(talk.next_of(0), talk.next_of(1))
        talk.step(talk.next_of(1))  # the other has ended
        talk.step(talk.next_of(1), talk.begin(2, [60, 61, 62, 63]))  # and a new one comes
        for _ in range(3):
            talk.step(talk.next_of(1), talk.next_of(2))
        tokens.append(talk.tokens)
        told.append(talk.told)
        assert talk.were_ahead == [False] * 10 if not goes_on else [False, False, *[True] * 5, False, True, True]
    assert tokens[0] == tokens[1]
    for (own, top), (other, other_top) in zip(*told, strict=True):
        assert own == pytest.approx(other, rel=1e-3), "steps of other sizes round otherwise"
        assert [token for token, _ in top] == [token for token, _ in other_top]
    if "frequency" in how:
        assert set(tokens[0][1][3:]) == {7, 9}
        assert len(told[0]) == 16
    elif "bias" in how:
        assert set(tokens[0][1][3:]) == {7}


def test_nothing_is_launched_ahead_beside_a_row_that_has_a_mask(opened: Opened) -> None:
    mask = np.zeros(16, np.uint32)
    mask[0] = 1 << 9
    tokens = []
    for goes_on in (0, 30):
        talk = Talk(opened, goes_on=goes_on)
        talk.step(talk.begin(0, [40, 41, 42]), talk.begin(1, [50, 51]))
        for mask_now in (None, mask, mask, None):  # a grammar that begins and ends in the middle of an answer
            talk.step(talk.next_of(0), talk.next_of(1, mask=mask_now))
        tokens.append(talk.tokens)
        assert talk.were_ahead == [False, False, goes_on > 0, False, False]
        assert talk.flights.is_ahead == (goes_on > 0)
    assert tokens[0] == tokens[1]
    assert tokens[0][1][4:6] == [9, 9]


def test_what_was_launched_for_a_sequence_that_has_changed_does_not_count(opened: Opened) -> None:
    talk = Talk(opened, goes_on=30)
    talk.step(talk.begin(0, [40, 41, 42]))
    talk.step(talk.next_of(0))
    *before, last = talk.tokens[0]
    talk.step(talk.begin(0, [43, 44, 45, 46][: len(before)]))  # as long, and another
    talk.tokens[0][-1] = last  # which goes on with the same token
    afresh = Talk(opened, goes_on=0)
    afresh.step(afresh.begin(0, talk.tokens[0][:-1]))
    afresh.tokens[0][-1] = last
    afresh.step(afresh.next_of(0))
    talk.step(talk.next_of(0))
    assert talk.tokens[0] == afresh.tokens[0]


def test_what_the_steps_of_two_flights_copy_from_is_not_filled_before_they_have(opened: Opened) -> None:
    graphs, group = opened.graphs, opened.graphs._group
    kept = {}
    for size in (StepSize(24, 4, 4, 4), StepSize(64, 40, 40, 4, decodes=True), StepSize(64, 40, 40, 4)):
        batch = StepBatch(opened.memory, graphs._tables, graphs._biases, size, group)
        kept[size.rows, size.decodes] = len({id(next(batch._hosts)) for _ in range(30)})
    two_flights = 2 * MOST_STEPS + 1
    assert kept == {(24, False): two_flights, (64, True): two_flights, (64, False): 3}


MANY_HOW = [{}, {"temperature": 1.5, "top_p": 0.9}, {"bias": ((7, 60.0),)}]


@pytest.mark.parametrize("how", MANY_HOW, ids=str)
def test_a_flight_of_many_sequences_takes_some_steps_and_gives_the_same_tokens(
    opened: Opened, how: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flights, "_MANY", 2)
    tokens = []
    for goes_on in (0, 30):
        talk = Talk(opened, goes_on=goes_on, **how)
        prompts = {0: [40, 41, 42], 1: [50, 51], 2: [60]}
        stops_after, left = 9, {0: 30, 1: 14, 2: 6}
        talk.step(*(talk.begin(s, prompt) for s, prompt in prompts.items()))
        while running := [s for s in prompts if len(talk.tokens[s]) < len(prompts[s]) + left[s]]:
            rest = {s: len(prompts[s]) + left[s] - len(talk.tokens[s]) - 1 for s in running}
            talk.step(*(talk.next_of(s, left=rest[s]) for s in running))
            if 0 in running and len(talk.tokens[0]) >= 3 + stops_after:  # it is stopped in the middle of a flight
                del talk.tokens[0][3 + stops_after :], prompts[0]
                talk.change(0, len(talk.tokens[0]))
        assert [len(talk.tokens[s]) for s in (1, 2)] == [2 + left[1], 1 + left[2]]
        if goes_on:
            assert talk.steps[:3] == [1, 1, 4]
            assert talk.steps[-1] == 1, "one alone takes one step a flight"
        tokens.append(talk.tokens)
    assert tokens[0] == tokens[1]


def test_what_counts_penalties_takes_one_step_a_flight(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flights, "_MANY", 2)
    tokens = []
    for goes_on in (0, 30):
        talk = Talk(opened, goes_on=goes_on, frequency=2.0)
        talk.step(talk.begin(0, [40, 41, 42]), talk.begin(1, [50, 51]))
        for _ in range(6):
            talk.step(talk.next_of(0), talk.next_of(1))
        assert talk.steps == [1] * 7
        tokens.append(talk.tokens)
    assert tokens[0] == tokens[1]


def test_a_newcomer_beside_a_flight_of_some_steps_has_a_step_of_its_own(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flights, "_MANY", 2)
    talk = Talk(opened, goes_on=30)
    talk.step(talk.begin(0, [40, 41, 42]), talk.begin(1, [50, 51]))
    talk.step(talk.next_of(0), talk.next_of(1))
    talk.step(talk.next_of(0), talk.next_of(1), talk.begin(2, [60, 61]))
    assert [len(talk.tokens[s]) for s in range(3)] == [3 + 2 + 4, 2 + 2 + 4, 2 + 1]
    assert not talk.flights.is_ahead
    alone = Talk(opened, goes_on=0)
    alone.step(alone.begin(0, [40, 41, 42]), alone.begin(1, [50, 51]))
    for _ in range(5):
        alone.step(alone.next_of(0), alone.next_of(1))
    alone.step(alone.begin(2, [60, 61]))
    assert talk.tokens == alone.tokens
