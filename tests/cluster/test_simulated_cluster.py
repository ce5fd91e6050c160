"""The simulator says of a small trace what a real cluster does with it."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from emberkeep.bench.cluster_model import Machine, Outcome, RemoteSettings, simulate
from emberkeep.bench.trace_file import BLOCK, Visit
from emberkeep.config import Config
from emberkeep.routing import new_routing
from helpers.cluster_models import slow_models
from helpers.kv_building import CHUNK_BYTES
from helpers.trace_replay import BLOCK_IDS, replay

pytest.importorskip("ray", reason="needs the extra emberkeep[cluster]")
pytestmark = [pytest.mark.slow, pytest.mark.serial]

SECONDS_PER_TOKEN = 2e-5
KEPT_BLOCKS = 240
"""For which all replicas together have RAM: fewer than the trace has."""
SLOTS = 4


def conversations(seed: int) -> list[Visit]:
    """Some that take turns, over two common beginnings; blocks that a later turn adds stay."""
    chance, new = random.Random(seed), count(100)
    talks = [[talk % 2 * 10, talk % 2 * 10 + 1, next(new)] for talk in range(30)]
    visits = []
    for number in range(150):
        talk = chance.choice(talks)
        talk.append(next(new))
        visits.append(Visit(tuple(talk), len(talk) * BLOCK, 1, number * 0.1))
    return visits


@contextmanager
def real_cluster(folder: Path, replicas: int, routing: str) -> Iterator[str]:
    from emberkeep.cluster.lifecycle import deploy, end, started_ray

    config = Config(
        model="fake",
        port=0,
        data_dir=folder,
        cluster_replicas=replicas,
        routing=routing,
        parallel=SLOTS,
        ram_budget=KEPT_BLOCKS * CHUNK_BYTES,
        disk_budget=0,
        memory=False,
        drain_s=5.0,
        log_level="warning",
    )
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    with started_ray(config):
        yield deploy(config, slow_models(0.001, SECONDS_PER_TOKEN))
        end()


def simulated(visits: list[Visit], replicas: int, routing: str) -> Outcome:
    machine = Machine(
        slots=SLOTS,
        prefill=BLOCK / BLOCK_IDS / SECONDS_PER_TOKEN,
        decode=100.0,
        import_=1e12,
        ram=KEPT_BLOCKS * CHUNK_BYTES // replicas,
        token_bytes=CHUNK_BYTES // BLOCK,
    )
    return simulate(visits, replicas, new_routing(routing), machine, RemoteSettings(0, 1.0, 0.0))


@pytest.mark.parametrize(("replicas", "routing"), [(1, "affinity"), (3, "affinity"), (3, "round_robin")])
def test_a_real_cluster_reuses_what_the_simulated_one_does(tmp_path: Path, replicas: int, routing: str) -> None:
    visits = conversations(7)
    with real_cluster(tmp_path, replicas, routing) as url:
        real = replay(url, visits)
    outcome = simulated(visits, replicas, routing)
    print(f"{replicas} {routing}: real {real.own_share:.3f}, simulated {outcome.own / outcome.tokens:.3f}")
    assert real.own_share == pytest.approx(outcome.own / outcome.tokens, abs=0.05)
