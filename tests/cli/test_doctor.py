from __future__ import annotations

import platform
import socket
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from emberkeep.cli import doctor
from emberkeep.cli.doctor import CHECKS, Finding, Level, examine
from emberkeep.cli.main import app
from emberkeep.config.kinds import LoraFile
from emberkeep.config.machine import total_ram
from emberkeep.config.settings import Config
from emberkeep.config.tables import McpServer
from emberkeep.engine.devices import Device
from emberkeep.engine.llamacpp import gpus as llama_gpus
from emberkeep.engine.llamacpp import prebuilt
from emberkeep.types.models import RemoteModel
from helpers import tiny_gguf

pytestmark = pytest.mark.slow


def findings(tmp_path: Path, **settings: object) -> dict[str, Finding]:
    settings = {"data_dir": tmp_path / "data", "port": 0, "disk_budget": 1, **settings}
    return dict(examine(Config(**settings)))  # type: ignore[arg-type]


def test_a_fresh_machine_is_fine_but_for_the_model(tmp_path: Path) -> None:
    found = findings(tmp_path)
    assert {name for name, finding in found.items() if finding.level is not Level.OK} <= {"model", "cpu"}
    assert found["model"].level is Level.WARN
    assert "`emberkeep serve` pulls it" in found["model"].text


@pytest.mark.parametrize(
    ("settings", "check", "level", "words"),
    [
        ({"model": "nothing-like-it"}, "model", Level.FAIL, "nothing-like-it"),
        ({"data_dir": Path(__file__) / "data"}, "data dir", Level.FAIL, "choose another --data-dir"),
        ({"disk_budget": 1 << 60}, "disk", Level.WARN, "make room or lower disk_budget"),
        ({"ram_budget": total_ram()}, "memory", Level.WARN, "lower ram_budget"),
        ({"host": "0.0.0.0"}, "access", Level.FAIL, "--api-key"),
        ({"host": "0.0.0.0", "api_key": "canary"}, "access", Level.OK, "an API key is set"),
        ({"llama_library": __file__}, "llama.cpp", Level.FAIL, "is not a llama.cpp library"),
        ({"device": "cpu"}, "hf engine", Level.OK, ", device cpu"),
        ({"backend": "unknown"}, "answers", Level.FAIL, "unknown"),
        ({"mcp": (McpServer("lost", ("no-such-program",)),)}, "mcp", Level.WARN, "no program no-such-program"),
    ],
)
def test_what_settings_lead_to_is_told(
    tmp_path: Path, settings: dict[str, object], check: str, level: Level, words: str
) -> None:
    found = findings(tmp_path, **settings)[check]
    assert found.level is level
    assert words in found.text


def test_adapters_are_checked_against_the_model(tmp_path: Path) -> None:
    model, lora = tiny_gguf.dense(tmp_path / "m.gguf"), tiny_gguf.lora(tmp_path / "lora.gguf")
    right = findings(tmp_path, model=str(model), lora=(LoraFile(lora, 0.5),))["model"]
    assert (right.level, right.text.endswith(f"with {lora}:0.5")) == (Level.OK, True)
    wrong = findings(tmp_path, model=str(model), lora=(LoraFile(model),))["model"]
    assert (wrong.level, "m.gguf is no LoRA adapter" in wrong.text) == (Level.FAIL, True)


def test_gpus_are_told_or_that_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "the CPU computes" in findings(tmp_path)["gpu"].text
    monkeypatch.setattr(llama_gpus, "seen_devices", lambda: [Device("CUDA", "CUDA0", "A card", 3 << 30, 4 << 30)])
    assert findings(tmp_path)["gpu"].text == "CUDA0 (A card), 3.0 GiB free"


def test_an_amd_gpu_that_rocm_has_to_be_told_about_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "amd_advice", lambda variables: "set it so.")
    found = findings(tmp_path)["gpu"]
    assert (found.level, found.text.endswith("; set it so.")) == (Level.WARN, True)


@pytest.mark.parametrize(("is_asked", "level"), [(False, Level.OK), (True, Level.WARN)])
def test_a_limit_to_locking_is_told_with_the_ways_to_raise_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_asked: bool, level: Level
) -> None:
    monkeypatch.setattr(doctor, "lockable", lambda: 8 << 20)
    found = findings(tmp_path, mlock=is_asked)["mlock"]
    assert (found.level, found.text.partition(";")[0]) == (level, "8.0 MiB of memory may be locked")
    for way in ("ulimit -l", "/etc/security/limits.conf", "LimitMEMLOCK", "--ulimit memlock"):
        assert way in found.text
    monkeypatch.setattr(doctor, "lockable", lambda: None)
    assert findings(tmp_path, mlock=is_asked)["mlock"] == Finding(Level.OK, "memory may be locked without limit")


def test_examining_leaves_nothing_behind(tmp_path: Path) -> None:
    assert findings(tmp_path)["data dir"].level is Level.OK
    assert list(tmp_path.iterdir()) == []


def test_a_port_in_use_is_a_warning(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = findings(tmp_path, port=taken.getsockname()[1])["port"]
    assert found.level is Level.WARN
    assert "--port" in found.text


def test_a_library_that_is_not_here_yet_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emberkeep.engine.llamacpp.shared_library.is_installed", lambda choice: False)
    found = findings(tmp_path)["llama.cpp"]
    assert found.level is Level.WARN
    assert "`emberkeep serve` fetches it" in found.text


def test_why_no_library_for_gpus_is_used_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prebuilt, "cuda_driver", lambda: 12_020)
    monkeypatch.setattr(prebuilt, "has_vulkan", lambda: True)
    monkeypatch.setattr(prebuilt, "_X64", (sys.platform, platform.machine()))
    found = findings(tmp_path)["llama.cpp"]
    assert found.level is Level.OK
    assert "CUDA here: the NVIDIA driver knows CUDA 12.2, and 12.4 is needed" in found.text
    assert "llama.cpp for vulkan would suit this machine: `make run GPU=vulkan` fetches it" in found.text


def test_a_machine_without_the_hugging_face_engine_is_fine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emberkeep.engine.devices.find_spec", lambda name: None)
    found = findings(tmp_path)["hf engine"]
    assert found.level is Level.OK
    assert "pip install 'emberkeep[hf]'" in found.text


def test_a_hugging_face_engine_that_does_not_load_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "emberkeep.engine.hf.device", None)
    found = findings(tmp_path)["hf engine"]
    assert found.level is Level.WARN
    assert "torch cannot be loaded" in found.text


def test_only_a_failure_gives_status_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBERKEEP_LLAMA_LIBRARY", str(tmp_path / "nowhere"))
    result = CliRunner().invoke(app, ["doctor", "--data-dir", str(tmp_path)])
    assert result.exit_code == 1
    assert "fail  llama.cpp " in result.output
    monkeypatch.setitem(CHECKS, "llama.cpp", lambda config: Finding(Level.WARN, "so"))
    result = CliRunner().invoke(app, ["doctor", "--data-dir", str(tmp_path)])
    assert result.exit_code == 0
    assert "warn  llama.cpp so" in result.output


def test_who_answers_and_whose_key_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    far = RemoteModel("far", "openai", api_key_env="NO_SUCH_KEY")
    near = RemoteModel("near", "ollama")
    found = findings(tmp_path, backends=(far, near))["answers"]
    assert found.level is Level.WARN
    assert found.text.startswith("local, then near; the key of far is not set")


def test_it_is_said_which_variable_a_key_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XAI_API_KEY", raising=False)
    monkeypatch.setenv("GROK_API_KEY", "secret")
    found = findings(tmp_path, backends=(RemoteModel("grk", "grok"),))["answers"]
    assert found.text.endswith("; keys from GROK_API_KEY")


def test_what_can_be_measured_is_measured_and_nothing_stays_in_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "_EACH_S", 60)  # the machine may be busy
    for speed in (doctor.measured(doctor.copy_speed), doctor.measured(partial(doctor.disk_speed, tmp_path))):
        assert speed is not None and speed > 0
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there_and_one_that_hangs_have_no_speed(tmp_path, monkeypatch):
    assert doctor.measured(partial(doctor.disk_speed, tmp_path / "none")) is None
    never = threading.Event()
    monkeypatch.setattr(doctor, "_EACH_S", 0.01)
    assert doctor.measured(lambda: float(never.wait())) is None
    never.set()
