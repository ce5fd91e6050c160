"""`emberkeep serve` as it is, over the deterministic engine, whose loop breaks at the first long prompt."""

from __future__ import annotations

from collections.abc import Sequence

from emberkeep.backend.base import Backend
from emberkeep.backend.models import Models
from emberkeep.cli import main as cli
from emberkeep.config.settings import Config
from emberkeep.engine.base import Rows
from emberkeep.engine.fake import FakeEngine
from emberkeep.runtime import served_models
from helpers.scripted_backend import fake_backend

LONG = 1000


def open_backend(config: Config) -> Backend:
    engine = FakeEngine()
    backend = fake_backend(config, engine)

    def broken() -> None:
        raise RuntimeError("a bug")

    def evaluate(batch: Sequence[Rows]) -> None:
        if any(rows.start >= LONG for rows in batch):
            backend.scheduler._admit = broken  # type: ignore[method-assign]

    engine.on_evaluate = evaluate
    return backend


if __name__ == "__main__":
    served_models.begin_models = lambda config, *_: Models(open_backend(config))
    cli.main()
