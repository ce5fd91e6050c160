"""A model that embeds or ranks: from a Config to engine, cache of vectors and backend."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from emberkeep.backend.base import Backend, ModelCard
from emberkeep.backend.embedder import EmbeddingBackend, EngineRunner, LocalEmbedder, VectorCache
from emberkeep.backend.limits import Permits
from emberkeep.config.settings import PREFILL_SLICE, Config, TooLong
from emberkeep.engine.devices import require_hf
from emberkeep.engine.embedding import EmbeddingEngine
from emberkeep.errors import EngineError
from emberkeep.kv.forgetting import Holders
from emberkeep.models.checks import check_charsmap
from emberkeep.models.digest import model_digest
from emberkeep.models.embedding import EmbeddingProfile
from emberkeep.models.gguf import read_header
from emberkeep.models.library import ModelFile
from emberkeep.models.profile import profile
from emberkeep.runtime.parts import open_vectors
from emberkeep.runtime.placement import gguf_details, live_kv_bytes, open_placed, place, read_adapters
from emberkeep.sched.engine_thread import EngineThread
from emberkeep.types.request import Json, Pooling

if TYPE_CHECKING:
    from emberkeep.engine.llamacpp.embedding_engine import LlamaEmbeddingSettings
    from emberkeep.engine.llamacpp.gpus import Placement
    from emberkeep.engine.llamacpp.model import LlamaModel

log = logging.getLogger("emberkeep")

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
    open_engine = _open_hf if model.is_folder else _open_llamacpp
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
    settings = _llamacpp_settings(config, pooling, model.train_context)
    return LlamaEmbeddingEngine(model, settings, weights, shared=True)


def make_embedder(config: Config, name: str, engine: EmbeddingEngine, run: EngineRunner) -> LocalEmbedder:
    permits = Permits(config.parallel + config.queue, config.max_concurrent_per_user)
    cache = VectorCache(engine.fingerprint, open_vectors(config))
    return LocalEmbedder(name, engine, run, cache, permits, truncates=config.too_long == TooLong.TRUNCATE)


Opened = tuple[EmbeddingEngine, Mapping[str, Json]]
"""With what the model's card tells."""


def _open_llamacpp(config: Config, model: ModelFile, shape: EmbeddingProfile, digests: Path) -> Opened:
    from emberkeep.engine.llamacpp.context import LlamaSettings
    from emberkeep.engine.llamacpp.embedding_engine import LlamaEmbeddingEngine
    from emberkeep.engine.llamacpp.model import LlamaModel, WeightsLoading
    from emberkeep.engine.llamacpp.threads import one_core_each
    from emberkeep.engine.llamacpp.trial import choose_library, prove_embedding

    choose_library(config.llama_library)
    header = read_header(model.path)
    check_charsmap(header)
    about = profile(header)
    settings = _llamacpp_settings(config, _pooling(config, shape), about.context_length)
    digest = model_digest(model.path, digests)
    prove_embedding(model.path, digest, _pooling(config, shape))
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


def _llamacpp_settings(config: Config, pooling: Pooling, trained: int) -> LlamaEmbeddingSettings:
    from emberkeep.engine.llamacpp.embedding_engine import LlamaEmbeddingSettings

    cap = _DEFAULT_CAUSAL_CONTEXT if pooling is Pooling.LAST else _DEFAULT_CONTEXT
    # Beyond what it was trained for, an encoder has no positions.
    context = min(config.ctx or cap, trained)
    return LlamaEmbeddingSettings(context, PREFILL_SLICE, pooling, config.threads)


def _open_hf(config: Config, model: ModelFile, shape: EmbeddingProfile, digests: Path) -> Opened:
    require_hf()
    from emberkeep.engine.hf.embedding_engine import HfEmbeddingEngine, HfEmbeddingSettings

    settings = HfEmbeddingSettings(
        pooling=_pooling(config, shape),
        context=config.ctx or shape.context,
        batch=PREFILL_SLICE,
        dense=shape.dense,
        device=config.device,
        dtype=config.dtype,
    )
    digest = model_digest(model.path, digests)
    engine = HfEmbeddingEngine(model.path, settings, digest)
    return engine, {"engine": "hf", **engine.details, "weights_sha256": digest}


def _pooling(config: Config, shape: EmbeddingProfile) -> Pooling:
    """A head that ranks has a pooling of its own."""
    return shape.pooling if config.pooling == AUTO or shape.pooling is Pooling.RANK else Pooling(config.pooling)
