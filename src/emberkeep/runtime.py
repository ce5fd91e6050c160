"""The composition root: a Config becomes a running backend."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from emberkeep.backend.base import Backend, ModelCard
from emberkeep.backend.channel import Outbox
from emberkeep.backend.local import LocalBackend
from emberkeep.backend.places import Places
from emberkeep.backend.precache import KeepAlive
from emberkeep.chat.template import ChatTemplate
from emberkeep.config import Config, total_ram, ttls
from emberkeep.engine.base import Engine
from emberkeep.errors import ModelBroken, TemplateFailed
from emberkeep.kv.cold import ColdTier
from emberkeep.kv.store import Keeping, KvStore
from emberkeep.models.digest import weights_digest
from emberkeep.models.gguf import read_header
from emberkeep.models.library import ModelLibrary
from emberkeep.models.profile import ModelProfile, profile
from emberkeep.sched.loop import EngineLoop, LoopSettings
from emberkeep.sched.thread import EngineThread

log = logging.getLogger("emberkeep")

_DEFAULT_CONTEXT = 32_768
"""Cap on a context nobody asked for: models that allow a million tokens exist, machines for them less so."""
_KV_SHARE_OF_RAM = 4
"""At most this part of RAM for the KV cells of the engine, unless a single context needs more."""


def open_backend(config: Config) -> Backend:
    """Load the configured model. Blocks for as long as that takes. Raises ModelError, EngineError."""
    library = ModelLibrary(config.data_dir / "models")
    model = library.resolve(config.model)
    shape = profile(read_header(model.path))
    context = _context(config, shape)
    digest = weights_digest(model.path, library.digests)
    thread = EngineThread()
    engine, source = thread.submit(lambda: _open_llamacpp(model.path, config, shape, context, digest)).result()
    details = {
        "architecture": shape.architecture,
        "kind": shape.kind,
        "parameters": shape.parameters,
        "quantisation": shape.quantisation,
        "trained_context": shape.context_length,
        "kv_bytes_per_token": shape.kv_bytes_per_token,
        "weights_sha256": digest,
    }
    card = ModelCard(model.id, int(model.path.stat().st_mtime), context, details=details)
    return assemble(config, engine, source, card, thread)


def assemble(
    config: Config,
    engine: Engine,
    template_source: str | None,
    card: ModelCard,
    thread: EngineThread | None = None,
) -> LocalBackend:
    """A backend over any engine, which was opened on `thread`. Both belong to it from now on."""
    template = _template(engine, template_source)
    store = open_store(config, engine.fingerprint, {"model": card.id})
    slice_ = min(config.prefill_slice, engine.capabilities.batch)
    settings = LoopSettings(
        parallel=config.parallel,
        prefill_slice=slice_,
        tracked=config.tracked_conversations,
        warm_after=config.turns_to_warm,
    )
    outbox = Outbox()
    return LocalBackend(
        card,
        engine.vocab,
        template,
        EngineLoop(engine, store, settings, thread=thread, after_step=outbox.flush),
        store,
        outbox,
        Places(config.parallel + config.queue, config.max_concurrent_per_user),
        context=engine.capabilities.context,
        keep_alive=KeepAlive(ttls(config), config.sweep_s, config.tracked_conversations),
        deadline_s=config.deadline_s,
        drain_s=config.drain_s,
    )


def open_store(config: Config, fingerprint: bytes, about: Mapping[str, str]) -> KvStore:
    """Without a usable folder the store lives in RAM: serving goes on."""
    keeping = Keeping(ttls(config), config.turns_to_cold, config.disk_writes_per_day)

    def store(cold: ColdTier | None) -> KvStore:
        return KvStore(
            fingerprint,
            warm_budget=config.ram_budget,
            cold=cold,
            cold_budget=config.disk_budget,
            keeping=keeping,
            about=about,
        )

    if config.disk_budget:
        try:
            return store(ColdTier(config.data_dir / "kv", fingerprint))
        except OSError as error:
            log.warning("stored state is kept in RAM only: %s", error)
    return store(None)


def _open_llamacpp(
    path: Path, config: Config, shape: ModelProfile, context: int, digest: str
) -> tuple[Engine, str | None]:
    from emberkeep.engine.llamacpp import LlamaEngine, LlamaModel, LlamaSettings, one_core_each

    model = LlamaModel(path, gpu_layers=config.gpu_layers)
    settings = LlamaSettings(
        context=context,
        cells=_cells(config, shape, context),
        sequences=2 * config.parallel,
        batch=max(config.prefill_slice, 2 * config.parallel),
        threads=config.threads,
        rope_switches=shape.short_rope_context is not None,
    )
    with one_core_each():
        engine = LlamaEngine(model, settings, digest)
    return engine, model.chat_template


def _context(config: Config, shape: ModelProfile) -> int:
    if config.ctx is None:
        return min(shape.context_length, _DEFAULT_CONTEXT)
    if config.ctx > shape.context_length:
        log.warning(
            "a context of %d tokens is more than the %d this model was trained for",
            config.ctx,
            shape.context_length,
        )
    return config.ctx


def _cells(config: Config, shape: ModelProfile, context: int) -> int:
    """Room for `parallel` full contexts if RAM allows, and always for one."""
    affordable = total_ram() // _KV_SHARE_OF_RAM // max(shape.kv_bytes_per_token, 1)
    short = shape.short_rope_context
    if short is not None and context <= short:
        # llama.cpp looks at the number of cells: with more of them it would rotate for long contexts.
        affordable = min(affordable, short)
    return max(context, min(config.parallel * context, affordable))


def _template(engine: Engine, source: str | None) -> ChatTemplate:
    vocab = engine.vocab
    bos, eos = (
        vocab.pieces[t].decode("utf-8", "replace") if t is not None else "" for t in (vocab.bos, vocab.eos)
    )
    if source is None:
        log.warning("the model has no chat template: ChatML is used")
        return ChatTemplate.default(bos=bos, eos=eos)
    try:
        return ChatTemplate(source, bos=bos, eos=eos)
    except TemplateFailed as error:
        engine.close()
        raise ModelBroken(f"{error} Choose another model file.") from error
