"""Writing a model's weights in another format.

As a program: `python -m emberkeep.engine.llamacpp.quantize IN OUT FORMAT`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

from emberkeep.engine.llamacpp.c_api import defaults
from emberkeep.engine.llamacpp.shared_library import llama, start_backend, take_errors
from emberkeep.errors import EngineError

_FILE_TYPES = {"F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9}
"""llama.cpp's numbers for files whose weights are mostly of one format."""


def requantize(source: Path, target: Path, to: str) -> None:
    """Write `source` with its weights as `to` (`Q8_0`, ...) to `target`; equal inputs give equal bytes.

    Blocks on all cores. Raises EngineError; what is at `target` is then worthless.
    """
    start_backend()
    if not hasattr(llama(), "llama_model_quantize"):
        raise EngineError("This build of llama.cpp cannot write weights in another format; keep them as they are.")
    parameters = defaults(llama().llama_model_quantize_default_params)
    parameters.ftype = _file_type(to)
    # Without this only 16 and 32 bit sources are taken.
    parameters.allow_requantize = True
    take_errors()
    status = llama().llama_model_quantize(os.fsencode(source), os.fsencode(target), ctypes.byref(parameters))
    if status != 0:
        reason = take_errors() or f"status {status}"
        raise EngineError(f"llama.cpp could not write {source.name} as {to} ({reason}); keep it as it is.")


def _file_type(name: str) -> int:
    if name not in _FILE_TYPES:
        raise EngineError(f"There is no weight format {name} here; use {' or '.join(_FILE_TYPES)}.")
    return _FILE_TYPES[name]


def main() -> None:
    # C code does not return to Python's handler before it is done: Ctrl-C ends the process right away.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    source, target, to = sys.argv[1:]
    try:
        requantize(Path(source), Path(target), to)
    except EngineError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
