from __future__ import annotations

import threading

import numpy as np
import pytest

from benchmarks.bare import decode_seconds, prefill
from benchmarks.miss import largest_slices, leading
from emberkeep.chat.prompt import prompt_of_ids
from emberkeep.errors import EmberkeepError
from emberkeep.kv.store import Budgets, KvStore
from emberkeep.sched.lifetimes import SchedulerSettings
from emberkeep.sched.sampling import Sampler
from emberkeep.sched.scheduler import Scheduler
from emberkeep.sched.sequence import Sequence
from emberkeep.sched.sequence_state import Ending
from emberkeep.types.events import Progress, TokenLogprob
from emberkeep.types.request import Request, Sampling
from helpers.engines import RecordingEngine

pytestmark = pytest.mark.slow


class UntilEnded:
    def __init__(self) -> None:
        self.over = threading.Event()

    def progress(self, progress: Progress) -> None: ...

    def token(self, token: int, logprob: TokenLogprob | None) -> bool:
        return False

    def kept_tokens(self) -> int:
        return 0

    def full(self) -> bool:
        return False

    def ended(self, ending: Ending) -> None:
        self.over.set()

    def failed(self, error: EmberkeepError) -> None:
        raise error


def test_the_bare_prefill_repeats_the_steps_of_the_scheduler() -> None:
    tokens = np.arange(32, 100, dtype=np.int32)
    scheduled, bare = RecordingEngine(), RecordingEngine()
    store = KvStore(scheduled.fingerprint, Budgets(1 << 30))
    loop = Scheduler(scheduled, store, SchedulerSettings(parallel=1, prefill_slice=16))
    consumer = UntilEnded()
    sampler = Sampler(Sampling(temperature=0))
    loop.submit(Sequence(prompt_of_ids(tokens, max_new=1), Request(), sampler, consumer))
    assert consumer.over.wait(30)
    loop.close()
    store.close()
    prefill(bare, tokens, leading([step[0][2] for step in scheduled.shapes], len(tokens)))
    assert bare.shapes == scheduled.shapes[: len(bare.shapes)]
    assert sum(step[0][2] for step in bare.shapes) == len(tokens)


def test_the_steps_of_a_prompt_end_where_its_answer_begins() -> None:
    assert leading([5, 4, 1, 1, 1], 10) == [5, 4, 1]


@pytest.mark.parametrize(
    ("tokens", "slices"), [(1, [1]), (2, [1, 1]), (16, [15, 1]), (17, [16, 1]), (40, [16, 16, 7, 1])]
)
def test_the_largest_slices_leave_the_last_token_alone(tokens: int, slices: list[int]) -> None:
    assert largest_slices(tokens, 16) == slices


def test_the_bare_decode_gives_every_sequence_its_length_and_then_forgets_it() -> None:
    engine = RecordingEngine()
    prompts = [np.arange(40, 45, dtype=np.int32), np.arange(50, 53, dtype=np.int32)]
    decode_seconds(engine, prompts, [4, 2])
    first, *steps = engine.shapes
    assert first == [(0, 0, 5, True), (1, 0, 3, True)]
    assert steps == [[(0, 5, 1, True), (1, 3, 1, True)], [(0, 6, 1, True)], [(0, 7, 1, True)]]
    decode_seconds(engine, prompts, [1, 1])  # would not start at 0 if anything were left
