"""`hf-turns`: a conversation in the Hugging Face engine, against `transformers.generate`, which keeps nothing.

Both get the same tokens on the same thread, in turns. Loading the model is in neither side.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from benchmarks.baseline import PlainModel
from benchmarks.hf import HfModelUnderTest, open_model, open_plain, plain_ttft_ms
from benchmarks.model_under_test import Reply
from emberkeep.bench.report import BenchResult, Row, Series, Table, ratios, series
from emberkeep.bench.turns import TurnsPlan
from emberkeep.bench.workspace import Workspace
from emberkeep.types.request import Message, Request, Sampling

_ROOM = 128
"""For what the template writes around messages."""


@dataclass(frozen=True, slots=True)
class _Turn:
    reply: Reply
    plain_ms: float
    plain_tokens: int
    """Those of the prompt that transformers got."""
    state_before: int
    """Tokens that the conversation already had in the engine."""

    @property
    def reuse(self) -> float:
        return self.reply.result.usage.cached_tokens / self.state_before if self.state_before else 0.0


async def run(workspace: Workspace, plan: TurnsPlan) -> BenchResult:
    async with open_model(workspace, plan.context + _ROOM) as model:
        plain = await model.beside(lambda: open_plain(model, workspace))
        workspace.say("a conversation that is not counted")
        await _talk(model, plain, plan, -1)
        talks = []
        for number in range(plan.repeat):
            workspace.say(f"conversation {number + 1} of {plan.repeat}")
            talks.append(await _talk(model, plain, plan, number))
    rows = [_row(number, turns) for number, turns in enumerate(zip(*talks, strict=True), 1)]
    return BenchResult("hf-turns", (Table(_title(plan), (*rows, _summary(plan, talks))),), tuple(_notes(talks)))


async def _talk(model: HfModelUnderTest, plain: PlainModel, plan: TurnsPlan, number: int) -> list[_Turn]:
    question = Message("user", model.words.text(plan.user_tokens, "question"))
    messages = [Message("system", model.words.text(plan.system_tokens, number))]
    turns, state = list[_Turn](), 0
    for _ in range(plan.turns):
        messages.append(question)
        ids, known = model.prompt_ids(messages), model.evaluated_tokens
        plain_ms = await model.beside(partial(plain_ttft_ms, plain, ids))
        reply = await model.ask(_request(messages, plan))
        turns.append(_Turn(reply, plain_ms, len(ids), state))
        # What was reused plus what was evaluated since is what the engine holds now.
        state = reply.result.usage.cached_tokens + model.evaluated_tokens - known
        messages.append(Message("assistant", reply.result.text))
    return turns


def _request(messages: list[Message], plan: TurnsPlan) -> Request:
    return Request(messages=tuple(messages), max_tokens=plan.answer_tokens, sampling=Sampling(temperature=0))


def _title(plan: TurnsPlan) -> str:
    return f"{plan.repeat} conversations, equal new text in every turn"


def _row(number: int, turns: tuple[_Turn, ...]) -> Row:
    reuse = {} if number == 1 else {"reuse": series((100 * turn.reuse for turn in turns), "%")}
    return Row(
        f"turn {number}",
        {
            "TTFT": _ours(turns),
            "prompt tokens": series((turn.reply.result.usage.prompt_tokens for turn in turns), ""),
            **reuse,
            "transformers": _plain(turns),
            "faster": ratios(_plain(turns), _ours(turns)),
        },
    )


def _summary(plan: TurnsPlan, talks: list[list[_Turn]]) -> Row:
    lasts, seconds = [talk[-1] for talk in talks], [talk[1] for talk in talks]
    return Row(
        f"turn {plan.turns} / turn 2",
        {"TTFT": ratios(_ours(lasts), _ours(seconds)), "transformers": ratios(_plain(lasts), _plain(seconds))},
    )


def _notes(talks: list[list[_Turn]]) -> Iterable[str]:
    yield "reuse: reused tokens / tokens of the conversation's state after the turn before."
    yield "transformers: generate(max_new_tokens=1) over the same prompt, without a cache between turns."
    if any(turn.plain_tokens != turn.reply.result.usage.prompt_tokens for talk in talks for turn in talk):
        yield "Some prompts differ by a few tokens: we replay answers as they were sampled."


def _ours(turns: Iterable[_Turn]) -> Series:
    return series((turn.reply.ttft_ms for turn in turns), "ms")


def _plain(turns: Iterable[_Turn]) -> Series:
    return series((turn.plain_ms for turn in turns), "ms")
