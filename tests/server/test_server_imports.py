"""What a server imports before its first answer: its user waits for it."""

from __future__ import annotations

import subprocess
import sys

NOT_NEEDED = {
    *("fastapi", "httpx", "huggingface_hub", "jinja2", "jsonpath", "jsonschema", "llguidance", "mcp"),
    *("prometheus_client", "prompt_toolkit", "ray", "rich", "torch", "transformers", "valkey"),
    *("anthropic", "openai"),
    *("emberkeep.bench", "emberkeep.cluster", "emberkeep.mcp", "emberkeep.tools"),
    *("emberkeep.library.arguments", "emberkeep.library.emberkeep", "emberkeep.models.pull"),
    *("emberkeep.chat.grammar", "emberkeep.engine.hf.engine"),
    *("emberkeep.api.anthropic_messages", "emberkeep.api.embeddings", "emberkeep.api.llama_server"),
    *("emberkeep.api.ollama_body", "emberkeep.api.responses_body"),
    *("emberkeep.server.routes.cache", "emberkeep.server.metrics", "emberkeep.server.openapi"),
}
"""Each of these is imported when the first request, or a setting, wants it."""

PROGRAM = """
import asyncio, sys
import emberkeep.cli.serve
import emberkeep.server.lifecycle, emberkeep.runtime.local_model, emberkeep.engine.llamacpp.engine
from emberkeep.backend.models import Models
from emberkeep.config.settings import Config
from emberkeep.server.app import create_app
from emberkeep.server.http_server import Server, warmup

class Backend:
    card = None

config = Config()
asyncio.run(warmup(create_app(Models(Backend()), config), config))
print(*sys.modules)
"""


def test_a_server_imports_only_what_it_serves() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    imported = set(done.stdout.split())
    assert "emberkeep.api.openai_chat" in imported
    assert NOT_NEEDED & imported == set()
