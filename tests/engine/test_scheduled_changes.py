"""Requests side by side while attention changes every few steps: answers and stored state are as without."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from threading import Event

import numpy as np
import pytest

from emberkeep.engine.base import Outcome, Rows
from emberkeep.engine.llamacpp.engine import LlamaEngine
from emberkeep.errors import EngineError
from helpers.engines import NOISE, SNAPSHOT_KINDS, TOKENS, few_with_flash
from helpers.kv_building import chunks_of
from helpers.scheduling import Rig

Open = Callable[..., LlamaEngine]
KINDS = ["dense", *SNAPSHOT_KINDS]
EVERY = 3
"""Steps from one change to the next."""


def prompt_of(number: int, length: int = 110) -> list[int]:
    """They have their first 40 tokens in common."""
    return [*TOKENS[:40].tolist(), *TOKENS[40 + 37 * number :][: length - 40].tolist()]


def run_all(rig: Rig, prompts: list[list[int]], longest: int = 12) -> list[list[int]]:
    """Answers of different lengths, so that fewer and fewer are computed together. All begin at once."""
    lengths = [longest - 4 * (number % 3) for number in range(len(prompts))]
    gate = Event()
    rig.scheduler.call(gate.wait)
    recorders = [
        rig.start(prompt, max_new=most, closing=()) for prompt, most in zip(prompts, lengths, strict=True)
    ]
    gate.set()
    return [recorder.answer for recorder in recorders]


def assert_greedy(engine: LlamaEngine, prompt: list[int], answer: list[int]) -> None:
    """Every token is the likeliest for an engine that computes all of it afresh, up to the noise of rounding."""
    tokens = np.array([*prompt, *answer], np.int32)
    begin = len(prompt) - 1
    assert engine.evaluate([Rows(0, 0, tokens[:begin], outputs=0)]) is Outcome.DONE
    assert engine.evaluate([Rows(0, begin, tokens[begin:-1], outputs=len(answer))]) is Outcome.DONE
    for row, token in enumerate(answer):
        logits = engine.logits(0, row)
        assert logits[token] > logits.max() - NOISE
    engine.trim(0, 0)


def changes(rig: Rig) -> int:
    changes = rig.engine.stats()["flash_attention_changes"]
    assert isinstance(changes, int)
    return changes


@pytest.fixture
def open_changing(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Engines that change every few steps, whatever they compute."""

    def make(kind: str, **settings: object) -> LlamaEngine:
        engine, steps = open_engine(kind, tables=few_with_flash(), **settings), count(1)
        monkeypatch.setattr(engine._switch, "is_due", lambda *_: next(steps) % EVERY == 0)
        return engine

    return make


@pytest.fixture(params=[True, False], ids=["with", "without"])
def fixed(request, open_engine: Open) -> Callable[[str], LlamaEngine]:
    return partial(open_engine, flash=request.param)


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_either_fixed_way(open_changing: Open, fixed, tmp_path: Path, kind: str) -> None:
    """In few cells: conversations are given up and loaded again in the other way than they were stored in."""
    prompts = [prompt_of(number) for number in range(6)]
    with Rig(tmp_path, open_changing(kind, cells=512), parallel=3, prefill_slice=64) as rig:
        answers = [run_all(rig, prompts) for _ in range(3)]
        rig.settle()
        assert changes(rig) > 5
        assert rig.scheduler.counters.failed == rig.store.counters.damaged_chunks == 0
    alone = fixed(kind)
    for answered in answers:
        for prompt, answer in zip(prompts, answered, strict=True):
            assert_greedy(alone, prompt, answer)


@pytest.mark.parametrize("kind", KINDS)
def test_state_is_reused_after_changes_and_after_a_restart(
    open_changing: Open, fixed, tmp_path: Path, kind: str
) -> None:
    prompts = [prompt_of(number) for number in range(3)]
    new = TOKENS[600:630].tolist()
    with Rig(tmp_path, open_changing(kind), parallel=3, prefill_slice=64) as rig:
        answers = run_all(rig, prompts)
        turns = [[*prompt, *answer, *new] for prompt, answer in zip(prompts, answers, strict=True)]
        before = changes(rig)
        for turn in turns:
            assert rig.run(turn, max_new=6, closing=()).lookup.reused_tokens >= len(turn) - len(new) - 1
        assert changes(rig) > before > 0
        ways = {rig.engine._context.layouts.of(np.frombuffer(payload, np.uint8)) for payload in payloads_of(rig)}
        assert len(ways) == (1 if kind == "recurrent" else 2)  # state of both is stored
    alone = fixed(kind)
    with Rig(tmp_path, open_changing(kind), parallel=3, prefill_slice=64) as rig:
        for turn in turns:
            again = rig.run(turn, max_new=6, closing=())
            assert again.lookup.reused_tokens >= len(turn) - len(new) - 1
            assert_greedy(alone, turn, again.answer)
        assert rig.store.counters.damaged_chunks == 0


def payloads_of(rig: Rig) -> list[memoryview]:
    return [chunk.payload for chunk in chunks_of(rig.store) if chunk.payload]


# ── when a change fails ──


def fail_at(engine: LlamaEngine, monkeypatch: pytest.MonkeyPatch, number: int, error: Exception) -> None:
    """What is put back in change `number` is lost."""
    put_back, changed = engine._context._put_back, count(1)

    def fail(moved) -> None:
        if next(changed) == number:
            put_back(())
            raise error
        put_back(moved)

    monkeypatch.setattr(engine._context, "_put_back", fail)


@pytest.mark.parametrize("kind", KINDS)
def test_requests_beside_each_other_are_answered_although_a_change_loses_everything(
    open_changing: Open, open_engine: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    """Each goes on alone; conversations that were idle in the engine are loaded or computed again."""
    engine, prompts = open_changing(kind), [prompt_of(number) for number in range(3)]
    idle, alone = prompt_of(7), open_engine(kind)
    with Rig(tmp_path, engine, parallel=3, prefill_slice=64) as rig:
        rest = rig.run(idle, max_new=4, closing=())
        fail_at(engine, monkeypatch, 4, MemoryError("llama.cpp has fewer cells than before."))
        before = changes(rig)
        answers = run_all(rig, prompts)
        rig.settle()
        assert changes(rig) >= before + 4
        turn = [*idle, *rest.answer, *TOKENS[600:630].tolist()]
        rig.start(turn, max_new=4, closing=()).wait()
        for prompt in (turn, *prompts):
            assert_greedy(alone, prompt, rig.run(prompt, max_new=6, closing=()).answer)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_greedy(alone, prompt, answer)


def test_requests_are_told_when_no_context_can_be_opened(
    open_changing: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The scheduler ends then, in good order, and says so to everyone who comes."""

    def fail(*_: object) -> None:
        raise EngineError("out of memory")

    with Rig(tmp_path, open_changing("dense"), parallel=3, prefill_slice=64) as rig:
        monkeypatch.setattr("emberkeep.engine.llamacpp.live_context.open_context", fail)
        assert isinstance(rig.start(prompt_of(0), max_new=12, closing=()).wait().error, EngineError)
        with pytest.raises(EngineError, match="answers no more: start again"):
            for _ in range(100):  # some may come while it ends
                assert rig.start(prompt_of(1), max_new=12, closing=()).wait().error is not None
