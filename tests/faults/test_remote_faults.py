"""Two servers share a third that is killed, paused, filled and made to lie: every answer is right, none fails."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import sleep

import pytest

from helpers import serve_fake
from helpers.chance import seed
from helpers.server_process import ServerProcess
from helpers.storm import Client, Tally
from helpers.valkey_server import FAULTS, FaultyProxy, ValkeyServer, faulty_proxy, running_valkey
from helpers.waiting import eventually

pytestmark = pytest.mark.slow

CLIENTS = 2
ANSWERS = 3
"""That come while something is wrong."""

Fault = tuple[Callable[[], object], Callable[[], object]]
"""How it begins, and how it ends."""


def faults(valkey: ValkeyServer, proxy: FaultyProxy) -> list[Fault]:
    settle = partial(setattr, proxy, "fault", "none")
    on_the_line: list[Fault] = [(partial(setattr, proxy, "fault", fault), settle) for fault in FAULTS]
    in_the_store: list[Fault] = [
        (partial(spoil, valkey, lambda value, other: other), settle),
        (partial(spoil, valkey, lambda value, other: value[: len(value) // 2]), settle),
        (partial(spoil, valkey, lambda value, other: value[:-3] + b"abc"), settle),
    ]
    is_full = (
        partial(valkey.client.config_set, "maxmemory", "1mb"),
        partial(valkey.client.config_set, "maxmemory", 0),
    )
    return [*on_the_line, *in_the_store, is_full, (valkey.pause, valkey.go_on), (valkey.kill, valkey.start)]


def spoil(valkey: ValkeyServer, spoiled: Callable[[bytes, bytes], bytes]) -> None:
    """Every value becomes another."""
    names = [name for name in valkey.client.scan_iter() if valkey.client.type(name) == b"string"]
    values = [valkey.client.get(name) or b"" for name in names]
    for name, value, other in zip(names, values, values[1:] + values[:1], strict=True):
        valkey.client.set(name, spoiled(value, other), keepttl=True)


def test_whatever_becomes_of_the_shared_server_answers_are_right(tmp_path: Path) -> None:
    tally, is_over = Tally(), threading.Event()
    with ExitStack() as stack:
        valkey = stack.enter_context(running_valkey(tmp_path))
        proxy = stack.enter_context(faulty_proxy(valkey.port))
        servers: list[ServerProcess] = []
        for name in ("a", "b"):
            options = ["--data-dir", str(tmp_path / name), "--remote", f"valkey://127.0.0.1:{proxy.port}"]
            servers.append(stack.enter_context(ServerProcess(serve_fake.__file__, *options)))

        def remote(name: str) -> list[object]:
            return [server.stats()["store"]["remote"][name] for server in servers]

        def talk(number: int) -> None:
            client, chance = Client(seed(number), tally), random.Random(seed(number))
            while not is_over.is_set():
                client.one_turn(chance.choice(servers), lambda: None)

        def is_all_well() -> bool:
            sleep(0.1)  # the servers have other things to answer
            return remote("breaker_open") == [0, 0] or any(each.done() for each in talking)

        def has_answered(before: int) -> bool:
            return tally.answers >= before + ANSWERS or any(each.done() for each in talking)

        with ThreadPoolExecutor(CLIENTS) as threads:
            talking = [threads.submit(talk, number) for number in range(CLIENTS)]
            try:
                for begin, end in faults(valkey, proxy):
                    assert eventually(is_all_well)
                    assert eventually(partial(has_answered, tally.answers))
                    begin()
                    assert eventually(partial(has_answered, tally.answers))
                    end()
                assert eventually(is_all_well)
            finally:
                is_over.set()
            for each in talking:
                each.result()
        assert sum(remote("failures")) > 0
        assert sum(remote("damaged_chunks")) > 0
        assert sum(remote("hits")) > 0
