"""`speculation`: tokens per second with drafts and without, for answers that repeat much, little or nothing.

All answers are greedy. Every round has texts of its own, and plain answers belong to another user: what was once
answered is a source of drafts, and would make everything after it look fast. With a llama-server, each of its
n-gram modes is tried once, and the one that is best for a kind of task is measured beside ours.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import field, replace
from math import log
from pathlib import Path

from benchmarks.tasks import KINDS, Task, make_task, recorded_tasks
from emberkeep.bench.report import BenchResult, Row, Series, Table, Value, ratios, series
from emberkeep.bench.servers import (
    PEER,
    ComparedServer,
    OwnServer,
    PeerServer,
    Reply,
    alone,
    burst,
    greedy,
    parse_stream,
    peer_version,
)
from emberkeep.bench.workspace import Workspace
from emberkeep.errors import EmberkeepError
from emberkeep.types.request import Json
from emberkeep.values import dataclass

_RECORDED = "recorded"
_CONTEXT, _RECORDED_CONTEXT = 2048, 4096
"""Tokens of the longest prompt that is made here, and of the longest recorded one; about."""
_MAP_K, _MAP_K4V = "--spec-ngram-map-k-size", "--spec-ngram-map-k4v-size"

MODES: dict[str, tuple[str, ...]] = {
    "none": (),
    "ngram-simple": ("--spec-type", "ngram-simple"),
    "ngram-map-k": ("--spec-type", "ngram-map-k"),
    "ngram-map-k4v": ("--spec-type", "ngram-map-k4v"),
    "ngram-mod": ("--spec-type", "ngram-mod"),
    "ngram-cache": ("--spec-type", "ngram-cache"),
    # Its defaults are long drafts after long matches, which suit a GPU.
    "ngram-simple 4:8": (
        *("--spec-type", "ngram-simple"),
        *("--spec-ngram-simple-size-n", "4", "--spec-ngram-simple-size-m", "8"),
    ),
    "ngram-map-k 4:8": ("--spec-type", "ngram-map-k", f"{_MAP_K}-n", "4", f"{_MAP_K}-m", "8"),
    "ngram-map-k4v 4:8": ("--spec-type", "ngram-map-k4v", f"{_MAP_K4V}-n", "4", f"{_MAP_K4V}-m", "8"),
    "ngram-mod 8:16": (
        *("--spec-type", "ngram-mod", "--spec-ngram-mod-n-match", "8"),
        *("--spec-ngram-mod-n-min", "2", "--spec-ngram-mod-n-max", "16"),
    ),
}
"""What a llama-server may draft from without a model: its defaults, and shorter (tokens matched : drafted)."""


@dataclass(frozen=True, slots=True)
class SpeculationPlan:
    peer: Path | None = None
    data: Path | None = None
    answer_tokens: int = 128
    clients: int = 8
    repeat: int = 5
    modes: tuple[str, ...] = tuple(MODES)

    @property
    def context(self) -> int:
        return (_RECORDED_CONTEXT if self.data else _CONTEXT) + self.answer_tokens

    def quick(self) -> SpeculationPlan:
        return replace(self, answer_tokens=16, clients=2, repeat=1, modes=("none", "ngram-simple"))


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer."""

    reply: Reply
    wall_ms: float
    """From its first text to its end."""
    tokens: tuple[int, ...]
    """Those of its text."""
    gap: float | None = None
    """Where it differs from the plain answer, by how many nats the plain one's token was the likeliest there."""

    @property
    def tokens_per_s(self) -> float:
        """The speed of decoding, by the server's own clock."""
        step_ms = self.reply.timings["predicted_ms"] / max(self.reply.completion_tokens - 1, 1)
        return float(1e3 / max(step_ms, 1e-3))

    @property
    def drafted(self) -> int:
        """Tokens, by llama-server's words, or else by OpenAI's. A server that does not speculate says neither."""
        details = self._details
        told = self.accepted + details.get("rejected_prediction_tokens", 0)
        return int(self.reply.timings.get("draft_n", told))

    @property
    def accepted(self) -> int:
        """Drafted tokens that cost no step of their own."""
        return int(self.reply.timings.get("draft_n_accepted", self._details.get("accepted_prediction_tokens", 0)))

    @property
    def _details(self) -> Mapping[str, Json]:
        return self.reply.usage.get("completion_tokens_details") or {}

    @property
    def wall_tokens_per_s(self) -> float:
        return 1e3 * max(self.reply.completion_tokens - 1, 1) / max(self.wall_ms, 1e-3)


Samples = dict[str, dict[str, list[Sample]]]
"""By kind of task, then by column, in the order they were taken."""
_PLAIN, _DRAFTS, _AGAIN = "plain", "drafts", "asked again"
_ALL = "all"
"""Instead of a kind of task."""
_TOP = 4
_TRIAL = -1
"""The number of a round whose texts no other round has."""


async def run(workspace: Workspace, plan: SpeculationPlan) -> BenchResult:
    workspace.require_context(plan.context)
    recorded = recorded_tasks(plan.data) if plan.data else []
    with ExitStack() as running:
        ours = running.enter_context(OwnServer(workspace, parallel=plan.clients, ctx=plan.context))
        bench = _Bench(workspace, plan, recorded, ours)
        trials, notes = await _try_modes(bench, plan.peer) if plan.peer else ({}, [])
        await _start_best(bench, trials, running)
        for number in range(plan.repeat):
            await _round(bench, number)
            await _burst_round(bench, number)
    return _result(bench, trials, notes)


@dataclass(slots=True)
class _Bench:
    workspace: Workspace
    plan: SpeculationPlan
    recorded: Sequence[Task]
    ours: OwnServer
    peers: dict[str, PeerServer] = field(default_factory=dict)
    """By kind of task: the one with the best mode for it. Under `_ALL`: the best one for all of them."""
    modes: dict[str, str] = field(default_factory=dict)
    """What they are started with."""
    samples: Samples = field(default_factory=dict)
    bursts: dict[str, list[float]] = field(default_factory=dict)

    @property
    def kinds(self) -> list[str]:
        return [*KINDS, *([_RECORDED] if self.recorded else [])]

    @property
    def sides(self) -> list[ComparedServer]:
        return [self.ours, *set(self.peers.values())]

    def task(self, kind: str, number: int) -> Task:
        return self.recorded[number % len(self.recorded)] if kind == _RECORDED else make_task(kind, number)

    def columns(self, kind: str, seed: object) -> list[_Column]:
        drafts = {"user": repr((_DRAFTS, seed))}
        own = [
            _Column(_PLAIN, self.ours, {"user": repr((_PLAIN, seed)), "speculation": False}),
            _Column(_DRAFTS, self.ours, drafts),
        ]
        again = [] if kind == _ALL else [_Column(_AGAIN, self.ours, drafts)]
        peer = [_Column(PEER, self.peers[kind], {})] if kind in self.peers else []
        return [*own, *again, *peer]


@dataclass(frozen=True, slots=True)
class _Column:
    name: str
    side: ComparedServer
    fields: Mapping[str, Json]
    """That a request has besides its task."""


async def _round(bench: _Bench, number: int) -> None:
    """One task of every kind, on every side in turn before the next one."""
    for kind in bench.kinds:
        bench.workspace.say(f"{kind}, round {number + 1} of {bench.plan.repeat}")
        task, taken = bench.task(kind, number), bench.samples.setdefault(kind, {})
        for column in bench.columns(kind, number):
            with alone(column.side, bench.sides):
                sample = await _ask(column.side, task, bench.plan.answer_tokens, column.fields)
                if column.name == _DRAFTS and sample.tokens != taken[_PLAIN][-1].tokens:
                    sample = replace(sample, gap=await _gap(bench, task, number, sample.reply.text))
                await column.side.settle()
            taken.setdefault(column.name, []).append(sample)


async def _ask(side: ComparedServer, task: Task, answer_tokens: int, fields: Mapping[str, Json]) -> Sample:
    exchange = await side.client.post(task.path, _body(task, answer_tokens, fields))
    reply = parse_stream(exchange)
    tokens = await side.client.tokenize(reply.text)
    return Sample(reply, 1e3 * (exchange.ended - exchange.first), tuple(tokens))


def _body(task: Task, answer_tokens: int, fields: Mapping[str, Json]) -> dict[str, Json]:
    return {**task.body, **greedy(answer_tokens), **fields}


async def _gap(bench: _Bench, task: Task, number: int, text: str) -> float | None:
    """Between the two likeliest tokens where `text` differs: the plain question once more, with probabilities."""
    plain = next(column for column in bench.columns(_ALL, number) if column.name == _PLAIN)
    logprobs = {"logprobs": _TOP} if task.path == "/v1/completions" else {"logprobs": True, "top_logprobs": _TOP}
    body = {**task.body, **greedy(bench.plan.answer_tokens), "stream": False, **plain.fields, **logprobs}
    answer = json.loads((await plain.side.client.post(task.path, body)).body())
    return gap_at_difference(answer["choices"][0].get("logprobs") or {}, text)


def gap_at_difference(logprobs: Mapping[str, Json], text: str) -> float | None:
    """`logprobs` are those of the plain answer, a completion or a chat. None where `text` is the same."""
    said = ""
    for token, top in _likeliest(logprobs):
        said += token
        if not text.startswith(said):
            return top[0] - top[1] if len(top) > 1 else None
    return None


def _likeliest(logprobs: Mapping[str, Json]) -> Iterator[tuple[str, list[float]]]:
    """Every token with the log probabilities of the likeliest ones in its place, the highest first."""
    if "content" in logprobs:
        for entry in logprobs["content"]:
            yield entry["token"], sorted((one["logprob"] for one in entry["top_logprobs"]), reverse=True)
    else:
        for token, top in zip(logprobs.get("tokens", ()), logprobs.get("top_logprobs", ()), strict=True):
            yield token, sorted(top.values(), reverse=True)


async def _burst_round(bench: _Bench, number: int) -> None:
    """Clients with tasks of all kinds at once. Their prompts are evaluated before: only decoding is measured."""
    bench.workspace.say(f"{bench.plan.clients} clients, round {number + 1} of {bench.plan.repeat}")
    clients = range(bench.plan.clients)
    tasks = [bench.task(bench.kinds[i % len(bench.kinds)], number + bench.plan.repeat * (i + 1)) for i in clients]
    for column in bench.columns(_ALL, ("clients", number)):
        with alone(column.side, bench.sides):
            for answer_tokens in (1, bench.plan.answer_tokens):
                bodies = [(task.path, _body(task, answer_tokens, column.fields)) for task in tasks]
                rate = await burst(column.side.client, bodies)
            await column.side.settle()
        bench.bursts.setdefault(column.name, []).append(rate)


# ── the modes of a llama-server ──

Trials = dict[str, dict[str, Sample]]
"""By mode, then by kind of task."""


async def _try_modes(bench: _Bench, program: Path) -> tuple[Trials, list[str]]:
    """Each mode once, with what a reader must know of it. Raises EmberkeepError when none can be tried."""
    trials: Trials = {}
    notes = [f"{PEER}: {peer_version(program)}"]
    failure: EmberkeepError | None = None
    for mode in bench.plan.modes:
        bench.workspace.say(f"{PEER}, {mode}")
        with bench.ours.pause():
            try:
                peer = _start(bench, program, mode)
            except EmberkeepError as error:
                notes.append(f"{PEER} cannot be started with {mode}.")
                failure = error
                continue
            with peer:
                tasks = {kind: bench.task(kind, _TRIAL) for kind in bench.kinds}
                trials[mode] = {
                    kind: await _ask(peer, task, bench.plan.answer_tokens, {}) for kind, task in tasks.items()
                }
    if not trials and failure:
        raise failure
    return trials, notes


def _start(bench: _Bench, program: Path, mode: str) -> PeerServer:
    plan = bench.plan
    return PeerServer(bench.workspace, program, parallel=plan.clients, ctx=plan.context, more=MODES[mode])


async def _start_best(bench: _Bench, trials: Trials, running: ExitStack) -> None:
    """Every mode that is best for something, in a server of its own that stands still until it is measured."""
    bench.modes = best_modes(trials)
    started: dict[str, PeerServer] = {}
    for mode in dict.fromkeys(bench.modes.values()):
        assert bench.plan.peer is not None
        with alone(None, [bench.ours, *started.values()]):
            started[mode] = running.enter_context(_start(bench, bench.plan.peer, mode))
    bench.peers = {kind: started[mode] for kind, mode in bench.modes.items()}


def best_modes(trials: Trials) -> dict[str, str]:
    """The quickest one for every kind of task; under `_ALL` the one with the highest geometric mean."""
    if not trials:
        return {}
    kinds = next(iter(trials.values()))
    best = {kind: max(trials, key=lambda mode: trials[mode][kind].tokens_per_s) for kind in kinds}
    overall = max(trials, key=lambda mode: sum(log(one.tokens_per_s) for one in trials[mode].values()))
    return {**best, _ALL: overall}


# ── the report ──


def _result(bench: _Bench, trials: Trials, notes: Sequence[str]) -> BenchResult:
    tables = [
        Table("tokens/s, one client", speed_rows(bench.samples)),
        Table("drafts", draft_rows(bench.samples)),
        Table(f"tokens/s, {bench.plan.clients} clients at once", burst_rows(bench.bursts, bench.modes)),
    ]
    if trials:
        tables.append(Table(f"tokens/s beside {PEER}", peer_rows(bench.samples, bench.modes)))
        tables.append(Table(f"tokens/s of {PEER}, one answer each", trial_rows(trials)))
    explained = (
        "plain, drafts: decoding by the server's own clock. asked again: the same request once more.",
        "per step: tokens of the answer / steps that it took. same: tokens equal to those of the plain answer, up "
        "to the first difference, and at the same position. gap: by how much the plain answer's token was "
        "likelier than the next one there; where it is small, rounding decides, which depends on a step's rows.",
    )
    return BenchResult("speculation", tuple(tables), (*explained, *notes))


def speed_rows(samples: Samples) -> tuple[Row, ...]:
    return tuple(Row(kind, _speeds(columns)) for kind, columns in samples.items())


def _speeds(columns: Mapping[str, Sequence[Sample]]) -> dict[str, Value]:
    plain, drafts, again = (_rates(columns[name]) for name in (_PLAIN, _DRAFTS, _AGAIN))
    walls = (series((one.wall_tokens_per_s for one in columns[name]), "") for name in (_DRAFTS, _PLAIN))
    return {
        _PLAIN: plain,
        _DRAFTS: drafts,
        "drafts / plain": ratios(drafts, plain),
        "by the wall clock": ratios(next(walls), next(walls)),
        _AGAIN: again,
        "again / plain": ratios(again, plain),
    }


def draft_rows(samples: Samples) -> tuple[Row, ...]:
    return tuple(Row(kind, _drafts(columns)) for kind, columns in samples.items())


def _drafts(columns: Mapping[str, Sequence[Sample]]) -> dict[str, Value]:
    pairs = list(zip(columns[_PLAIN], columns[_DRAFTS], strict=True))
    gaps = [one.gap for one in columns[_DRAFTS] if one.gap is not None]
    return {
        "answer tokens": sum(one.reply.completion_tokens for one in columns[_DRAFTS]),
        **_accepted(columns[_DRAFTS]),
        "per step": _per_step(columns[_DRAFTS]),
        "per step, again": _per_step(columns[_AGAIN]),
        "same, up to a difference": series((100 * same_prefix(a.tokens, b.tokens) for a, b in pairs), "%"),
        "same, by position": series((100 * same_positions(a.tokens, b.tokens) for a, b in pairs), "%"),
        **({"gap": series(gaps, "nats")} if gaps else {}),
    }


def _accepted(samples: Sequence[Sample]) -> dict[str, Value]:
    drafted = sum(one.drafted for one in samples)
    accepted = sum(one.accepted for one in samples)
    return {"drafted": drafted, "accepted": f"{accepted:,} ({100 * accepted / max(drafted, 1):.0f}%)"}


def _per_step(samples: Sequence[Sample]) -> Series:
    counts = [(one.reply.completion_tokens, one.accepted) for one in samples]
    return series((tokens / max(tokens - accepted, 1) for tokens, accepted in counts), "")


def burst_rows(bursts: Mapping[str, Sequence[float]], modes: Mapping[str, str]) -> tuple[Row, ...]:
    plain, drafts = (_burst_rates(bursts[name]) for name in (_PLAIN, _DRAFTS))
    values: dict[str, Value] = {_PLAIN: plain, _DRAFTS: drafts, "drafts / plain": ratios(drafts, plain)}
    if PEER in bursts:
        peer = _burst_rates(bursts[PEER])
        values |= {PEER: peer, "its mode": modes[_ALL], f"drafts / {PEER}": ratios(drafts, peer)}
    return (Row("all kinds", values),)


def _burst_rates(rates: Iterable[float]) -> Series:
    return series(rates, "tokens/s")


def peer_rows(samples: Samples, modes: Mapping[str, str]) -> tuple[Row, ...]:
    return tuple(Row(kind, _beside(columns, modes[kind])) for kind, columns in samples.items())


def _beside(columns: Mapping[str, Sequence[Sample]], mode: str) -> dict[str, Value]:
    drafts, peer = _rates(columns[_DRAFTS]), _rates(columns[PEER])
    return {
        "ours": drafts,
        PEER: peer,
        "its mode": mode,
        "ratio": ratios(drafts, peer),
        **_accepted(columns[PEER]),
        "per step": _per_step(columns[PEER]),
    }


def trial_rows(trials: Trials) -> tuple[Row, ...]:
    return tuple(
        Row(mode, {kind: series([one.tokens_per_s], "") for kind, one in by_kind.items()})
        for mode, by_kind in trials.items()
    )


def _rates(samples: Iterable[Sample]) -> Series:
    return series((one.tokens_per_s for one in samples), "tokens/s")


def same_prefix(plain: Sequence[int], other: Sequence[int]) -> float:
    """The share of the plain answer up to the first difference."""
    pairs = zip(plain, other, strict=False)
    same = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(plain), len(other)))
    return same / len(plain) if plain else 1.0


def same_positions(plain: Sequence[int], other: Sequence[int]) -> float:
    """The share of the plain answer's tokens that the other one has in the same place."""
    return sum(a == b for a, b in zip(plain, other, strict=False)) / len(plain) if plain else 1.0
