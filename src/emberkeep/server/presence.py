"""Where servers run, for commands on the same machine that would change what a server has open; and who else could
reach them.

    <data_dir>/servers/<pid>.json    url and pid, never the key; locked for as long as its server runs

A lock dies with its owner: the file of a server that was killed is not believed.
"""

from __future__ import annotations

import fcntl
import ipaddress
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from emberkeep.config.settings import Config
from emberkeep.errors import ConfigError
from emberkeep.files import private_folder

log = logging.getLogger(__name__)

_FOLDER = "servers"


@contextmanager
def announce(data_dir: Path, url: str) -> Iterator[None]:
    """Let commands find this server until the block ends. If the file cannot be written, they do not find it."""
    path = data_dir / _FOLDER / f"{os.getpid()}.json"
    try:
        descriptor = _write(path, url)
    except OSError as error:
        log.warning("commands such as `emberkeep cache ls` will not find this server: %s", error)
        yield
        return
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def server_urls(data_dir: Path) -> list[str]:
    """The address of every server that runs on this folder, the latest first. It may no longer answer."""
    paths = sorted((data_dir / _FOLDER).glob("*.json"), key=_written_at, reverse=True)
    return [url for path in paths if (url := _url_in(path))]


def pid_of(data_dir: Path, url: str) -> int | None:
    """The process of the server at `url`; None where it is not known, or gone."""
    for path in (data_dir / _FOLDER).glob("*.json"):
        if _url_in(path) == url and path.stem.isdecimal():
            return int(path.stem)
    return None


def reachable_url(host: str, port: int) -> str:
    """How this machine itself reaches a server that listens on `host`."""
    with suppress(ValueError):
        address = ipaddress.ip_address(host)
        if address.is_unspecified:
            host = "127.0.0.1" if address.version == 4 else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _write(path: Path, url: str) -> int:
    """Returns the descriptor that holds the lock. The file appears locked and whole."""
    for left_behind in private_folder(path.parent).glob("*.json"):
        if _url_in(left_behind) is None:
            left_behind.unlink(missing_ok=True)
    temporary = path.with_suffix(".new")
    descriptor = os.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, json.dumps({"url": url, "pid": os.getpid()}).encode())
        temporary.rename(path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _url_in(path: Path) -> str | None:
    """None for the file of a server that is gone, and for what is no such file."""
    try:
        with path.open("rb") as file:
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return None
            return str(json.load(file)["url"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _written_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def check_exposure(config: Config) -> None:
    """Raises ConfigError when others could reach the server without a key."""
    if config.api_key is None and not is_loopback(config.host):
        raise ConfigError(
            f"Listening on {config.host} lets other machines in: set --api-key or EMBERKEEP_API_KEY."
        )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
