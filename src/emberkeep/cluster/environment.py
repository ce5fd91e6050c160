"""Ray's environment: quiet, telling nobody, and closed to all who do not have the token of this data folder.

Ray reads it when it is imported, so that it has to be set before.

    <data_dir>/cluster.json     the address of the Ray on which the cluster of this folder runs
               cluster.token    what processes show each other that belong to it
               cluster.lock     held by the process that has started it
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from emberkeep.config.settings import Config
from emberkeep.errors import EmberkeepError
from emberkeep.files import private_folder, replace_file

_ADDRESS, _TOKEN, _LOCK = "cluster.json", "cluster.token", "cluster.lock"
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # a replica without GPUs sees none
}


def prepare_start(config: Config) -> None:
    """For a Ray that is about to be started, which asks for the token by itself. Raises OSError."""
    path = private_folder(config.data_dir) / _TOKEN
    replace_file(path, secrets.token_hex(32).encode())
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):  # of another Ray; they would open this one
        os.environ.pop(name, None)
    os.environ.update({**_QUIET, "RAY_AUTH_TOKEN_PATH": str(path)})


def prepare_join(config: Config) -> None:
    """For the Ray of this data folder; one that the configuration names has a token of its own, or none."""
    os.environ.update(_QUIET)
    if config.cluster_address is None and (config.data_dir / _TOKEN).exists():
        os.environ.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(config.data_dir / _TOKEN)})


@contextmanager
def alone_on(data_dir: Path) -> Iterator[None]:
    """No other process starts a cluster on this folder until the block ends. Raises EmberkeepError, OSError."""
    lock = os.open(private_folder(data_dir) / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise EmberkeepError(
            f"A cluster runs on {data_dir} already: `emberkeep cluster update` gives it other settings."
        ) from error
    finally:
        os.close(lock)


def note_address(data_dir: Path, address: str) -> None:
    replace_file(private_folder(data_dir) / _ADDRESS, json.dumps({"address": address}).encode())


def noted_address(data_dir: Path) -> str | None:
    try:
        return str(json.loads((data_dir / _ADDRESS).read_text())["address"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def forget_address(data_dir: Path) -> None:
    for name in (_ADDRESS, _TOKEN):
        (data_dir / name).unlink(missing_ok=True)
