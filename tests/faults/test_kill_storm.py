from __future__ import annotations

import itertools
import os
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from fake_reference import said
from storm import SERVER, Client, Tally, ask
from support.server_process import ServerProcess

KILLS = int(os.environ.get("EMBERKEEP_TEST_KILLS", "10"))
CLIENTS = 4


def live_and_die(server: ServerProcess, clients: list[Client], pieces: int) -> None:
    """All clients talk at once until the server is killed: after `pieces` pieces of answers, or by itself."""
    countdown = itertools.count(pieces, -1)

    def on_event() -> None:
        if next(countdown) == 1:
            server.kill()

    with ThreadPoolExecutor(len(clients)) as pool:
        for done in [pool.submit(client.talk, server, on_event) for client in clients]:
            done.result()


@pytest.mark.slow
def test_answers_stay_right_and_state_stays_useful_however_often_the_server_is_killed(tmp_path: Path) -> None:
    chance, tally = random.Random(20), Tally()
    clients = [Client(seed, tally) for seed in range(CLIENTS)]
    damaged = 0
    for life in range(KILLS):
        # Every other life ends inside a file operation of its own, the rest wherever the signal finds it.
        die_at = chance.randrange(20, 120) if life % 2 else 0
        with ServerProcess(
            SERVER, "--data-dir", str(tmp_path), "--ram-budget", "65536", "--die-at", str(die_at)
        ) as server:
            damaged += server.stats()["store"]["cold"]["damaged_chunks"]
            live_and_die(server, clients, chance.randrange(40, 400))

    conversations = [conversation for client in clients for conversation in client.conversations]
    questions = [[*conversation, said("user", "And now?")] for conversation in conversations]
    with ServerProcess(SERVER, "--data-dir", str(tmp_path)) as server:
        damaged += server.stats()["store"]["cold"]["damaged_chunks"]
        assert all(ask(server, tally, question)[1] > 0 for question in questions)
        server.stop()
    with ServerProcess(SERVER, "--data-dir", str(tmp_path)) as server:
        for question in questions:
            prompt_tokens, cached_tokens = ask(server, tally, question)
            assert cached_tokens == prompt_tokens - 1
    print(f"{KILLS} kills, {damaged} damaged files, {len(conversations)} conversations, {tally}")
    assert damaged == 0
