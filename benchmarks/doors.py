"""doors: the same new prompt through every API. What does each cost beside `/v1/chat/completions`?

Every request has a prompt that nothing has seen, so that all of it is evaluated. The doors take turns in every
round, each time in another order, and are compared within their round.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from emberkeep.bench.figures import Series, overhead, series
from emberkeep.bench.http_client import Client
from emberkeep.bench.report import BenchResult, Row, Table
from emberkeep.bench.server_process import ServerProcess
from emberkeep.bench.stage import Stage
from emberkeep.errors import EmberkeepError
from emberkeep.types import Json

_SPARE = 128
"""Tokens of a chat template."""


@dataclass(frozen=True, slots=True)
class Workload:
    prompt_tokens: int = 512
    answer_tokens: int = 16
    repeat: int = 24

    @property
    def context(self) -> int:
        return self.prompt_tokens + self.answer_tokens + _SPARE

    def quick(self) -> Workload:
        return replace(self, prompt_tokens=64, answer_tokens=4, repeat=2)


@dataclass(frozen=True, slots=True)
class Door:
    path: str
    body: Callable[[str, int], dict[str, Json]]
    """Of a text and the number of tokens to answer with."""


def _messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _chat(text: str, tokens: int) -> dict[str, Json]:
    return {"messages": _messages(text), "max_tokens": tokens, "temperature": 0}


def _messages_body(text: str, tokens: int) -> dict[str, Json]:
    return {"model": "default", **_chat(text, tokens)}


def _responses(text: str, tokens: int) -> dict[str, Json]:
    # OpenAI's smallest limit is 16; nothing is stored, as over the other doors.
    return {"input": text, "max_output_tokens": max(tokens, 16), "temperature": 0, "store": False}


def _ollama_chat(text: str, tokens: int) -> dict[str, Json]:
    return {"model": "default", "messages": _messages(text), "options": {"num_predict": tokens, "temperature": 0}}


def _ollama_generate(text: str, tokens: int) -> dict[str, Json]:
    return {"model": "default", "prompt": text, "options": {"num_predict": tokens, "temperature": 0}}


def _completion(text: str, tokens: int) -> dict[str, Json]:
    return {"prompt": text, "max_tokens": tokens, "temperature": 0}


def _llama_completion(text: str, tokens: int) -> dict[str, Json]:
    return {"prompt": text, "n_predict": tokens, "temperature": 0}


REFERENCE = "/v1/chat/completions"
DOORS = (
    Door(REFERENCE, _chat),
    Door("/v1/messages", _messages_body),
    Door("/v1/responses", _responses),
    Door("/api/chat", _ollama_chat),
    Door("/api/generate", _ollama_generate),
    Door("/v1/completions", _completion),
    Door("/completion", _llama_completion),
)


async def run(stage: Stage, plan: Workload) -> BenchResult:
    tables = []
    for way in ("streamed", "whole"):
        with ServerProcess(stage.model, stage.new_data_dir(), parallel=1) as server:
            seconds = await _rounds(stage, plan, Client(server.port), stream=way == "streamed")
        times = {path: series((1e3 * s for s in taken), "ms") for path, taken in seconds.items()}
        rows = tuple(_row(path, times[path], times[REFERENCE]) for path in times)
        tables.append(Table(f"{plan.prompt_tokens} new tokens, {plan.answer_tokens} of the answer, {way}", rows))
    return BenchResult("doors", tuple(tables), ("more: than /v1/chat/completions in the same round, the median.",))


def _row(path: str, taken: Series, reference: Series) -> Row:
    return Row(path, {"request": taken, "more": overhead(taken, reference)})


async def _rounds(stage: Stage, plan: Workload, client: Client, *, stream: bool) -> dict[str, list[float]]:
    taken: dict[str, list[float]] = {door.path: [] for door in DOORS}
    order = Random(0)
    for number in range(-1, plan.repeat):
        stage.say("warm-up" if number < 0 else f"round {number + 1} of {plan.repeat}")
        for door in order.sample(DOORS, len(DOORS)):
            text = stage.words.text(plan.prompt_tokens, (door.path, number, stream))
            seconds = await _ask(client, door, text, plan.answer_tokens, stream=stream)
            if number >= 0:
                taken[door.path].append(seconds)
    return taken


async def _ask(client: Client, door: Door, text: str, tokens: int, *, stream: bool) -> float:
    """Seconds until the end of the answer. Nothing else runs meanwhile, nor does anything wait to be written."""
    exchange = await client.post(door.path, {**door.body(text, tokens), "stream": stream})
    body = exchange.body()
    if stream and b'"error": {' in body:
        raise EmberkeepError(f"{door.path} failed: {body[-500:].decode(errors='replace')}")
    if not stream:
        json.loads(body)
    await client.wait_until_settled()
    return exchange.ended - exchange.sent
