"""`cluster`: what routing does to reuse, load and the network when replicas share a remote tier, simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks.cluster_model import Machine, Outcome, RemoteSettings, simulate
from benchmarks.policies import POLICIES
from benchmarks.trace_file import MOST, Visit, read_trace
from emberkeep.bench.report import BenchResult, Row, Table, Value, percentile, series
from emberkeep.bench.workspace import Workspace
from emberkeep.errors import EmberkeepError
from emberkeep.values import dataclass

MOST_REPLICAS = 4096
_SPREAD_S = 60.0
"""Over which the beginnings of copies of a trace are spread."""
_GIB, _GB = 1 << 30, 1e9


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """Rates are those of a model of 8 billion parameters on one accelerator of a server, roughly."""

    trace: tuple[Path, ...]
    replicas: str = "1..64"
    policies: tuple[str, ...] = tuple(POLICIES)
    slots: int = 8
    prefill: float = 8_000
    decode: float = 60
    import_rate: float = 10
    """GB/s."""
    ram: float = 64
    """GiB."""
    token_kib: float = 128
    """State of a token: 32 layers of 8 heads of 128 numbers, keys and values, in 16 bits."""
    remote: float = 512
    """GiB."""
    no_remote: bool = False
    link: float = 3.125
    """GB/s: 25 Gbit/s."""
    round_trip: float = 0.5
    """Milliseconds."""
    speedup: float = 1.0
    per_replica: bool = False
    requests: int | None = None
    """From the beginning of a trace; None: all of them."""

    def quick(self) -> ClusterPlan:
        return replace(self, replicas="1..4", requests=300)

    @property
    def machine(self) -> Machine:
        token_bytes = max(round(self.token_kib * 1024), 1)
        ram = round(self.ram * _GIB)
        return Machine(self.slots, self.prefill, self.decode, self.import_rate * _GB, ram, token_bytes)

    @property
    def shared(self) -> RemoteSettings:
        budget = 0 if self.no_remote else round(self.remote * _GIB)
        return RemoteSettings(budget, self.link * _GB, self.round_trip / 1000)


def replica_counts(text: str) -> tuple[int, ...]:
    """`1..64` is every power of two between, with both ends; `1,3,8` is these. Raises EmberkeepError."""
    first, dots, last = text.partition("..")
    try:
        ends = (int(first), int(last)) if dots else None
        counts = _doubling(*ends) if ends else tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        counts = ()
    if not counts or not all(1 <= count <= MOST_REPLICAS for count in counts):
        raise EmberkeepError(
            f"--replicas {text} says no numbers from 1 to {MOST_REPLICAS:,}: give 1..64, or some such as 1,3,8."
        )
    return counts


def _doubling(first: int, last: int) -> tuple[int, ...]:
    if not 1 <= first <= last <= MOST_REPLICAS:
        return ()
    between = (2**power for power in range(last.bit_length()))
    return tuple(sorted({first, last, *(count for count in between if first <= count <= last)}))


async def run(workspace: Workspace, plan: ClusterPlan) -> BenchResult:
    counts = replica_counts(plan.replicas)
    traces = [(path.stem, read_trace(path, timed=True)[: plan.requests]) for path in plan.trace]
    tables = tuple(_table(workspace, plan, counts, name, visits) for name, visits in traces)
    return BenchResult("cluster", tables, _notes(plan))


def _table(
    workspace: Workspace, plan: ClusterPlan, counts: Sequence[int], name: str, visits: Sequence[Visit]
) -> Table:
    rows = []
    for count in counts:
        load = played(visits, plan, count)
        for policy in plan.policies if count > 1 else plan.policies[:1]:  # one has no choice
            label = f"{count} replicas, {policy}" if count > 1 else "1 replica"
            workspace.say(f"{name}, {label}")
            with _bar(len(load)) as answered:
                outcome = simulate(load, count, POLICIES[policy](), plan.machine, plan.shared, answered)
            rows.append(Row(label, _columns(outcome)))
    return Table(f"{name}, {len(visits):,} requests", tuple(rows))


def played(visits: Sequence[Visit], plan: ClusterPlan, replicas: int) -> list[Visit]:
    """The requests as they come: `plan.speedup` times as fast as they were recorded; with `plan.per_replica`, a
    copy of them for each replica, which has nothing in common with the others. Raises EmberkeepError."""
    copies = replicas if plan.per_replica else 1
    ids = 1 + max(block for visit in visits for block in visit.blocks)
    if ids * copies > MOST:
        raise EmberkeepError(
            f"The ids of the trace are too large for {copies:,} copies of it: number its blocks from 0."
        )
    return [
        replace(
            visit,
            blocks=tuple(block + copy * ids for block in visit.blocks),
            at=visit.at / plan.speedup + copy * _SPREAD_S / copies,
        )
        for copy in range(copies)
        for visit in visits
    ]


def _columns(outcome: Outcome) -> dict[str, Value]:
    def share(part: float, whole: float) -> Value:
        return series([100 * part / whole], "%")

    given_up = {"not written": series([outcome.unwritten_bytes / _GB], "GB")} if outcome.unwritten_bytes else {}
    return {
        "own": share(outcome.own, outcome.tokens),
        "remote": share(outcome.remote, outcome.tokens),
        "evaluated": share(outcome.evaluated, outcome.tokens),
        "imbalance": series([outcome.imbalance], "×"),
        "network": series([(outcome.read_bytes + outcome.written_bytes) / _GB], "GB"),
        "link busy": share(outcome.link_busy, outcome.seconds),
        "TTFT p50": series([percentile(outcome.ttfts, 50)], "s"),
        "TTFT p95": series([percentile(outcome.ttfts, 95)], "s"),
        "requests/s": series([len(outcome.ttfts) / outcome.seconds], ""),
        **given_up,
    }


def _notes(plan: ClusterPlan) -> tuple[str, ...]:
    load = "as recorded" if plan.speedup == 1 else f"{plan.speedup:g} times as fast as recorded"
    copies = ", and a copy of it for each replica, with nothing in common" if plan.per_replica else ""
    remote = f"{plan.remote:g} GiB, LRU; link {plan.link:g} GB/s each way, round trip {plan.round_trip:g} ms"
    return (
        f"A replica: {plan.slots} slots, prefill {plan.prefill:g} tokens/s, decode {plan.decode:g} tokens/s per "
        f"slot, import {plan.import_rate:g} GB/s,",
        f"{plan.ram:g} GiB of RAM, no disk; {plan.token_kib:g} KiB of state per token.",
        f"Remote tier: {'none' if plan.no_remote else remote}. Load: {load}{copies}.",
        "own, remote, evaluated: of all prompt tokens. imbalance: the busiest replica by the mean.",
        "network: read and written. link busy: its busier direction. not written: the link had no time for it.",
        "Simulated: the router, the stores and what they evict are real; times are computed from the rates.",
    )


@contextmanager
def _bar(total: int) -> Iterator[Callable[[], None]]:
    """What to call for each request that is answered; a terminal shows how far it is."""
    from rich.console import Console
    from rich.progress import Progress

    output = Console(stderr=True)
    with Progress(console=output, transient=True, disable=not output.is_terminal) as progress:
        task = progress.add_task("Answering", total=total)
        yield lambda: progress.advance(task)
