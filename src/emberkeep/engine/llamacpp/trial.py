"""Whether a llama.cpp library, or a model in it, can run here, found out in a process that may die of it.

llama.cpp was compiled for some CPU and traps on another, and it ends the process where a model's metadata
contradict each other. A library is tried with a model that means nothing.
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
from functools import cache
from pathlib import Path

import numpy as np

from emberkeep.config.machine import total_ram
from emberkeep.engine.base import Logits, Rows
from emberkeep.engine.devices import cuda_driver
from emberkeep.engine.embedding import TokenInput
from emberkeep.engine.facts import Facts
from emberkeep.engine.llamacpp.context import BatchBuffer, LlamaSettings, open_context
from emberkeep.engine.llamacpp.embedding_engine import LlamaEmbeddingEngine, LlamaEmbeddingSettings
from emberkeep.engine.llamacpp.gpus import ON_CPU, Placement, gpus, share_layers
from emberkeep.engine.llamacpp.learning import StateFacts
from emberkeep.engine.llamacpp.model import LlamaModel, WeightsLoading
from emberkeep.engine.llamacpp.prebuilt import CUDA, GPU_BUILDS, cache_folder
from emberkeep.engine.llamacpp.shared_library import (
    NATIVE,
    LibraryFile,
    candidates,
    facts_about,
    facts_of,
    library_in_use,
    llama,
    take_errors,
    use_library,
)
from emberkeep.engine.llamacpp.specimen import LAYERS, write_specimen
from emberkeep.errors import EngineError, ModelBroken, ModelError
from emberkeep.signals import with_default_signals
from emberkeep.types.request import Pooling

log = logging.getLogger("emberkeep.engine")
_SHAPES = (1, 2, 8, 33, 64, 128, 512)
"""Rows of a batch; kernels differ by how many there are."""
_LIBRARY_S, _MODEL_S = 120.0, 1800.0
"""How long a trial may take; weights may have to come from a slow disk, and drivers to compile what GPUs run."""
_TRAPS = (signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT)
"""Signals that code ends its own process by. Others come from outside."""
_LIBRARY, _ON_GPU, _WRITES, _NO_FLASH, _POOLS = "library", "gpu", "writes", "no flash", "pools "
"""What is tried: a library with a model that means nothing, on the CPU or on GPUs, or a model in one of several
ways."""
_WORKS, _FAILS = "works", "fails"
"""What is remembered of it."""
_REFUSED = 3
"""Status of a child that found out by itself, and says what on stderr."""
_MEND_NATIVE = (
    "`make native` compiles it for this one, and without it (`pip uninstall llama-cpp-python`) the ready-made one "
    "is used"
)
_MEND = "`make native` or `pip install 'emberkeep[native]'` compiles one that does"
_MEND_GPU = "the one for CPUs is used; `llama_library = ready-made` tries no other"


class _DoesNotRun(EngineError):
    """A library that this machine cannot run."""


def choose_library(choice: str, verdicts: Path | None = None) -> LibraryFile:
    """Let this process run on the first library of `choice` that works here, and say which.

    Each is tried once per version and kind of CPU, in a child process: blocks for a second then. The folder
    `verdicts` remembers it. Raises EngineError with what to do when none works, or none could be tried.
    """
    failures: list[EngineError] = []
    for library in candidates(choice):
        try:
            prove(library, verdicts)
        except EngineError as failure:
            if not isinstance(failure, _DoesNotRun) and library.kind not in GPU_BUILDS:
                raise
            log.warning("%s", failure)
            failures.append(failure)
        else:
            use_library(library)
            return library
    raise failures[0]


def choose_known_library(choice: str, weights_digest: str) -> bool:
    """Let this process run on the first library of `choice`, if it is known to work here, with these weights too.
    Raises EngineError where there is none."""
    library = candidates(choice)[0]
    is_known = _works(_verdict(None, library)) and _works(_verdict(None, library, weights_digest))
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
) -> str:
    """Try a library and a model in one child, which takes a third of the time, where several trials are due, and
    call `tell` meanwhile. Gives the digest of the weights: `known_digest`, or what `find_digest` finds while the
    library is tried. Nothing is remembered unless `is_same` says that they did not change.

    Raises only as these do: what fails is tried again by itself, by the function that explains it.
    """
    digest = cache(lambda: find_digest() if known_digest is None else known_digest)

    def about() -> str:
        tell()
        found = digest()
        tell()  # reading them is done; the child goes on
        return found

    try:
        library = candidates(choice)[0]
        alone = _alone(library)

        def verdict(how: str) -> Facts:
            more = [] if how == alone else [digest()] if how == _WRITES else [digest(), how]
            return _verdict(None, library, *more)

        due = [] if _works(verdict(alone)) else [alone]
        is_known = not due or known_digest is not None
        due += [how for how in (_WRITES, _NO_FLASH) if not (is_known and _works(verdict(how)))]
        if len(due) > 1 and not (is_known and verdict(_NO_FLASH).read(_FAILS) is not None):
            passed, _ = _try_all(_MODEL_S, library.path, path, due, about)
            for how in passed if is_same() else ():
                verdict(how).remember(_WORKS, path.name.encode())
    except EngineError as error:
        log.debug("%s", error)
    return digest()


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
    how, verdict = _alone(library), _verdict(verdicts, library)
    if how == _ON_GPU and not _works(verdict):
        log.info("Trying llama.cpp for %s, once: some drivers compile its kernels for minutes.", library.kind)
    reason = _reason(_MODEL_S if how == _ON_GPU else _LIBRARY_S, library, Path(), how, verdict)
    if reason is not None:
        place = "GPU" if how == _ON_GPU else "CPU"
        mend = _MEND_GPU if how == _ON_GPU else _MEND_NATIVE if library.kind == NATIVE else _MEND
        raise _DoesNotRun(f"llama.cpp ({library}) does not run on this {place}, it {reason}: {mend}.")


def _alone(library: LibraryFile) -> str:
    """How it is tried without a model."""
    return _ON_GPU if library.kind in GPU_BUILDS else _LIBRARY


def prove_model(path: Path, weights_digest: str, verdicts: Path | None = None) -> None:
    """Raises ModelBroken where the model at `path` ends the process that loads it, with the library in use.

    Tried once per library and weights: blocks for as long as loading them takes. Raises EngineError where no child
    could be had.
    """
    _prove_model(path, _WRITES, _verdict(verdicts, library_in_use(), weights_digest))


def _prove_model(path: Path, how: str, verdict: Facts) -> None:
    reason = _reason(_MODEL_S, library_in_use(), path, how, verdict)
    if reason is not None:
        raise ModelBroken(
            f"{path.name} cannot be loaded, a process that tried {reason}: pull it again, or choose another model."
        )


def prove_embedding(path: Path, weights_digest: str, pooling: Pooling, verdicts: Path | None = None) -> None:
    """As `prove_model`, for a model that embeds or ranks, whose table for rewriting texts was checked."""
    _prove_model(path, _POOLS + pooling, _verdict(verdicts, library_in_use(), weights_digest, pooling))


def survives_without_flash(path: Path, weights_digest: str, verdicts: Path | None = None) -> bool:
    """Whether the model at `path` can be run without flash attention, with the library in use.

    Tried once, as by `prove_model`, and blocks as that does. A failure is remembered too: no one has to mend it.
    """
    verdict = _verdict(verdicts, library_in_use(), weights_digest, _NO_FLASH)
    if verdict.read(_FAILS) is not None:
        return False
    try:
        reason = _reason(_MODEL_S, library_in_use(), path, _NO_FLASH, verdict)
    except EngineError as error:
        log.debug("%s", error)
        return False
    if reason is not None:
        verdict.remember(_FAILS, reason.encode())
    return reason is None


def _verdict(folder: Path | None, library: LibraryFile, *more: str) -> Facts:
    driver = [str(cuda_driver())] if library.kind == CUDA else []
    return facts_of(library, *driver, *more, folder=folder or cache_folder() / "trials")


def _works(verdict: Facts) -> bool:
    return verdict.read(_WORKS) is not None


def _reason(seconds: float, library: LibraryFile, model: Path, how: str, verdict: Facts) -> str | None:
    """What became of a process that ran it; None if all went well, now or as `verdict` remembers. Raises
    EngineError where that says nothing."""
    if _works(verdict):
        return None
    reason = _try(seconds, library.path, model, how)
    if reason is None:
        verdict.remember(_WORKS, (model.name or str(library)).encode())
    return reason


def _try(seconds: float, library: Path, model: Path, how: str) -> str | None:
    """As `_reason`, whatever is remembered."""
    return _try_all(seconds, library, model, [how])[1]


def _try_all(
    seconds: float, library: Path, model: Path, ways: Sequence[str], about: Callable[[], str] = str
) -> tuple[list[str], str | None]:
    """Those of `ways` that went well, one after the other, and what became of the process then. What it learns of
    the model is remembered as facts about what `about` gives, unless that is empty; it is called meanwhile."""
    # -P: the folder that a command was started in is no place to import from.
    program = [sys.executable, "-P", "-c", f"from {__name__} import main; main()", str(library), str(model), *ways]
    # Two threads find what threads get wrong; more would only wait for each other.
    env, pipe = {**os.environ, "OMP_NUM_THREADS": "2"}, subprocess.PIPE
    try:
        process = subprocess.Popen(with_default_signals(program), env=env, stdin=pipe, stdout=pipe, stderr=pipe)
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
    last = lines[-1].rstrip(".") if lines else f"status {process.returncode}"
    if process.returncode == _REFUSED:
        return passed, f"failed ({last})"
    raise EngineError(f"llama.cpp could not be tried ({last}): try again.")


def main() -> None:
    """The child's: its arguments are a library, a model, and what is tried of them. It prints what went well. The
    digest of the weights, if what is learned is to be remembered, comes on stdin."""
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
        if how in (_LIBRARY, _ON_GPU):
            _run_specimen(on_gpu=how == _ON_GPU)
            yield how
        elif how.startswith(_POOLS):
            _run_embedding(model, Pooling(how.removeprefix(_POOLS)))
            yield how
    if of_weights := [how for how in ways if how in (_WRITES, _NO_FLASH)]:
        yield from _run_model(model, of_weights)


def _run_specimen(*, on_gpu: bool) -> None:
    placement = _on_gpus() if on_gpu else ON_CPU
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "specimen.gguf"
        write_specimen(model)
        loaded = LlamaModel(model, placement=placement)
        for flash in (True,) if on_gpu else (True, False):  # layers on a GPU need flash attention
            settings = replace(_settings(max(_SHAPES)), flash=flash)
            for rows, scores in zip(_SHAPES, _decode(loaded, settings, _SHAPES), strict=True):
                if not np.isfinite(scores).all():
                    raise EngineError(f"computed no numbers in a batch of {rows} tokens")
        loaded.close()


def _on_gpus() -> Placement:
    """All of the specimen. Raises EngineError with why there is none: llama.cpp skips what it cannot open."""
    if found := gpus():
        return Placement(LAYERS, LAYERS + 1, share_layers(found, None))
    complaint = take_errors()
    for file in library_in_use().path.parent.glob("libggml-[cv]u*"):
        try:
            ctypes.CDLL(str(file))
        except OSError as error:
            raise EngineError(str(error)) from error
    raise EngineError(complaint or "found no GPU that it can use")


def _run_model(path: Path, ways: Sequence[str]) -> Iterator[str]:
    """Without the copies that faster kernels want. One larger than RAM is loaded, and nothing is evaluated."""
    if not (line := sys.stdin.readline()):
        sys.exit("nobody waits for it")
    facts = facts_about(line.strip()) if line.strip() else None
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


def _decode(model: LlamaModel, settings: LlamaSettings, shapes: Iterable[int]) -> Iterator[Logits]:
    """Those behind the last row of batches of so many."""
    context, batch = open_context(model, settings, None), BatchBuffer(settings.batch)
    try:
        for rows in shapes:
            tokens = np.arange(rows, dtype=np.int32) % model.vocab.size
            batch.decode(context, Rows(0, 0, tokens, outputs=1))
            scores = (ctypes.c_float * model.vocab.size).from_address(llama().llama_get_logits_ith(context, -1))
            yield np.frombuffer(scores, np.float32).copy()
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
    return LlamaSettings(2 * rows + 128, 2 * rows + 128, sequences=2, batch=rows, threads=2)
