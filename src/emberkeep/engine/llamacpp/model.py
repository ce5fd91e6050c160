"""A loaded GGUF model, whose weights may have begun to be loaded before it was asked for."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from emberkeep.config.machine import resident_ram
from emberkeep.engine.facts import Facts
from emberkeep.engine.llamacpp.c_api import Handle, ProgressCallback, defaults
from emberkeep.engine.llamacpp.gpus import ON_CPU, Gpu, Placement, gpus, put_placement
from emberkeep.engine.llamacpp.shared_library import llama, silent, start_backend, take_buffers, take_errors
from emberkeep.engine.llamacpp.vocab import LlamaVocab
from emberkeep.engine.locked_memory import CAN_TELL_MEMORY, added, lock_weights, private_memory
from emberkeep.errors import EngineError, ModelBroken, ModelNotFound
from emberkeep.files import FileVersion
from emberkeep.values import dataclass

_LOAD_COPIED, _LOAD_LOCKED = 0, 2
"""Into memory of the process's own; the second locks a part of it."""


@dataclass(frozen=True, slots=True, order=True)
class Adapter:
    """A LoRA adapter, whose header was checked against the model's: llama.cpp trusts types and some shapes."""

    digest: str
    scale: float
    path: Path


Report = Callable[[float], None]
"""Is told which part of the weights is loaded."""
Tell = Callable[[str, int, int | None], None]
"""Told of the step that is done now how much is done, of how much."""
Prove = Callable[[Tell], tuple[str | None, bool]]
"""Chooses the library, and tries it and the weights out where no start has. Gives their digest, None where that
could not be found out, and whether they work here."""


@dataclass(frozen=True, slots=True)
class WeightsLoading:
    """How weights come into memory."""

    repacks: bool = True
    """They are copied into the layout that the CPU's fastest kernels want."""
    locks: bool = False
    """What of them is in RAM is locked there, if the system allows it."""
    early: EarlyLoad | None = None
    """The load of the same file that has begun already: into RAM, repacked and not locked."""


class LlamaModel:
    """Raises ModelNotFound, ModelBroken or EngineError. `close` frees the handle; contexts must be closed before.

    `adapters` apply to every context of it, in an order of their own: what they compute together depends on it.
    `report` is told meanwhile which part of the weights is loaded. `may_rewrite` and `facts`: as in `LlamaVocab`.
    """

    def __init__(
        self,
        path: Path,
        *,
        placement: Placement = ON_CPU,
        adapters: Sequence[Adapter] = (),
        loading: WeightsLoading | None = None,
        report: Report = lambda fraction: None,
        may_rewrite: bool = False,
        facts: Facts | None = None,
    ) -> None:
        self.path = path
        loading = loading or WeightsLoading()
        start_backend()
        if not path.is_file():
            raise ModelNotFound(f"There is no model file at {path}.")
        found = gpus()
        before = private_memory() if loading.locks else []
        self.resident_before = resident_ram() or 0
        """What the process held without it, in bytes."""
        self.handle: Handle | None = None
        if loading.early is not None and loading.repacks and not loading.locks and not found:
            self.resident_before = min(self.resident_before, loading.early.resident_before)
            self.handle = loading.early.take(report)
        if self.handle is None:
            take_errors()
            take_buffers()
            self.handle = _load_weights(path, placement, found, loading, report)
        if not self.handle:
            way_out = "; try fewer --gpu-layers" if found and placement.gpu_layers else ""
            reason = take_errors() or "unknown format"
            raise ModelBroken(f"llama.cpp cannot load {path.name}: {reason}{way_out}.")
        if loading.locks and CAN_TELL_MEMORY:
            lock_weights(added(before, private_memory()))
        self.offloads = bool(found and placement.gpu_layers)
        self.is_offloaded = self.offloads and placement.gpu_layers > placement.layers and not placement.cpu_moe
        """GPUs compute all of it: nothing but embeddings is looked up elsewhere."""
        self.placement = placement.facts(found)
        """What is computed where, for fingerprints."""
        self.adapters = sorted(adapters)
        self._loaded_adapters = [self._load_adapter(adapter.path) for adapter in self.adapters]
        self.vocab = self._read_vocab(may_rewrite, facts)
        self.train_context: int = llama().llama_model_n_ctx_train(self.handle)

    def _read_vocab(self, may_rewrite: bool, facts: Facts | None) -> LlamaVocab:
        try:
            pre = self.metadata("tokenizer.ggml.pre") or ""
            handle = llama().llama_model_get_vocab(self.handle)
            return LlamaVocab(handle, pre, may_rewrite=may_rewrite, facts=facts)
        except ModelBroken:
            self.close()
            raise

    def _load_adapter(self, path: Path) -> Handle:
        take_errors()
        loaded: Handle | None = llama().llama_adapter_lora_init(self.handle, str(path).encode())
        if not loaded:
            reason = take_errors() or "unknown format"
            self.close()
            raise EngineError(f"llama.cpp cannot use the adapter {path.name}, {reason}: leave --lora out.")
        return loaded

    def open_context(self, params: Any) -> Handle:
        """One to which all adapters apply. Raises EngineError with what llama.cpp says."""
        take_errors()
        context: Handle | None = llama().llama_init_from_model(self.handle, params)
        if not context:
            raise EngineError(take_errors() or "out of memory")
        if count := len(self._loaded_adapters):
            scales = (adapter.scale for adapter in self.adapters)
            llama().llama_set_adapters_lora(
                context,
                (ctypes.c_void_p * count)(*self._loaded_adapters),
                count,
                (ctypes.c_float * count)(*scales),
            )
        return context

    @property
    def chat_template(self) -> str | None:
        source = llama().llama_model_chat_template(self.handle, None)
        return source.decode("utf-8", "replace") if source else None

    def metadata(self, key: str) -> str | None:
        buffer = ctypes.create_string_buffer(1 << 12)
        length = llama().llama_model_meta_val_str(self.handle, key.encode(), buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace") if length >= 0 else None

    def hyperparameter(self, key: str) -> str | None:
        """What the file says under the name of the model's architecture."""
        return self.metadata(f"{self.metadata('general.architecture')}.{key}")

    def close(self) -> None:
        """Blocks while a text is being tokenized."""
        if self.handle:
            if hasattr(self, "vocab"):  # it may be what could not be read
                self.vocab.close()
            llama().llama_model_free(self.handle)
            self.handle = None


def _load_weights(
    path: Path, placement: Placement, found: Sequence[Gpu], loading: WeightsLoading, report: Report | None
) -> Handle | None:
    """Blocks. None where llama.cpp cannot, whose log says why."""
    params = defaults(llama().llama_model_default_params)
    put_placement(params, placement, found)
    params.use_extra_bufts = loading.repacks
    if loading.locks:
        params.load_mode = _LOAD_COPIED if CAN_TELL_MEMORY else _LOAD_LOCKED
    if report is not None:
        params.progress_callback = ProgressCallback(lambda fraction, _: report(fraction) is None)
    handle: Handle | None = llama().llama_model_load_from_file(str(path).encode(), params)
    return handle


# ── weights that are loaded before they are asked for ──

_WATCHED = 1 << 30
"""Bytes of weights from which on it is told how far they are. Each word from llama.cpp to Python waits for what is
being imported: a small model, with 1,400 lines of log and 270 steps, took four times as long to load."""


class EarlyLoad:
    """Weights that llama.cpp loads while the rest of the program is imported, which takes about as long. Has begun
    when it is made.

    The `LlamaModel` of the same file takes them, if it is still the file of which the load began. Whatever fails
    here is met again, and said, by who loads them then.
    """

    def __init__(self, path: Path, versions: Sequence[FileVersion], prove: Prove) -> None:
        """`versions`: of all files of the model, as they were before anything else was asked about them. `prove`
        is called first, by another thread."""
        self.path = path
        self.resident_before = resident_ram() or 0
        self._versions = versions
        self._size = sum(version.size for version in versions)
        self._prove = prove
        self._is_proved = threading.Event()
        self._digest: str | None = None
        self.is_claimed = False
        self._latest: tuple[str, int, int | None] | None = None
        self._tell: Tell = lambda step, done, total: None
        self._report: Report = lambda fraction: None
        self._handle: Handle | None = None
        self._loading = threading.Lock()
        self._is_needless = False
        self._thread = threading.Thread(target=self._run, name="early load", daemon=True)
        self._thread.start()

    def proved(self, tell: Tell) -> str | None:
        """The digest of the weights, which were tried out; None where it has to be found, or is another by now.
        Blocks until it is known, and tells how far that is."""
        self._tell = tell
        if self._latest is not None:
            tell(*self._latest)
        self._is_proved.wait()
        return self._digest if self._is_the_same() else None

    def take(self, report: Report) -> Handle | None:
        """The weights, for good; None where they are not those of the file any more. Blocks until they are there,
        and tells `report` meanwhile how many of them are."""
        self._report = report
        self._thread.join()
        handle, self._handle = self._handle, None
        if handle and not self._is_the_same():
            llama().llama_model_free(handle)
            return None
        return handle

    def wait(self) -> None:
        """Until nothing is loaded, and nothing will be."""
        self._is_needless = True
        with self._loading:
            pass

    def _is_the_same(self) -> bool:
        try:
            return all(FileVersion.of(Path(version.path)) == version for version in self._versions)
        except OSError:
            return False

    def _run(self) -> None:
        works = False
        try:
            self._digest, works = self._prove(self._pass_on)
        finally:
            self._is_proved.set()
        with self._loading:
            if works and not self._is_needless and self._is_the_same():
                self._load()

    def _pass_on(self, step: str, done: int, total: int | None) -> None:
        self._latest = step, done, total
        self._tell(step, done, total)

    def _load(self) -> None:
        start_backend()  # a GPU's takes a third of a second
        if gpus():  # where weights go is planned by who takes them
            return
        report = (lambda fraction: self._report(fraction)) if self._size >= _WATCHED else None
        with silent():
            self._handle = _load_weights(self.path, ON_CPU, [], WeightsLoading(), report)


_begun: list[EarlyLoad] = []


def begin(path: Path, versions: Sequence[FileVersion], prove: Prove) -> None:
    """Where there are GPUs only llama.cpp itself is brought up."""
    _begun.append(EarlyLoad(path, versions, prove))


def begun(path: Path) -> EarlyLoad | None:
    """What has begun to be loaded of `path`, once."""
    for early in _begun:
        if early.path == path and not early.is_claimed:
            early.is_claimed = True
            return early
    return None


def wait() -> None:
    """Until nothing is being loaded any more: a process that ends meanwhile may crash."""
    for early in _begun:
        early.wait()


# ── weights in another format ──

_FILE_TYPES = {"F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9}
"""llama.cpp's numbers for files whose weights are mostly of one format."""


def requantize(source: Path, target: Path, to: str) -> None:
    """Write `source` with its weights as `to` (`Q8_0`, ...) to `target`; equal inputs give equal bytes. This
    module does it as a program, too: `python -m emberkeep.engine.llamacpp.model SOURCE TARGET TO`.

    Blocks on all cores. Raises EngineError; what is at `target` is then worthless.
    """
    if to not in _FILE_TYPES:
        raise EngineError(f"There is no weight format {to} here; use {' or '.join(_FILE_TYPES)}.")
    start_backend()
    if not hasattr(llama(), "llama_model_quantize"):
        raise EngineError("This build of llama.cpp cannot write weights in another format; keep them as they are.")
    parameters = defaults(llama().llama_model_quantize_default_params)
    parameters.ftype = _FILE_TYPES[to]
    # Without this only 16 and 32 bit sources are taken.
    parameters.allow_requantize = True
    take_errors()
    status = llama().llama_model_quantize(os.fsencode(source), os.fsencode(target), ctypes.byref(parameters))
    if status != 0:
        reason = take_errors() or f"status {status}"
        raise EngineError(f"llama.cpp could not write {source.name} as {to} ({reason}); keep it as it is.")


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
