"""Adapters and other types of state, in servers that are stopped and started: each finds its own alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from emberkeep.types.request import Json
from helpers import tiny_gguf
from helpers.server_process import Reply, ServerProcess, serve, system, user

pytestmark = pytest.mark.slow

TALK: list[Json] = [system("talk like a pirate, be brief, and count the ships. " * 4), user("who goes there?")]
PRINTABLE = {str(3 + byte): -100 for byte in (*range(32), *range(127, 256))}
"""What is not text would not come back as it was sampled."""


def ask(server: ServerProcess, **fields: Json) -> Reply:
    return server.chat(TALK, max_tokens=8, logit_bias=PRINTABLE, **fields)


def details(server: ServerProcess) -> Json:
    return server.http.get(f"{server.url}/v1/models").json()["data"][0]["details"]


def answered(model: Path, data: Path, *options: str) -> Reply:
    """By a server that is stopped afterwards, so that all is on disk."""
    with serve(model, data, *options) as server:
        reply = ask(server)
        server.stop()
    return reply


def test_each_adapter_finds_its_own_state_after_a_restart_and_no_other(tmp_path: Path) -> None:
    model, data = tiny_gguf.dense(tmp_path / "tiny.gguf"), tmp_path / "data"
    lora = tiny_gguf.lora(tmp_path / "lora.gguf")
    ways = ([], ["--lora", str(lora)], ["--lora", f"{lora}:0.5"])
    first = [answered(model, data, *way) for way in ways]
    again = [answered(model, data, *way) for way in ways]
    assert [reply.cached_tokens for reply in first] == [0] * len(ways)
    assert all(reply.cached_tokens >= reply.prompt_tokens - 1 for reply in again)
    assert [reply.text for reply in again] == [reply.text for reply in first]
    assert first[0].text != first[1].text
    with serve(model, data, *ways[2]) as server:
        (adapter,) = details(server)["lora"]
    assert (adapter["file"], adapter["scale"], len(adapter["sha256"])) == ("lora.gguf", 0.5, 64)


def test_each_type_of_state_finds_its_own_after_a_restart_and_no_other(tmp_path: Path) -> None:
    model, data = tiny_gguf.wide(tmp_path / "tiny.gguf"), tmp_path / "data"
    first = [answered(model, data, "--kv-type", kind) for kind in ("f16", "q8_0")]
    again = [answered(model, data, "--kv-type", kind) for kind in ("f16", "q8_0")]
    assert [reply.cached_tokens for reply in first] == [0, 0]
    assert all(reply.cached_tokens >= reply.prompt_tokens - 1 for reply in again)
    assert [reply.text for reply in again] == [reply.text for reply in first]


def test_state_of_flash_attention_and_without_it_is_kept_apart(tmp_path: Path) -> None:
    model, data = tiny_gguf.dense(tmp_path / "tiny.gguf"), tmp_path / "data"
    first = [answered(model, data, "--flash-attention", way) for way in ("on", "off")]
    again = [answered(model, data, "--flash-attention", way) for way in ("on", "off")]
    assert [reply.cached_tokens for reply in first] == [0, 0]
    assert all(reply.cached_tokens >= reply.prompt_tokens - 1 for reply in again)
    assert [reply.text for reply in again] == [reply.text for reply in first]
