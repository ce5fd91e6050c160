"""`load`: tokens per second of one client and of eight at once, and how long first tokens take among eight.

Only decoding is timed where tokens per second are told: the prompts are in the store before the clock starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from random import Random

from emberkeep.bench.report import BenchResult, Row, Table, percentile, ratios, series
from emberkeep.bench.servers import OwnServer, burst, completion_body
from emberkeep.bench.workspace import Workspace
from emberkeep.values import dataclass

_MIXED = (32, 64, 128, 256, 512)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    clients: int = 8
    prompt_tokens: int = 24
    answer_tokens: int = 256
    mixed_requests: int = 3
    """Per client, of random length, for the time to the first token under load."""
    mixed_answer: int = 24
    repeat: int = 5

    @property
    def context(self) -> int:
        return max(self.prompt_tokens + self.answer_tokens, _MIXED[-1] + self.mixed_answer)

    def quick(self) -> LoadPlan:
        return replace(self, answer_tokens=16, mixed_requests=1, mixed_answer=4, repeat=1)


async def run(workspace: Workspace, plan: LoadPlan) -> BenchResult:
    workspace.require_context(plan.context)
    rates: dict[int, list[float]] = {1: [], plan.clients: []}
    waits: list[list[float]] = []
    with OwnServer(workspace, parallel=plan.clients) as server:
        await decode(server, await new_prompts(workspace, server, plan, 1, "warm-up"), 2)
        for number in range(plan.repeat):
            workspace.say(f"round {number + 1} of {plan.repeat}")
            for clients, measured in rates.items():
                prompts = await new_prompts(workspace, server, plan, clients, number)
                measured.append(await decode(server, prompts, plan.answer_tokens))
            waits.append(await mixed_ttfts(workspace, server, plan, number))
    one, all_ = (series(measured, "tokens/s") for measured in rates.values())
    speeds = (Row("1 client", {"throughput": one}), Row("all", {"throughput": all_, "ratio": ratios(all_, one)}))
    tables = (
        Table(f"{plan.answer_tokens} tokens for each of {plan.clients} clients", speeds),
        Table(f"prompts of {_MIXED[0]} to {_MIXED[-1]} tokens", (wait_row(f"{plan.clients} clients", waits),)),
    )
    return BenchResult("load", tables)


async def new_prompts(
    workspace: Workspace, server: OwnServer, plan: LoadPlan, count: int, seed: object
) -> list[list[int]]:
    """Token ids that no request had before: reuse would be measured otherwise."""
    texts = (workspace.words.text(plan.prompt_tokens, (seed, count, number)) for number in range(count))
    return [await server.client.tokenize(text) for text in texts]


async def decode(server: OwnServer, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    """Tokens per second of answers of this length to all prompts at once, which are evaluated before. Returns when
    all is stored."""
    for length in (1, tokens):
        bodies = [completion_body(prompt, length) | {"ignore_eos": True} for prompt in prompts]
        tokens_per_s = await burst(server.client, [("/v1/completions", body) for body in bodies])
    await server.settle()
    return tokens_per_s


async def mixed_ttfts(workspace: Workspace, server: OwnServer, plan: LoadPlan, seed: object) -> list[float]:
    """Returns the milliseconds to the first token of prompts of random lengths, which every client sends one after
    the other, when everything is stored."""
    lengths = Random(0)  # the same in every round, of texts that no round had before

    async def talk(texts: Sequence[str]) -> list[float]:
        asked = ([{"role": "user", "content": text}] for text in texts)
        return [(await server.client.chat(messages, plan.mixed_answer)).ttft_ms for messages in asked]

    talks = [
        [
            workspace.words.text(lengths.choice(_MIXED), (seed, who, number))
            for number in range(plan.mixed_requests)
        ]
        for who in range(plan.clients)
    ]
    ttfts = await asyncio.gather(*map(talk, talks))
    await server.settle()
    return [ttft for mine in ttfts for ttft in mine]


def wait_row(label: str, rounds: Sequence[Sequence[float]]) -> Row:
    everything = [ttft for ttfts in rounds for ttft in ttfts]
    medians = series((percentile(ttfts, 50) for ttfts in rounds), "ms")
    return Row(label, {"TTFT": medians, "TTFT, 95th percentile": series([percentile(everything, 95)], "ms")})
