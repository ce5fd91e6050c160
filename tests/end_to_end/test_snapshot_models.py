"""Models whose state cannot be divided by token, in a server that is killed: stored state answers the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from emberkeep.types.request import Json
from helpers import tiny_gguf
from helpers.server_process import Reply, ServerProcess, assistant, serve, system, user

pytestmark = pytest.mark.slow

STABLE = "talk like a pirate, be brief, never lie, and count the ships."
PRINTABLE = {str(3 + byte): -100 for byte in (*range(32), *range(127, 256))}
"""What is not text would not come back as it was sampled."""
MODELS: dict[str, Callable[[Path], Path]] = {
    "recurrent": tiny_gguf.recurrent,
    "hybrid": tiny_gguf.hybrid,
    "hybrid with a window": tiny_gguf.hybrid_window,
    "sliding window": tiny_gguf.sliding_window,
    "latent attention": tiny_gguf.latent,
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return MODELS[request.param](tmp_path / "tiny.gguf")


def ask(server: ServerProcess, messages: list[Json], **fields: Json) -> Reply:
    return server.chat(messages, max_tokens=8, logit_bias=PRINTABLE, **fields)


def like_uncached(server: ServerProcess, messages: list[Json]) -> Reply:
    """The reply with stored state, which must be the one without."""
    cached = ask(server, messages)
    fresh = ask(server, messages, cache_prompt=False)
    assert fresh.cached_tokens == 0
    assert cached.text == fresh.text
    return cached


def test_killed_resumed_and_branched_it_answers_as_if_nothing_were_stored(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    messages = [system(STABLE)]
    with serve(model, data) as server:
        for question in ("who goes there?", "how many masts?", "what of the moon?"):
            messages.append(user(question))
            reply = like_uncached(server, messages)
            messages.append(assistant(reply.text))
        before = reply.prompt_tokens + reply.completion_tokens
        server.wait_until_stored()
        server.kill()
    # Each in a process of its own: one that has measured so small a model may find it quicker than a disk.
    with serve(model, data) as server:
        resumed = like_uncached(server, [*messages, user("and the tide?")])
        assert resumed.cached_tokens >= before - 4
        kept = ask(server, [*messages[:4], user("x")], cache_prompt=False).prompt_tokens - 40
    with serve(model, data) as server:
        assert like_uncached(server, [*messages[:4], user("how many sails?")]).cached_tokens >= kept
    with serve(model, data) as server:
        other = like_uncached(server, [system(STABLE), user("another ship?")])
        assert other.cached_tokens >= len(STABLE)
