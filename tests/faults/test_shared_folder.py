"""Two servers on one data folder at the same time."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from helpers.chance import seed, times
from helpers.server_process import ServerProcess
from helpers.stored_chats import ask, cold, is_all_reused, start
from helpers.storm import Client, Tally


@pytest.mark.slow
def test_the_second_server_finds_what_the_first_has_just_stored(tmp_path: Path) -> None:
    with start(tmp_path) as first, start(tmp_path) as second:
        ask(second, "another-user")
        ask(first, "ann")
        first.wait_until_stored()
        assert is_all_reused(ask(second, "ann"))
        ask(second, "ben")
        second.wait_until_stored()
        assert is_all_reused(ask(first, "ben"))


@pytest.mark.slow
def test_a_server_outlives_the_one_it_shares_a_folder_with(tmp_path: Path) -> None:
    with start(tmp_path) as first, start(tmp_path) as second:
        ask(second, "ben")
        ask(first, "ann")
        first.wait_until_stored()
        first.kill()
        assert is_all_reused(ask(second, "ann"))
        second.stop()
    with start(tmp_path) as server:
        assert is_all_reused(ask(server, "ann"))
        assert is_all_reused(ask(server, "ben"))


def talk(client: Client, servers: list[ServerProcess], turns: int, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(turns):
        client.one_turn(chance.choice(servers), on_event=lambda: None)


@pytest.mark.slow
def test_conversations_may_hop_between_servers(tmp_path: Path) -> None:
    tally = Tally()
    clients = [Client(seed(number), tally) for number in range(4)]
    with start(tmp_path, "--ram-budget", "65536") as first, start(tmp_path, "--ram-budget", "65536") as second:
        with ThreadPoolExecutor(len(clients)) as pool:
            talks = [
                pool.submit(talk, client, [first, second], times(12), seed(number))
                for number, client in enumerate(clients)
            ]
            for done in talks:
                done.result()
        assert cold(first)["damaged_chunks"] == cold(second)["damaged_chunks"] == 0
        first.stop()
        second.stop()
    assert tally.cached_tokens > tally.prompt_tokens / 2
