"""`shared`: many sessions over one prefix, a few at a time, coming back in random order.

Nothing is timed: what counts is how many tokens were evaluated and how many bytes stored for what is unique.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sequence
from dataclasses import field, replace
from pathlib import Path

from emberkeep.bench.report import BenchResult, Row, Table, series
from emberkeep.bench.servers import BenchClient, OwnServer, Reply
from emberkeep.bench.workspace import Workspace
from emberkeep.models.gguf import read_header
from emberkeep.models.profile import profile
from emberkeep.values import dataclass

_AT_A_TIME = 4
_PROBE = ({"role": "user", "content": "Hello"},)


@dataclass(frozen=True, slots=True)
class SharedPlan:
    sessions: tuple[int, ...] = (16, 32)
    prefix_tokens: int = 2048
    user_tokens: int = 48
    answer_tokens: int = 24
    visits: int = 2
    """How often each session comes."""

    @property
    def context(self) -> int:
        return self.prefix_tokens + self.visits * (self.user_tokens + self.answer_tokens)

    def quick(self) -> SharedPlan:
        return replace(self, sessions=(6,), prefix_tokens=256, answer_tokens=8)


@dataclass(slots=True)
class _Session:
    messages: list[dict[str, str]]
    replies: list[Reply] = field(default_factory=list)


async def run(workspace: Workspace, plan: SharedPlan) -> BenchResult:
    workspace.require_context(plan.context)
    rows = [await _measure(workspace, plan, count) for count in plan.sessions]
    return BenchResult(
        "shared",
        (Table(f"sessions over one prefix of {plan.prefix_tokens:,} tokens", tuple(rows)),),
        (
            "unique tokens: what every different prefix of every conversation has, counted once.",
            "bytes: all files of the store, its index included, against 16-bit KV of the unique tokens.",
        ),
    )


async def _measure(workspace: Workspace, plan: SharedPlan, count: int) -> Row:
    workspace.say(f"{count} sessions")
    data_dir = workspace.new_data_dir()
    with OwnServer(workspace, data_dir, parallel=_AT_A_TIME) as server:
        client = server.client
        sessions = [_Session(_first_messages(workspace, plan, number)) for number in range(count)]
        first = [await client.prompt_tokens(session.messages) for session in sessions]
        probe = await client.prompt_tokens(_PROBE)
        closing = await _closing_tokens(client)
        before = (await client.wait_until_settled())["scheduler"]["evaluated_tokens"]
        bytes_before = _folder_bytes(data_dir / "kv")
        await _visit_all(workspace, plan, client, sessions)
        evaluated = (await client.wait_until_settled())["scheduler"]["evaluated_tokens"] - before
        stored = _folder_bytes(data_dir / "kv") - bytes_before
    unique = distinct_prefixes([probe, *first]) - len(probe)
    unique += sum(grown_tokens(session.replies, closing) for session in sessions)
    kv_bytes = profile(read_header(workspace.model)).kv_bytes_per_token
    return Row(
        f"{count} sessions",
        {
            "requests": count * plan.visits,
            "prompt tokens": sum(reply.prompt_tokens for session in sessions for reply in session.replies),
            "unique tokens": unique,
            "evaluated": evaluated,
            "evaluated / unique": series([evaluated / unique], "×"),
            "bytes stored / unique": series([stored / (unique * kv_bytes)], "×"),
        },
    )


def _first_messages(workspace: Workspace, plan: SharedPlan, number: int) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": workspace.words.text(plan.prefix_tokens, "prefix")},
        {"role": "user", "content": workspace.words.text(plan.user_tokens, (number, 0))},
    ]


async def _closing_tokens(client: BenchClient) -> int:
    """How many tokens the chat template writes after an answer: they are part of the state, too."""
    before = (await client.wait_until_settled())["scheduler"]["evaluated_tokens"]
    reply = await client.chat(_PROBE, 4)
    after = (await client.wait_until_settled())["scheduler"]["evaluated_tokens"]
    return int(after - before - reply.prompt_tokens - reply.completion_tokens)


async def _visit_all(
    workspace: Workspace, plan: SharedPlan, client: BenchClient, sessions: Sequence[_Session]
) -> None:
    """Every session's first visit in order, then the revisits in random order, at most a few at a time."""
    revisits = [index for index in range(len(sessions)) for _ in range(plan.visits - 1)]
    random.Random(len(sessions)).shuffle(revisits)
    order = iter([*range(len(sessions)), *revisits])
    turns = [asyncio.Lock() for _ in sessions]

    async def visitor() -> None:
        for index in order:
            async with turns[index]:
                await _visit(workspace, plan, client, index, sessions[index])

    await asyncio.gather(*(visitor() for _ in range(_AT_A_TIME)))


async def _visit(
    workspace: Workspace, plan: SharedPlan, client: BenchClient, index: int, session: _Session
) -> None:
    if session.replies:
        question = workspace.words.text(plan.user_tokens, (index, len(session.replies)))
        session.messages.append({"role": "user", "content": question})
    reply = await client.chat(session.messages, plan.answer_tokens)
    session.replies.append(reply)
    session.messages.append({"role": "assistant", "content": reply.text})


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def distinct_prefixes(sequences: Iterable[Sequence[int]]) -> int:
    """How many tokens a tree holds that stores every common prefix of `sequences` once."""
    total, previous = 0, list[int]()
    for sequence in sorted(list(sequence) for sequence in sequences):
        total += len(sequence) - _common(previous, sequence)
        previous = sequence
    return total


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def grown_tokens(replies: Sequence[Reply], closing: int) -> int:
    """Tokens of one conversation beyond its first prompt: answers, ends of turns, later questions."""
    last = replies[-1]
    return last.prompt_tokens - replies[0].prompt_tokens + last.completion_tokens + closing
