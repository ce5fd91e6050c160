"""Models for replicas of tests: the real backend over the deterministic engine, as slow as a test wants it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from emberkeep.backend.models import Models
from emberkeep.config.settings import Config
from emberkeep.engine.base import Rows
from emberkeep.engine.fake import FakeEngine
from helpers.scripted_backend import fake_backend


def slow_models(seconds_per_step: float, seconds_per_token: float = 0.0) -> Callable[[Config], Models]:
    def pause(batch: Sequence[Rows]) -> None:
        time.sleep(seconds_per_step + seconds_per_token * sum(len(rows.tokens) for rows in batch))

    def open_slow(config: Config) -> Models:
        engine = FakeEngine(sequences=2 * config.parallel, cells=16_384, on_evaluate=pause)
        return Models(fake_backend(config, engine))

    return open_slow
