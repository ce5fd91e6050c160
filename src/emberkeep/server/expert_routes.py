"""Which experts a mixture chooses: look at the counts, begin and end to count."""

from __future__ import annotations

from pydantic import ConfigDict
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from emberkeep.api.field_kinds import one_of
from emberkeep.api.request import Body
from emberkeep.backend.capabilities import experts_of
from emberkeep.backend.models import Models, using
from emberkeep.errors import RequestError
from emberkeep.server.json_response import json_response
from emberkeep.server.routes import OfModel, Routes, of_model, takes
from emberkeep.server.stream import read_body
from emberkeep.types.models import ExpertStats, LayerExperts
from emberkeep.types.request import Json


class TrackingBody(Body):
    model_config = ConfigDict(json_schema_extra=one_of("enabled", "reset"))

    enabled: bool | None = None
    reset: bool | None = None

    def check(self) -> None:
        """Raises RequestError where nothing is asked for."""
        if self.enabled is None and self.reset is None:
            raise RequestError("Nothing is asked for: give enabled, reset or both.")


def expert_routes(models: Models) -> Routes:
    routes = Routes()

    @routes.get("/expert-stats", parameters=OfModel, errors={400: "The model has no experts."})
    async def expert_stats(http: HttpRequest) -> Response:
        async with using(models.find(of_model(http))) as backend:
            return json_response(stats_json(experts_of(backend).stats()))

    @routes.post("/expert-tracking", parameters=OfModel, body=takes(TrackingBody))
    async def expert_tracking(http: HttpRequest) -> Response:
        model, body = of_model(http), await read_body(http, TrackingBody)
        body.check()
        async with using(models.find(model)) as backend:
            stats = await experts_of(backend).track(body.enabled, reset=bool(body.reset))
        return json_response(stats_json(stats))

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
