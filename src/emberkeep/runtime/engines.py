"""From a Config to an engine with its model: a GGUF file in llama.cpp, a folder in the Hugging Face engine;
whether it writes, embeds or ranks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from emberkeep.backend.base import Backend, ModelCard
from emberkeep.backend.embedder import EmbeddingBackend, EngineRunner, LocalEmbedder, VectorCache
from emberkeep.backend.limits import Permits
from emberkeep.backend.model_pool import Report, tell_nobody
from emberkeep.config.settings import PREFILL_SLICE, Config, TooLong
from emberkeep.engine.devices import require_hf
from emberkeep.engine.embedding import EmbeddingEngine
from emberkeep.engine.facts import facts_folder
from emberkeep.engine.locked_memory import lock_weights
from emberkeep.errors import ConfigError, EngineError
from emberkeep.kv.forgetting import Holders
from emberkeep.models.checks import check_charsmap
from emberkeep.models.digest import model_digest
from emberkeep.models.early_load import try_out
from emberkeep.models.gguf import read_header
from emberkeep.models.library import ModelFile
from emberkeep.models.parts import part_files
from emberkeep.models.profile import EmbeddingProfile, ModelProfile, profile
from emberkeep.runtime.parts import OpenedModel, open_vectors, stored_by
from emberkeep.runtime.placement import (
    checked_context,
    engine_cells,
    gguf_details,
    live_kv_bytes,
    open_placed,
    place,
    read_adapters,
)
from emberkeep.sched.engine_thread import EngineThread, promised
from emberkeep.types.lineage import EXACT_BITS
from emberkeep.types.models import AttentionTier, Quantization, Residency
from emberkeep.types.request import Json, Pooling

if TYPE_CHECKING:
    from emberkeep.engine.base import Engine
    from emberkeep.engine.hf.model_loader import HfModel, HfSettings, HfSource
    from emberkeep.engine.hf.residency import Placing
    from emberkeep.engine.llamacpp.context import LlamaSettings
    from emberkeep.engine.llamacpp.embedding_engine import LlamaEmbeddingSettings
    from emberkeep.engine.llamacpp.gpus import Placement
    from emberkeep.engine.llamacpp.model import LlamaModel

log = logging.getLogger("emberkeep")
_CONTEXT_BESIDE_WEIGHTS = 8192
"""Cap on a context that was not asked for, beside weights that pass through a GPU: with more of it, more of them
would have to pass."""
_SLICE_ON_GPU = 4096
"""Most prompt tokens in one step: a GPU takes as long for 500 as for thousands."""
_SHARE_OF_DRAFT = 0.1
"""The part of a GPU's free memory that is for the KV cells of a draft model."""


def open_hf(
    model: ModelFile, config: Config, digests: Path, *, is_draft: bool = False, report: Report = tell_nobody
) -> OpenedModel:
    """Blocks while torch is imported and the model is loaded. A draft model leaves most of a GPU's memory to the
    other one. Raises ModelError, EngineError."""
    report(f"Loading {model.id}", 0, None)  # importing torch takes seconds
    # Beside it: reading all of a large model takes as long as importing and loading.
    digest, compute_digest = promised(lambda: model_digest(model.path, digests))
    threading.Thread(target=compute_digest, name="emberkeep-digest", daemon=True).start()
    from emberkeep.engine.hf.model_loader import load_model
    from emberkeep.engine.hf.whole_engine import open_engine

    loaded = load_model(
        _source(model),
        device=config.device,
        dtype=config.dtype,
        attention="eager",
        placing=placing_of(config),
        quantization=Quantization(config.quantization),
    )
    settings, on_cpu = _settings(config, loaded, is_draft=is_draft), loaded.device == "cpu"
    try:
        engine = open_engine(loaded, settings, digest.result())
    except BaseException:
        loaded.close()
        raise
    if config.mlock and on_cpu:
        lock_weights(loaded.memory())
    if engine.capabilities.context < settings.context:
        log.warning(
            "%s has room for a context of %d tokens, not of %d: keep fewer layers there, raise gpu_memory, or "
            "choose a smaller model",
            loaded.device,
            engine.capabilities.context,
            settings.context,
        )
    details = _details(loaded, engine) | {"weights_sha256": digest.result()}
    return OpenedModel(engine, loaded.chat_template, details)


def _settings(config: Config, loaded: HfModel, *, is_draft: bool) -> HfSettings:
    from emberkeep.engine.hf.footprint import affordable_batch, cells_of_share
    from emberkeep.engine.hf.model_loader import HfSettings

    # Beyond it there are no positions, or other ones than what is stored was computed with.
    context = min(checked_context(config, loaded.context_length), loaded.context_length)
    on_cpu = loaded.device == "cpu"
    cells = engine_cells(config, loaded.kv_bytes_per_token, context) if on_cpu else None
    if is_draft and not on_cpu:
        cells = min(config.parallel * context, cells_of_share(loaded, _SHARE_OF_DRAFT))
    batch = affordable_batch(loaded, PREFILL_SLICE if on_cpu else _SLICE_ON_GPU, config.gpu_memory)
    return HfSettings(
        context=context,
        cells=cells,
        sequences=2 * config.parallel,
        batch=max(batch, 2 * config.parallel),
        attention=None if config.attention == "auto" else AttentionTier(config.attention),
        threads=config.threads,
        gpu_memory=config.gpu_memory,
        facts=facts_folder("hf"),
        stored=stored_by(config),
    )


def _details(loaded: HfModel, engine: Engine) -> dict[str, Json]:
    return {
        "engine": "hf",
        "architecture": loaded.architecture,
        "parameters": loaded.parameters,
        "dtype": loaded.dtype,
        "quantisation": loaded.quantization,
        "weights_bytes": loaded.weights_bytes,
        "device": loaded.device,
        "layers": engine.capabilities.layers,
        "trained_context": loaded.context_length,
        "kv_bytes_per_token": engine.capabilities.kv_bytes_per_token,
    }


def _source(model: ModelFile) -> HfSource:
    from emberkeep.engine.hf.model_loader import HfSource

    if model.is_folder:
        return HfSource(model.path)
    prefix = "tokenizer.ggml."
    metadata = read_header(model.path).metadata
    facts = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    return HfSource(model.path.parent, model.path.name, facts, part_files(model.path)[1:])


def placing_of(config: Config) -> Placing:
    """Where weights of the hf engine may be."""
    from emberkeep.engine.hf.residency import Placing

    mode, _, kept = config.residency.partition(":")
    first, last = map(int, kept.split(",")) if kept else (None, None)
    return Placing(
        Residency(mode),
        first,
        last,
        config.gpu_memory,
        spill=config.data_dir,
        promised_ram=config.ram_budget,
        context=config.ctx or _CONTEXT_BESIDE_WEIGHTS,
    )


# ── llama.cpp ──
_FLASH = {"auto": None, "on": True, "off": False}


def open_llamacpp(model: ModelFile, config: Config, digests: Path, *, report: Report = tell_nobody) -> OpenedModel:
    """Blocks while the model is tried out and loaded. Raises ConfigError, ModelError, EngineError."""
    from emberkeep.engine.llamacpp.engine import LlamaEngine
    from emberkeep.engine.llamacpp.model import LlamaModel, WeightsLoading, begun
    from emberkeep.engine.llamacpp.shared_library import facts_about
    from emberkeep.engine.llamacpp.threads import name_workers
    from emberkeep.engine.llamacpp.trial import choose_library, prove_model
    from emberkeep.engine.llamacpp.tuning import tune

    name_workers()
    _check_kv_bits(config)
    header = read_header(model.path)
    shape = profile(header)
    early = begun(model.path)
    digest = early.proved(report) if early is not None else None
    if digest is None:
        digest = try_out(config, model, digests, report)
    choose_library(config.llama_library)
    prove_model(model.path, digest)
    facts, size = facts_about(digest), sum(part.stat().st_size for part in part_files(model.path))
    adapter_headers, adapters = read_adapters(config, header, digests)
    kv_bytes = live_kv_bytes(shape, config.kv_type)
    settings = _llamacpp_settings(config, shape, kv_bytes)
    placement, settings = place(config, [header, *adapter_headers], shape, settings, kv_bytes)

    def open_engine(loaded: LlamaModel) -> LlamaEngine:
        tuned, tuning = tune(loaded, settings, digest, _FLASH[config.flash_attention])
        return LlamaEngine(loaded, tuned, digest, tuning, facts, owns_thread=True)

    def load(where: Placement) -> LlamaModel:
        return LlamaModel(
            model.path,
            placement=where,
            adapters=adapters,
            loading=WeightsLoading(locks=config.mlock, early=early),
            report=lambda fraction: report(f"Loading {model.id}", int(fraction * size), size),
            facts=facts,
        )

    is_planned = config.gpu_layers is None
    engine, loaded, placement = open_placed(load, placement, open_engine, is_planned=is_planned)
    details = {
        **gguf_details(shape, placement, digest),
        "file": model.path.name,
        "kind": shape.kind,
        "kv_type": config.kv_type,
        **engine.stats(),
        "kv_bytes_per_token": kv_bytes,
        "lora": [{"file": each.path.name, "scale": each.scale, "sha256": each.digest} for each in adapters],
    }
    states = None if config.pooling == AUTO else open_own_states(config, loaded, digest)
    return OpenedModel(engine, loaded.chat_template, details, states)


def _check_kv_bits(config: Config) -> None:
    """Raises ConfigError."""
    if config.kv_type != "f16" and config.kv_bits != EXACT_BITS:
        raise ConfigError(
            f"kv_bits packs state that is held as f16, and kv_type = {config.kv_type} holds it in fewer bits "
            "already: leave one of the two out."
        )


def _llamacpp_settings(config: Config, shape: ModelProfile, kv_bytes: int) -> LlamaSettings:
    from emberkeep.engine.llamacpp.context import LlamaSettings

    context, short = checked_context(config, shape.context_length), shape.short_rope_context
    # llama.cpp looks at the number of cells: with more of them it would rotate for long contexts.
    most = short if short is not None and context <= short else None
    return LlamaSettings(
        context=context,
        cells=engine_cells(config, kv_bytes, context, most),
        sequences=2 * config.parallel,
        batch=max(PREFILL_SLICE, 2 * config.parallel),
        threads=config.threads,
        kv_type=config.kv_type,
        rope_switches=short is not None,
        stored=stored_by(config),
    )


# ── a model that embeds or ranks ──

AUTO = "auto"
_DEFAULT_CONTEXT = 2048
"""Cap on the length of inputs that was not asked for: all of an input is in one step, and buffers are as large as
the longest step. Where inputs can be cut into steps they may be longer."""
_DEFAULT_CAUSAL_CONTEXT = 8192


def open_embedding(
    config: Config, model: ModelFile, shape: EmbeddingProfile, digests: Path, holders: Holders | None = None
) -> Backend:
    """Blocks while the model is loaded. Raises ModelError, EngineError."""
    if model.is_folder == (config.engine == "llamacpp") and config.engine != AUTO:
        runs = "hf" if model.is_folder else "llamacpp"
        raise EngineError(f"{model.id} gives embeddings with --engine {runs}: choose it, or leave --engine out.")
    open_engine = _open_hf_embedding if model.is_folder else _open_llamacpp_embedding
    thread = EngineThread()
    try:
        engine, details = thread.submit(lambda: open_engine(config, model, shape, digests)).result()
    except BaseException:
        thread.end()
        raise
    capabilities = engine.capabilities
    about = {"pooling": capabilities.pooling, "dimension": capabilities.dimension}
    card = ModelCard(
        model.id,
        int(model.path.stat().st_mtime),
        capabilities.context,
        details={**details, **about},
        calls_tools=False,
    )
    log.info("%s takes inputs of %d tokens and gives %d numbers", card.id, card.context, capabilities.dimension)
    return EmbeddingBackend(card, engine, thread, make_embedder(config, card.id, engine, thread.submit), holders)


def open_own_states(config: Config, model: LlamaModel, weights: str) -> EmbeddingEngine:
    """The pooled states of a chat model, beside the engine that writes. Call it on the thread of that."""
    from emberkeep.engine.llamacpp.embedding_engine import LlamaEmbeddingEngine

    pooling = Pooling(config.pooling)
    settings = _llamacpp_embedding_settings(config, pooling, model.train_context)
    return LlamaEmbeddingEngine(model, settings, weights, shared=True)


def make_embedder(config: Config, name: str, engine: EmbeddingEngine, run: EngineRunner) -> LocalEmbedder:
    permits = Permits(config.parallel + config.queue, config.max_concurrent_per_user)
    cache = VectorCache(engine.fingerprint, open_vectors(config))
    return LocalEmbedder(name, engine, run, cache, permits, truncates=config.too_long == TooLong.TRUNCATE)


Opened = tuple[EmbeddingEngine, Mapping[str, Json]]
"""With what the model's card tells."""


def _open_llamacpp_embedding(config: Config, model: ModelFile, shape: EmbeddingProfile, digests: Path) -> Opened:
    from emberkeep.engine.llamacpp.context import LlamaSettings
    from emberkeep.engine.llamacpp.embedding_engine import LlamaEmbeddingEngine
    from emberkeep.engine.llamacpp.model import LlamaModel, WeightsLoading
    from emberkeep.engine.llamacpp.threads import one_core_each
    from emberkeep.engine.llamacpp.trial import choose_library, prove_embedding

    choose_library(config.llama_library)
    header = read_header(model.path)
    check_charsmap(header)
    about = profile(header)
    settings = _llamacpp_embedding_settings(config, _pooling_of(config, shape), about.context_length)
    digest = model_digest(model.path, digests)
    prove_embedding(model.path, digest, _pooling_of(config, shape))
    adapter_headers, adapters = read_adapters(config, header, digests)
    room = LlamaSettings(settings.context, max(settings.context, settings.batch), 1, settings.batch)
    headers, kv_bytes = [header, *adapter_headers], live_kv_bytes(about, "f16")
    placement, _ = place(config, headers, about, room, kv_bytes)

    def open_engine(loaded: LlamaModel) -> LlamaEmbeddingEngine:
        with one_core_each():
            return LlamaEmbeddingEngine(loaded, settings, digest)

    def load(where: Placement) -> LlamaModel:
        loading = WeightsLoading(locks=config.mlock)
        return LlamaModel(model.path, placement=where, adapters=adapters, loading=loading, may_rewrite=True)

    engine, _, placement = open_placed(load, placement, open_engine, is_planned=config.gpu_layers is None)
    return engine, gguf_details(about, placement, digest)


def _llamacpp_embedding_settings(config: Config, pooling: Pooling, trained: int) -> LlamaEmbeddingSettings:
    from emberkeep.engine.llamacpp.embedding_engine import LlamaEmbeddingSettings

    cap = _DEFAULT_CAUSAL_CONTEXT if pooling is Pooling.LAST else _DEFAULT_CONTEXT
    # Beyond what it was trained for, an encoder has no positions.
    context = min(config.ctx or cap, trained)
    return LlamaEmbeddingSettings(context, PREFILL_SLICE, pooling, config.threads)


def _open_hf_embedding(config: Config, model: ModelFile, shape: EmbeddingProfile, digests: Path) -> Opened:
    require_hf()
    from emberkeep.engine.hf.embedding_engine import HfEmbeddingEngine, HfEmbeddingSettings

    settings = HfEmbeddingSettings(
        pooling=_pooling_of(config, shape),
        context=config.ctx or shape.context,
        batch=PREFILL_SLICE,
        dense=shape.dense,
        device=config.device,
        dtype=config.dtype,
    )
    digest = model_digest(model.path, digests)
    engine = HfEmbeddingEngine(model.path, settings, digest)
    return engine, {"engine": "hf", **engine.details, "weights_sha256": digest}


def _pooling_of(config: Config, shape: EmbeddingProfile) -> Pooling:
    """A head that ranks has a pooling of its own."""
    return shape.pooling if config.pooling == AUTO or shape.pooling is Pooling.RANK else Pooling(config.pooling)
