"""`load`: many clients at once, against a bare decode loop over the same tokens.

First decoding is compared: the prompts are in the server's store before the clock starts, and the bare loop has
evaluated them. It runs in a process of its own while the server stands still.

Then the time to the first token of prompts of any length is measured, in turns without and with an open page.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from emberkeep.bench.bare import decode_seconds_elsewhere
from emberkeep.bench.figures import Series, percentile, ratios, series
from emberkeep.bench.http_client import (
    Client,
    Exchange,
    chat_body,
    completion_body,
    completion_tokens,
    parse_stream,
)
from emberkeep.bench.report import BenchResult, Row, Table, Value
from emberkeep.bench.server_process import ServerProcess
from emberkeep.bench.stage import Stage
from emberkeep.signals import with_default_signals
from emberkeep.values import dataclass

_MIXED = (32, 64, 128, 256, 512)


@dataclass(frozen=True, slots=True)
class Workload:
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

    def quick(self) -> Workload:
        return replace(self, answer_tokens=16, mixed_requests=1, mixed_answer=4, repeat=1)


@dataclass(frozen=True, slots=True)
class _Burst:
    tokens_per_s: float
    lengths: list[int]


async def run(stage: Stage, plan: Workload) -> BenchResult:
    with ServerProcess(stage.model, stage.new_data_dir(), parallel=plan.clients) as server:
        client = Client(server.port)
        rows = await _throughput_rows(stage, plan, server, client)
        mixed = await _mixed_rows(stage, plan, client, server.port)
    tables = (
        Table(f"{plan.clients} clients, {plan.answer_tokens} tokens each", rows),
        Table(f"{plan.clients} clients, prompts of {_MIXED[0]} to {_MIXED[-1]} tokens", mixed),
    )
    notes = (
        "share: tokens/s of the server / tokens/s of the bare loop beside it.",
        "page open: another process follows the events and reads what the page reads, as often.",
    )
    return BenchResult("load", tables, notes)


async def _throughput_rows(stage: Stage, plan: Workload, server: ServerProcess, client: Client) -> tuple[Row, ...]:
    rates: dict[str, list[float]] = {"streaming": [], "not streaming": []}
    bare: dict[str, list[float]] = {name: [] for name in rates}
    await _burst(
        replace(plan, answer_tokens=2), client, await _prompts(stage, plan, client, "warm-up"), stream=True
    )
    for number in range(plan.repeat):
        stage.say(f"round {number + 1} of {plan.repeat}")
        for name in rates:
            prompts = await _prompts(stage, plan, client, (name, number))
            await _burst(replace(plan, answer_tokens=0), client, prompts, stream=False)
            burst = await _burst(plan, client, prompts, stream=name == "streaming")
            rates[name].append(burst.tokens_per_s)
            await client.wait_until_settled()
            with server.pause():
                seconds = decode_seconds_elsewhere(stage.model, prompts, burst.lengths)
            bare[name].append(sum(burst.lengths) / seconds)
    return tuple(_throughput_row(name, rates[name], bare[name]) for name in rates)


def _throughput_row(name: str, served: Sequence[float], bare: Sequence[float]) -> Row:
    rate, limit = series(served, "tokens/s"), series(bare, "tokens/s")
    return Row(name, {"throughput": rate, "bare loop": limit, "share": ratios(rate, limit)})


async def _prompts(stage: Stage, plan: Workload, client: Client, seed: object) -> list[list[int]]:
    """Token ids that no request had before: reuse would be measured otherwise."""
    texts = (stage.words.text(plan.prompt_tokens, (seed, number)) for number in range(plan.clients))
    return [await client.tokenize(text) for text in texts]


async def _burst(plan: Workload, client: Client, prompts: Sequence[Sequence[int]], *, stream: bool) -> _Burst:
    bodies = [completion_body(prompt, plan.answer_tokens, stream=stream) for prompt in prompts]
    exchanges = await asyncio.gather(*(client.post("/v1/completions", body) for body in bodies))
    lengths = [completion_tokens(exchange, stream=stream) for exchange in exchanges]
    seconds = max(e.ended for e in exchanges) - min(e.sent for e in exchanges)
    return _Burst(sum(lengths) / seconds, lengths)


async def _mixed_rows(stage: Stage, plan: Workload, client: Client, port: int) -> tuple[Row, ...]:
    alone: list[list[float]] = []
    watched: list[list[float]] = []
    for number in range(plan.repeat):
        stage.say(f"mixed prompts, round {number + 1} of {plan.repeat}")
        alone.append(await _mixed_ttfts(stage, plan, client, (number, "alone")))
        with _page_open(port):
            watched.append(await _mixed_ttfts(stage, plan, client, (number, "watched")))
        await client.wait_until_settled()
    return (
        Row("nobody watches", _ttft_columns(alone)),
        Row("page open", {**_ttft_columns(watched), "of nobody": ratios(_medians(watched), _medians(alone))}),
    )


def _ttft_columns(rounds: Sequence[Sequence[float]]) -> dict[str, Value]:
    ttfts = [ttft for each in rounds for ttft in each]
    return {"TTFT": _medians(rounds), "TTFT, 95th percentile": series([percentile(ttfts, 95)], "ms")}


def _medians(rounds: Sequence[Sequence[float]]) -> Series:
    return series([percentile(each, 50) for each in rounds], "ms")


async def _mixed_ttfts(stage: Stage, plan: Workload, client: Client, seed: object) -> list[float]:
    sizes = random.Random(0)  # the same in every round, of texts that no round had before
    texts = [
        [stage.words.text(sizes.choice(_MIXED), (seed, who, number)) for number in range(plan.mixed_requests)]
        for who in range(plan.clients)
    ]
    answers = await asyncio.gather(*(_one_after_the_other(plan, client, mine) for mine in texts))
    return [parse_stream(exchange).ttft_ms for mine in answers for exchange in mine]


@contextmanager
def _page_open(port: int) -> Iterator[None]:
    command = [sys.executable, "-P", "-m", "emberkeep.bench.watcher", str(port)]
    with subprocess.Popen(with_default_signals(command), stdout=subprocess.PIPE) as watcher:
        try:
            assert watcher.stdout is not None
            watcher.stdout.readline()
            yield
        finally:
            watcher.kill()


async def _one_after_the_other(plan: Workload, client: Client, texts: Sequence[str]) -> list[Exchange]:
    bodies = [chat_body([{"role": "user", "content": text}], plan.mixed_answer) for text in texts]
    return [await client.post("/v1/chat/completions", body) for body in bodies]
