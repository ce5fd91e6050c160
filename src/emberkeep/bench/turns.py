"""`turns`: a conversation whose client sends everything back each time, as clients do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from emberkeep.bench.report import BenchResult, Row, Series, Table, ratios, series
from emberkeep.bench.servers import STATS, BenchClient, OwnServer, Reply
from emberkeep.bench.workspace import Workspace
from emberkeep.values import dataclass


@dataclass(frozen=True, slots=True)
class TurnsPlan:
    turns: int = 8
    system_tokens: int = 512
    user_tokens: int = 64
    answer_tokens: int = 48
    repeat: int = 5

    @property
    def context(self) -> int:
        return self.system_tokens + self.turns * (self.user_tokens + self.answer_tokens)

    def quick(self) -> TurnsPlan:
        return replace(self, turns=3, system_tokens=128, answer_tokens=8, repeat=1)


MeasuredTurn = tuple[Reply, int]
"""With how many tokens the conversation already had in the engine."""


async def run(workspace: Workspace, plan: TurnsPlan) -> BenchResult:
    workspace.require_context(plan.context)
    with OwnServer(workspace, parallel=1) as server:
        talks = [await _talk(workspace, plan, server.client, number) for number in range(plan.repeat)]
    rows = tuple(_row(number, turns) for number, turns in enumerate(zip(*talks, strict=True), 1))
    last, second = (_ttft(talk[index] for talk in talks) for index in (-1, 1))
    summary = Row(f"turn {plan.turns} / turn 2", {"TTFT": ratios(last, second)})
    return BenchResult(
        "turns",
        (Table(f"{plan.repeat} conversations, equal new text in every turn", (*rows, summary)),),
        ("reuse: reused tokens / tokens of the conversation's state after the turn before.",),
    )


async def _talk(workspace: Workspace, plan: TurnsPlan, client: BenchClient, number: int) -> list[MeasuredTurn]:
    workspace.say(f"conversation {number + 1} of {plan.repeat}")
    question = workspace.words.text(plan.user_tokens, "question")
    messages = [{"role": "system", "content": workspace.words.text(plan.system_tokens, number)}]
    turns: list[MeasuredTurn] = []
    state = 0
    for _ in range(plan.turns):
        messages.append({"role": "user", "content": question})
        evaluated_before = (await client.get(STATS))["scheduler"]["evaluated_tokens"]
        reply = await client.chat(messages, plan.answer_tokens)
        stats = await client.wait_until_settled()
        turns.append((reply, state))
        # What was reused plus what was evaluated since is what the engine holds now.
        state = reply.cached_tokens + stats["scheduler"]["evaluated_tokens"] - evaluated_before
        messages.append({"role": "assistant", "content": reply.text})
    return turns


def _row(number: int, turns: tuple[MeasuredTurn, ...]) -> Row:
    known = {} if number == 1 else {"reuse": series((100 * r.cached_tokens / state for r, state in turns), "%")}
    replies = [reply for reply, _ in turns]
    return Row(
        f"turn {number}",
        {
            "TTFT": _ttft(turns),
            "prompt tokens": series((reply.prompt_tokens for reply in replies), ""),
            "new tokens": series((reply.prompt_tokens - reply.cached_tokens for reply in replies), ""),
            **known,
        },
    )


def _ttft(turns: Iterable[MeasuredTurn]) -> Series:
    return series((reply.ttft_ms for reply, _ in turns), "ms")
