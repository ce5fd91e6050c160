"""Many prompts at once: what they share is evaluated once, and one that fails loses nothing of the others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from emberkeep import Emberkeep
from emberkeep.config.settings import Config
from emberkeep.engine.base import KvUnit
from emberkeep.engine.fake import FakeEngine
from emberkeep.errors import ContextExceeded, EngineError, InvalidField, Overloaded, RateLimited
from emberkeep.library.bridge import Bridge
from emberkeep.types.events import Event
from emberkeep.types.request import Message, Request
from helpers.scripted_backend import ScriptedBackend, answer, fake_backend

SHARED = " ".join(f"word{i}" for i in range(80))

PROMPTS = [f"{SHARED} question {number} of them" for number in "ABCDEFGH"]

GREEDY: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}


def run_together(tmp_path: Path, parallel: int, unit: KvUnit) -> tuple[list[Any], int]:
    """The results of all prompts, and how many tokens were evaluated. No step is run before all have come: else it
    would depend on the machine what the first one knows of the others."""
    all_here = threading.Event()
    engine = FakeEngine(cells=1 << 15, batch=128, kv_unit=unit, on_evaluate=lambda rows: all_here.wait(60))
    backend = fake_backend(Config(data_dir=tmp_path, parallel=parallel), engine)
    submit, come = backend.scheduler.submit, []

    def count(sequence: Any) -> None:
        submit(sequence)
        come.append(sequence)
        if len(come) == len(PROMPTS):
            all_here.set()

    backend.scheduler.submit = count  # type: ignore[method-assign]
    with Emberkeep(backend) as llm:
        results = llm.generate_batch(PROMPTS, **GREEDY)
    return results, backend.scheduler.counters.evaluated_tokens


@pytest.mark.slow
@pytest.mark.parametrize("unit", list(KvUnit))
@pytest.mark.parametrize("parallel", [1, 3, 8])
def test_a_shared_beginning_is_evaluated_once(tmp_path: Path, parallel: int, unit: KvUnit) -> None:
    results, evaluated = run_together(tmp_path / "together", parallel, unit)
    length = results[0].usage.prompt_tokens
    reused = sorted(result.usage.cached_tokens for result in results)
    assert reused[0] == 0
    assert length - 20 < reused[1] == reused[-1] < length
    rest = 7 * (length - reused[1])
    sampled = 4 * len(PROMPTS)  # the last of each is evaluated, or not, after the answer
    assert length + rest + sampled - len(PROMPTS) <= evaluated <= length + rest + sampled


@pytest.mark.slow
@pytest.mark.parametrize("unit", list(KvUnit))
def test_answers_are_those_of_a_model_that_knows_nothing(tmp_path: Path, unit: KvUnit) -> None:
    results, _ = run_together(tmp_path / "together", 3, unit)
    fresh = FakeEngine(cells=1 << 15, batch=128, kv_unit=unit)
    with Emberkeep(fake_backend(Config(data_dir=tmp_path / "fresh"), fresh)) as llm:
        expected = [llm.generate(prompt, use_cache=False, **GREEDY).text for prompt in PROMPTS]
    assert [result.text for result in results] == expected
    assert len(set(expected)) == len(PROMPTS)


@pytest.mark.slow
def test_a_prompt_that_does_not_fit_has_its_error_and_the_others_their_answers(tmp_path: Path) -> None:
    backend = fake_backend(Config(data_dir=tmp_path), FakeEngine(context=256))
    with Emberkeep(backend) as llm:
        first, long, last = llm.generate_batch(["one", "word " * 300, "three"], **GREEDY)
    assert isinstance(long.error, ContextExceeded)
    assert (long.text, long.finish_reason) == ("", None)
    assert first.error is last.error is None
    assert len(first.tokens) == len(last.tokens) == 4


@pytest.mark.slow
def test_more_prompts_than_may_wait_are_all_answered(tmp_path: Path) -> None:
    config = Config(data_dir=tmp_path, parallel=2, queue=0, max_concurrent_per_user=2)
    with Emberkeep(fake_backend(config), at_once=8) as llm:
        results = llm.generate_batch([f"number {n}" for n in range(20)], **GREEDY)
    assert [result.error for result in results] == [None] * 20


def named(request: Request) -> str:
    return str(request.prompt if request.prompt is not None else request.messages[0].content)


def test_texts_are_raw_and_messages_are_chats_and_results_are_in_order() -> None:
    backend = ScriptedBackend(lambda request: answer(f"to {named(request)}"))
    with Emberkeep(backend, at_once=2) as llm:
        results = llm.generate_batch(["a", [Message("user", "b")], [{"role": "user", "content": "c"}]], seed=3)
        assert llm.generate_batch([]) == []
    assert [result.text for result in results] == ["to a", "to b", "to c"]
    assert [request.prompt for request in backend.requests] == ["a", None, None]
    assert {request.sampling.seed for request in backend.requests} == {3}
    assert not any(request.execution.in_pieces for request in backend.requests)


class Counting(ScriptedBackend):
    """Lets in `limit` requests at a time, and notes how many there were."""

    def __init__(self, limit: int, refusal: Exception) -> None:
        super().__init__(lambda request: answer("x"))
        self.limit, self.refusal = limit, refusal
        self.here = self.most = 0

    async def generate(self, request: Request) -> AsyncIterator[Event]:
        if self.here >= self.limit:
            raise self.refusal
        self.here += 1
        self.most = max(self.most, self.here)
        await asyncio.sleep(0)
        try:
            async for event in super().generate(request):
                yield event
        finally:
            self.here -= 1


@pytest.mark.parametrize("refusal", [Overloaded("full"), RateLimited("yours are full", 1.0)])
@pytest.mark.parametrize("limit", [1, 3])
def test_what_is_refused_beside_others_of_the_batch_is_asked_again(limit: int, refusal: Exception) -> None:
    backend = Counting(limit, refusal)
    with Emberkeep(backend, at_once=5) as llm:
        results = llm.generate_batch([str(n) for n in range(12)])
    assert [result.error for result in results] == [None] * 12
    assert backend.most == limit


def test_what_is_refused_though_the_batch_is_alone_says_so() -> None:
    refusal = Overloaded("full")
    with Emberkeep(Counting(0, refusal), at_once=5) as llm:
        results = llm.generate_batch(["a", "b", "c"])
    assert [result.error for result in results] == [refusal] * 3


def test_no_more_are_under_way_than_are_useful() -> None:
    backend = Counting(100, Overloaded("full"))
    with Emberkeep(backend, at_once=4) as llm:
        llm.generate_batch([str(n) for n in range(12)])
    assert backend.most == 4


def test_an_error_in_the_middle_keeps_what_was_said() -> None:
    failed = EngineError("The engine has failed.")
    backend = ScriptedBackend(
        lambda request: [*answer("half")[:1], failed] if request.prompt == "b" else answer("x")
    )
    with Emberkeep(backend) as llm:
        first, second = llm.generate_batch(["a", "b"])
    assert (first.text, first.error) == ("x", None)
    assert (second.text, second.error) == ("half", failed)


@pytest.mark.parametrize(
    ("prompts", "param"),
    [
        ("one text", "prompts"),
        (5, "prompts"),
        (["a", 5], "prompts[1]"),
        (["a", []], "prompts[1]"),
        (["a", [{"role": "robot", "content": "x"}]], "prompts[1]"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_anything_runs(prompts: Any, param: str) -> None:
    backend = ScriptedBackend(lambda request: answer("x"))
    with Emberkeep(backend) as llm, pytest.raises(InvalidField) as caught:
        llm.generate_batch(prompts)
    assert caught.value.param == param
    assert backend.requests == []


def test_a_bad_option_is_named_itself() -> None:
    with Emberkeep(ScriptedBackend(lambda request: answer("x"))) as llm:
        with pytest.raises(InvalidField, match=r"^temperature: "):
            llm.generate_batch(["a"], temperature=9)
        with pytest.raises(InvalidField, match=r"^suffix: is not an argument here"):
            llm.generate_batch([[Message("user", "b")]], suffix="x")


async def leave() -> None:
    raise SystemExit(3)


async def seven() -> int:
    await asyncio.sleep(0)
    return 7


def test_a_task_that_ends_the_loop_ends_no_other_wait() -> None:
    bridge = Bridge()
    with pytest.raises(SystemExit):
        bridge.run(leave())
    assert bridge.run(seven()) == 7
    bridge.close()
    assert not bridge._thread.is_alive()
