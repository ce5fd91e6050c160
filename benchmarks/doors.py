"""doors: the same new prompt through every API. What does each cost beside `/v1/chat/completions`?

Every request has a prompt that nothing has seen, so that all of it is evaluated. The doors take turns in every
round, each time in another order, and are compared within their round. How long the model takes, which varies with
whatever else the machine does, every answer tells itself; what is left of the request is *beside the model*.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from emberkeep.bench.report import BenchResult, Row, Table, series
from emberkeep.bench.servers import BenchClient, OwnServer
from emberkeep.bench.workspace import Workspace
from emberkeep.errors import EmberkeepError
from emberkeep.types.request import Json

_SPARE = 128
"""Tokens of a chat template."""


@dataclass(frozen=True, slots=True)
class DoorsPlan:
    prompt_tokens: int = 512
    answer_tokens: int = 16
    repeat: int = 24

    @property
    def context(self) -> int:
        return self.prompt_tokens + self.answer_tokens + _SPARE

    def quick(self) -> DoorsPlan:
        return replace(self, prompt_tokens=64, answer_tokens=4, repeat=2)


@dataclass(frozen=True, slots=True)
class Door:
    path: str
    body: Callable[[str, int], dict[str, Json]]
    """It is made of a text and the number of tokens to answer with."""


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


async def run(workspace: Workspace, plan: DoorsPlan) -> BenchResult:
    workspace.require_context(plan.context)
    tables = []
    for way in ("streamed", "whole"):
        with OwnServer(workspace, parallel=1) as server:
            taken = await _rounds(workspace, plan, server.client, stream=way == "streamed")
        rows = tuple(_row(path, taken[path], taken[REFERENCE]) for path in taken)
        tables.append(Table(f"{plan.prompt_tokens} new tokens, {plan.answer_tokens} of the answer, {way}", rows))
    return BenchResult("doors", tuple(tables), ("more: than /v1/chat/completions in the same round, the median.",))


@dataclass(frozen=True, slots=True)
class Taken:
    """Milliseconds of a request, and how many of them were the model's."""

    request: float
    model: float

    @property
    def beside(self) -> float:
        return self.request - self.model


def _row(path: str, taken: Sequence[Taken], reference: Sequence[Taken]) -> Row:
    pairs = list(zip(taken, reference, strict=True))
    return Row(
        path,
        {
            "request": series((one.request for one in taken), "ms"),
            "beside the model": series((one.beside for one in taken), "ms"),
            "more": series((one.beside - other.beside for one, other in pairs), "ms"),
            "more of a request": series(
                (100 * (one.beside - other.beside) / other.request for one, other in pairs), "%"
            ),
        },
    )


async def _rounds(
    workspace: Workspace, plan: DoorsPlan, client: BenchClient, *, stream: bool
) -> dict[str, list[Taken]]:
    taken: dict[str, list[Taken]] = {door.path: [] for door in DOORS}
    order = Random(0)
    for number in range(-1, plan.repeat):
        workspace.say("warm-up" if number < 0 else f"round {number + 1} of {plan.repeat}")
        for door in order.sample(DOORS, len(DOORS)):
            text = workspace.words.text(plan.prompt_tokens, (door.path, number, stream))
            one = await _ask(client, door, text, plan.answer_tokens, stream=stream)
            if number >= 0:
                taken[door.path].append(one)
    return taken


async def _ask(client: BenchClient, door: Door, text: str, tokens: int, *, stream: bool) -> Taken:
    """Until the end of the answer. Nothing else runs meanwhile, nor does anything wait to be written."""
    exchange = await client.post(door.path, {**door.body(text, tokens), "stream": stream})
    body = exchange.body()
    if stream and b'"error": {' in body:
        raise EmberkeepError(f"{door.path} failed: {body[-500:].decode(errors='replace')}")
    if not stream:
        json.loads(body)
    await client.wait_until_settled()
    return Taken(1e3 * (exchange.ended - exchange.sent), model_ms(body))


_MILLISECONDS = {"prompt_ms": 1.0, "predicted_ms": 1.0, "prompt_eval_duration": 1e-6, "eval_duration": 1e-6}
_TIMES = re.compile(rf'"({"|".join(_MILLISECONDS)})": ?([0-9.e+-]+)'.encode())


def model_ms(body: bytes) -> float:
    """The milliseconds that an answer tells of its prompt and of itself, in the way of any API."""
    told = {name.decode(): float(number) for name, number in _TIMES.findall(body)}
    return sum(_MILLISECONDS[name] * number for name, number in told.items())
