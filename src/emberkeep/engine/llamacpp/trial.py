"""Whether a llama.cpp library, or a model in it, can run here, found out in a process that may die of it.

llama.cpp was compiled for some CPU and traps on another, and it ends the process where a model's metadata
contradict each other.
"""

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

from emberkeep.config import cpu_facts, total_ram
from emberkeep.engine.base import Rows
from emberkeep.engine.llamacpp.context import LlamaSettings
from emberkeep.engine.llamacpp.engine import LlamaEngine
from emberkeep.engine.llamacpp.model import LlamaModel
from emberkeep.engine.llamacpp.prebuilt import cache_folder
from emberkeep.engine.llamacpp.shared_library import (
    NATIVE,
    LibraryFile,
    candidates,
    digest,
    loader_variables,
    use,
    used,
)
from emberkeep.engine.llamacpp.specimen import write_specimen
from emberkeep.errors import EngineError, ModelBroken, ModelError
from emberkeep.files import private_folder, replace_file
from emberkeep.signals import with_default_signals

log = logging.getLogger("emberkeep.engine")

_SHAPES = (1, 2, 8, 33, 64, 128, 512)
"""Rows of a batch; kernels differ by how many there are."""
_LIBRARY_S, _MODEL_S = 120.0, 1800.0
"""How long a trial may take; weights may have to come from a slow disk."""
_TRAPS = frozenset((signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT))
"""Signals that code ends its own process by. Others come from outside."""
_REFUSED = 3
"""Status of a child that found out by itself, and says what on stderr."""
_MEND = {
    NATIVE: "`make native` compiles it for this one, and without it (`pip uninstall llama-cpp-python`) "
    "the ready-made one is used",
}
_MEND_OTHERS = "`make native` or `pip install 'emberkeep[native]'` compiles one that does"


class _DoesNotRun(EngineError):
    """A library that this CPU cannot run."""


def choose(choice: str, verdicts: Path | None = None) -> LibraryFile:
    """Let this process run on the first library of `choice` that works here, and say which.

    Each is tried once per version and kind of CPU, in a child process: blocks for a second then. The folder
    `verdicts` remembers it. Raises EngineError with what to do when none works, or none could be tried.
    """
    failures = []
    for library in candidates(choice):
        try:
            prove(library, verdicts)
        except _DoesNotRun as failure:
            log.warning("%s", failure)
            failures.append(failure)
        else:
            use(library)
            return library
    raise failures[0]


def failing(choice: str, verdicts: Path | None = None) -> list[EngineError]:
    """What is wrong with those libraries of `choice` that do not run here. Blocks as `choose`."""
    failures: list[EngineError] = []
    for library in candidates(choice):
        try:
            prove(library, verdicts)
        except EngineError as failure:
            failures.append(failure)
    return failures


def prove(library: LibraryFile, verdicts: Path | None = None) -> None:
    """Raises EngineError unless `library` runs here. Only that it does is remembered: a failure may be mended."""
    verdict = _verdict(verdicts, library)
    if not verdict.exists():
        reason = _try(_LIBRARY_S, library.path)
        if reason is not None:
            mend = _MEND.get(library.kind, _MEND_OTHERS)
            raise _DoesNotRun(f"llama.cpp ({library}) does not run on this CPU, it {reason}: {mend}.")
        _remember(verdict, str(library))


def prove_model(path: Path, weights_digest: str, verdicts: Path | None = None) -> None:
    """Raises ModelBroken where the model at `path` ends the process that loads it, with the library in use.

    Tried once per library and weights: blocks for as long as loading them takes. Raises EngineError where no child
    could be had.
    """
    verdict = _verdict(verdicts, used(), weights_digest)
    if not verdict.exists():
        reason = _try(_MODEL_S, used().path, path)
        if reason is not None:
            raise ModelBroken(
                f"{path.name} cannot be loaded, a process that tried {reason}: "
                "pull it again, or choose another model."
            )
        _remember(verdict, path.name)


def _verdict(folder: Path | None, library: LibraryFile, *more: str) -> Path:
    facts = (digest(library), *cpu_facts(instructions=True), *loader_variables(), *more)
    name = hashlib.sha256("\0".join(facts).encode()).hexdigest()
    return (folder or cache_folder() / "trials") / f"{name}.works"


def _remember(verdict: Path, what: str) -> None:
    try:
        replace_file(private_folder(verdict.parent) / verdict.name, f"{what}\n".encode())
    except OSError as error:
        log.debug("that %s works is not remembered: %s", what, error)


def _try(seconds: float, library: Path, *model: Path) -> str | None:
    """What became of a process that ran it; None if all went well. Raises EngineError where that says nothing."""
    # -P: the folder that a command was started in is no place to import from.
    program = [sys.executable, "-P", "-c", f"from {__name__} import main; main()", str(library), *map(str, model)]
    # Two threads find what threads get wrong; more would only wait for each other.
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    try:
        done = subprocess.run(
            with_default_signals(program), env=environment, capture_output=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        raise EngineError(f"llama.cpp could not be tried within {seconds:.0f} s: try again.") from None
    except OSError as error:
        raise EngineError(f"llama.cpp could not be tried ({error.strerror}): try again.") from error
    if done.returncode == 0:
        return None
    if -done.returncode in _TRAPS:
        return f"was ended by {signal.Signals(-done.returncode).name}"
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    said = lines[-1].rstrip(".") if lines else f"status {done.returncode}"
    if done.returncode == _REFUSED:
        return f"failed ({said})"
    raise EngineError(f"llama.cpp could not be tried ({said}): try again.")


def main() -> None:
    """The child's: its arguments are the path of a library, and that of a model if one is to be tried."""
    library, *models = map(Path, sys.argv[1:])
    try:
        use(candidates(str(library))[0])
        if models:
            _run_model(models[0])
        else:
            _run_specimen()
    except (EngineError, ModelError) as error:
        print(error, file=sys.stderr)
        sys.exit(_REFUSED)


def _run_specimen() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "specimen.gguf"
        write_specimen(model)
        _evaluate(LlamaModel(model), _SHAPES, must_be_finite=True)


def _run_model(path: Path) -> None:
    """Without the copies that faster kernels want. One larger than RAM is loaded only."""
    model = LlamaModel(path, repacks=False)
    for text in ("Hello", "a  b\n\n c", "é漢\U0001f600\x00\x7f", "<s></s><|im_end|>"):
        model.vocab.tokenize(text)
    _evaluate(model, (1, 2) if path.stat().st_size < total_ram() // 2 else (), must_be_finite=False)


def _evaluate(model: LlamaModel, shapes: tuple[int, ...], *, must_be_finite: bool) -> None:
    most = max(shapes, default=1)
    settings = LlamaSettings(context=2 * most + 128, cells=2 * most + 128, sequences=2, batch=most, threads=2)
    engine = LlamaEngine(model, settings, "trial")
    try:
        for rows in shapes:
            tokens = np.arange(rows, dtype=np.int32) % model.vocab.size
            engine.evaluate([Rows(0, 0, tokens, want_logits=True)])
            if must_be_finite and not np.isfinite(engine.logits(0)).all():
                raise EngineError(f"computed no numbers in a batch of {rows} tokens")
            engine.trim(0, 0)
    finally:
        engine.close()
