"""`python serve_fake.py --data-dir X`: the real server and the real store over the deterministic engine.

With `--die-at N` the process kills itself, as `kill -9` does, at its Nth file operation inside the data folder.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from emberkeep.backend.models import Models
from emberkeep.config.settings import Config
from emberkeep.engine.base import Rows
from emberkeep.engine.fake import FakeEngine
from emberkeep.server.app import create_app
from emberkeep.server.http_server import Server
from emberkeep.server.lifecycle import banner, bind, run_until_stopped
from helpers.scripted_backend import fake_backend

SECONDS_PER_TOKEN = 1e-4
"""Slow enough that loading is worth its while, as with a real model, and that a kill can come in between."""
_FILE_EVENTS = frozenset({"open", "os.rename", "os.remove", "os.mkdir"})


def main() -> None:
    options = _options()
    if options.die_at:
        _die_at(options.die_at, str(options.data_dir))
    config = Config(
        model="fake",
        port=0,
        data_dir=options.data_dir,
        ram_budget=options.ram_budget,
        parallel=options.sequences // 2,
        remote=options.remote,
    )
    engine = FakeEngine(
        sequences=options.sequences, cells=8192, weights=options.weights, on_evaluate=_take_as_long_as_a_model
    )
    with bind(config.host, config.port) as listener:
        backend = fake_backend(config, engine)
        print(banner(config, backend, listener), file=sys.stderr, flush=True)
        models = Models(backend)
        run_until_stopped(Server(create_app(models, config), config), models, listener)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--weights", default="fake")
    parser.add_argument("--ram-budget", type=int, default=1 << 20)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--remote")
    parser.add_argument("--die-at", type=int, default=0)
    return parser.parse_args()


def _take_as_long_as_a_model(batch: Sequence[Rows]) -> None:
    time.sleep(SECONDS_PER_TOKEN * sum(len(rows.tokens) for rows in batch))


def _die_at(operation: int, folder: str) -> None:
    left = itertools.count(operation, -1)

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if event in _FILE_EVENTS and str(arguments[0]).startswith(folder) and next(left) <= 1:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


if __name__ == "__main__":
    main()
