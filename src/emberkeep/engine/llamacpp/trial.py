"""Whether a llama.cpp library can run on this CPU, found out in a process that may die of it."""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from emberkeep.engine.llamacpp.prebuilt import cache_folder
from emberkeep.engine.llamacpp.shared_library import NATIVE, LibraryFile, candidates, cpu, digest, use
from emberkeep.errors import EngineError
from emberkeep.files import private_folder, replace_file
from emberkeep.signals import with_default_signals

log = logging.getLogger("emberkeep.engine")

_SHAPES = (1, 2, 8, 33, 64, 128, 512)
"""Rows of a batch; kernels differ by how many there are."""
_TIMEOUT_S = 120.0
_MEND = {
    NATIVE: "`make native` compiles it for this one, and without it (`pip uninstall llama-cpp-python`) "
    "the ready-made one is used",
}
_MEND_OTHERS = "`make native` or `pip install 'emberkeep[native]'` compiles one that does"


def choose(choice: str, verdicts: Path | None = None) -> LibraryFile:
    """Let this process run on the first library of `choice` that works here, and say which.

    Each is tried once per version and kind of CPU, in a child process: blocks for a second then. The folder
    `verdicts` remembers it. Raises EngineError with what to do when none works.
    """
    failures = []
    for library in candidates(choice):
        failure = _failure(library, verdicts)
        if failure is None:
            use(library)
            return library
        log.warning("%s", failure)
        failures.append(failure)
    raise failures[0]


def failing(choice: str, verdicts: Path | None = None) -> list[EngineError]:
    """What is wrong with those libraries of `choice` that do not run here. Blocks as `choose`."""
    return [failure for library in candidates(choice) if (failure := _failure(library, verdicts))]


def _failure(library: LibraryFile, verdicts: Path | None) -> EngineError | None:
    try:
        prove(library, verdicts or cache_folder() / "trials")
    except EngineError as error:
        return error
    return None


def prove(library: LibraryFile, verdicts: Path) -> None:
    """Raises EngineError unless `library` runs here. Only that it does is remembered: a failure may be mended."""
    name = hashlib.sha256(f"{digest(library)}\0{cpu()}".encode()).hexdigest()
    verdict = verdicts / f"{name}.works"
    if verdict.exists():
        return
    reason = _try(library)
    if reason is not None:
        mend = _MEND.get(library.kind, _MEND_OTHERS)
        raise EngineError(f"llama.cpp ({library}) does not run on this CPU, it {reason}: {mend}.")
    try:
        replace_file(private_folder(verdicts) / verdict.name, f"{library}\n".encode())
    except OSError as error:
        log.debug("that %s works is not remembered: %s", library, error)


def _try(library: LibraryFile) -> str | None:
    """What became of a process that ran it; None if all went well."""
    program = [sys.executable, "-c", f"from {__name__} import main; main()", str(library.path)]
    # Two threads find what threads get wrong; more would only wait for each other.
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    try:
        done = subprocess.run(
            with_default_signals(program), env=environment, capture_output=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"did not finish within {_TIMEOUT_S:.0f} seconds"
    except OSError as error:
        return f"could not be started ({error.strerror})"
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        return f"was ended by {signal.Signals(-done.returncode).name}"
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return f"failed ({lines[-1] if lines else f'status {done.returncode}'})"


def run_trial(path: Path) -> None:
    """Evaluate a few tokens in several shapes with the library at `path`. Raises EngineError; may die."""
    from emberkeep.engine.base import Rows
    from emberkeep.engine.llamacpp import LlamaEngine, LlamaModel, LlamaSettings
    from emberkeep.engine.llamacpp.specimen import VOCABULARY, write_specimen

    use(candidates(str(path))[0])
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "specimen.gguf"
        write_specimen(model)
        most = max(_SHAPES)
        settings = LlamaSettings(context=2 * most, cells=2 * most, sequences=2, batch=most, threads=2)
        engine = LlamaEngine(LlamaModel(model), settings, "specimen")
        try:
            for rows in _SHAPES:
                tokens = np.arange(rows, dtype=np.int32) % VOCABULARY
                engine.evaluate([Rows(0, 0, tokens, want_logits=True)])
                if not np.isfinite(engine.logits(0)).all():
                    raise EngineError(f"computed no numbers in a batch of {rows} tokens")
                engine.trim(0, 0)
        finally:
            engine.close()


def main() -> None:
    """The child's: its argument is the path of a library."""
    try:
        run_trial(Path(sys.argv[1]))
    except EngineError as error:
        sys.exit(str(error))
