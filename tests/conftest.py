"""Fixtures that any test may use."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from platformdirs import user_cache_path

from emberkeep.config.settings import DEFAULT_MODEL
from emberkeep.files import locked, private_folder
from emberkeep.logs import LINES
from emberkeep.models.library import ModelLibrary
from emberkeep.models.pull import pull
from emberkeep.models.registries import ensure_llama_library
from helpers import slowing
from helpers.chance import learn_characters, load_profile

if TYPE_CHECKING:
    from emberkeep.memory.memory import Memory

pytest_plugins = ["helpers.parts", "helpers.speed_limit", "pytester"]

_IN_RAM = Path("/dev/shm")
_ROOMY = 4 << 30

if (worker := os.environ.get("PYTEST_XDIST_WORKER")) and sys.platform == "linux":
    # A core for each worker, for its engines and for what it starts: compute threads of two workers that share
    # cores wait for each other by spinning, and take ten times as long.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})

_TORTURE = load_profile()
"""How to repeat this run, if it is one of its own."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object:
    """Tests that are coroutines run in an event loop of their own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


def pytest_configure(config: pytest.Config) -> None:
    """Fast tests wait for no disk, where there is one in RAM: a fifth of their time. All others use a real one."""
    if slowing.MOST_S:
        slowing.slow_down()
    is_worker = hasattr(config, "workerinput")
    if is_worker or config.getoption("--part") != "fast" or os.environ.get("TMPDIR"):
        return
    if _IN_RAM.is_dir() and os.access(_IN_RAM, os.W_OK) and shutil.disk_usage(_IN_RAM).free > _ROOMY:
        os.environ["TMPDIR"] = str(_IN_RAM)  # of the workers too
        tempfile.tempdir = None


def pytest_sessionstart(session: pytest.Session) -> None:
    """What all workers would do is done before there are any: llama.cpp is fetched."""
    if not hasattr(session.config, "workerinput"):
        ensure_llama_library(os.environ.get("EMBERKEEP_LLAMA_LIBRARY", "auto"))
        learn_characters()
        if _TORTURE:
            session.config.get_terminal_writer().line(f"To repeat this run: {_TORTURE}")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imported modules and collected tests stay until the end: the collector need not look through them.

    It would take a tenth of the time. What tests leave behind is collected as ever.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000)
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _signals_as_in_a_terminal() -> None:
    """Also under nohup: what tests start has to get them. exec undoes handlers, so children get the default."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else lambda *_: None)


@pytest.fixture(scope="session")
def model_cache() -> Path:
    """A folder of models that stays between runs; usable as `<data_dir>/models`."""
    return user_cache_path("emberkeep-tests") / "models"


@pytest.fixture(scope="session")
def smollm2(model_cache: Path) -> Path:
    """The default model's file, pulled by Emberkeep itself the first time. For tests marked slow."""
    with locked(private_folder(model_cache.parent) / "pull.lock"):  # workers that come second find it there
        return pull(DEFAULT_MODEL, ModelLibrary(model_cache)).path


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Memory]:
    from emberkeep.memory.memory import Memory

    opened = Memory(tmp_path / "memory.sqlite3", limit_bytes=1 << 40)
    yield opened
    opened.close()


@pytest.fixture
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a test writes very many files, and cuts no power."""
    monkeypatch.setattr("os.fsync", lambda _: None)


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """A command that ran here has begun to log for its whole process."""
    yield
    root = logging.getLogger()
    if LINES in root.handlers:
        root.removeHandler(LINES)
        root.setLevel(logging.WARNING)
        logging.getLogger("emberkeep").setLevel(logging.NOTSET)
