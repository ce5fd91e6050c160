"""`rag`: questions over passages that were seen before, in another order.

The passages of a question are stored once, in one order. Then it is asked with them in another: evaluated afresh,
and with their stored state moved to where they stand now, repaired in each of the ways that there are. Nothing of
these answers is kept, so that each finds the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev

from benchmarks.hf import HfModelUnderTest, open_model
from benchmarks.model_under_test import Reply
from benchmarks.questions import Question, f1, made_up_questions, read_questions
from emberkeep.bench.report import BenchResult, Row, Table, Value, ratios, series
from emberkeep.bench.workspace import Workspace
from emberkeep.library.results import CANDIDATES, kl
from emberkeep.types.lineage import Approximation, Repair
from emberkeep.types.request import Message, Request, Sampling

_BETWEEN = 2
"""Tokens between two passages."""
_FULL = "full prefill"
_WAYS: dict[str, Request] = {
    _FULL: Request(use_cache=False),
    **{repair.value: Request(approximate=Approximation(repair=repair)) for repair in Repair},
}
_BEFORE = "What do these passages have in common?"
"""What was asked when they were stored: no part of the question itself may be known."""
_INSTRUCTION = "You answer questions from the passages that you are given. You answer with a few words only."


@dataclass(frozen=True, slots=True)
class RagPlan:
    questions: Path | None = None
    """None: they are made up."""
    tokens: tuple[int, ...] = (1536,)
    """Tokens of a prompt."""
    passages: int = 8
    prompts: int = 40
    """Questions that are asked."""
    answer_tokens: int = 24

    @property
    def context(self) -> int:
        return max(self.tokens) + self.answer_tokens + 1

    def quick(self) -> RagPlan:
        return replace(self, tokens=(400,), passages=4, prompts=2, answer_tokens=4)


@dataclass(frozen=True, slots=True)
class _Answer:
    reply: Reply
    score: float
    """F1 against the best of the right answers."""
    evaluated: int
    """Tokens of the prompt that went through all layers, or all but the first ones."""
    token_layers: float
    """The share of a prefill's."""


_Asked = dict[str, _Answer]
"""One question, asked in every way."""


async def run(workspace: Workspace, plan: RagPlan) -> BenchResult:
    async with open_model(workspace, plan.context) as model:
        tables = [await _table(workspace, plan, model, size) for size in plan.tokens]
    return BenchResult("rag", tuple(tables), _NOTES)


_NOTES = (
    "moved: tokens whose state came from another place; repaired: those of them that were evaluated again.",
    "token-layers: how many tokens went through how many layers, against a prefill. ± is one standard error.",
    "first token: how often it is that of the full prefill, and the mean KL divergence from it.",
)


async def _table(workspace: Workspace, plan: RagPlan, model: HfModelUnderTest, size: int) -> Table:
    questions = _questions(plan, model, size)
    asked = []
    for number, question in enumerate(questions):
        workspace.say(f"question {number + 1} of {len(questions)}")
        asked.append(await _ask_in_every_way(plan, model, _shorten(model, question, plan, size), number))
    rows = tuple(_row(way, asked) for way in _WAYS)
    return Table(f"{len(asked)} questions of about {size:,} tokens, {plan.passages} shuffled passages each", rows)


def _questions(plan: RagPlan, model: HfModelUnderTest, size: int) -> list[Question]:
    if plan.questions is None:
        return made_up_questions(model.words, plan.prompts, plan.passages, size // plan.passages)
    return read_questions(plan.questions)[: plan.prompts]


# ── prompts ──


def _shorten(model: HfModelUnderTest, question: Question, plan: RagPlan, size: int) -> Question:
    """As many passages as wanted, those with an answer first, so short that the prompt has at most `size`."""
    chosen = sorted(question.passages, key=question.holds_answer, reverse=True)[: plan.passages]
    bare = (replace(question, text=text, passages=()) for text in (question.text, _BEFORE))
    frame = max(len(model.prompt_ids(_messages(one))) for one in bare)
    room = (size - frame) // len(chosen) - _BETWEEN
    return replace(question, passages=tuple(question.shorten(p, room, model.tokenize) for p in chosen))


def _messages(question: Question) -> tuple[Message, ...]:
    asked = f"Question: {question.text}\nAnswer from the passages above, with a few words."
    return Message("system", _INSTRUCTION), Message("user", "\n\n".join([*question.passages, asked]))


# ── asking ──


async def _ask_in_every_way(plan: RagPlan, model: HfModelUnderTest, question: Question, number: int) -> _Asked:
    await model.ask(Request(messages=_messages(replace(question, text=_BEFORE)), max_tokens=0))
    shuffled = question.shuffle(number)
    ways = list(_WAYS)
    turn = number % len(ways)  # no way is always the first
    answers = {way: await _ask(plan, model, shuffled, _WAYS[way]) for way in ways[turn:] + ways[:turn]}
    return {way: answers[way] for way in ways}


async def _ask(plan: RagPlan, model: HfModelUnderTest, question: Question, way: Request) -> _Answer:
    before = model.blended
    reply = await model.ask(
        replace(
            way,
            messages=_messages(question),
            max_tokens=plan.answer_tokens,
            sampling=Sampling(temperature=0),
            stop=("\n",),
            top_logprobs=CANDIDATES,
        ).decided(is_kept=False)
    )
    lookup = reply.result.lookup
    blended = model.blended - before
    alone = lookup.prompt_tokens - lookup.reused_tokens - blended.tokens
    return _Answer(
        reply,
        f1(reply.result.text, question.answers),
        lookup.prompt_tokens - lookup.cached_tokens + lookup.repaired_tokens,
        (blended.token_layers / model.layers + alone) / lookup.prompt_tokens,
    )


# ── what came of it ──


def _row(way: str, asked: list[_Asked]) -> Row:
    answers, full = [one[way] for one in asked], [one[_FULL] for one in asked]
    ttft, full_ttft = (series((answer.reply.ttft_ms for answer in some), "ms") for some in (answers, full))
    lookups = [answer.reply.result.lookup for answer in answers]
    values: dict[str, Value] = {
        "TTFT": ttft,
        "faster": ratios(full_ttft, ttft),
        "moved": series((lookup.moved_tokens for lookup in lookups), ""),
        "repaired": series((lookup.repaired_tokens for lookup in lookups), ""),
        "evaluated": series((answer.evaluated for answer in answers), ""),
        "token-layers": series((100 * answer.token_layers for answer in answers), "%"),
        "F1": f"{mean(answer.score for answer in answers):.3f}",
    }
    return Row(way, values if way == _FULL else values | _compare(answers, full))


def _compare(answers: list[_Answer], full: list[_Answer]) -> dict[str, Value]:
    pairs = list(zip(answers, full, strict=True))
    firsts = [(a.reply.first, b.reply.first) for a, b in pairs]
    both = [(ours, exact) for ours, exact in firsts if ours is not None and exact is not None]
    same = mean(ours.token_id == exact.token_id for ours, exact in both) if both else 0.0
    differences = [answer.score - exact.score for answer, exact in pairs]
    return {
        "ΔF1": f"{mean(differences):+.3f} ± {_standard_error(differences):.3f}",
        "first token": f"{100 * same:.0f} %",
        "KL": f"{mean(kl(exact, ours) for ours, exact in both):.3f}" if both else "-",
    }


def _standard_error(samples: Sequence[float]) -> float:
    """The one of their mean; 0 for a single one."""
    return stdev(samples) / len(samples) ** 0.5 if len(samples) > 1 else 0.0
