"""Counting experts: what is asked, and how the counts look in JSON."""

from __future__ import annotations

from emberkeep.api.request import Body
from emberkeep.errors import RequestError
from emberkeep.types import ExpertStats, Json, LayerExperts


class TrackingBody(Body):
    enabled: bool | None = None
    reset: bool | None = None

    def check(self) -> None:
        """Raises RequestError where nothing is asked for."""
        if self.enabled is None and self.reset is None:
            raise RequestError("Nothing is asked for: give enabled, reset or both.")


def stats_json(stats: ExpertStats) -> dict[str, Json]:
    return {
        "enabled": stats.enabled,
        "experts": stats.experts,
        "experts_used": stats.experts_used,
        "layers": [_layer_json(layer) for layer in stats.layers],
    }


def _layer_json(layer: LayerExperts) -> dict[str, Json]:
    return {
        "layer": layer.layer,
        "tokens": layer.tokens,
        "counts": layer.counts,
        "frequencies": [round(frequency, 6) for frequency in layer.frequencies],
    }
