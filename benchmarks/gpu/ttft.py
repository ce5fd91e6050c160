"""The first token of a cached prompt and of cached turns, against evaluating everything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from benchmarks.gpu.rig import Answer, Rig
from benchmarks.gpu.workload import GpuPlan
from emberkeep.bench.report import Row, Series, Table, ratios, series


def measure_prompts(rig: Rig, plan: GpuPlan) -> Iterator[Table]:
    """One prompt after the other: evaluated alone, evaluated and stored, from the engine, from RAM."""
    for size in plan.tokens:
        yield _prompts(rig, plan, size)


def _prompts(rig: Rig, plan: GpuPlan, size: int) -> Table:
    rounds = [_four_ways(rig, size) for _ in range(1 + plan.repeat)][1:]  # the first one is not counted
    labels = ("prefill alone", "prefill, stored", "from the engine", "from RAM")
    alone, *others = (list(answers) for answers in zip(*rounds, strict=True))
    rows = [Row(labels[0], {"TTFT": _ttft(alone), "reused tokens": 0})]
    rows += [_against(_ttft(alone), label, answers) for label, answers in zip(labels[1:], others, strict=True)]
    return Table(f"a prompt of {size:,} tokens", tuple(rows))


def _four_ways(rig: Rig, size: int) -> tuple[Answer, Answer, Answer, Answer]:
    prompt = rig.prompt(size)
    alone, stored, hot = rig.ask(prompt, afresh=True), rig.ask(prompt), rig.ask(prompt)
    rig.leave_engine()
    return alone, stored, hot, rig.ask(prompt)


def _against(prefill: Series, label: str, answers: list[Answer]) -> Row:
    return Row(
        label,
        {
            "TTFT": _ttft(answers),
            "reused tokens": min(answer.lookup.reused_tokens for answer in answers),
            "faster": ratios(prefill, _ttft(answers)),
        },
    )


def measure_turns(rig: Rig, plan: GpuPlan) -> Iterator[Table]:
    """A conversation that goes on, and afterwards each of its turns evaluated afresh."""
    talks = [_talk(rig, plan) for _ in range(1 + plan.repeat)][1:]
    rows = [_turn_row(number, list(turns)) for number, turns in enumerate(zip(*talks, strict=True), 1)]
    title = f"{plan.turns} turns of {plan.turn_tokens} new tokens, after the first {plan.first_tokens:,}"
    yield Table(title, tuple(rows))


def _talk(rig: Rig, plan: GpuPlan) -> list[tuple[Answer, Answer]]:
    """(with what is stored, afresh) of every turn."""
    history, prompts, answers = rig.prompt(plan.first_tokens), [], []
    for _ in range(plan.turns):
        prompts.append(np.concatenate([history, rig.prompt(plan.turn_tokens)]))
        answers.append(rig.ask(prompts[-1], plan.answer_tokens))
        history = np.concatenate([prompts[-1], np.array(answers[-1].tokens, np.int32)])
    # Not before the end: what is evaluated afresh takes the engine for itself.
    return [(answer, rig.ask(prompt, afresh=True)) for prompt, answer in zip(prompts, answers, strict=True)]


def _turn_row(number: int, turns: list[tuple[Answer, Answer]]) -> Row:
    cached, fresh = zip(*turns, strict=True)
    return Row(
        f"turn {number}",
        {
            "TTFT": _ttft(cached),
            "prompt tokens": cached[0].lookup.prompt_tokens,
            "new tokens": max(answer.lookup.prompt_tokens - answer.lookup.reused_tokens for answer in cached),
            "without cache": _ttft(fresh),
            "faster": ratios(_ttft(fresh), _ttft(cached)),
        },
    )


def _ttft(answers: Iterable[Answer]) -> Series:
    return series((answer.ttft_ms for answer in answers), "ms")
