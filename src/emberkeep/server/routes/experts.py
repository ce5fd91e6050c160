"""Which experts a mixture chooses: look at the counts, begin and end to count."""

from __future__ import annotations

from pydantic import ConfigDict

from emberkeep.api.body import Body, one_of
from emberkeep.backend.capabilities import experts_of
from emberkeep.backend.models import loaded
from emberkeep.errors import RequestError
from emberkeep.server.routes.base import OfModel, Routes, Served
from emberkeep.types.models import ExpertStats, LayerExperts
from emberkeep.types.request import Json


class TrackingBody(Body):
    model_config = ConfigDict(json_schema_extra=one_of("enabled", "reset"))

    enabled: bool | None = None
    reset: bool | None = None


def routes(served: Served) -> Routes:
    routes, models = Routes(), served.models

    @routes.get("/expert-stats", errors={400: "The model has no experts."})
    async def expert_stats(query: OfModel) -> Json:
        async with loaded(models.find(query.model)) as backend:
            return stats_json(experts_of(backend).stats())

    @routes.post("/expert-tracking")
    async def expert_tracking(query: OfModel, body: TrackingBody) -> Json:
        if body.enabled is None and body.reset is None:
            raise RequestError("Nothing is asked for: give enabled, reset or both.")
        async with loaded(models.find(query.model)) as backend:
            return stats_json(await experts_of(backend).track(body.enabled, reset=bool(body.reset)))

    return routes


def stats_json(stats: ExpertStats) -> dict[str, Json]:
    """Everything by the names of other servers, too, so that what was written for them can read it."""
    return {
        "enabled": stats.enabled,
        "experts": stats.experts,
        "experts_used": stats.experts_used,
        "tracking_enabled": stats.enabled,
        "n_expert": stats.experts,
        "n_expert_used": stats.experts_used,
        "total_tokens": stats.tokens,
        "layers": [_layer_json(layer) for layer in stats.layers],
    }


def _layer_json(layer: LayerExperts) -> dict[str, Json]:
    return {
        "layer": layer.layer,
        "tokens": layer.tokens,
        "counts": layer.counts,
        "frequencies": [round(frequency, 6) for frequency in layer.frequencies],
        "activations": [
            {"expert": expert, "count": count, "frequency": round(share, 6)}
            for expert, (count, share) in enumerate(zip(layer.counts, layer.shares, strict=True))
        ],
    }
