"""The models that answer here, by name."""

from __future__ import annotations

from collections.abc import Sequence

from emberkeep.backend.base import Backend
from emberkeep.errors import ModelNotFound

DEFAULT_NAME = "default"
_LATEST = ":latest"
"""Ollama's clients write it behind every name that has no other tag."""


class Models:
    """Every request names its model, or means the default one."""

    def __init__(self, default: Backend, others: Sequence[Backend] = ()) -> None:
        self.default = default
        self._all = (default, *others)

    def find(self, name: str | None) -> Backend:
        """The backend of the model that a client calls `name`; the default one where it names none. Raises
        ModelNotFound."""
        if not name or name == DEFAULT_NAME:
            return self.default
        wanted = name.removesuffix(_LATEST)
        for backend in self._all:
            card = backend.card
            if wanted == card.id or name == card.id or wanted in card.also:
                return backend
        raise ModelNotFound(
            f"The model {name[:100]!r} is not served here: use {self.default.card.id!r} or 'default'."
        )

    def list(self) -> Sequence[Backend]:
        """The default one first."""
        return self._all
