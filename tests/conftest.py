"""Fixtures that any test may use."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings
from platformdirs import user_cache_path

from emberkeep.config import DEFAULT_MODEL
from emberkeep.files import locked, private_folder
from emberkeep.models.library import ModelLibrary
from emberkeep.models.llama_library import ensure_llama_library
from emberkeep.models.pull import pull

_SLOW_FILES = (
    # slow to import already: torch, schemathesis, vendors' SDKs
    "test_hf_",
    "test_from_pretrained",
    "test_real_model",
    "test_both_engines",
    "test_server_schemathesis",
    "test_anthropic_provider",
    "test_gemini_provider",
    # seconds each, of what is seldom worked on: the inner loop is to take a minute
    "test_archive_faults",
    "test_backend_evicting_answers",
    "test_backend_evicting_branches",
    "test_backend_evicting_recall",
    "test_bench_",
    "test_cache_commands",
    "test_chat_saved",
    "test_cli_main",
    "test_configuration_docs",
    "test_doctor",
    "test_every_vendor",
    "test_hostile_state",
    "test_mcp_commands",
    "test_mcp_hostile",
    "test_mcp_http",
    "test_mcp_offers",
    "test_mcp_pins",
    "test_mcp_serving",
    "test_mcp_third_party",
    "test_hostile_tools",
    "test_json_tools",
    "test_memory_disk",
    "test_memory_retention",
    "test_opening",
    "test_packed_exports",
    "test_packing",
    "test_pull_",
    "test_server_cache",
    "test_server_lifecycle",
    "test_server_metrics",
    "test_server_tools_http",
    "test_server_warm",
    "test_snapshot_contract",
    "test_tools_commands",
)
"""Files of tests that begin like this are not in the inner loop."""

if (worker := os.environ.get("PYTEST_XDIST_WORKER")) and sys.platform == "linux":
    # A core for each worker, for its engines and for what it starts: compute threads of two workers that share
    # cores wait for each other by spinning, and take ten times as long.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})

# A busy machine is no failure.
settings.register_profile("emberkeep", deadline=None)
settings.load_profile("emberkeep")


def pytest_sessionstart(session: pytest.Session) -> None:
    """llama.cpp is fetched before there are workers, which would all do it."""
    if not hasattr(session.config, "workerinput"):
        ensure_llama_library(os.environ.get("EMBERKEEP_LLAMA_LIBRARY", "auto"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What is not going to run is not even imported: that takes half a minute."""
    chosen = config.getoption("-m")
    is_slow = collection_path.name.startswith(_SLOW_FILES)
    if is_slow and "not slow" in chosen:
        return True
    if chosen == "serial" and collection_path.is_file():
        return "pytest.mark.serial" not in collection_path.read_text() or None
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name.startswith(_SLOW_FILES):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def _signals_as_in_a_terminal() -> None:
    """Also under nohup: what tests start has to hear them. exec undoes handlers, so children get the default."""
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
