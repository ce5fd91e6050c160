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
from emberkeep.server.request_metrics import RequestMetrics
from emberkeep.server.routes import Routes, Served
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
                if found := figure_at(path):
                    figure, labels = found
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
    for source, told in sources.items():
        lengths = told["accepted_lengths"]
        buckets = list(zip([*map(str, range(len(lengths) - 1)), "+Inf"], accumulate(lengths), strict=True))
        family.add_metric([*labels, source], buckets, told["accepted_tokens"])


@dataclass(frozen=True, slots=True)
class Figure:
    """Numbers of `Backend.stats()` that make one metric. A name that ends in `_total` is a counter's."""

    path: str
    """A pattern of keys joined by dots; its named groups are labels."""
    name: str
    help: str

    def labels(self, path: str) -> dict[str, str] | None:
        """None: `path` is another figure's."""
        found = re.fullmatch(self.path, path)
        return None if found is None else found.groupdict()


FIGURES = (
    Figure(r"scheduler\.prompt_tokens", "prefix_cache_queries_total", "Prompt tokens of all requests."),
    Figure(
        r"scheduler\.reused_(?P<tier>hot|warm|cold|remote)_tokens",
        "prefix_cache_hits_total",
        "Prompt tokens whose state was reused, by where it was.",
    ),
    Figure(r"scheduler\.moved_tokens", "moved_tokens_total", "Prompt tokens whose state was moved: approximate."),
    Figure(r"scheduler\.repaired_tokens", "repaired_tokens_total", "Moved tokens that were evaluated again."),
    Figure(r"scheduler\.approximate_jobs", "approximate_answers_total", "Answers that rest on moved state."),
    Figure(r"scheduler\.cuts", "cuts_total", "Splices of state in the engine: approximate."),
    Figure(r"scheduler\.blended_tokens", "blended_tokens_total", "Tokens of steps into which state was moved."),
    Figure(
        r"scheduler\.blended_token_layers",
        "blended_token_layers_total",
        "How many tokens of these steps went through how many layers.",
    ),
    Figure(r"scheduler\.evaluated_tokens", "evaluated_tokens_total", "Tokens that the engine computed."),
    Figure(r"scheduler\.sampled_tokens", "generated_tokens_total", "Tokens of answers."),
    Figure(r"scheduler\.saved_s", "saved_prefill_seconds_total", "Prefill that reuse has saved, less loading."),
    Figure(r"scheduler\.steps", "engine_steps_total", "Batches that the engine computed."),
    Figure(r"speculation\.steps", "speculative_steps_total", "Batches with a draft in them."),
    Figure(
        r"speculation\.sources\.(?P<source>\w+)\.drafts", "drafts_total", "Drafts that were computed, by source."
    ),
    Figure(
        r"speculation\.sources\.(?P<source>\w+)\.drafted_tokens",
        "drafted_tokens_total",
        "Tokens of these drafts.",
    ),
    Figure(
        r"speculation\.sources\.(?P<source>\w+)\.accepted_tokens",
        "accepted_draft_tokens_total",
        "Of these, the ones that became a part of an answer.",
    ),
    Figure(r"scheduler\.active", "queue_active", "Answers being computed; a request has as many as its n."),
    Figure(r"scheduler\.waiting", "queue_waiting", "Answers that wait for a slot in the engine."),
    Figure(r"scheduler\.idle_sequences", "idle_sequences", "Sequences at rest in the engine, ready to go on."),
    Figure(r"scheduler\.resident_tokens", "resident_tokens", "Tokens in the engine, which is the hot tier."),
    Figure(r"store\.(?P<tier>warm|cold)\.bytes", "tier_bytes", "Bytes of stored state."),
    Figure(r"store\.(?P<tier>warm|cold)\.budget", "tier_budget_bytes", "Bytes that a tier may hold."),
    Figure(r"store\.(?P<tier>warm|cold)\.tokens", "tier_tokens", "Tokens of stored state."),
    Figure(r"store\.(?P<tier>warm|cold)\.chunks", "tier_chunks", "Pieces of stored state."),
    Figure(r"store\.(?P<tier>warm|cold)\.read_seconds", "tier_load_seconds_total", "Time spent loading."),
    Figure(
        r"store\.evictions\.(?P<tier>\w+)\.(?P<reason>\w+)",
        "evictions_total",
        "Chunks that left a tier, and why.",
    ),
    Figure(r"store\.entries", "store_entries", "Conversations and prefixes that the store knows."),
    Figure(r"store\.ghosts", "store_ghosts", "Removed chunks that are remembered, to explain misses."),
    Figure(r"store\.corpus\.owners", "corpus_users", "Users from whose earlier texts drafts are taken."),
    Figure(r"store\.corpus\.tokens", "corpus_tokens", "Tokens of these texts."),
    Figure(r"store\.corpus\.bytes", "corpus_bytes", "RAM that these texts take."),
    Figure(r"store\.lookups", "store_lookups_total", "Prompts looked up in the store."),
    Figure(r"store\.inserted_chunks", "store_inserted_chunks_total", "Chunks that were added to the store."),
    Figure(r"store\.cold\.read_chunks", "cold_read_chunks_total", "Files read from disk."),
    Figure(r"store\.cold\.read_bytes", "cold_read_bytes_total", "Bytes read from disk."),
    Figure(r"store\.cold\.written_chunks", "cold_written_chunks_total", "Files written to disk."),
    Figure(r"store\.cold\.written_bytes", "cold_written_bytes_total", "Bytes written to disk."),
    Figure(r"store\.cold\.write_seconds", "cold_write_seconds_total", "Time spent writing to disk."),
    Figure(r"store\.cold\.refused_chunks", "cold_refused_chunks_total", "Writes that the disk refused."),
    Figure(r"store\.cold\.pending_chunks", "cold_pending_chunks", "Chunks on their way to disk."),
    Figure(r"store\.cold\.unwritten_chunks", "cold_unwritten_chunks", "Chunks that are not worth writing yet."),
    Figure(r"store\.cold\.written_today_bytes", "cold_written_today_bytes", "Bytes written since midnight (UTC)."),
    Figure(r"store\.cold\.daily_write_budget", "cold_daily_write_budget_bytes", "Bytes that a day may write."),
    Figure(r"store\.cold\.damaged_chunks", "damaged_chunks_total", "Files that failed verification."),
    Figure(r"store\.cold\.vanished_chunks", "vanished_chunks_total", "Files that disappeared."),
    Figure(
        r"store\.cold\.unreadable_chunks", "unreadable_chunks_total", "Reads that failed in a way that may pass."
    ),
    Figure(
        r"store\.cold\.other_bytes", "cold_other_bytes", "In quarantine, about to be removed, or not reachable."
    ),
    Figure(r"store\.remote\.lookups", "remote_lookups_total", "Prompts that the shared server was asked for."),
    Figure(r"store\.remote\.hits", "remote_hits_total", "Those for which something came."),
    Figure(r"store\.remote\.late", "remote_late_total", "Those that did not wait for its answer any longer."),
    Figure(r"store\.remote\.read_chunks", "remote_read_chunks_total", "Chunks that came from the shared server."),
    Figure(r"store\.remote\.read_bytes", "remote_read_bytes_total", "Bytes that came from it."),
    Figure(r"store\.remote\.read_seconds", "remote_read_seconds_total", "Time spent reading them."),
    Figure(r"store\.remote\.written_chunks", "remote_written_chunks_total", "Chunks written to it."),
    Figure(r"store\.remote\.written_bytes", "remote_written_bytes_total", "Bytes written to it."),
    Figure(r"store\.remote\.refused_chunks", "remote_refused_chunks_total", "Writes that it refused."),
    Figure(r"store\.remote\.touched_chunks", "remote_touched_chunks_total", "Chunks that it is to keep longer."),
    Figure(r"store\.remote\.pending_chunks", "remote_pending_chunks", "Chunks on their way to it."),
    Figure(
        r"store\.remote\.damaged_chunks", "remote_damaged_chunks_total", "Its chunks that failed verification."
    ),
    Figure(r"store\.remote\.vanished_chunks", "remote_vanished_chunks_total", "Its chunks that disappeared."),
    Figure(r"store\.remote\.requests", "remote_requests_total", "Round trips to it."),
    Figure(r"store\.remote\.request_seconds", "remote_request_seconds_total", "Time spent in them."),
    Figure(r"store\.remote\.failures", "remote_failures_total", "Round trips that failed."),
    Figure(r"store\.remote\.breaker_opened", "remote_breaker_opened_total", "How often it was left alone."),
    Figure(r"store\.remote\.breaker_open", "remote_breaker_open", "1 while it is left alone."),
    Figure(
        r"engine\.pool\.(?P<state>used|shared|copied)_blocks",
        "pool_blocks",
        "Blocks of the engine's pool, by state.",
    ),
    Figure(r"engine\.pool\.blocks", "pool_size_blocks", "Blocks that the engine's pool has."),
    Figure(
        r"engine\.pool\.references", "pool_references", "Blocks that sequences use, shared ones counted again."
    ),
    Figure(r"engine\.sequences", "engine_sequences", "Sequences whose state the engine holds as a whole."),
    Figure(r"planning\.refused", "planning_refused_total", "Prompts refused for want of memory."),
    Figure(r"planning\.truncated", "planning_truncated_total", "Prompts of which the oldest part was left out."),
    Figure(r"planning\.margin", "planning_margin_ratio", "Share of the predicted memory that is kept free."),
    Figure(
        r"planning\.suggested_margin",
        "planning_suggested_margin_ratio",
        "The share that would have covered 95 of 100 requests, from 0.05 to 0.5.",
    ),
    Figure(
        r"planning\.actual_to_predicted\.(?P<statistic>min|median|p95|max)",
        "planning_actual_to_predicted_ratio",
        "Memory that requests used, by what was predicted.",
    ),
    Figure(
        r"planning\.actual_to_predicted\.count",
        "planning_compared_total",
        "Requests whose memory was compared with its prediction.",
    ),
    Figure(
        r"planning\.footprint\.(?P<part>capacity|fixed|in_ram|per_\w+)",
        "planning_footprint_bytes",
        "What the engine's memory is made of, by part.",
    ),
    Figure(r"sessions\.evictions", "context_evictions_total", "Times that messages left a context."),
    Figure(r"sessions\.evicted_messages", "evicted_messages_total", "Messages that left a context."),
    Figure(r"sessions\.evicted_tokens", "evicted_tokens_total", "Tokens of these messages."),
    Figure(r"sessions\.archived_turns", "archived_turns_total", "Turns that were archived when they left."),
    Figure(r"sessions\.archive_failures", "archive_failures_total", "Times that this was not possible."),
    Figure(r"sessions\.recalls", "recalls_total", "Prompts into which archived turns were put."),
    Figure(r"sessions\.searches", "memory_searches_total", "Searches of models in what had left their context."),
    Figure(r"sessions\.calls", "server_tool_calls_total", "Tool calls that ran here, unknown to the client."),
    Figure(r"sessions\.recalled_turns", "recalled_turns_total", "Archived turns that were put into prompts."),
    Figure(
        r"memory\.(?P<kind>turns|facts|answers|conversations|responses|notes)",
        "memory_entries",
        "What is remembered, by kind.",
    ),
    Figure(r"memory\.bytes", "memory_bytes", "Bytes of the memory's file."),
    Figure(r"memory\.limit", "memory_budget_bytes", "Bytes beyond which the oldest turns and responses go."),
    Figure(
        r"measured\.evaluate_tokens_per_s",
        "measured_evaluate_tokens_per_second",
        "Speed of prompt evaluation, a running average.",
    ),
    Figure(
        r"measured\.import_bytes_per_s",
        "measured_import_bytes_per_second",
        "Speed from RAM into the engine, a running average.",
    ),
    Figure(
        r"measured\.fetch_bytes_per_s",
        "measured_fetch_bytes_per_second",
        "Speed of the shared server, a running average.",
    ),
    Figure(
        r"measured\.read_bytes_per_s",
        "measured_read_bytes_per_second",
        "Speed from disk into RAM, a running average.",
    ),
)


@cache
def figure_at(path: str) -> tuple[Figure, dict[str, str]] | None:
    """Which figure that number belongs to, and its labels."""
    for figure in FIGURES:
        labels = figure.labels(path)
        if labels is not None:
            return figure, labels
    return None
