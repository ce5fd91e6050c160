"""`restart`: what a long prompt costs in a fresh process, and what it costs again after a crash.

Cold means: a fresh process and an empty store. Warm means: another fresh process on the store that the first
one left when it was killed, with the store's files dropped from the page cache. Loading the model is in
neither; tokenising, looking up, reading and importing are in both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from emberkeep.bench.report import BenchResult, Row, Series, Table, series
from emberkeep.bench.servers import Messages, OwnServer, Reply, chunk_files, drop_from_page_cache
from emberkeep.bench.workspace import Workspace
from emberkeep.values import dataclass

ANSWER = 16
_SPARE = 64
_OTHER = 640
"""Tokens of the conversation in between. The context is so tight that only one of the two fits the engine."""


_NOT_THE_SAME = (
    "An answer may differ from the cold one where tokens are about equally likely: llama.cpp rounds differently "
    "when the same state lies elsewhere in its memory. `Emberkeep.verify` compares them."
)


@dataclass(frozen=True, slots=True)
class RestartPlan:
    tokens: tuple[int, ...] = (1000, 2800, 4000, 7900)
    """Prompt lengths."""
    repeat: int = 5
    cold_budget_s: float = 60.0
    """Cold runs are repeated as long as they take no more than this in all, per length."""

    def quick(self) -> RestartPlan:
        return replace(self, tokens=(500,), repeat=1)


@dataclass(frozen=True, slots=True)
class LongPrompt:
    """A prompt of a given length, and servers with just enough context for it."""

    workspace: Workspace
    tokens: int
    around: int = 0
    """Tokens that the chat template, the system message and the question add to the words."""

    @property
    def context(self) -> int:
        return max(self.tokens, _OTHER) + _SPARE + 2 * ANSWER

    @property
    def main(self) -> Messages:
        return _messages(self.workspace.words.text(self.tokens - self.around, "main"))

    @property
    def other(self) -> Messages:
        return _messages(self.workspace.words.text(_OTHER - self.around, "other"))

    def server(self, data_dir: Path) -> OwnServer:
        return OwnServer(self.workspace, data_dir, parallel=1, ctx=self.context)

    async def evaluate(self, data_dir: Path) -> Reply:
        """Answers it in a server that is killed once everything is on disk."""
        with self.server(data_dir) as server:
            reply = await server.client.chat(self.main, ANSWER)
            await server.settle()
            return reply


_Replies = dict[str, Reply]
"""By where the prompt was: `cold`, which is the answer of the server whose store is used, `disk`, `RAM`, `hot`."""


async def run(workspace: Workspace, plan: RestartPlan) -> BenchResult:
    rows, rounds = list[Row](), list[_Replies]()
    for prompt in await long_prompts(workspace, plan.tokens):
        cold, warm = await _measure(prompt, plan)
        rows += _rows(cold, warm)
        rounds += warm
    is_same = all(_is_same(one, state) for one in rounds for state in ("disk", "RAM", "hot"))
    notes = () if is_same else (_NOT_THE_SAME,)
    return BenchResult("restart", (Table("time to first token", tuple(rows)),), notes)


async def long_prompts(workspace: Workspace, lengths: Sequence[int]) -> list[LongPrompt]:
    """Raises EmberkeepError for one that is too long for the model."""
    workspace.require_context(max(LongPrompt(workspace, tokens).context for tokens in lengths))
    with OwnServer(workspace, parallel=1) as server:
        around = len(await server.client.prompt_tokens(_messages("")))
    return [LongPrompt(workspace, tokens, around) for tokens in lengths]


async def _measure(prompt: LongPrompt, plan: RestartPlan) -> tuple[list[Reply], list[_Replies]]:
    """Cold and warm in turns; warm goes on against the newest store when cold has used up its time."""
    cold, warm, data_dir, spent_s = list[Reply](), list[_Replies](), Path(), 0.0
    for number in range(plan.repeat):
        prompt.workspace.say(f"{prompt.tokens:,} tokens, round {number + 1} of {plan.repeat}")
        if not cold or spent_s + cold[-1].ttft_ms / 1e3 <= plan.cold_budget_s:
            data_dir = prompt.workspace.new_data_dir()
            cold.append(await prompt.evaluate(data_dir))
            spent_s += cold[-1].ttft_ms / 1e3
        warm.append({"cold": cold[-1], **await _resume(prompt, data_dir)})
    return cold, warm


async def _resume(prompt: LongPrompt, data_dir: Path) -> _Replies:
    drop_from_page_cache(chunk_files(data_dir))
    with prompt.server(data_dir) as server:
        disk = await server.client.chat(prompt.main, ANSWER)
        await server.settle()
        hot = await server.client.chat(prompt.main, ANSWER)
        await server.client.chat(prompt.other, ANSWER)
        await server.settle()
        return {"disk": disk, "hot": hot, "RAM": await server.client.chat(prompt.main, ANSWER)}


def _messages(text: str) -> Messages:
    return (
        {"role": "system", "content": "You tell stories."},
        {"role": "user", "content": f"{text}\n\nTell me a long story about these words."},
    )


def _rows(cold: Sequence[Reply], warm: Sequence[_Replies]) -> Iterable[Row]:
    tokens, reference = f"{cold[0].prompt_tokens:,} tokens", _ttft(cold)
    yield Row(f"{tokens}, cold", {"TTFT": reference, "reused tokens": cold[-1].cached_tokens})
    for state in ("disk", "RAM", "hot"):
        replies = [one[state] for one in warm]
        ttft, same = _ttft(replies), sum(_is_same(one, state) for one in warm)
        yield Row(
            f"{tokens}, {state}",
            {
                "TTFT": ttft,
                "faster than cold": series((reference.median / one for one in ttft.samples), "×"),
                "reused tokens": int(median(reply.cached_tokens for reply in replies)),
                "mostly from": " ".join(sorted({reply.tier for reply in replies})),
                "same answer": f"{same} of {len(replies)}",
            },
        )


def _ttft(replies: Iterable[Reply]) -> Series:
    return series((reply.ttft_ms for reply in replies), "ms")


def _is_same(replies: _Replies, state: str) -> bool:
    one, cold = replies[state], replies["cold"]
    return (one.text, one.completion_tokens) == (cold.text, cold.completion_tokens)
