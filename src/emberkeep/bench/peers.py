"""`peers`: our server and a llama-server with the same model, measured in turns in one run.

Both get the same texts, threads and context. What each reused is read from its own counters.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import field, replace
from pathlib import Path
from random import Random
from statistics import median

from emberkeep.bench.figures import ratios, series
from emberkeep.bench.http_client import Client, Messages, Reply, completion_body
from emberkeep.bench.report import BenchResult, Row, Table
from emberkeep.bench.server_process import peer_version
from emberkeep.bench.sides import (
    OURS,
    PEER,
    OwnSide,
    PeerSide,
    Rate,
    Side,
    alone,
    burst,
    busy_process,
    standing_still,
)
from emberkeep.bench.stage import Stage
from emberkeep.values import dataclass

_ANSWER = 16
_WARM_UP = 48
"""Tokens of the answers before those that are timed: the prompts are evaluated then, and a server has come to the
state that it stays in, whatever it did before."""
_STREAM_PROMPT = 48
"""Most tokens of a prompt whose continuation is timed."""
_SPARE = 256
"""Tokens of the answers, the second question and what the template adds."""


@dataclass(frozen=True, slots=True)
class Workload:
    peer: Path = Path("llama-server")
    sizes: tuple[int, ...] = (3400,)
    turn_tokens: int = 45
    answer_tokens: int = 128
    clients: int = 8
    repeat: int = 5

    @property
    def context(self) -> int:
        return max(*self.sizes, _STREAM_PROMPT + self.answer_tokens) + self.turn_tokens + _SPARE

    def quick(self) -> Workload:
        return replace(self, sizes=(500,), answer_tokens=16, clients=2, repeat=2)


async def run(stage: Stage, plan: Workload) -> BenchResult:
    version = peer_version(plan.peer)
    with OwnSide(stage, parallel=plan.clients, ctx=plan.context) as ours:
        around = await _template_tokens(ours.client)
        with standing_still([ours]):
            peer = PeerSide(stage, plan.peer, parallel=plan.clients, ctx=plan.context)
        with peer:
            return await _compare(_Ring(stage, plan, around, (ours, peer)), f"{version}, {peer.flags}")


@dataclass(frozen=True, slots=True)
class _Ring:
    stage: Stage
    plan: Workload
    around: int
    """Tokens that the template adds to a turn."""
    sides: tuple[Side, ...]


async def _compare(ring: _Ring, peer: str) -> BenchResult:
    plan = ring.plan
    waits: dict[int, Waits] = {tokens: {} for tokens in plan.sizes}
    rates: Rates = {}
    for side in ring.sides:
        with alone(side, ring.sides):
            await side.client.chat([{"role": "user", "content": "Hello"}], 2)  # the first one is always slow
            await side.settle()
    for number in range(plan.repeat):
        for tokens in plan.sizes:
            ring.stage.say(f"{tokens:,} tokens, round {number + 1} of {plan.repeat}")
            await _talk_round(ring, tokens, number, waits[tokens])
        ring.stage.say(f"streams, round {number + 1} of {plan.repeat}")
        await _stream_round(ring, number, rates)
    tables = [Table(f"time to first token at {n:,} tokens", wait_rows(waits[n])) for n in plan.sizes]
    speeds = Table(f"tokens/s, {plan.answer_tokens} tokens each", rate_rows(rates))
    notes = (
        f"{PEER}: {peer}",
        "ratio: above 1 means that ours is faster. reused: prompt tokens, by each server's own count.",
        f"after a restart: ours from disk; {PEER} with the slot that its client saved, and restores.",
        *(doubt for samples in waits.values() for doubt in wait_doubts(samples)),
        *rate_doubts(rates, plan.answer_tokens),
    )
    return BenchResult("peers", (*tables, speeds), notes)


# ── the time to the first token ──

Waits = dict[str, dict[str, list[Reply]]]
"""By row, then by side, in the order they were taken."""


@dataclass(slots=True)
class _Talk:
    """One conversation with one side."""

    side: Side
    ring: _Ring
    tokens: int
    seed: object
    answer: str = field(default="", init=False)

    def messages(self, question: str) -> list[Mapping[str, str]]:
        text = self.ring.stage.words.text(self.tokens, (self.seed, "text"))
        return [{"role": "system", "content": text}, {"role": "user", "content": question}]

    def words(self, tokens: int, seed: object) -> str:
        return self.ring.stage.words.text(tokens, (self.seed, seed))

    async def chat(self, messages: Messages) -> Reply:
        reply = await self.side.client.chat(messages, _ANSWER)
        await self.side.settle()
        return reply


async def _cold(talk: _Talk) -> Reply:
    reply = await talk.chat(talk.messages("Which of these words is the first?"))
    talk.answer = reply.text
    return reply


async def _turn(talk: _Talk) -> Reply:
    plan = talk.ring.plan
    new = talk.words(max(plan.turn_tokens - talk.ring.around, 1), "turn")
    said = talk.messages("Which of these words is the first?")
    return await talk.chat(
        [*said, {"role": "assistant", "content": talk.answer}, {"role": "user", "content": new}]
    )


async def _other_question(talk: _Talk) -> Reply:
    return await talk.chat(talk.messages(talk.words(talk.ring.plan.turn_tokens, "question")))


async def _after_another(talk: _Talk) -> Reply:
    await talk.chat([{"role": "user", "content": talk.words(talk.tokens // 4, "another")}])
    return await talk.chat(talk.messages("Which of these words is the first?"))


async def _restarted(talk: _Talk) -> Reply:
    reply = await talk.side.resume(talk.messages("Which of these words is the first?"), _ANSWER)
    await talk.side.settle()
    return reply


_COLD = "cold prompt"
_WAITS: dict[str, Callable[[_Talk], Awaitable[Reply]]] = {
    _COLD: _cold,
    "next turn": _turn,
    "another question, same prefix": _other_question,
    "same prompt after another one": _after_another,
    "same prompt after a restart": _restarted,
}


async def _talk_round(ring: _Ring, tokens: int, number: int, samples: Waits) -> None:
    """Every row on one side, then on the other, before the next row: the machine changes with time."""
    talks = [_Talk(side, ring, tokens, (tokens, number)) for side in ring.sides]
    for name, ask in _WAITS.items():
        for talk in talks:
            with alone(talk.side, ring.sides):
                reply = await ask(talk)
            samples.setdefault(name, {}).setdefault(talk.side.name, []).append(reply)


async def _template_tokens(client: Client) -> int:
    """What a further turn costs besides its words, the answer before it included as a single token."""
    first = [{"role": "user", "content": "a"}]
    turns = [*first, {"role": "assistant", "content": "a"}, *first]
    return len(await client.prompt_tokens(turns)) - len(await client.prompt_tokens(first)) - 1


def wait_rows(samples: Waits) -> tuple[Row, ...]:
    return tuple(_wait_row(name, by_side[OURS], by_side[PEER]) for name, by_side in samples.items())


def _wait_row(name: str, ours: Sequence[Reply], peer: Sequence[Reply]) -> Row:
    own, other = (series((reply.ttft_ms for reply in replies), "ms") for replies in (ours, peer))
    return Row(
        name,
        {
            OURS: own,
            PEER: other,
            "ratio": ratios(other, own),
            "prompt tokens": _middle(reply.prompt_tokens for reply in ours),
            "reused by us": _middle(reply.cached_tokens for reply in ours),
            f"by {PEER}": _middle(reply.cached_tokens for reply in peer),
        },
    )


def wait_doubts(samples: Waits) -> Iterable[str]:
    """Rows that are not what they are called, by the servers' own counters."""
    for name, by_side in samples.items():
        for side, replies in by_side.items():
            shares = [reply.cached_tokens / reply.prompt_tokens for reply in replies]
            if name == _COLD and max(shares) > 0.05:
                yield f"{name}: {side} reused a part of it, so it was not cold."
            if name != _COLD and min(shares) < 0.5:
                yield f"{name}: {side} found less than half of it in its cache at least once."
        prompts = [{reply.prompt_tokens for reply in replies} for replies in by_side.values()]
        if name == _COLD and prompts[0] != prompts[1]:
            yield "The two servers' templates make prompts of different lengths."


def _middle(counts: Iterable[int]) -> int:
    return round(median(counts))


# ── tokens per second ──


Rates = dict[str, dict[str, list[Rate]]]
"""By row, then by side, in the order they were taken."""


async def _stream_round(ring: _Ring, number: int, samples: Rates) -> None:
    for beside, context in (("", nullcontext), (" beside a busy process", busy_process)):
        for clients in dict.fromkeys((1, ring.plan.clients)):
            name = f"{clients} {'stream' if clients == 1 else 'clients'}{beside}"
            texts = [_counting((name, number, i)) for i in range(clients)]
            for side in ring.sides:
                with alone(side, ring.sides):
                    await _burst(side, texts, min(_WARM_UP, ring.plan.answer_tokens))
                    with context():
                        rate = await _burst(side, texts, ring.plan.answer_tokens)
                    await side.settle()
                samples.setdefault(name, {}).setdefault(side.name, []).append(rate)


def _counting(seed: object) -> str:
    """What every model goes on with: an answer that ends early would not be as long as the other server's."""
    start = Random(repr(seed)).randrange(1000, 9000)
    return ", ".join(str(number) for number in range(start, start + 6)) + ","


_STEPS_ONLY = {"ignore_eos": True, "speculation": False}
"""Of whole answers, token by token: a small model soon repeats itself, and drafts would hide what a step costs."""


async def _burst(side: Side, texts: Sequence[str], answer_tokens: int) -> Rate:
    prompts = [await side.client.tokenize(text) for text in texts]
    bodies = [completion_body(prompt, answer_tokens, stream=True) | _STEPS_ONLY for prompt in prompts]
    return await burst(side, [("/v1/completions", body) for body in bodies])


def rate_rows(samples: Rates) -> tuple[Row, ...]:
    return tuple(_rate_row(name, by_side[OURS], by_side[PEER]) for name, by_side in samples.items())


def _rate_row(name: str, ours: Sequence[Rate], peer: Sequence[Rate]) -> Row:
    own, other = (series((rate.tokens_per_s for rate in rates), "tokens/s") for rates in (ours, peer))
    return Row(name, {OURS: own, PEER: other, "ratio": ratios(own, other)})


def rate_doubts(samples: Rates, wanted: int) -> Iterable[str]:
    for name, by_side in samples.items():
        for side, rates in by_side.items():
            if any(length < wanted for rate in rates for length in rate.lengths):
                yield f"{name}: some answers of {side} ended before {wanted} tokens."
