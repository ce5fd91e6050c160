"""Whether a llama.cpp library, or a model in it, can run here, found out in a process that may die of it.

llama.cpp was compiled for some CPU and traps on another, and it ends the process where a model's metadata
contradict each other. A library is tried with a model that means nothing: random weights in every format that
CPUs have kernels of their own for, small enough to be written and run within a second.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from emberkeep.config.machine import total_ram
from emberkeep.engine.base import Rows
from emberkeep.engine.embedding import TokenInput
from emberkeep.engine.facts import Facts
from emberkeep.engine.llamacpp.context import BatchBuffer, LlamaSettings, open_context
from emberkeep.engine.llamacpp.embedding_engine import LlamaEmbeddingEngine, LlamaEmbeddingSettings
from emberkeep.engine.llamacpp.gpus import gpus
from emberkeep.engine.llamacpp.learning import StateFacts
from emberkeep.engine.llamacpp.model import LlamaModel, WeightsLoading
from emberkeep.engine.llamacpp.shared_library import (
    NATIVE,
    LibraryFile,
    cache_folder,
    candidates,
    facts_about,
    file_name,
    library_in_use,
    llama,
    use_library,
)
from emberkeep.engine.llamacpp.specimen import write_specimen
from emberkeep.errors import EngineError, ModelBroken, ModelError
from emberkeep.files import private_folder, replace_file
from emberkeep.signals import with_default_signals
from emberkeep.types.request import Pooling

log = logging.getLogger("emberkeep.engine")
_SHAPES = (1, 2, 8, 33, 64, 128, 512)
"""Rows of a batch; kernels differ by how many there are."""
_LIBRARY_S, _MODEL_S = 120.0, 1800.0
"""How long a trial may take; weights may have to come from a slow disk."""
_TRAPS = frozenset((signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT))
"""Signals that code ends its own process by. Others come from outside."""
_LIBRARY, _WRITES, _NO_FLASH, _POOLS = "library", "writes", "no flash", "pools "
"""What is tried: a library with a model that means nothing, or a model in one of several ways."""
_REFUSED = 3
"""Status of a child that found out by itself, and says what on stderr."""
_MEND = {
    NATIVE: "`make native` compiles it for this one, and without it (`pip uninstall llama-cpp-python`) "
    "the ready-made one is used",
}
_MEND_OTHERS = "`make native` or `pip install 'emberkeep[native]'` compiles one that does"


class _DoesNotRun(EngineError):
    """A library that this CPU cannot run."""


def choose_library(choice: str, verdicts: Path | None = None) -> LibraryFile:
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
            use_library(library)
            return library
    raise failures[0]


def choose_known_library(choice: str, weights_digest: str, verdicts: Path | None = None) -> bool:
    """Let this process run on the first library of `choice`, if it is known to work here, with these weights too.
    Raises EngineError where there is none."""
    library = candidates(choice)[0]
    is_known = _verdict(verdicts, library).exists() and _verdict(verdicts, library, weights_digest).exists()
    if is_known:
        use_library(library)
    return is_known


def try_together(
    choice: str,
    path: Path,
    known_digest: str | None,
    find_digest: Callable[[], str],
    is_same: Callable[[], bool],
    tell: Callable[[], None] = lambda: None,
    verdicts: Path | None = None,
) -> str:
    """Try a library and a model in one child, which takes a third of the time, where several trials are due, and
    call `tell` meanwhile. Gives the digest of the weights: `known_digest`, or what `find_digest` finds while the
    library is tried. Nothing is remembered unless `is_same` says that they did not change.

    Raises only as these do: what fails is tried again by itself, by the function that explains it.
    """
    digests = [] if known_digest is None else [known_digest]

    def digest() -> str:
        if not digests:
            digests.append(find_digest())
        return digests[0]

    def about() -> str:
        tell()
        found = digest()
        tell()  # reading them is done; the child goes on
        return found

    try:
        library = candidates(choice)[0]
        due = [_LIBRARY] if not _verdict(verdicts, library).exists() else []
        of_model = {} if due and not digests else _of_model(verdicts, library, digest())
        due += [how for how in (_WRITES, _NO_FLASH) if how not in of_model or not of_model[how].exists()]
        if len(due) > 1 and not _is_known_to_fail(of_model.get(_NO_FLASH)):
            passed, _ = _try_all(_MODEL_S, library.path, path, due, about)
            proven = {_LIBRARY: _verdict(verdicts, library), **_of_model(verdicts, library, digest())}
            for how in passed if is_same() else ():
                _remember(proven[how], path.name)
    except EngineError as error:
        log.debug("%s", error)
    return digest()


def _of_model(verdicts: Path | None, library: LibraryFile, weights_digest: str) -> dict[str, Path]:
    return {
        _WRITES: _verdict(verdicts, library, weights_digest),
        _NO_FLASH: _verdict(verdicts, library, weights_digest, _NO_FLASH),
    }


def _is_known_to_fail(verdict: Path | None) -> bool:
    return verdict is not None and _failure_of(verdict).exists()


def _failure_of(verdict: Path) -> Path:
    return verdict.with_suffix(".fails")


def find_failures(choice: str, verdicts: Path | None = None) -> list[EngineError]:
    """What is wrong with those libraries of `choice` that do not run here. Blocks as `choose_library`."""
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
        reason = _try(_LIBRARY_S, library.path, Path(), _LIBRARY)
        if reason is not None:
            mend = _MEND.get(library.kind, _MEND_OTHERS)
            raise _DoesNotRun(f"llama.cpp ({library}) does not run on this CPU, it {reason}: {mend}.")
        _remember(verdict, str(library))


def prove_model(path: Path, weights_digest: str, verdicts: Path | None = None) -> None:
    """Raises ModelBroken where the model at `path` ends the process that loads it, with the library in use.

    Tried once per library and weights: blocks for as long as loading them takes. Raises EngineError where no child
    could be had.
    """
    _prove_model(path, _WRITES, _verdict(verdicts, library_in_use(), weights_digest))


def _prove_model(path: Path, how: str, verdict: Path) -> None:
    if not verdict.exists():
        reason = _try(_MODEL_S, library_in_use().path, path, how)
        if reason is not None:
            raise ModelBroken(
                f"{path.name} cannot be loaded, a process that tried {reason}: "
                "pull it again, or choose another model."
            )
        _remember(verdict, path.name)


def prove_embedding(path: Path, weights_digest: str, pooling: Pooling, verdicts: Path | None = None) -> None:
    """As `prove_model`, for a model that embeds or ranks, whose table for rewriting texts was checked."""
    _prove_model(path, _POOLS + pooling, _verdict(verdicts, library_in_use(), weights_digest, pooling))


def survives_without_flash(path: Path, weights_digest: str, verdicts: Path | None = None) -> bool:
    """Whether the model at `path` can be run without flash attention, with the library in use.

    Tried once, as by `prove_model`, and blocks as that does. A failure is remembered too: no one has to mend it.
    """
    verdict = _verdict(verdicts, library_in_use(), weights_digest, _NO_FLASH)
    failure = _failure_of(verdict)
    if not verdict.exists() and not failure.exists():
        try:
            reason = _try(_MODEL_S, library_in_use().path, path, _NO_FLASH)
        except EngineError as error:
            log.debug("%s", error)
            return False
        _remember(verdict if reason is None else failure, reason or path.name)
        return reason is None
    return verdict.exists()


def _verdict(folder: Path | None, library: LibraryFile, *more: str) -> Path:
    return (folder or cache_folder() / "trials") / f"{file_name(library, *more)}.works"


def _remember(verdict: Path, what: str) -> None:
    try:
        replace_file(private_folder(verdict.parent) / verdict.name, f"{what}\n".encode())
    except OSError as error:
        log.debug("that %s works is not remembered: %s", what, error)


def _try(seconds: float, library: Path, model: Path, how: str) -> str | None:
    """What became of a process that ran it; None if all went well. Raises EngineError where that says nothing."""
    return _try_all(seconds, library, model, [how])[1]


def _try_all(
    seconds: float, library: Path, model: Path, ways: Sequence[str], about: Callable[[], str] = str
) -> tuple[list[str], str | None]:
    """Those of `ways` that went well, one after the other, and what became of the process then. What it learns of
    the model is remembered as facts about what `about` gives, unless that is empty; it is called meanwhile."""
    # -P: the folder that a command was started in is no place to import from.
    program = [sys.executable, "-P", "-c", f"from {__name__} import main; main()", str(library), str(model), *ways]
    # Two threads find what threads get wrong; more would only wait for each other.
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            with_default_signals(program), env=environment, stdin=pipe, stdout=pipe, stderr=pipe
        )
    except OSError as error:
        raise EngineError(f"llama.cpp could not be tried ({error.strerror}): try again.") from error
    with process:
        try:
            printed, complaint = process.communicate(f"{about()}\n".encode(), seconds)
        except subprocess.TimeoutExpired:
            raise EngineError(f"llama.cpp could not be tried within {seconds:.0f} s: try again.") from None
        finally:
            process.kill()
    passed = printed.decode().splitlines()
    if process.returncode == 0:
        return passed, None
    if -process.returncode in _TRAPS:
        return passed, f"was ended by {signal.Signals(-process.returncode).name}"
    lines = complaint.decode("utf-8", "replace").strip().splitlines()
    said = lines[-1].rstrip(".") if lines else f"status {process.returncode}"
    if process.returncode == _REFUSED:
        return passed, f"failed ({said})"
    raise EngineError(f"llama.cpp could not be tried ({said}): try again.")


def main() -> None:
    """The child's: its arguments are the path of a library, that of a model, and what is tried of them. It prints
    what went well. The digest of the weights, if what is learned is to be remembered, comes on stdin."""
    library, model, *ways = sys.argv[1:]
    try:
        use_library(candidates(library)[0])
        for how in _run(Path(model), ways):
            print(how, flush=True)
    except (EngineError, ModelError) as error:
        print(error, file=sys.stderr)
        sys.exit(_REFUSED)


def _run(model: Path, ways: Sequence[str]) -> Iterator[str]:
    """Those that went well, as they do."""
    for how in ways:
        if how == _LIBRARY:
            _run_specimen()
            yield how
        elif how.startswith(_POOLS):
            _run_embedding(model, Pooling(how.removeprefix(_POOLS)))
            yield how
    if of_weights := [how for how in ways if how in (_WRITES, _NO_FLASH)]:
        told = sys.stdin.readline()
        if not told:
            sys.exit("nobody waits for it")
        about = told.strip()
        yield from _run_model(model, of_weights, facts_about(about) if about else None)


def _run_specimen() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "specimen.gguf"
        write_specimen(model)
        loaded = LlamaModel(model)
        for flash in (True, False):
            settings = replace(_settings(max(_SHAPES)), flash=flash)
            for rows, scores in _decode(loaded, settings, _SHAPES):
                if not np.isfinite(scores).all():
                    raise EngineError(f"computed no numbers in a batch of {rows} tokens")
        loaded.close()


def _run_model(path: Path, ways: Sequence[str], facts: Facts | None) -> Iterator[str]:
    """Without the copies that faster kernels want. One larger than RAM is loaded, and nothing is evaluated."""
    model = _load(path, facts=facts)
    shapes = (1, 2) if path.stat().st_size < total_ram() // 2 else ()
    settings = _settings(2)
    has_gpus = bool(gpus())
    for how in ways[:1] if has_gpus else ways:  # layers on a GPU need flash attention
        with_flash = how != _NO_FLASH
        if not has_gpus:
            # What an engine learns of it when it is opened, as one with both kinds of attention does.
            StateFacts(facts, model, settings, both=not with_flash).learned()
        list(_decode(model, replace(settings, flash=with_flash), shapes))
        yield how
    model.close()


def _decode(
    model: LlamaModel, settings: LlamaSettings, shapes: Iterable[int]
) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
    """Batches of so many rows, and the scores behind the last of each."""
    context, batch = open_context(model, settings, None), BatchBuffer(settings.batch)
    try:
        for rows in shapes:
            batch.decode(context, Rows(0, 0, _tokens(rows, model), outputs=1))
            scores = (ctypes.c_float * model.vocab.size).from_address(llama().llama_get_logits_ith(context, -1))
            yield rows, np.frombuffer(scores, np.float32).copy()
            llama().llama_memory_clear(llama().llama_get_memory(context), True)
    finally:
        llama().llama_free(context)


def _load(path: Path, *, may_rewrite: bool = False, facts: Facts | None = None) -> LlamaModel:
    model = LlamaModel(path, loading=WeightsLoading(repacks=False), may_rewrite=may_rewrite, facts=facts)
    for text in ("Hello", "a  b\n\n c", "é漢\U0001f600\x00\x7f", "<s></s><|im_end|>"):
        model.vocab.tokenize(text)
    return model


def _run_embedding(path: Path, pooling: Pooling) -> None:
    settings = LlamaEmbeddingSettings(context=64, batch=64, pooling=pooling, threads=2)
    engine = LlamaEmbeddingEngine(_load(path, may_rewrite=True), settings, "trial")
    engine.embed([TokenInput((0,)), TokenInput((0, 1))])
    engine.close()


def _settings(rows: int) -> LlamaSettings:
    cells = 2 * rows + 128
    return LlamaSettings(cells, cells, sequences=2, batch=rows, threads=2)


def _tokens(rows: int, model: LlamaModel) -> npt.NDArray[np.int32]:
    return np.arange(rows, dtype=np.int32) % model.vocab.size
