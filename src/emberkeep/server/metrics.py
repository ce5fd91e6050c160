"""Metrics for Prometheus: of requests, of the backend's statistics, and `/metrics`, where they are read."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, Metric, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from starlette.responses import Response

from emberkeep import __version__
from emberkeep.backend.models import Models
from emberkeep.server.request_log import RequestMetrics
from emberkeep.server.routes.base import Routes, Served
from emberkeep.types.request import Json
from emberkeep.values import dataclass

PREFIX = "emberkeep_"

_TEXT = {"text/plain": {"schema": {"type": "string"}}}


def routes(served: Served) -> Routes:
    routes, registry = Routes(), CollectorRegistry()
    registry.register(StatsCollector(served.models))
    registry.register(RequestCollector(served.metrics))

    @routes.get("/metrics", content=_TEXT)
    async def metrics() -> Response:
        # The backend's figures may have to wait for a lock: not in the loop that serves the streams.
        text = await asyncio.to_thread(generate_latest, registry)
        return Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return routes


# ── requests ──


class RequestCollector(Collector):
    """Safe to use from any thread."""

    def __init__(self, metrics: RequestMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        for tally in self._metrics.tallies:
            counter = CounterMetricFamily(PREFIX + tally.name, tally.help, labels=[tally.label])
            for value, count in dict(tally.counts).items():
                counter.add_metric([value], count)
            yield counter
        for distribution in self._metrics.distributions:
            histogram = HistogramMetricFamily(PREFIX + distribution.name, distribution.help)
            bounds = [*map(floatToGoString, distribution.bounds), "+Inf"]
            buckets = list(zip(bounds, accumulate(distribution.counts), strict=True))
            histogram.add_metric([], buckets, distribution.total)
            yield histogram


# ── the backend ──


class StatsCollector(Collector):
    """Reads the statistics of the loaded models at the moment of a scrape: nothing is counted twice.

    Where there may be several, each figure has the label `model`. What a backend does not tell is not exported.
    Safe to use from any thread.
    """

    def __init__(self, models: Models) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        about = {"version": __version__, "model": self._models.default.card.id}
        yield InfoMetricFamily("emberkeep", "What answers here.", about)
        families: dict[Figure, CounterMetricFamily | GaugeMetricFamily] = {}
        lengths: HistogramMetricFamily | None = None
        for backend in self._models.loaded():
            whose = {"model": backend.card.id} if self._models.has_others else {}
            stats = backend.stats()
            for path, value in _numbers(stats):
                if match := figure_at(path):
                    figure, labels = match
                    if figure not in families:
                        families[figure] = _family(figure, [*whose, *labels])
                    families[figure].add_metric([*whose.values(), *labels.values()], value)
            if sources := stats.get("speculation", {}).get("sources"):
                lengths = lengths or _accepted_lengths([*whose])
                _add_lengths(lengths, [*whose.values()], sources)
        yield from families.values()
        if lengths is not None:
            yield lengths


def read_requests(metrics: RequestMetrics) -> bytes:
    """As Prometheus reads them, and nothing of models."""
    registry = CollectorRegistry()
    registry.register(RequestCollector(metrics))
    return generate_latest(registry)


def _numbers(stats: Mapping[str, Json], above: str = "") -> Iterator[tuple[str, float]]:
    """Every number, with its keys joined by dots."""
    for key, value in stats.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{above}{key}.")
        elif isinstance(value, (int, float)):
            yield above + key, value


def _family(figure: Figure, labels: Sequence[str]) -> CounterMetricFamily | GaugeMetricFamily:
    kind = CounterMetricFamily if figure.name.endswith("_total") else GaugeMetricFamily
    return kind(PREFIX + figure.name, figure.help, labels=labels)


def _accepted_lengths(labels: Sequence[str]) -> HistogramMetricFamily:
    return HistogramMetricFamily(
        f"{PREFIX}accepted_draft_length",
        "Drafts by how many of their tokens were accepted, by source.",
        labels=[*labels, "source"],
    )


def _add_lengths(family: HistogramMetricFamily, labels: Sequence[str], sources: Mapping[str, Json]) -> None:
    for source, stats in sources.items():
        lengths = stats["accepted_lengths"]
        buckets = list(zip([*map(str, range(len(lengths) - 1)), "+Inf"], accumulate(lengths), strict=True))
        family.add_metric([*labels, source], buckets, stats["accepted_tokens"])


@dataclass(frozen=True, slots=True)
class Figure:
    """Numbers of `Backend.stats()` that make one metric. A name that ends in `_total` is a counter's."""

    path: str
    """Keys joined by dots; `{label}` stands for any key, `{label:a|b}` for some, and its value becomes a label."""
    name: str
    help: str

    def labels(self, path: str) -> dict[str, str] | None:
        """None: `path` is another figure's."""
        pattern = re.sub(r"\{(\w+):?([^}]*)\}", _group, self.path.replace(".", r"\."))
        match = re.fullmatch(pattern, path)
        return None if match is None else match.groupdict()


def _group(label: re.Match[str]) -> str:
    return f"(?P<{label[1]}>{label[2] or '[^.]+'})"


_ROWS = (
    ("scheduler.prompt_tokens", "prefix_cache_queries_total", "Prompt tokens of all requests."),
    ("scheduler.reused_{tier}_tokens", "prefix_cache_hits_total", "Reused prompt tokens, by where they were."),
    ("scheduler.moved_tokens", "moved_tokens_total", "Prompt tokens whose state was moved: approximate."),
    ("scheduler.repaired_tokens", "repaired_tokens_total", "Moved tokens that were evaluated again."),
    ("scheduler.approximate_jobs", "approximate_answers_total", "Answers that rest on moved state."),
    ("scheduler.cuts", "cuts_total", "Splices of state in the engine: approximate."),
    ("scheduler.blended_tokens", "blended_tokens_total", "Tokens of steps into which state was moved."),
    ("scheduler.blended_token_layers", "blended_token_layers_total", "The same, times the layers passed."),
    ("scheduler.evaluated_tokens", "evaluated_tokens_total", "Tokens that the engine computed."),
    ("scheduler.sampled_tokens", "generated_tokens_total", "Tokens of answers."),
    ("scheduler.saved_s", "saved_prefill_seconds_total", "Prefill that reuse has saved, less loading."),
    ("scheduler.steps", "engine_steps_total", "Batches that the engine computed."),
    ("speculation.steps", "speculative_steps_total", "Batches with a draft in them."),
    ("speculation.sources.{source}.drafts", "drafts_total", "Drafts that were computed, by source."),
    ("speculation.sources.{source}.drafted_tokens", "drafted_tokens_total", "Tokens of these drafts."),
    ("speculation.sources.{source}.accepted_tokens", "accepted_draft_tokens_total", "Those of an answer."),
    ("scheduler.active", "queue_active", "Answers being computed; a request has as many as its n."),
    ("scheduler.waiting", "queue_waiting", "Answers that wait for a slot in the engine."),
    ("scheduler.idle_sequences", "idle_sequences", "Sequences at rest in the engine, ready to go on."),
    ("scheduler.resident_tokens", "resident_tokens", "Tokens in the engine, which is the hot tier."),
    ("store.{tier:warm|cold}.bytes", "tier_bytes", "Bytes of stored state."),
    ("store.{tier:warm|cold}.budget", "tier_budget_bytes", "Bytes that a tier may hold."),
    ("store.{tier:warm|cold}.tokens", "tier_tokens", "Tokens of stored state."),
    ("store.{tier:warm|cold}.chunks", "tier_chunks", "Pieces of stored state."),
    ("store.{tier:warm|cold}.read_seconds", "tier_load_seconds_total", "Time spent loading."),
    ("store.evictions.{tier}.{reason}", "evictions_total", "Chunks that left a tier, and why."),
    ("store.entries", "store_entries", "Conversations and prefixes that the store knows."),
    ("store.ghosts", "store_ghosts", "Removed chunks that are remembered, to explain misses."),
    ("store.corpus.owners", "corpus_users", "Users from whose earlier texts drafts are taken."),
    ("store.corpus.tokens", "corpus_tokens", "Tokens of these texts."),
    ("store.corpus.bytes", "corpus_bytes", "RAM that these texts take."),
    ("store.lookups", "store_lookups_total", "Prompts looked up in the store."),
    ("store.inserted_chunks", "store_inserted_chunks_total", "Chunks that were added to the store."),
    ("store.cold.read_chunks", "cold_read_chunks_total", "Files read from disk."),
    ("store.cold.read_bytes", "cold_read_bytes_total", "Bytes read from disk."),
    ("store.cold.written_chunks", "cold_written_chunks_total", "Files written to disk."),
    ("store.cold.written_bytes", "cold_written_bytes_total", "Bytes written to disk."),
    ("store.cold.write_seconds", "cold_write_seconds_total", "Time spent writing to disk."),
    ("store.cold.refused_chunks", "cold_refused_chunks_total", "Writes that the disk refused."),
    ("store.cold.pending_chunks", "cold_pending_chunks", "Chunks on their way to disk."),
    ("store.cold.unwritten_chunks", "cold_unwritten_chunks", "Chunks that are not worth writing yet."),
    ("store.cold.written_today_bytes", "cold_written_today_bytes", "Bytes written since midnight (UTC)."),
    ("store.cold.daily_write_budget", "cold_daily_write_budget_bytes", "Bytes that a day may write."),
    ("store.cold.damaged_chunks", "damaged_chunks_total", "Files that failed verification."),
    ("store.cold.vanished_chunks", "vanished_chunks_total", "Files that disappeared."),
    ("store.cold.unreadable_chunks", "unreadable_chunks_total", "Reads that failed in a way that may pass."),
    ("store.cold.other_bytes", "cold_other_bytes", "In quarantine, about to be removed, or not reachable."),
    ("store.remote.lookups", "remote_lookups_total", "Prompts that the shared server was asked for."),
    ("store.remote.hits", "remote_hits_total", "Those for which something came."),
    ("store.remote.late", "remote_late_total", "Those that did not wait for its answer any longer."),
    ("store.remote.read_chunks", "remote_read_chunks_total", "Chunks that came from the shared server."),
    ("store.remote.read_bytes", "remote_read_bytes_total", "Bytes that came from it."),
    ("store.remote.read_seconds", "remote_read_seconds_total", "Time spent reading them."),
    ("store.remote.written_chunks", "remote_written_chunks_total", "Chunks written to it."),
    ("store.remote.written_bytes", "remote_written_bytes_total", "Bytes written to it."),
    ("store.remote.refused_chunks", "remote_refused_chunks_total", "Writes that it refused."),
    ("store.remote.touched_chunks", "remote_touched_chunks_total", "Chunks that it is to keep longer."),
    ("store.remote.pending_chunks", "remote_pending_chunks", "Chunks on their way to it."),
    ("store.remote.damaged_chunks", "remote_damaged_chunks_total", "Its chunks that failed verification."),
    ("store.remote.vanished_chunks", "remote_vanished_chunks_total", "Its chunks that disappeared."),
    ("store.remote.requests", "remote_requests_total", "Round trips to it."),
    ("store.remote.request_seconds", "remote_request_seconds_total", "Time spent in them."),
    ("store.remote.failures", "remote_failures_total", "Round trips that failed."),
    ("store.remote.breaker_opened", "remote_breaker_opened_total", "How often it was left alone."),
    ("store.remote.breaker_open", "remote_breaker_open", "1 while it is left alone."),
    ("engine.pool.{state:used|shared|copied}_blocks", "pool_blocks", "Blocks of the engine's pool, by state."),
    ("engine.pool.blocks", "pool_size_blocks", "Blocks that the engine's pool has."),
    ("engine.pool.references", "pool_references", "Blocks that sequences use, shared ones counted again."),
    ("engine.sequences", "engine_sequences", "Sequences whose state the engine holds as a whole."),
    ("planning.refused", "planning_refused_total", "Prompts refused for want of memory."),
    ("planning.truncated", "planning_truncated_total", "Prompts of which the oldest part was left out."),
    ("planning.margin", "planning_margin_ratio", "Share of the predicted memory that is kept free."),
    ("planning.suggested_margin", "planning_suggested_margin_ratio", "The share that would have covered 95%."),
    (
        "planning.actual_to_predicted.{statistic:min|median|p95|max}",
        "planning_actual_to_predicted_ratio",
        "Memory used, by what was predicted.",
    ),
    ("planning.actual_to_predicted.count", "planning_compared_total", "Requests whose memory was compared."),
    (r"planning.footprint.{part:capacity|fixed|in_ram|per_\w+}", "planning_footprint_bytes", "Memory, by part."),
    ("sessions.evictions", "context_evictions_total", "Times that messages left a context."),
    ("sessions.evicted_messages", "evicted_messages_total", "Messages that left a context."),
    ("sessions.evicted_tokens", "evicted_tokens_total", "Tokens of these messages."),
    ("sessions.archived_turns", "archived_turns_total", "Turns that were archived when they left."),
    ("sessions.archive_failures", "archive_failures_total", "Times that this was not possible."),
    ("sessions.recalls", "recalls_total", "Prompts into which archived turns were put."),
    ("sessions.searches", "memory_searches_total", "Searches of models in what had left their context."),
    ("sessions.calls", "server_tool_calls_total", "Tool calls that ran here, unknown to the client."),
    ("sessions.recalled_turns", "recalled_turns_total", "Archived turns that were put into prompts."),
    ("memory.{kind:turns|facts|answers|conversations|responses|notes}", "memory_entries", "What is remembered."),
    ("memory.bytes", "memory_bytes", "Bytes of the memory's file."),
    ("memory.limit", "memory_budget_bytes", "Bytes beyond which the oldest turns and responses go."),
    ("measured.evaluate_tokens_per_s", "measured_evaluate_tokens_per_second", "Prompt evaluation, on average."),
    ("measured.import_bytes_per_s", "measured_import_bytes_per_second", "From RAM into the engine."),
    ("measured.fetch_bytes_per_s", "measured_fetch_bytes_per_second", "From the shared server."),
    ("measured.read_bytes_per_s", "measured_read_bytes_per_second", "From disk into RAM."),
)
FIGURES = tuple(Figure(*row) for row in _ROWS)


@cache
def figure_at(path: str) -> tuple[Figure, dict[str, str]] | None:
    """Which figure that number belongs to, and its labels."""
    for figure in FIGURES:
        labels = figure.labels(path)
        if labels is not None:
            return figure, labels
    return None
