"""`python serve_scripted.py DATA_DIR PORT TOOLS TEXT...`: a server whose model says these, one after the other.

It runs tools by itself: those of the group TOOLS.
"""

from __future__ import annotations

import sys
from pathlib import Path

from emberkeep.backend.models import Models
from emberkeep.config.settings import Config
from emberkeep.server.app import create_app
from emberkeep.server.http_server import Server
from emberkeep.server.lifecycle import banner, bind, run_until_stopped
from helpers.conversing import TEMPLATE, ScriptedEngine
from helpers.scripted_backend import fake_backend


def main() -> None:
    data_dir, port, tools, *texts = sys.argv[1:]
    config = Config(data_dir=Path(data_dir), port=int(port), server_tools="safe", enable_tools=(tools,))
    engine = ScriptedEngine(context=2048)
    with bind(config.host, config.port) as listener:
        backend = fake_backend(config, engine, template=TEMPLATE, name="scripted")
        engine.will_say(*texts)
        print(banner(config, backend, listener), file=sys.stderr, flush=True)
        models = Models(backend)
        run_until_stopped(Server(create_app(models, config), config), models, listener)


if __name__ == "__main__":
    main()
