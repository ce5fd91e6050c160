"""memory: a million archived turns, as years of conversations leave them: searching them, and archiving one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from random import Random
from time import perf_counter

import numpy as np

from emberkeep.bench.report import BenchResult, Row, Table, Value, percentile, series
from emberkeep.bench.workspace import COMMON, Workspace
from emberkeep.memory.memory import Memory
from emberkeep.types.memory import Turn

_VOCABULARY = 200_000
_SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "er", "il", "on", "ar")]
_STRIDE = 999_983
_USER_WORDS, _ASSISTANT_WORDS = 12, 28
_PER_CONVERSATION = 200
_BATCH = 2_000
_EVERY_S = 90.0
"""Between two turns: a million of them are three years."""
_PLENTY = 1 << 50
_OWNER = ""
_FIRST = 5
"""How many results are asked for."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    turns: int = 1_000_000
    searches: int = 500
    writes: int = 500

    def quick(self) -> MemoryPlan:
        return MemoryPlan(turns=4_000, searches=50, writes=50)


async def run(workspace: Workspace, plan: MemoryPlan) -> BenchResult:
    path = workspace.new_data_dir() / "memory.sqlite"
    memory = Memory(path, limit_bytes=_PLENTY)
    try:
        seconds = fill(memory, plan.turns, workspace)
        workspace.say("searching")
        rows = [*measure_searches(memory, plan), measure_writes(memory, plan)]
        size = int(memory.stats()["bytes"])
    finally:
        memory.close()
    filled: dict[str, Value] = {"turns": plan.turns, "turns per second": round(plan.turns / seconds)}
    facts = {**filled, "file": f"{size / 1e6:,.0f} MB", "bytes per turn": size // plan.turns}
    return BenchResult(
        "memory",
        (Table(f"{plan.turns:,} archived turns", tuple(rows)), Table("the file", (Row("", facts),))),
        (
            "The file is in the page cache as far as it fits there. A write is on disk (fsync) when it counts.",
            f"found: the turn that is asked for is among the first {_FIRST} results.",
        ),
    )


def fill(memory: Memory, turns: int, workspace: Workspace) -> float:
    """In how many seconds."""
    begin = perf_counter()
    tenth = max(turns // 10, 1)
    batch: list[Turn] = []
    for i, turn in enumerate(made_up_turns(turns, begin=0), 1):
        batch.append(turn)
        if i % tenth == 0:
            workspace.say(f"archived {i:,} of {turns:,} turns")
        if len(batch) == _BATCH or i == turns:
            memory.archive(_OWNER, batch)
            batch = []
    return perf_counter() - begin


def made_up_turns(count: int, begin: int) -> Iterator[Turn]:
    """Words as often as people use them (Zipf): the common ones are English, the others are made up."""
    words = _vocabulary()
    shares = 1 / np.arange(1, len(words) + 1)
    cumulated = np.cumsum(shares / shares.sum())
    length = _USER_WORDS + _ASSISTANT_WORDS
    for start in range(begin, begin + count, _BATCH):
        random = np.random.default_rng(start)
        ranks = np.searchsorted(cumulated, random.random((min(_BATCH, begin + count - start), length)))
        for i, row in enumerate(np.minimum(ranks, len(words) - 1).tolist(), start):
            said = [words[rank] for rank in row]
            user, assistant = " ".join(said[:_USER_WORDS]), " ".join(said[_USER_WORDS:])
            yield Turn(i.to_bytes(16), f"talk {i // _PER_CONVERSATION}", 1e9 + i * _EVERY_S, user, assistant)


def measure_searches(memory: Memory, plan: MemoryPlan) -> Iterator[Row]:
    everything: list[float] = []
    for kind, write in _KINDS.items():
        times, found = [], 0
        for turn, text in _questions(write, plan):
            begin = perf_counter()
            results = memory.search(_OWNER, text, max_results=_FIRST)
            times.append(1e3 * (perf_counter() - begin))
            found += any(result.user_text == turn.user_text for result in results)
        everything += times
        yield _row(f"search, {kind}", times, "" if kind == _ABOUT_NOTHING else f"{100 * found / len(times):.0f}%")
    yield _row("search, all of them", everything)


def measure_writes(memory: Memory, plan: MemoryPlan) -> Row:
    times = []
    for turn in made_up_turns(plan.writes, begin=plan.turns):
        begin = perf_counter()
        memory.archive(_OWNER, [turn])
        times.append(1e3 * (perf_counter() - begin))
    return _row("archive one turn", times)


def _row(label: str, times: list[float], found: str = "") -> Row:
    p95 = f"{percentile(times, 95):.2f} ms"
    return Row(label, {"time": series(times, "ms"), "p95": p95, "found": found})


def _questions(write: _Writer, plan: MemoryPlan) -> Iterator[tuple[Turn, str]]:
    """Turns from all of the time, each with a question about it."""
    random = Random(plan.searches)
    rank_of = {word: rank for rank, word in enumerate(_vocabulary())}
    for _ in range(plan.searches // len(_KINDS)):
        turn = next(made_up_turns(1, begin=random.randrange(0, plan.turns, _BATCH)))
        words = sorted(set(f"{turn.user_text} {turn.assistant_text}".split()), key=rank_of.__getitem__)
        yield turn, write(turn, words, random)


_Writer = Callable[[Turn, list[str], Random], str]
"""Writes a question about a turn, of which it gets the different words, the rarest last."""
_ABOUT_NOTHING = "common words"
_KINDS: dict[str, _Writer] = {
    "rare words": lambda _turn, words, _random: f"what did I say about {words[-1]} and {words[-2]}?",
    "any words": lambda _turn, words, random: "what was that about " + " ".join(random.sample(words, 4)),
    "a whole message": lambda turn, _words, _random: turn.user_text,
    _ABOUT_NOTHING: lambda _turn, _words, random: "tell me about " + " ".join(random.sample(COMMON[100:], 3)),
}


@cache
def _vocabulary() -> list[str]:
    """The most frequent first."""
    known = set(COMMON)
    made_up = [_made_up_word(i) for i in range(_VOCABULARY)]
    return [*COMMON, *(word for word in made_up if word not in known)][:_VOCABULARY]


def _made_up_word(rank: int) -> str:
    """Two syllables for the more frequent ones, three for the others; neighbours have nothing in common."""
    place, syllables = rank * _STRIDE, 2 if rank < len(_SYLLABLES) ** 2 else 3
    return "".join(_SYLLABLES[place // len(_SYLLABLES) ** i % len(_SYLLABLES)] for i in range(syllables))
