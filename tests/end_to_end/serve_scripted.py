"""`python serve_scripted.py DATA_DIR PORT TEXT...`: a server whose model says these, one text for each answer.

It runs tools by itself: those that ask the models which are registered in DATA_DIR.
"""

from __future__ import annotations

import sys
from pathlib import Path

from emberkeep.backend.base import ModelCard
from emberkeep.config import Config
from emberkeep.runtime import assemble
from emberkeep.server.app import create_app
from emberkeep.server.lifecycle import Server, run_until_stopped
from emberkeep.server.listener import bind
from emberkeep.server.serve import banner
from helpers.conversing import TEMPLATE, ScriptedEngine


def main() -> None:
    data_dir, port, *texts = sys.argv[1:]
    config = Config(data_dir=Path(data_dir), port=int(port), server_tools=True, enable_tools=("models",))
    engine = ScriptedEngine(context=2048)
    with bind(config.host, config.port) as listener:
        backend = assemble(config, engine, TEMPLATE, ModelCard("scripted", 0, engine.capabilities.context))
        engine.will_say(*texts)
        print(banner(config, backend, listener), file=sys.stderr, flush=True)
        run_until_stopped(Server(create_app(backend, config), config), backend, listener)


if __name__ == "__main__":
    main()
