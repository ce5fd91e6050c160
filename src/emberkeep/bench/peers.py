"""`peers`: our server and a llama-server with the same model, measured in turns in one run.

Both get the same texts, threads and context. What each reused is read from its own counters.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from random import Random
from statistics import median
from typing import TypeVar

from emberkeep.bench.report import BenchResult, Row, Table, ratios, series
from emberkeep.bench.servers import (
    OURS,
    PEER,
    BenchClient,
    ComparedServer,
    Messages,
    OwnServer,
    PeerServer,
    Reply,
    alone,
    burst,
    completion_body,
    peer_version,
)
from emberkeep.bench.workspace import Workspace
from emberkeep.values import dataclass

T = TypeVar("T")

_ANSWER = 16
WARM_UP = 48
"""Tokens of the answers before those that are timed: the prompts are evaluated then, and a server has come to the
state that it stays in, whatever it did before."""
_SPARE = 256
"""Tokens of the answers, the second question, what the template adds, and a prompt whose continuation is timed."""
_FIRST_QUESTION = "Which of these words is the first?"


@dataclass(frozen=True, slots=True)
class PeersPlan:
    peer: Path
    tokens: tuple[int, ...] = (3400,)
    """Prompt lengths."""
    turn_tokens: int = 45
    answer_tokens: int = 128
    clients: int = 8
    repeat: int = 5

    @property
    def context(self) -> int:
        return max(*self.tokens, self.answer_tokens) + self.turn_tokens + _SPARE

    def quick(self) -> PeersPlan:
        return replace(self, tokens=(500,), answer_tokens=16, clients=2, repeat=2)


async def run(workspace: Workspace, plan: PeersPlan) -> BenchResult:
    workspace.require_context(plan.context)
    version = peer_version(plan.peer)
    with OwnServer(workspace, parallel=plan.clients, ctx=plan.context) as ours:
        with ours.pause():
            peer = PeerServer(workspace, plan.peer, parallel=plan.clients, ctx=plan.context)
        with peer:
            comparison = _Comparison(workspace, plan, (ours, peer))
            await comparison.measure()
    tables = (
        Table("time to first token", tuple(_wait_row(*one) for one in comparison.waits.items())),
        Table(
            f"tokens/s, {plan.answer_tokens} tokens each",
            tuple(rate_row(*one) for one in comparison.rates.items()),
        ),
    )
    notes = (
        f"{PEER}: {version}, {' '.join(peer.flags)}",
        "ratio: above 1 means that ours is faster. reused: prompt tokens, by each server's own count.",
        f"after a restart: ours from disk; {PEER} with the slot that its client saved, and restores.",
    )
    return BenchResult("peers", tables, notes)


Samples = dict[str, dict[str, list[T]]]
"""By row, then by server, in the order they were taken."""


@dataclass(frozen=True, slots=True)
class _Comparison:
    workspace: Workspace
    plan: PeersPlan
    servers: tuple[ComparedServer, ComparedServer]
    waits: Samples[Reply] = field(default_factory=dict)
    rates: Samples[float] = field(default_factory=dict)

    async def measure(self) -> None:
        for server in self.servers:
            with alone(server, self.servers):
                await server.client.chat([_user("Hello")], 2)  # the first one is always slow
                await server.settle()
        for number in range(self.plan.repeat):
            self.workspace.say(f"round {number + 1} of {self.plan.repeat}")
            for tokens in self.plan.tokens:
                await self._talks(tokens, number)
            await self._streams(number)

    async def _talks(self, tokens: int, number: int) -> None:
        """Every row with one server, then with the other, before the next row: the machine changes with time."""
        talks = [_Talk(server, self, tokens, (tokens, number)) for server in self.servers]
        for name, ask in _WAITS.items():
            samples = self.waits.setdefault(f"{name}, {tokens:,} tokens", {})
            for talk in talks:
                with alone(talk.server, self.servers):
                    samples.setdefault(talk.server.name, []).append(await ask(talk))

    async def _streams(self, number: int) -> None:
        for clients in dict.fromkeys((1, self.plan.clients)):
            name = f"{clients} {'stream' if clients == 1 else 'clients'}"
            texts = [counting((name, number, i)) for i in range(clients)]
            samples = self.rates.setdefault(name, {})
            for server in self.servers:
                with alone(server, self.servers):
                    await stream(server.client, texts, min(WARM_UP, self.plan.answer_tokens))
                    tokens_per_s = await stream(server.client, texts, self.plan.answer_tokens)
                    await server.settle()
                samples.setdefault(server.name, []).append(tokens_per_s)


# ── the time to the first token ──


@dataclass(slots=True)
class _Talk:
    """One conversation with one server."""

    server: ComparedServer
    of: _Comparison
    tokens: int
    seed: object
    answer: str = field(default="", init=False)

    def messages(self, question: str = _FIRST_QUESTION) -> list[Mapping[str, str]]:
        return [{"role": "system", "content": self.words(self.tokens, "text")}, _user(question)]

    def words(self, tokens: int, seed: object) -> str:
        return self.of.workspace.words.text(tokens, (self.seed, seed))

    async def chat(self, messages: Messages) -> Reply:
        reply = await self.server.client.chat(messages, _ANSWER)
        await self.server.settle()
        return reply

    async def cold(self) -> Reply:
        reply = await self.chat(self.messages())
        self.answer = reply.text
        return reply

    async def next_turn(self) -> Reply:
        new = _user(self.words(self.of.plan.turn_tokens, "turn"))
        return await self.chat([*self.messages(), {"role": "assistant", "content": self.answer}, new])

    async def other_question(self) -> Reply:
        return await self.chat(self.messages(self.words(self.of.plan.turn_tokens, "question")))

    async def after_another(self) -> Reply:
        await self.chat([_user(self.words(self.tokens // 4, "another"))])
        return await self.chat(self.messages())

    async def restarted(self) -> Reply:
        reply = await self.server.resume(self.messages(), _ANSWER)
        await self.server.settle()
        return reply


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


_WAITS: dict[str, Callable[[_Talk], Awaitable[Reply]]] = {
    "cold prompt": _Talk.cold,
    "next turn": _Talk.next_turn,
    "another question, same prefix": _Talk.other_question,
    "same prompt after another one": _Talk.after_another,
    "same prompt after a restart": _Talk.restarted,
}


# ── tokens per second ──

_STEPS_ONLY = {"ignore_eos": True, "speculation": False}
"""Whole answers, token by token: a small model soon repeats itself, and drafts would hide what a step costs."""


def counting(seed: object) -> str:
    """What every model goes on with: an answer that ends early would not be as long as the other server's."""
    start = Random(repr(seed)).randrange(1000, 9000)
    return ", ".join(str(number) for number in range(start, start + 6)) + ","


async def stream(client: BenchClient, texts: Sequence[str], answer_tokens: int) -> float:
    prompts = [await client.tokenize(text) for text in texts]
    bodies = [completion_body(prompt, answer_tokens) | _STEPS_ONLY for prompt in prompts]
    return await burst(client, [("/v1/completions", body) for body in bodies])


# ── the report ──


def _wait_row(name: str, replies: Mapping[str, Sequence[Reply]]) -> Row:
    ours, peer = replies[OURS], replies[PEER]
    own, other = (series((reply.ttft_ms for reply in side), "ms") for side in (ours, peer))
    counts = {
        "prompt tokens": round(median(reply.prompt_tokens for reply in ours)),
        "reused by us": round(median(reply.cached_tokens for reply in ours)),
        f"by {PEER}": round(median(reply.cached_tokens for reply in peer)),
    }
    return Row(name, {OURS: own, PEER: other, "ratio": ratios(other, own), **counts})


def rate_row(name: str, rates: Mapping[str, Sequence[float]]) -> Row:
    own, other = (series(rates[side], "tokens/s") for side in (OURS, PEER))
    return Row(name, {OURS: own, PEER: other, "ratio": ratios(own, other)})
