from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import talkers
from benchmarks.endless import EndlessPlan, Talk, Turn, made_up_facts, run
from benchmarks.talkers import Left, Said
from emberkeep.bench.report import BenchResult
from emberkeep.bench.servers import Messages
from emberkeep.bench.workspace import COMMON, Words, Workspace
from emberkeep.errors import EmberkeepError
from emberkeep.types.events import Eviction
from helpers import tiny_gguf
from helpers.benchmarks import ScriptedWorkspace, measure

pytestmark = pytest.mark.slow

SAID = Said(
    text="Yes.",
    ttft_ms=5.0,
    prompt_tokens=100,
    completion_tokens=10,
    cached_tokens=90,
    evictions=(),
    is_approximate=False,
)
EVICTION = Eviction(messages=4, tokens=50, out=4, plan_ms=1.0, archive_ms=2.0, engine_ms=30.0)
PLAN = EndlessPlan(ctx=200, times=3, exact_times=1, facts=5, user_tokens=20, answer_tokens=10, through="script")


def turn(*, evicts: bool = False, **fields: Any) -> Turn:
    usual = {"state_before": 90, "state": 110, "has_system": True, "has_message": True}
    return Turn(replace(SAID, evictions=(EVICTION,) if evicts else ()), **{**usual, **fields})


# ── facts ──


def test_no_two_facts_have_a_question_or_a_value_in_common() -> None:
    facts = made_up_facts(100)
    assert len({fact.question for fact in facts}) == len({fact.value for fact in facts}) == 100
    assert all(fact.value in fact.sentence and fact.value not in fact.question for fact in facts)
    assert made_up_facts(100) == facts


# ── turns ──


def test_turns_are_told_apart_by_what_happened_in_them() -> None:
    first, evicts, follows, again, last = (turn(evicts=evicts) for evicts in (False, True, False, True, True))
    talk = Talk(turns=[first, evicts, follows, again, last])
    assert talk.ordinary == [follows]
    assert talk.evicting == [evicts, again, last]
    assert talk.following == [follows]


def test_what_is_kept_is_measured_against_the_state_before() -> None:
    assert turn(state_before=120).kept == 0.75
    assert turn(state_before=60).kept == 1.0


# ── the conversation, with an answer from a script ──


class Script:
    """A model that has read the last few messages, and a memory that finds what it is told to."""

    def __init__(self, *, reads: int, fails_at: int = -1) -> None:
        self.asked: list[Messages] = []
        self.exact: list[bool] = []
        self._reads = reads
        self._fails_at = fails_at

    def __call__(self, workspace: Workspace, ctx: int) -> AbstractAsyncContextManager[Script]:
        @asynccontextmanager
        async def opened() -> Any:
            yield self

        return opened()

    async def ask(self, messages: Messages, max_tokens: int, *, exact: bool) -> Said:
        self.asked.append(messages)
        self.exact.append(exact)
        if len(self.asked) - 1 == self._fails_at:
            raise EmberkeepError("It was too long.")
        evicts = len(self.asked) % 4 == 0
        return replace(SAID, evictions=(EVICTION,) if evicts else (), is_approximate=not exact)

    async def left(self) -> Left:
        messages: Sequence[Any] = self.asked[-1]
        return Left("\n".join(message["content"] for message in [messages[0], *messages[-self._reads :]]), 110)

    async def search(self, query: str, most: int) -> list[str]:
        told = [message["content"] for message in self.asked[-1] if message["role"] == "user"]
        return told[:most]


def endless(script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **changes: Any) -> BenchResult:
    monkeypatch.setitem(talkers.WAYS, "script", script)
    workspace = ScriptedWorkspace(tmp_path, Words(dict.fromkeys(COMMON, 1)))
    return asyncio.run(run(workspace, replace(PLAN, **changes)))


def held(result: BenchResult, row: int = 0) -> dict[str, Any]:
    return dict(result.tables[2].rows[row].values)


def test_facts_are_told_first_and_asked_for_last(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = Script(reads=1000)
    result = endless(script, monkeypatch, tmp_path)
    facts = made_up_facts(PLAN.facts)
    end = script.exact.index(True) - 1
    messages = [message["content"] for message in script.asked[end] if message["role"] == "user"]
    assert [fact.question for fact in facts] == messages[-5:]
    assert all(fact.sentence in " ".join(messages[:3]) for fact in facts)
    # 20 tokens of a message and 10 of an answer, until three contexts of 200 are full.
    assert len(messages) == 3 * 200 / 30 + 5
    assert held(result)["fact in the prompt"] == held(result)["fact among the first 3 found"] == "5 of 5"


def test_what_is_not_in_the_prompt_is_not_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = endless(Script(reads=1), monkeypatch, tmp_path)
    assert held(result)["system message"] == held(result)["current message"] == "25 of 25"
    assert held(result)["fact in the prompt"] == "0 of 5"
    assert f"Not found: {made_up_facts(5)[0].question}" in result.notes


def test_a_turn_that_fails_is_counted_and_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = Script(reads=1000, fails_at=2)
    result = endless(script, monkeypatch, tmp_path)
    assert held(result)["errors"] == 1
    assert "A turn failed: It was too long." in result.notes
    failed, after = script.asked[2], script.asked[3]
    assert list(after[: len(failed) - 1]) == list(failed[:-1])
    assert failed[-1] not in after


def test_the_second_conversation_is_exact(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = Script(reads=1000)
    result = endless(script, monkeypatch, tmp_path)
    assert held(result, 0)["marked approximate"] == "25 of 25"
    assert held(result, 1)["marked approximate"].startswith("0 of ")
    assert sorted(script.exact) == script.exact


def test_the_pause_of_an_eviction_is_without_the_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    row = endless(Script(reads=1000), monkeypatch, tmp_path).json()["tables"][1]["rows"][0]
    assert (row["label"], row["pause"]["median"], row["engine"]["median"]) == ("6 evictions", 3.0, 30.0)


# ── as a command ──


@pytest.mark.parametrize("through", ["http", "library"])
def test_the_benchmark_runs_and_reports(through: str, tmp_path: Path) -> None:
    model = tiny_gguf.dense(tmp_path / "tiny.gguf")
    result = measure(tmp_path, "endless", "--quick", "--model", str(model), "--through", through)
    _, evictions, prompts = result["tables"]
    assert [row["not archived"] for row in evictions["rows"]] == [0, 0]
    for row in prompts["rows"]:
        turns = row["label"].split()[-2]
        assert row["errors"] == 0
        assert row["system message"] == row["current message"] == f"{turns} of {turns}"
