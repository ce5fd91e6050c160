"""A backend that is closed while it makes something ready."""

from __future__ import annotations

import asyncio
from pathlib import Path

from emberkeep.config.settings import Config
from emberkeep.engine.fake import FakeEngine
from emberkeep.types.request import Request
from helpers.scheduling import PATIENCE, Gate
from helpers.scripted_backend import fake_backend

PREFIX = Request(prompt="harbour " * 400, max_tokens=0).decided(is_prefix=True)


def test_no_request_waits_for_a_prefix_that_is_being_warmed(tmp_path: Path) -> None:
    engine = FakeEngine(batch=128)
    gate = Gate(engine)
    config = Config(data_dir=tmp_path)
    backend = fake_backend(config, engine)
    whole = len(backend.tokenizer.tokenize(str(PREFIX.prompt), add_special=True, parse_special=True))
    backend.warmer.keep_warm([PREFIX])
    gate.reached()
    backend.warmer.stop()
    backend.warmer._thread.join(PATIENCE)
    gate.open()
    asyncio.run(backend.close())
    assert 0 < engine.evaluated_tokens < whole
