"""Which CPU this is, as far as it shapes what is computed."""

from __future__ import annotations

import platform
from pathlib import Path

_KIND = ("model name", "CPU implementer", "CPU part", "CPU variant")
_INSTRUCTIONS = ("flags", "Features")


def cpu_facts(*, instructions: bool = False) -> tuple[str, ...]:
    """What tells this machine's CPU from others; with `instructions` also which ones it has."""
    wanted = (*_KIND, *_INSTRUCTIONS) if instructions else _KIND
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    said = {line for line in lines if line.partition(":")[0].strip() in wanted}
    return (platform.machine(), platform.processor(), *sorted(said))
