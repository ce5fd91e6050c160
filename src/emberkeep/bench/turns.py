"""`turns`: a conversation whose client sends everything back each time, as clients do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from emberkeep.bench.figures import Series, ratios, series
from emberkeep.bench.http_client import Client, Reply
from emberkeep.bench.report import BenchResult, Row, Table
from emberkeep.bench.server_process import ServerProcess
from emberkeep.bench.stage import Stage
from emberkeep.values import dataclass


@dataclass(frozen=True, slots=True)
class Workload:
    turns: int = 8
    system_tokens: int = 512
    user_tokens: int = 64
    answer_tokens: int = 48
    repeat: int = 5

    @property
    def context(self) -> int:
        return self.system_tokens + self.turns * (self.user_tokens + self.answer_tokens)

    def quick(self) -> Workload:
        return replace(self, turns=3, system_tokens=128, answer_tokens=8, repeat=1)


@dataclass(frozen=True, slots=True)
class MeasuredTurn:
    reply: Reply
    state_before: int
    """Tokens that the conversation already had in the engine."""

    @property
    def reuse(self) -> float:
        return self.reply.cached_tokens / self.state_before if self.state_before else 0.0

    @property
    def new_tokens(self) -> int:
        return self.reply.prompt_tokens - self.reply.cached_tokens


async def run(stage: Stage, plan: Workload) -> BenchResult:
    with ServerProcess(stage.model, stage.new_data_dir(), parallel=1) as server:
        talks = [await _talk(stage, plan, Client(server.port), number) for number in range(plan.repeat)]
    rows = tuple(_row(number, turns) for number, turns in enumerate(zip(*talks, strict=True), 1))
    last, second = (_ttft(talk[index] for talk in talks) for index in (-1, 1))
    summary = Row(f"turn {plan.turns} / turn 2", {"TTFT": ratios(last, second)})
    return BenchResult(
        "turns",
        (Table(f"{plan.repeat} conversations, equal new text in every turn", (*rows, summary)),),
        ("reuse: reused tokens / tokens of the conversation's state after the turn before.",),
    )


async def _talk(stage: Stage, plan: Workload, client: Client, number: int) -> list[MeasuredTurn]:
    stage.say(f"conversation {number + 1} of {plan.repeat}")
    question = stage.words.text(plan.user_tokens, "question")
    messages = [{"role": "system", "content": stage.words.text(plan.system_tokens, number)}]
    turns: list[MeasuredTurn] = []
    state = 0
    for _ in range(plan.turns):
        messages.append({"role": "user", "content": question})
        known = (await client.stats())["scheduler"]["evaluated_tokens"]
        reply = await client.chat(messages, plan.answer_tokens)
        stats = await client.wait_until_settled()
        turns.append(MeasuredTurn(reply, state))
        # What was reused plus what was evaluated since is what the engine holds now.
        state = reply.cached_tokens + stats["scheduler"]["evaluated_tokens"] - known
        messages.append({"role": "assistant", "content": reply.text})
    return turns


def _row(number: int, turns: tuple[MeasuredTurn, ...]) -> Row:
    reuse = {} if number == 1 else {"reuse": series((100 * turn.reuse for turn in turns), "%")}
    return Row(
        f"turn {number}",
        {
            "TTFT": _ttft(turns),
            "prompt tokens": series((turn.reply.prompt_tokens for turn in turns), ""),
            "new tokens": series((turn.new_tokens for turn in turns), ""),
            **reuse,
        },
    )


def _ttft(turns: Iterable[MeasuredTurn]) -> Series:
    return series((turn.reply.ttft_ms for turn in turns), "ms")
