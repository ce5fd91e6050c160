from __future__ import annotations

import itertools
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from helpers.chance import seed, times
from helpers.stored_chats import cold, said, start
from helpers.storm import Client, Tally, ask

KILLS = times(10)
CLIENTS = 4


def live_and_die(data_dir: Path, clients: list[Client], chance: random.Random, *, by_itself: bool) -> int:
    """All clients talk at once until the server is killed; returns how many damaged files it found.

    The kill comes after some pieces of answers, or at one of the server's own file operations, which may be one
    of those with which it opens its store.
    """
    die_at = chance.randrange(1, 150) if by_itself else 0
    countdown = itertools.count(chance.randrange(40, 400), -1)
    with start(data_dir, "--ram-budget", "65536", "--die-at", str(die_at)) as server:

        def on_event() -> None:
            if next(countdown) == 1:
                server.kill()

        if not server.gets_ready():
            assert by_itself and server.exit_code() == -signal.SIGKILL, server.log
            return 0
        try:
            damaged = int(cold(server)["damaged_chunks"])
        except httpx.TransportError:  # it was at work on its files when it was asked
            assert by_itself and server.exit_code() == -signal.SIGKILL, server.log
            return 0
        with ThreadPoolExecutor(len(clients)) as pool:
            for done in [pool.submit(client.talk, server, on_event) for client in clients]:
                done.result()
        return damaged


@pytest.mark.slow
@pytest.mark.timeout(300 + 30 * KILLS)
def test_answers_stay_right_and_state_stays_useful_however_often_the_server_is_killed(tmp_path: Path) -> None:
    chance, tally = random.Random(seed(20)), Tally()
    clients = [Client(seed(number), tally) for number in range(CLIENTS)]
    damaged = sum(live_and_die(tmp_path, clients, chance, by_itself=life % 2 == 1) for life in range(KILLS))
    conversations = [conversation for client in clients for conversation in client.conversations]
    questions = [[*conversation, said("user", "And now?")] for conversation in conversations]
    with start(tmp_path) as server:
        assert all(ask(server, tally, question)[1] > 0 for question in questions)
        damaged += cold(server)["damaged_chunks"]
        server.stop()
    with start(tmp_path) as server:
        for question in questions:
            prompt_tokens, cached_tokens = ask(server, tally, question)
            assert cached_tokens == prompt_tokens - 1
    print(f"{KILLS} kills, {damaged} damaged files, {len(conversations)} conversations, {tally}")
    assert damaged == 0
