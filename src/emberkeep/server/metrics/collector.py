"""Reads the backend's statistics at the moment of a scrape: nothing is counted twice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from emberkeep import __version__
from emberkeep.backend.base import Backend
from emberkeep.server.metrics.figures import PREFIX, Figure, figure_at
from emberkeep.types import Json


class StatsCollector(Collector):
    """What a backend does not tell is not exported. Safe to use from any thread."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def collect(self) -> Iterator[Metric]:
        about = {"version": __version__, "model": self._backend.card.id}
        yield InfoMetricFamily("emberkeep", "What answers here.", about)
        families: dict[Figure, CounterMetricFamily | GaugeMetricFamily] = {}
        for path, value in _numbers(self._backend.stats()):
            if found := figure_at(path):
                figure, labels = found
                if figure not in families:
                    families[figure] = _family(figure, labels)
                families[figure].add_metric(list(labels.values()), value)
        yield from families.values()


def _numbers(stats: Mapping[str, Json], above: str = "") -> Iterator[tuple[str, float]]:
    """Every number, with its keys joined by dots."""
    for key, value in stats.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{above}{key}.")
        elif isinstance(value, (int, float)):
            yield above + key, value


def _family(figure: Figure, labels: Mapping[str, str]) -> CounterMetricFamily | GaugeMetricFamily:
    kind = CounterMetricFamily if figure.name.endswith("_total") else GaugeMetricFamily
    return kind(PREFIX + figure.name, figure.help, labels=list(labels))
