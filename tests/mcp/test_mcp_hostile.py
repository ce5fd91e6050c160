"""Servers that hang, crash, flood and lie: only the call fails, and nothing of them is left."""

from __future__ import annotations

import asyncio
import json
import logging
import resource

import pytest

from emberkeep.mcp.client import ServerStatus
from helpers.mcp_servers import Clock, alive, call, connected, hostile, offered

pytestmark = pytest.mark.slow


def test_a_crash_fails_the_calls_that_run_and_the_next_call_starts_it_again(tmp_path):
    async def story():
        async with connected(tmp_path, hostile("a"), hostile("b")) as clients:
            hanging = asyncio.create_task(call(clients, "a__hang"))
            await call(clients, "a__echo")
            crashed = await call(clients, "a__crash")
            (state, _) = clients.states()
            return (
                crashed,
                await hanging,
                state,
                await call(clients, "b__echo", x=1),
                await call(clients, "a__echo", x=2),
            )

    crashed, hanging, state, other, again = asyncio.run(story())
    assert crashed.failed and "a went away before it answered (it ended with status 3" in crashed.text
    assert "the last words" in crashed.text
    assert hanging.failed and "went away" in hanging.text
    assert state.status is ServerStatus.STOPPED
    assert (other.text, again.text) == ('{"x": 1}', '{"x": 2}')


def test_one_that_crashes_again_and_again_is_not_started_at_once(tmp_path):
    async def story(clock):
        said = []
        async with connected(tmp_path, hostile("a"), clock=clock) as clients:
            await call(clients, "a__crash")
            for passed in (0, 1, 0, 1, 1):
                clock.now += passed
                said.append((await call(clients, "a__crash")).text)
            clock.now += 60
            return said, await call(clients, "a__echo")

    said, last = asyncio.run(story(Clock()))
    started = ["went away" in text for text in said]
    assert started == [False, True, False, False, True]
    assert "started again if called in 1 s" in said[0] and "in 2 s" in said[2] and "in 1 s" in said[3]
    assert not last.failed


def test_a_call_that_hangs_fails_alone(tmp_path):
    async def story():
        async with connected(tmp_path, hostile("a", timeout_s=0.5)) as clients:
            return await asyncio.gather(call(clients, "a__hang"), call(clients, "a__echo"))

    hanging, echoed = asyncio.run(story())
    assert hanging.text == "Error: a did not answer within 0.5 s."
    assert not echoed.failed


def test_one_that_answers_nothing_any_more_is_started_anew(tmp_path):
    pids = tmp_path / "pids"

    async def story():
        server = hostile("a", timeout_s=1, env={"PIDS": str(pids)})
        async with connected(tmp_path, server) as clients:
            await call(clients, "a__echo")
            await asyncio.gather(call(clients, "a__hang"), call(clients, "a__hang"))
            return await call(clients, "a__echo")

    assert not asyncio.run(story()).failed
    assert len(pids.read_text().split()) == 2


def test_cancelling_a_call_leaves_the_server_usable(tmp_path):
    async def story():
        async with connected(tmp_path, hostile("a")) as clients:
            hanging = asyncio.create_task(call(clients, "a__hang"))
            await call(clients, "a__echo")
            hanging.cancel()
            with pytest.raises(asyncio.CancelledError):
                await hanging
            return await call(clients, "a__echo"), clients.states()

    echoed, (state,) = asyncio.run(story())
    assert not echoed.failed and state.status is ServerStatus.READY


@pytest.mark.parametrize(
    ("mode", "why"), [("crash-at-start", "ended with status 1"), ("hang-at-start", "did not start within 1 s")]
)
def test_one_that_does_not_start_is_a_line_in_the_log_and_a_state(tmp_path, caplog, mode, why):
    async def story():
        async with connected(tmp_path, hostile("bad", mode, timeout_s=1), hostile("good")) as clients:
            return clients.states(), offered(clients)

    (bad, good), names = asyncio.run(story())
    assert bad.status is ServerStatus.STOPPED and why in bad.reason
    assert any("bad cannot be used" in record.message for record in caplog.records)
    assert good.status is ServerStatus.READY
    assert names and all(name.startswith("good__") for name in names)


def test_one_that_takes_long_to_start_is_not_waited_for(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("emberkeep.mcp.client._PATIENCE_S", 0.01)

    async def story():
        async with connected(tmp_path, hostile("slow")) as clients:
            before = offered(clients), clients.states()[0].status
            await clients.start_wholly("slow")
            return before, offered(clients)

    before, after = asyncio.run(story())
    assert before == ([], ServerStatus.STARTING)
    assert "slow is still starting" in caplog.text
    assert "slow__echo" in after


def test_after_close_nothing_is_started_again(tmp_path):
    pids = tmp_path / "pids"

    async def story():
        async with connected(tmp_path, hostile("a", env={"PIDS": str(pids)})) as clients:
            pass
        return await call(clients, "a__echo")

    assert "a is closed" in asyncio.run(story()).text
    assert len(pids.read_text().split()) == 1


def test_a_program_that_does_not_exist_is_named(tmp_path):
    from emberkeep.config.tables import McpServer

    async def story():
        async with connected(tmp_path, McpServer("x", ("no-such-program",))) as clients:
            return clients.states()

    (state,) = asyncio.run(story())
    assert state.reason == "there is no no-such-program"


@pytest.mark.parametrize(
    ("tool", "why"),
    [
        ("endless", "more than 16 MiB"),
        ("huge", "more than 16 MiB"),
        ("spam", "messages that were not asked for"),
    ],
)
def test_a_flood_ends_the_connection_and_not_us(tmp_path, tool, why):
    async def story():
        async with connected(tmp_path, hostile("a"), hostile("b")) as clients:
            flooded, other = await asyncio.gather(call(clients, f"a__{tool}"), call(clients, "b__echo"))
            return flooded, other, await call(clients, "a__echo"), clients.states()[0]

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    flooded, other, again, _ = asyncio.run(story())
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert flooded.failed and why in flooded.text
    assert not other.failed
    assert not again.failed or "started again" in again.text
    assert grown < 150 << 10  # KiB: twice the longest message, and what it is made of


@pytest.mark.parametrize("mode", ["many", "pages"])
def test_of_very_many_tools_some_are_used(tmp_path, mode, caplog):
    async def story():
        async with connected(tmp_path, hostile("a", mode)) as clients:
            return offered(clients)

    names = asyncio.run(story())
    assert 100 <= len(names) <= 256


def test_garbage_fails_one_call_and_noise_is_passed_over(tmp_path):
    async def story():
        async with connected(tmp_path, hostile("a")) as clients:
            return await call(clients, "a__garbage"), await call(clients, "a__noise", x=1)

    garbage, noise = asyncio.run(story())
    assert garbage.text == "Error: a gave an answer that cannot be understood."
    assert noise.text == '{"x": 1}'


@pytest.mark.parametrize("mode", ["plain", "stubborn", "hang-at-start", "crash"])
def test_nothing_survives_close(tmp_path, mode):
    pids = tmp_path / "pids"

    async def story():
        how = "plain" if mode == "crash" else mode
        server = hostile("a", how, env={"PIDS": str(pids)}, timeout_s=1 if mode == "hang-at-start" else 60)
        async with connected(tmp_path, server) as clients:
            if mode != "hang-at-start":
                await call(clients, "a__spawn")
                await asyncio.gather(call(clients, "a__echo"), return_exceptions=True)
                started = [int(pid) for pid in pids.read_text().split()]
                assert len(alive(started)) == 2
            if mode == "crash":
                await call(clients, "a__crash")

    asyncio.run(story())
    started = [int(pid) for pid in pids.read_text().split()]
    assert started and not alive(started)


def test_a_loop_that_is_torn_down_leaves_nothing_either(tmp_path):
    pids = tmp_path / "pids"

    async def story():
        from emberkeep.mcp.client import McpClients

        clients = McpClients([hostile("a", env={"PIDS": str(pids)})], tmp_path / "pins.json")
        await clients.start()
        await call(clients, "a__spawn")

    asyncio.run(story())
    assert not alive([int(pid) for pid in pids.read_text().split()])


def test_its_environment_is_clean_and_has_what_its_table_says(tmp_path, monkeypatch):
    monkeypatch.setenv("PRIVATE_THING", "canary-of-ours")
    monkeypatch.setenv("TOKEN_HERE", "canary-for-it")

    async def story():
        async with connected(
            tmp_path, hostile("a", env={"TOKEN": "${TOKEN_HERE}", "X": "a-$TOKEN_HERE"})
        ) as clients:
            return json.loads((await call(clients, "a__env")).text)

    env = asyncio.run(story())
    assert (env["TOKEN"], env["X"]) == ("canary-for-it", "a-canary-for-it")
    assert "PRIVATE_THING" not in env and "canary-of-ours" not in env.values()


def test_a_variable_that_is_not_set_is_said(tmp_path):
    async def story():
        async with connected(tmp_path, hostile("a", env={"TOKEN": "$NO_SUCH_THING_SET"})) as clients:
            return clients.states()

    (state,) = asyncio.run(story())
    assert "The variable NO_SUCH_THING_SET is not set" in state.reason


def test_secrets_stay_out_of_logs_and_reasons(tmp_path, caplog):
    caplog.set_level(logging.DEBUG, "emberkeep")

    async def story():
        server = hostile("a", "crash-at-start", env={"SECRET": "canary-secret-1"}, timeout_s=5)
        async with connected(tmp_path, server) as clients:
            return clients.states()

    (state,) = asyncio.run(story())
    assert "this does not work: ***" in state.reason
    assert "canary-secret-1" not in caplog.text + str(state)
