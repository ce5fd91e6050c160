"""`emberkeep devices`: what can compute here, and what a model would be put on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from emberkeep.cli.main import app
from emberkeep.config.machine import total_ram
from emberkeep.engine.devices import Device
from emberkeep.engine.llamacpp import gpus as llama_gpus
from emberkeep.engine.llamacpp import shared_library

pytestmark = pytest.mark.slow

VULKAN = Device("Vulkan", "Vulkan0", "A card", 3 << 30, 4 << 30)
CUDA = Device("CUDA", "cuda:0", "A card", 3 << 30, 4 << 30)


def _devices(*flags: str) -> Result:
    result = CliRunner().invoke(app, ["devices", *flags])
    assert result.exit_code == 0, result.output
    return result


def _json(*flags: str) -> dict[str, Any]:
    return dict(json.loads(_devices("--json", *flags).stdout))


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that llama.cpp sees through Vulkan, and torch through CUDA."""
    from emberkeep.engine.hf import device

    gpu = llama_gpus.Gpu(1, VULKAN.name, VULKAN.description, 3 << 30, 4 << 30)
    monkeypatch.setattr(llama_gpus, "gpus", lambda: [gpu])
    monkeypatch.setattr(llama_gpus, "seen_devices", lambda: [VULKAN])
    monkeypatch.setattr(device, "seen_devices", lambda: [CUDA])
    monkeypatch.setattr(device, "choose_device", lambda name: "cpu" if name == "cpu" else "cuda:0")


def test_the_cpu_runs_everything_where_there_is_nothing_else(data_dir: Path) -> None:
    told = _json("--device", "cpu", "--gpu-layers", "0")
    assert told["used_for"] == {"gguf": ["cpu"], "hf": ["cpu"]}
    assert told["cpu"]["total"] == total_ram()
    assert told["cpu"]["cores"] >= 1
    row = _devices("--device", "cpu", "--gpu-layers", "0").stdout.splitlines()[1]
    assert row.startswith("cpu ")
    assert row.rstrip().endswith("GGUF, Hugging Face")


@pytest.mark.usefixtures("cards")
def test_every_engine_tells_what_it_sees_and_what_it_would_use(data_dir: Path) -> None:
    told = _json()
    assert told["used_for"] == {"gguf": ["Vulkan0"], "hf": ["cuda:0"]}
    first, second = told["devices"]
    assert (first["engine"], first["backend"], first["total"]) == ("llamacpp", "Vulkan", 4 << 30)
    assert (second["engine"], second["name"], second["free"]) == ("hf", "cuda:0", 3 << 30)
    rows = [line.split() for line in _devices().stdout.splitlines()]
    assert [row[0] for row in rows[1:]] == ["cpu", "Vulkan0", "cuda:0"]
    assert rows[2][-1] == "GGUF"


@pytest.mark.usefixtures("cards")
def test_the_settings_decide_what_would_be_used(data_dir: Path) -> None:
    assert _json("--gpu-layers", "0")["used_for"] == {"gguf": ["cpu"], "hf": ["cuda:0"]}
    assert _json("--engine", "hf", "--device", "cpu")["used_for"] == {"gguf": ["cpu"], "hf": ["cpu"]}
    assert _json("--engine", "llamacpp")["used_for"] == {"gguf": ["Vulkan0"], "hf": []}


def test_a_device_that_is_not_here_is_told_and_the_rest_too(data_dir: Path) -> None:
    told = _json("--device", "cuda:77", "--gpu-layers", "0")
    assert told["used_for"] == {"gguf": ["cpu"], "hf": []}
    assert any("There is no device cuda:77 here" in note for note in told["notes"])


def test_neither_torch_nor_llamacpp_has_to_be_here(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emberkeep.engine.devices.find_spec", lambda name: None)
    monkeypatch.setattr(shared_library, "is_installed", lambda choice: False)
    told = _json()
    assert told["used_for"] == {"gguf": [], "hf": []}
    assert [note.partition(":")[0] for note in told["notes"]] == [
        "llama.cpp is not here yet",
        "The Hugging Face engine is not installed",
    ]


def test_a_torch_or_a_library_that_does_not_load_is_a_sentence(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "emberkeep.engine.hf.device", None)
    monkeypatch.setenv("EMBERKEEP_LLAMA_LIBRARY", str(tmp_path / "none.so"))
    shown = _devices().stdout
    assert "There is no library at" in shown
    assert "torch cannot be loaded" in shown


def test_no_model_is_needed_and_nothing_is_left_behind(data_dir: Path) -> None:
    _devices("--device", "cpu")
    assert not data_dir.exists()
