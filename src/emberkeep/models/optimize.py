"""Requantising weights whose format is slow on CPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from emberkeep.engine.llamacpp.shared_library import AUTO
from emberkeep.errors import EngineError
from emberkeep.models.llama_library import usable_library
from emberkeep.signals import with_default_signals

SLOW_FORMATS = frozenset({"Q4_1", "Q5_0", "Q5_1"})
"""llama.cpp repacks Q4_0, Q8_0 and the K formats for the CPU's dot-product instructions, but not these."""
FAST_FORMAT = "Q8_0"
"""Eight bits lose next to nothing of a source that has four or five."""


def requantize_apart(source: Path, target: Path) -> None:
    """Write `source` as `FAST_FORMAT` to `target`. Blocks. Raises EngineError, then `target` is not there.

    In a process of its own: C code cannot be interrupted, and a crash in it must not end the caller.
    """
    library = usable_library(os.environ.get("EMBERKEEP_LLAMA_LIBRARY", AUTO))
    program = [
        sys.executable,
        "-P",
        "-m",
        "emberkeep.engine.llamacpp.quantize",
        str(source),
        str(target),
        FAST_FORMAT,
    ]
    try:
        done = subprocess.run(
            with_default_signals(program),
            env={**os.environ, "EMBERKEEP_LLAMA_LIBRARY": str(library)},
            capture_output=True,
            text=True,
            check=False,
        )
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    if done.returncode != 0:
        target.unlink(missing_ok=True)
        lines = done.stderr.strip().splitlines()
        raise EngineError(lines[-1] if lines else f"The quantiser ended with status {done.returncode}.")
