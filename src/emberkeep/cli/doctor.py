"""`emberkeep doctor`: is everything in place, and if not, what to do about it."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from enum import StrEnum
from functools import partial
from importlib import metadata
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import typer

from emberkeep import large_pages
from emberkeep.cli.commands import one_command, with_settings
from emberkeep.cli.console import console
from emberkeep.cli.devices import describe, describe_cpu, llamacpp_view, torch_view
from emberkeep.config.kinds import readable_size
from emberkeep.config.machine import free_ram, total_ram
from emberkeep.config.settings import DEFAULT_MODEL, Config, memory_file
from emberkeep.config.tables import McpServer
from emberkeep.engine.devices import amd_advice, has_hf, hf_versions, read_cpu
from emberkeep.engine.locked_memory import lockable
from emberkeep.errors import ConfigError, EngineError, ModelError, ModelNotFound
from emberkeep.files import nearest_folder
from emberkeep.sched.engine_thread import promised
from emberkeep.server.presence import check_exposure
from emberkeep.values import dataclass

if TYPE_CHECKING:
    from emberkeep.engine.llamacpp.shared_library import LibraryFile
    from emberkeep.models.library import ModelFile

PACKAGES = (
    "numpy",
    "apsw",
    "llguidance",
    "jinja2",
    "starlette",
    "uvicorn",
    "huggingface-hub",
)


_RAISE_MEMLOCK = (
    "more with `ulimit -l unlimited` where that is allowed, a line `* - memlock unlimited` in "
    "/etc/security/limits.conf, LimitMEMLOCK=infinity in a systemd unit, or `--ulimit memlock=-1` of a container"
)


class Level(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


_STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    text: str


@with_settings("data_dir", "config")
def doctor(config: Config) -> None:
    """Check this machine and say what to do about what is missing. Exit status 1 only for a failure."""
    from rich.text import Text

    out = console()
    failed = False
    for name, finding in examine(config):
        failed |= finding.level is Level.FAIL
        label = Text(f"{finding.level:<5}", style=_STYLES[finding.level])
        out.print(label, f"{name:<9} {finding.text}", soft_wrap=True, markup=False)
    if failed:
        raise typer.Exit(1)


def examine(config: Config) -> Iterator[tuple[str, Finding]]:
    """Every check with its finding, one after the other."""
    for name, check in CHECKS.items():
        yield name, check(config)


def _pages(config: Config) -> Finding:
    words = {
        "always": "large ones for every program",
        "madvise": "large ones for the model and its state",
        "never": "small ones: `echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`, as root, makes "
        "answers about a tenth faster on a CPU",
    }
    return Finding(Level.OK, words.get(large_pages.mode() or "", "of the size that this system gives"))


def _llama_cpp(config: Config) -> Finding:
    """Which one is used, tried out in a process of its own first; also others that do not run here, and why none
    for GPUs is used."""
    from emberkeep.engine.llamacpp.shared_library import is_missing, system_info, version
    from emberkeep.engine.llamacpp.trial import choose_library, find_failures

    if is_missing(config.llama_library):
        return Finding(Level.WARN, "llama.cpp is not here yet: `emberkeep serve` fetches it.")
    try:
        library = choose_library(config.llama_library)
        text = f"{version()} ({library}): {' '.join(system_info().split())}"
    except EngineError as error:
        return Finding(Level.FAIL, str(error))
    broken = [str(failure) for failure in find_failures(config.llama_library)]
    level = Level.WARN if broken else Level.OK
    return Finding(level, "; ".join([text, *broken, *_other_builds(library)]))


def _other_builds(used: LibraryFile) -> Iterator[str]:
    """Why those for GPUs are not used that did not fail."""
    from emberkeep.engine.llamacpp.prebuilt import GPU_BUILDS, READY_MADE, build_for

    for kind in GPU_BUILDS:
        try:
            is_here = build_for(kind).library is not None
        except EngineError as error:
            yield str(error)
            continue
        if used.kind == READY_MADE and not is_here:
            yield f"llama.cpp for {kind} would suit this machine: `make run GPU={kind}` fetches it."
        elif is_here and used.kind not in (kind, READY_MADE):
            yield f"llama.cpp for {kind} is here, too, and {used.kind} comes first."


def _gpu(config: Config) -> Finding:
    """As llama.cpp sees them; the row of the Hugging Face engine tells its own device."""
    view = llamacpp_view(config)
    if view.problem:
        when = "before llama.cpp is here" if view.is_missing else "while llama.cpp cannot be used"
        text = f"not known {when}"
    else:
        text = "; ".join(map(describe, view.devices)) or "llama.cpp finds none that it can use: the CPU computes"
    advice = amd_advice(os.environ)
    return Finding(Level.WARN, f"{text}; {advice}") if advice else Finding(Level.OK, text)


def _hf_engine(config: Config) -> Finding:
    view = torch_view(config)
    if view.problem:
        return Finding(Level.OK if view.is_missing else Level.WARN, view.problem)
    known = {device.name: describe(device) for device in view.devices}
    (name,) = view.used
    return Finding(Level.OK, f"{hf_versions()}, device {known.get(name, name)}")


def _memory(config: Config) -> Finding:
    total, budget, free = total_ram(), config.ram_budget, free_ram()
    now = "" if free is None else f" ({readable_size(free)} free)"
    text = f"{readable_size(total)}{now}, of which {readable_size(budget)} may hold stored prompt state"
    if budget > total // 2:
        return Finding(Level.WARN, f"{text}: lower ram_budget, the model needs room as well.")
    return Finding(Level.OK, text)


def _archive(config: Config) -> Finding:
    """Where the memory is; nothing is made or opened."""
    if not config.memory:
        return Finding(Level.OK, "off: nothing is archived")
    path = memory_file(config)
    if reason := "it is a folder" if path.is_dir() else _why_unwritable(path.parent):
        return Finding(Level.FAIL, f"{path} cannot be written ({reason}): choose another data_dir.")
    return Finding(Level.OK, f"in {path}" if path.exists() else f"will be in {path}")


def _disk(config: Config) -> Finding:
    free = shutil.disk_usage(nearest_folder(config.data_dir)).free
    text = f"{readable_size(free)} free, disk_budget is {readable_size(config.disk_budget)}"
    if free < config.disk_budget:
        return Finding(Level.WARN, f"{text}: make room or lower disk_budget.")
    return Finding(Level.OK, text)


def _speed(config: Config) -> Finding:

    speeds = {
        "RAM is copied at": measured(copy_speed),
        "the data folder read at": measured(partial(disk_speed, nearest_folder(config.data_dir))),
    }
    if (device := _device_of_torch(config)) is not None:
        from emberkeep.engine.hf.device import DeviceLimits

        limits = DeviceLimits(device)
        limits.settle()  # the first use of a device takes longer than all that follow
        speeds[f"RAM goes to {device} at"] = measured(lambda: limits.load_speed(64 << 20))
    known = [f"{what} {readable_size(speed)}/s" for what, speed in speeds.items() if speed is not None]
    return Finding(Level.OK, ", ".join(known) or "not known: nothing could be measured in time")


def _device_of_torch(config: Config) -> str | None:
    """A GPU that the hf engine would use; None where there is none, or another check tells why."""
    if not has_hf():
        return None
    try:
        from emberkeep.engine.hf.device import choose_device

        chosen = choose_device(config.device)
    except (EngineError, ImportError, OSError, RuntimeError):
        return None
    return None if chosen.type == "cpu" else str(chosen)


def _data_dir(config: Config) -> Finding:
    if reason := _why_unwritable(config.data_dir):
        return Finding(Level.FAIL, f"{config.data_dir} cannot be written ({reason}): choose another --data-dir.")
    return Finding(Level.OK, str(config.data_dir))


def _why_unwritable(folder: Path) -> str:
    """Empty where it can be written. Nothing is left behind: a folder that is not there yet is not made here."""
    try:
        with tempfile.TemporaryFile(dir=nearest_folder(folder)):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _model(config: Config) -> Finding:
    from emberkeep.models.library import ModelLibrary

    try:
        library = ModelLibrary(config.data_dir / "models")
        found = library.resolve(config.local_model)
        adapters = _adapters(config, found)
        draft = f", drafts by {library.resolve(config.draft_model).id}" if config.draft_model else ""
    except ModelNotFound as error:
        if config.local_model == DEFAULT_MODEL and not config.lora and not config.draft_model:
            return Finding(Level.WARN, f"{DEFAULT_MODEL} is not here yet: `emberkeep serve` pulls it.")
        return Finding(Level.FAIL, str(error))
    except ModelError as error:
        return Finding(Level.FAIL, str(error))
    return Finding(Level.OK, f"{found.id} ({found.path}){adapters}{draft}")


def _adapters(config: Config, model: ModelFile) -> str:
    """What is added to the model. Raises ModelError where it does not fit."""
    from emberkeep.models.checks import check_adapter
    from emberkeep.models.gguf import read_header

    for lora in config.lora:
        check_adapter(lora.path, read_header(model.path))
    return f" with {', '.join(map(str, config.lora))}" if config.lora else ""


def _port(config: Config) -> Finding:
    address = f"{config.host}:{config.port}"
    try:
        family, kind, proto, _, target = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
    except OSError as error:
        reason = error.strerror or error
        return Finding(Level.WARN, f"{address} cannot be used now ({reason}): is a server running? else --port.")
    return Finding(Level.OK, f"{address} is free")


def _exposure(config: Config) -> Finding:
    try:
        check_exposure(config)
    except ConfigError as error:
        return Finding(Level.FAIL, str(error))
    return Finding(Level.OK, "an API key is set" if config.api_key else "only this machine can connect")


def _shared_server(config: Config) -> Finding:
    """Whether the server answers in which hosts share their state, and how it makes room."""
    from emberkeep.cli.cache_stores import shared_server_report

    if config.remote is None:
        return Finding(Level.OK, 'none: `remote = "valkey://HOST:6379"` lets hosts share what they computed')
    try:
        text, advice = shared_server_report(config)
    except ConfigError as error:
        return Finding(Level.FAIL, str(error))
    return Finding(Level.WARN if advice else Level.OK, "; ".join([text, *advice]))


def _mlock(config: Config) -> Finding:
    """Whether `--mlock` would be allowed to lock weights, and how to be allowed more."""
    limit = lockable()
    if limit is None:
        return Finding(Level.OK, "memory may be locked without limit")
    text = f"{readable_size(limit)} of memory may be locked; {_RAISE_MEMLOCK}"
    return Finding(Level.WARN if config.mlock else Level.OK, text)


def _packages(config: Config) -> Finding:
    try:
        return Finding(Level.OK, ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES))
    except metadata.PackageNotFoundError as error:
        return Finding(Level.FAIL, f"{error.name} is missing: `pip install {error.name}`.")


def _backends(config: Config) -> Finding:
    """Who answers, in which order; no request is sent."""
    from emberkeep.backend.remote.vendors import has_key, with_defaults
    from emberkeep.models.remotes import Remotes
    from emberkeep.runtime.served_models import backend_names

    try:
        names, remotes = backend_names(config), Remotes(config).list()
        keyless = [remote.name for remote in remotes if not has_key(remote, os.environ)]
        usual = [with_defaults(remote, os.environ) for remote in remotes if remote.name not in keyless]
    except ConfigError as error:
        return Finding(Level.FAIL, str(error))
    keys = dict.fromkeys(remote.api_key_env for remote in usual if remote.api_key_env)
    text = ", then ".join(names) + (f"; keys from {', '.join(keys)}" if keys else "")
    if keyless:
        return Finding(Level.WARN, f"{text}; the key of {', '.join(keyless)} is not set: `emberkeep api list`.")
    return Finding(Level.OK, text)


def _mcp(config: Config) -> Finding:
    """Programs that are not there; nothing is started."""
    if not config.mcp:
        return Finding(Level.OK, "no MCP servers: [mcp.servers.NAME] in the configuration adds one")
    lost = [server for server in config.mcp if server.command and not _is_there(server)]
    if lost:
        return Finding(Level.WARN, f"{lost[0].name} cannot start: there is no program {lost[0].command[0]}.")
    return Finding(Level.OK, ", ".join(server.name for server in config.mcp))


def _is_there(server: McpServer) -> bool:
    """Its program is found from where it is started."""
    program = server.command[0]
    return shutil.which(str((server.cwd or Path()) / program) if "/" in program else program) is not None


CHECKS: dict[str, Callable[[Config], Finding]] = {
    "python": lambda _: Finding(Level.OK, f"{platform.python_version()} ({platform.python_implementation()})"),
    "platform": lambda _: Finding(Level.OK, platform.platform()),
    "packages": _packages,
    "llama.cpp": _llama_cpp,
    "cpu": lambda _: Finding(Level.OK, describe_cpu(read_cpu())),
    "gpu": _gpu,
    "hf engine": _hf_engine,
    "memory": _memory,
    "pages": _pages,
    "data dir": _data_dir,
    "archive": _archive,
    "disk": _disk,
    "speed": _speed,
    "mlock": _mlock,
    "model": _model,
    "answers": _backends,
    "mcp": _mcp,
    "shared": _shared_server,
    "port": _port,
    "access": _exposure,
}

# ── how fast this machine moves bytes: per second, and None where that cannot be measured within a moment ──

_EACH_S = 0.6
_COPIED = 32 << 20
_READ = 8 << 20


def measured(measure: Callable[[], float]) -> float | None:
    """Never raises."""
    future, run = promised(measure)
    threading.Thread(target=run, name="speed", daemon=True).start()
    try:
        return future.result(_EACH_S)
    except Exception:
        return None


def copy_speed() -> float:
    """Copies within RAM, by one thread."""
    source, target = memoryview(b"1" * _COPIED), memoryview(bytearray(_COPIED))
    target[:] = source  # the first one also brings the pages in
    begin = perf_counter()
    target[:] = source
    return _COPIED / (perf_counter() - begin)


def disk_speed(folder: Path) -> float:
    """Writes and reads in `folder`, where nothing stays. Raises OSError."""
    # A file without a name: it is gone whatever happens.
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        file.write(os.urandom(_READ))
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            # Else it would be read from the system's cache.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        begin = perf_counter()
        length = len(file.read(_READ))
        return length / (perf_counter() - begin)


app = one_command(doctor)
