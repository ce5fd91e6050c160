"""swap: two models in turns, with memory for one. How long until the first token after a swap?

The two are one file under two names, which neither server knows. Each has a prompt of its own; it is asked for in
turns with the other, and each time the other model has to go. What each server reused is read from its counters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from emberkeep.bench.report import BenchResult, Row, Table, ratios, series
from emberkeep.bench.servers import (
    OURS,
    PEER,
    BenchClient,
    OwnServer,
    Reply,
    ServerUnderTest,
    chat_body,
    parse_stream,
    peer_version,
)
from emberkeep.bench.workspace import Workspace
from emberkeep.engine.llamacpp.threads import available_cores

_NAMES = ("left", "right")
_ANSWER = 4
_SPARE = 256
"""Tokens of the answers, the questions and what the template adds."""
_EVALUATED, _SWAPPED, _NEW = "evaluated, its model loaded", "after a swap, known", "after a swap, new"


@dataclass(frozen=True, slots=True)
class SwapPlan:
    peer: Path | None = None
    tokens: tuple[int, ...] = (2000,)
    repeat: int = 3

    @property
    def context(self) -> int:
        return max(self.tokens) + _SPARE

    def quick(self) -> SwapPlan:
        return replace(self, tokens=(300,), repeat=1)


Waits = dict[str, dict[str, list[Reply]]]
"""By row, then by side, in the order they were taken."""


async def run(workspace: Workspace, plan: SwapPlan) -> BenchResult:
    workspace.require_context(plan.context)
    tables = []
    for tokens in plan.tokens:
        waits: Waits = {}
        with ExitStack() as servers:
            sides = {OURS: servers.enter_context(_ours(workspace, plan.context)).client}
            if plan.peer is not None:
                sides[PEER] = servers.enter_context(_router(workspace, plan.peer, plan.context)).client
            for client in sides.values():
                for name in _NAMES:  # what is done once only, at the first loading
                    await _ask(client, name, "Hello")
            for number in range(plan.repeat):
                workspace.say(f"{tokens:,} tokens, round {number + 1} of {plan.repeat}")
                await _round(workspace, sides, tokens, number, waits)
        tables.append(Table(f"time to first token, prompts of {tokens:,} tokens", rows(waits)))
    notes = [
        "known: the prompt was asked for before, and its model unloaded since. reused: of the prompt's tokens."
    ]
    if plan.peer is not None:
        notes.append(f"{PEER}: {peer_version(plan.peer)}, as a router with --models-max 1.")
    return BenchResult("swap", tuple(tables), tuple(notes))


async def _round(
    workspace: Workspace, sides: Mapping[str, BenchClient], tokens: int, number: int, waits: Waits
) -> None:
    """The second name was asked for last. Every row on one side, then on the other: the machine changes with
    time."""
    left, right = _NAMES
    texts = {name: workspace.words.text(tokens, (name, number)) for name in (*_NAMES, "alone")}
    for row, name, text in (
        (_EVALUATED, right, texts["alone"]),
        (_NEW, left, texts[left]),
        (_NEW, right, texts[right]),
        (_SWAPPED, left, texts[left]),
        (_SWAPPED, right, texts[right]),
    ):
        for side, client in sides.items():
            waits.setdefault(row, {}).setdefault(side, []).append(await _ask(client, name, text))


async def _ask(client: BenchClient, model: str, text: str) -> Reply:
    messages = [{"role": "system", "content": text}, {"role": "user", "content": "Which word is the first?"}]
    body = chat_body(messages, _ANSWER) | {"model": model}
    return parse_stream(await client.post("/v1/chat/completions", body))


def _linked(workspace: Workspace) -> Path:
    """A folder with the model under both names."""
    folder = workspace.new_data_dir()
    for name in _NAMES:
        (folder / f"{name}.gguf").symlink_to(workspace.model)
    return folder


def _ours(workspace: Workspace, context: int) -> OwnServer:
    left, right = (str(_linked(workspace) / f"{name}.gguf") for name in _NAMES)
    settings = {"model": left, "models": [right], "model_memory": 1}  # which one alone may exceed
    return OwnServer(workspace, parallel=1, ctx=context, more=settings)


def _router(workspace: Workspace, program: Path, context: int) -> ServerUnderTest:
    sizes = {"--threads": available_cores(), "--parallel": 1, "--ctx-size": context, "--models-max": 1}
    numbers = [text for name, size in sizes.items() for text in (name, str(size))]
    places = ["--models-dir", str(_linked(workspace)), "--host", "127.0.0.1"]
    return ServerUnderTest([str(program), *places, *numbers], workspace.new_data_dir() / "router.log")


def rows(waits: Waits) -> tuple[Row, ...]:
    return tuple(_row(name, by_side) for name, by_side in waits.items())


def _row(name: str, by_side: Mapping[str, Sequence[Reply]]) -> Row:
    times = {side: series((reply.ttft_ms for reply in replies), "ms") for side, replies in by_side.items()}
    reused = {f"reused by {side}": _share(replies) for side, replies in by_side.items()}
    ratio = {"ratio": ratios(times[PEER], times[OURS])} if PEER in times else {}
    return Row(name, {**times, **ratio, **reused})


def _share(replies: Sequence[Reply]) -> str:
    return f"{median(reply.cached_tokens / reply.prompt_tokens for reply in replies):.0%}"
