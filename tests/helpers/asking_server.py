"""A server whose model says what a test wants, and whose dangerous tools are for clients that ask a person."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from emberkeep.config.settings import Config
from helpers.conversing import Harbour, ScriptedEngine
from helpers.scripted_server import Running, running


@contextmanager
def asking_server(engine: ScriptedEngine, root: Path, **config: Any) -> Iterator[Running]:
    """`root`: the folder of its file tools."""
    options = {"server_tools": "ask", "tools_root": root, **config}
    with (
        Harbour(root.parent / "data", engine, **options) as harbour,
        running(harbour.backend, Config()) as server,  # type: ignore[arg-type]
    ):
        yield server
