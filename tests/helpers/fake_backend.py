"""The real backend over the deterministic engine."""

from __future__ import annotations

from emberkeep.backend.base import ModelCard
from emberkeep.backend.local import LocalBackend
from emberkeep.config.settings import Config
from emberkeep.engine.fake import CHATML, FakeEngine
from emberkeep.runtime.local_model import assemble
from emberkeep.runtime.parts import ModelParts


def fake_backend(
    config: Config,
    engine: FakeEngine | None = None,
    *,
    template: str = CHATML,
    name: str = "fake",
    parts: ModelParts | None = None,
) -> LocalBackend:
    engine = engine or FakeEngine()
    return assemble(config, engine, template, ModelCard(name, 0, engine.capabilities.context), parts=parts)


def settle(backend: LocalBackend) -> None:
    """Wait until no turn is being closed any more, which happens a moment after its answer."""
    # Between two steps: within one a turn is no longer active and not stored yet.
    while backend.scheduler.call(lambda: backend.scheduler.stats()["active"]).result():
        pass
