"""Where and with what a benchmark ran."""

from __future__ import annotations

import os
import platform
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from emberkeep import __version__
from emberkeep.bench.disk import folder_bytes
from emberkeep.config.machine import total_ram
from emberkeep.engine.llamacpp.shared_library import library_in_use, system_info, version
from emberkeep.errors import EngineError
from emberkeep.models.parts import part_files
from emberkeep.types.request import Json

_PACKAGES = ("numpy", "starlette", "uvicorn", "apsw")


def surroundings(model: Path | None, folder: Path) -> dict[str, Json]:
    return {
        "emberkeep": __version__,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv[1:],
        "model": {"file": model.name, "bytes": _size(model)} if model else None,
        "machine": {
            "platform": platform.platform(),
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "ram_bytes": total_ram(),
            "filesystem": _filesystem(folder),
            "load_average": list(os.getloadavg()),
            "llama.cpp": _llama(),
        },
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in _PACKAGES},
        },
    }


def _llama() -> str:
    """Benchmarks of the Hugging Face engine do without it."""
    try:
        return f"{version()} ({library_in_use().kind}): {' '.join(system_info().split())}"
    except EngineError:
        return "not installed"


def _size(model: Path) -> int:
    return folder_bytes(model) if model.is_dir() else sum(file.stat().st_size for file in part_files(model))


def _cpu() -> str:
    lines = _lines(Path("/proc/cpuinfo"))
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _filesystem(folder: Path) -> str:
    """The type of the file system that holds `folder`: on `tmpfs` nothing ever comes from a disk."""
    mounts = [line.split()[1:3] for line in _lines(Path("/proc/mounts"))]
    holding = [(point, kind) for point, kind in mounts if folder.resolve().is_relative_to(point)]
    return max(holding, key=lambda mount: len(mount[0]), default=("", "unknown"))[1]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
