"""The machine: its RAM, or that of the container, which some defaults are a share of; and its CPU."""

from __future__ import annotations

import os
import platform
from pathlib import Path

_IF_UNKNOWN = 8 << 30
_GROUP = Path("/sys/fs/cgroup")
_STATUS, _MARKS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_LOWER_PEAK = "5"
"""What Linux reads as: the peak is what is held now."""
_KIND = ("model name", "CPU implementer", "CPU part", "CPU variant")
_INSTRUCTIONS = ("flags", "Features")


def total_ram() -> int:
    """In bytes."""
    try:
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        machine = _IF_UNKNOWN
    limit = _number(_GROUP / "memory.max")
    return machine if limit is None else min(machine, limit)


def free_ram() -> int | None:
    """Bytes that can be had without swapping; None where the system does not say."""
    available = _value(Path("/proc/meminfo"), "MemAvailable:")
    if available is None:
        return None
    limit, used = _number(_GROUP / "memory.max"), _number(_GROUP / "memory.current")
    if limit is None or used is None:
        return available << 10
    # Files that were read count as used, and go as soon as their room is needed.
    droppable = _value(_GROUP / "memory.stat", "inactive_file") or 0
    return min(available << 10, max(limit - used + droppable, 0))


def resident_ram() -> int | None:
    """Bytes of RAM that this process holds now; None where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError, AttributeError):
        return None


def peak_ram() -> int | None:
    """The most bytes of RAM that this process held since this was last asked; where the system does not tell, what
    it holds now, or None."""
    peak = _value(_STATUS, "VmHWM:")
    try:
        _MARKS.write_text(_LOWER_PEAK)
    except OSError:
        peak = None
    return resident_ram() if peak is None else peak << 10


def cpu_facts(*, instructions: bool = False) -> tuple[str, ...]:
    """What tells this machine's CPU from others, as far as it shapes what is computed.

    With `instructions` also which ones it has.
    """
    wanted = (*_KIND, *_INSTRUCTIONS) if instructions else _KIND
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    found = {line for line in lines if line.partition(":")[0].strip() in wanted}
    return (platform.machine(), platform.processor(), *sorted(found))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _value(path: Path, name: str) -> int | None:
    """The number behind a name, in a file with a line for each."""
    try:
        lines = map(str.split, path.read_text().splitlines())
        return next((int(words[1]) for words in lines if words[:1] == [name]), None)
    except (OSError, ValueError, IndexError):
        return None
