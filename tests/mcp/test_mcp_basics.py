"""MCP in two seconds: a server is used, crashes and comes back; variables are expanded; secrets are masked."""

from __future__ import annotations

import asyncio

import pytest

from emberkeep.errors import ConfigError
from emberkeep.mcp.transport import expand_variables, mask_secrets
from helpers.mcp_servers import alive, call, connected, hostile


def test_a_server_is_used_comes_back_after_a_crash_and_is_gone_after_close(tmp_path):
    pids = tmp_path / "pids"

    async def story():
        async with connected(tmp_path, hostile("a", env={"PIDS": str(pids)})) as clients:
            return [await call(clients, name, x=1) for name in ("a__echo", "a__crash", "a__echo")]

    first, crashed, again = asyncio.run(story())
    assert (first.text, again.text) == ('{"x": 1}', '{"x": 1}')
    assert crashed.failed
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) == 2 and not alive(started)


def test_variables_are_replaced_and_missing_ones_named(monkeypatch):
    monkeypatch.setenv("MCP_A", "one")
    assert expand_variables({"x": "$MCP_A-${MCP_A}s", "y": "5$", "z": "$"}) == {
        "x": "one-ones",
        "y": "5$",
        "z": "$",
    }
    monkeypatch.delenv("MCP_A")
    with pytest.raises(ConfigError, match="The variable MCP_A is not set"):
        expand_variables({"x": "$MCP_A"})


def test_secrets_are_masked_and_common_words_are_not():
    assert mask_secrets("the key sk-12345678 is true", ["sk-12345678", "true"]) == "the key *** is true"
