"""One real server with the real small model, for all tests of this folder: `make test` runs them one by one.

Each test asks as a user of its own, so that none finds what another one left behind, in any order.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from helpers.server_process import ServerLives, ServerProcess, serve

SETTINGS = ("--ctx", "2048", "--parallel", "2", "--threads", "1")
"""One thread: two of them wait for each other by spinning where something else wants the cores."""


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In which the server keeps everything, over all its lives."""
    return tmp_path_factory.mktemp("smoke")


@pytest.fixture(scope="session")
def lives(smollm2: Path, data_dir: Path) -> Iterator[ServerLives]:
    """For tests that end the server: whoever needs it next starts it again."""
    with ServerLives(lambda: serve(smollm2, data_dir, *SETTINGS)) as lives:
        yield lives


@pytest.fixture
def server(lives: ServerLives) -> ServerProcess:
    """For tests that leave it running."""
    return lives.now


@pytest.fixture
def me(request: pytest.FixtureRequest) -> str:
    """A user whom no other test is."""
    return str(request.node.name)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What the server logged stands under a failure."""
    report = yield
    lives = getattr(item, "funcargs", {}).get("lives")
    if report.failed and lives is not None:
        report.sections.append(("Log of the server", lives.log))
    return report
