"""swap: two models in turns, with memory for one. How long until the first token after a swap?

The two are one file under two names, which neither server knows. Each has a prompt of its own; it is asked for in
turns with the other, and each time the other model has to go. What each server reused is read from its counters.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from emberkeep.bench.figures import ratios, series
from emberkeep.bench.http_client import Client, Reply, chat_body, parse_stream
from emberkeep.bench.report import BenchResult, Row, Table
from emberkeep.bench.server_process import ServerUnderTest, peer_version
from emberkeep.bench.sides import OURS, PEER
from emberkeep.bench.stage import Stage
from emberkeep.config.sources import ENV_PREFIX
from emberkeep.engine.llamacpp.context import available_cores

_NAMES = ("left", "right")
_ANSWER = 4
_SPARE = 256
"""Tokens of the answers, the questions and what the template adds."""
_EVALUATED, _SWAPPED, _NEW = "evaluated, its model loaded", "after a swap, known", "after a swap, new"


@dataclass(frozen=True, slots=True)
class Workload:
    peer: Path | None = None
    sizes: tuple[int, ...] = (2000,)
    repeat: int = 3

    @property
    def context(self) -> int:
        return max(self.sizes) + _SPARE

    def quick(self) -> Workload:
        return replace(self, sizes=(300,), repeat=1)


Waits = dict[str, list[Reply]]
"""By row, in the order they were taken."""


async def run(stage: Stage, plan: Workload) -> BenchResult:
    tables = []
    for tokens in plan.sizes:
        waits = {OURS: await _measure(stage, plan, tokens, _ours(stage, plan.context))}
        if plan.peer is not None:
            waits[PEER] = await _measure(stage, plan, tokens, _router(stage, plan.peer, plan.context))
        tables.append(Table(f"time to first token, prompts of {tokens:,} tokens", rows(waits)))
    notes = [
        f"known: the prompt was asked for before, and its model unloaded since. {_EVALUATED}: for comparison."
    ]
    if plan.peer is not None:
        notes.append(f"{PEER}: {peer_version(plan.peer)}, as a router with --models-max 1.")
    return BenchResult("swap", tuple(tables), tuple(notes))


async def _measure(stage: Stage, plan: Workload, tokens: int, server: Iterator[ServerUnderTest]) -> Waits:
    waits: Waits = {}
    with contextmanager(lambda: server)() as running:
        client = Client(running.port)
        for name in _NAMES:  # what is done once only, at the first loading
            await _ask(client, name, "Hello")
        for number in range(plan.repeat):
            stage.say(f"{tokens:,} tokens, round {number + 1} of {plan.repeat}")
            await _round(stage, client, tokens, number, waits)
    return waits


async def _round(stage: Stage, client: Client, tokens: int, number: int, waits: Waits) -> None:
    """The first name is loaded last in a round, so it is the other that is loaded now."""
    left, right = _NAMES
    texts = {name: stage.words.text(tokens, (name, number)) for name in (*_NAMES, "alone")}
    for row, name, text in (
        (_EVALUATED, right, texts["alone"]),
        (_NEW, left, texts[left]),
        (_NEW, right, texts[right]),
        (_SWAPPED, left, texts[left]),
        (_SWAPPED, right, texts[right]),
    ):
        waits.setdefault(row, []).append(await _ask(client, name, text))


async def _ask(client: Client, model: str, text: str) -> Reply:
    messages = [{"role": "system", "content": text}, {"role": "user", "content": "Which word is the first?"}]
    body = chat_body(messages, _ANSWER) | {"model": model}
    return parse_stream(await client.post("/v1/chat/completions", body))


def _linked(stage: Stage) -> Path:
    """A folder with the model under both names."""
    folder = stage.new_data_dir()
    for name in _NAMES:
        (folder / f"{name}.gguf").symlink_to(stage.model)
    return folder


def _ours(stage: Stage, context: int) -> Iterator[ServerUnderTest]:
    files, data_dir = _linked(stage), stage.new_data_dir()
    left, right = (str(files / f"{name}.gguf") for name in _NAMES)
    settings = {
        "model": left,
        "models": [right],
        "model_memory": 1,  # which one alone may exceed
        "data_dir": str(data_dir),
        "port": 0,
        "parallel": 1,
        "ctx": context,
        "log_level": "warning",
    }
    file = data_dir / "serve.json"
    file.write_text(json.dumps(settings))
    command = [sys.executable, "-m", "emberkeep", "serve", "--config", str(file)]
    with ServerUnderTest(command, data_dir / "serve.log", ENV_PREFIX) as server:
        yield server


def _router(stage: Stage, program: Path, context: int) -> Iterator[ServerUnderTest]:
    folder = stage.new_data_dir()
    sizes = {"--threads": available_cores(), "--parallel": 1, "--ctx-size": context, "--models-max": 1}
    numbers = [text for name, size in sizes.items() for text in (name, str(size))]
    places = ["--models-dir", str(_linked(stage)), "--host", "127.0.0.1", "--port", "0"]
    with ServerUnderTest([str(program), *places, *numbers], folder / "router.log", "LLAMA_") as server:
        yield server


def rows(waits: dict[str, Waits]) -> tuple[Row, ...]:
    return tuple(_row(name, {side: taken[name] for side, taken in waits.items()}) for name in waits[OURS])


def _row(name: str, by_side: dict[str, Sequence[Reply]]) -> Row:
    times = {side: series((reply.ttft_ms for reply in replies), "ms") for side, replies in by_side.items()}
    reused = {f"reused by {side}": _share(replies) for side, replies in by_side.items()}
    ratio = {"ratio": ratios(times[PEER], times[OURS])} if PEER in times else {}
    return Row(name, {**times, **ratio, **reused})


def _share(replies: Sequence[Reply]) -> str:
    return f"{median(reply.cached_tokens / reply.prompt_tokens for reply in replies):.0%}"
