"""The models as Anthropic's clients expect them: `/v1/models` is OpenAI's path as well, and they send a header."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from starlette.requests import Request as HttpRequest

from emberkeep.backend.base import ModelCard
from emberkeep.types.request import Json

_HEADER = "anthropic-version"


def is_anthropic(http: HttpRequest) -> bool:
    return _HEADER in http.headers


def models_json(cards: Sequence[ModelCard]) -> dict[str, Json]:
    """All of them on one page."""
    return {
        "data": [model_json(card) for card in cards],
        "has_more": False,
        "first_id": cards[0].id if cards else None,
        "last_id": cards[-1].id if cards else None,
    }


def model_json(card: ModelCard) -> dict[str, Json]:
    return {
        "type": "model",
        "id": card.id,
        "display_name": card.id,
        "created_at": datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": card.context,
        "max_tokens": card.context,
    }
