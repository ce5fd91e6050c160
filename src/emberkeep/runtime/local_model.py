"""A model that runs here: from a Config to engine, store, scheduler and backend."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

from emberkeep.backend.base import Backend, ModelCard
from emberkeep.backend.limits import Permits
from emberkeep.backend.local import LocalBackend, LocalSettings
from emberkeep.backend.model_pool import Report, tell_nobody
from emberkeep.backend.precache import KeepAlive
from emberkeep.chat.template import ChatTemplate, begin_worker
from emberkeep.config.kinds import readable_size
from emberkeep.config.settings import DRAIN_S, NEVER, OFF, Config, TooLong, placed_by_itself
from emberkeep.engine.base import Engine, Footprint
from emberkeep.engine.devices import require_hf
from emberkeep.errors import ConfigError, EmberkeepError, EngineError, ModelBroken, TemplateFailed
from emberkeep.kv.store import KvStore
from emberkeep.models.digest import file_versions
from emberkeep.models.library import ModelFile, ModelLibrary
from emberkeep.models.profile import embedding_profile
from emberkeep.runtime.engines import AUTO, make_embedder, open_embedding, open_hf, open_llamacpp
from emberkeep.runtime.parts import ModelParts, open_sessions
from emberkeep.runtime.tools import server_tools
from emberkeep.sched.admission import Admission, Lineages, open_admission
from emberkeep.sched.draft_model import LoadedDraft
from emberkeep.sched.engine_thread import EngineThread
from emberkeep.sched.lifetimes import SchedulerSettings
from emberkeep.sched.scheduler import Scheduler
from emberkeep.types.lineage import Approximation, Repair
from emberkeep.types.models import Quantization, Vocab
from emberkeep.types.request import ReasoningFormat
from emberkeep.values import dataclass

log = logging.getLogger("emberkeep")

_LLAMACPP_ONLY = {
    "lora": (),
    "kv_type": "f16",
    "flash_attention": "auto",
    "cpu_moe": 0,
    "tensor_split": None,
    "pooling": AUTO,
}
"""Settings that say what is computed, and their defaults."""
_TRACKED = 16
"""Conversations whose slot and prefix are looked after at a time."""
_MOST_DRAFTED = 24
"""Tokens for one answer in one step."""


def open_local(config: Config, parts: ModelParts | None = None, report: Report = tell_nobody) -> Backend:
    """Load the configured model. Blocks for as long as that takes. Raises ModelError, EngineError.

    `parts`: those that it shares with other models.
    """
    library = ModelLibrary(config.data_dir / "models")
    model = library.resolve(config.local_model)
    embedding = embedding_profile(model.path)
    if embedding is not None:
        return open_embedding(config, model, embedding, library.digests, parts.holders if parts else None)
    begin_worker()
    open_engine = open_hf if _uses_hf(config, model) else open_llamacpp
    before = file_versions(model.path)
    thread = EngineThread()
    # First the draft model: what it takes is counted, and what is planned for the other one has room beside it.
    draft = _open_draft(config, model, library, thread)
    try:
        opened = thread.submit(lambda: open_engine(model, config, library.digests, report=report)).result()
        if file_versions(model.path) != before:
            # State of other weights would be stored as that of those whose digest was taken.
            thread.submit(opened.engine.close).result()
            raise ModelBroken(
                f"{model.path.name} changed while it was loaded: try again when nothing writes to it."
            )
        if draft is not None:
            check_draft(opened.engine, draft.engine)
    except BaseException:
        if draft is not None:
            thread.submit(draft.engine.close).result()
        thread.end()
        raise
    card = ModelCard(
        model.id,
        int(model.path.stat().st_mtime),
        opened.engine.capabilities.context,
        details={**opened.details, **({"draft_model": draft.name} if draft else {})},
    )
    backend = assemble(config, opened.engine, opened.template, card, thread, draft, parts)
    _log_plan(opened.engine.footprint)
    if opened.states is not None:
        backend.embed_with(make_embedder(config, card.id, opened.states, backend.scheduler.call))
    return backend


def _log_plan(footprint: Footprint | None) -> None:
    """What memory is planned with: an operator has to know it where something does not fit."""
    if footprint is not None:
        log.info(
            "memory of %s: %s in all, %s fixed; bytes per token of a step %.0f, per token of context %.0f, "
            "per pair of them %.3g, per row of logits %.0f",
            footprint.device,
            readable_size(footprint.capacity),
            readable_size(footprint.fixed),
            footprint.per_step_token,
            footprint.per_context_token,
            footprint.per_pair,
            footprint.per_logits_row,
        )


@dataclass(frozen=True, slots=True)
class OpenedDraft:
    name: str
    engine: Engine


def _open_draft(
    config: Config, model: ModelFile, library: ModelLibrary, thread: EngineThread
) -> OpenedDraft | None:
    """None where none is configured. Raises as `open_local` does."""
    if config.draft_model is None:
        return None
    draft = library.resolve(config.draft_model)
    if draft.path.resolve() == model.path.resolve():
        raise ConfigError("The draft model is the model itself: choose a smaller one.")
    # Without adapters, and placed by itself, whatever is said of the other one.
    own = replace(placed_by_itself(config), model=config.draft_model, pooling=AUTO)
    drafts_in_hf = _uses_hf(own, draft)
    if drafts_in_hf != _uses_hf(config, model):
        here, there = ("llama.cpp", "the Hugging Face engine")[:: 1 if drafts_in_hf else -1]
        raise ConfigError(
            f"The model runs in {here} and its draft model in {there}: choose a draft model of the same kind."
        )
    open_engine = partial(open_hf, is_draft=True) if drafts_in_hf else open_llamacpp
    opened = thread.submit(lambda: open_engine(draft, own, library.digests)).result()
    return OpenedDraft(draft.id, opened.engine)


def _uses_hf(config: Config, model: ModelFile) -> bool:
    """Raises EngineError where the engine that was asked for cannot run this model, or is not installed."""
    if config.engine == "llamacpp" and model.is_folder:
        raise EngineError(f"llama.cpp runs GGUF files only, and {model.id} is a folder: choose --engine hf.")
    uses_hf = config.engine == "hf" or model.is_folder
    if uses_hf:
        _refuse_llamacpp_settings(config)
        require_hf()
    elif config.quantization != Quantization.NONE:
        log.warning("quantization is for the hf engine: %s keeps the bits of its file", model.id)
    return uses_hf


def assemble(
    config: Config,
    engine: Engine,
    template_source: str | None,
    card: ModelCard,
    thread: EngineThread | None = None,
    draft: OpenedDraft | None = None,
    parts: ModelParts | None = None,
) -> LocalBackend:
    """A backend over any engine, which was opened on `thread`, as `draft` was. All belong to it from now on."""
    try:
        template, lineages = _template(engine.vocab, template_source), _lineages(config, engine)
    except EmberkeepError:
        engine.close()
        raise
    share = _share_of_draft(engine, draft.engine) if draft else 0.0
    parts = parts or ModelParts(config)
    store = parts.store(engine.fingerprint, {"model": card.id}, 1 - share)
    store.read_into(engine.payload_buffer)
    loaded = None
    if draft is not None:
        its_store = parts.store(draft.engine.fingerprint, {"model": draft.name}, share, is_draft=True)
        loaded = LoadedDraft(draft.name, draft.engine, its_store)
    slice_ = engine.capabilities.batch
    admission = _admission(config, engine, store, slice_)
    scheduling = SchedulerSettings(
        parallel=config.parallel,
        prefill_slice=slice_,
        tracked=_TRACKED,
        drain_s=DRAIN_S,
        memory=admission.budget if admission else None,
        draft_max=0 if config.speculation == OFF else _MOST_DRAFTED,
    )
    memory = parts.memory()
    context, vocab = engine.capabilities.context, engine.vocab
    sessions = open_sessions(config, memory, context, lambda text: len(vocab.tokenize(text)))
    scheduler = Scheduler(engine, store, scheduling, thread=thread, draft=loaded)
    settings = _local_settings(config, parts, lineages, admission)
    return LocalBackend(card, template, scheduler, sessions, settings, server_tools(config, memory))


def _local_settings(
    config: Config, parts: ModelParts, lineages: Lineages, admission: Admission | None
) -> LocalSettings:
    return LocalSettings(
        lineages=lineages,
        permits=Permits(config.parallel + config.queue, config.max_concurrent_per_user),
        keep_alive=KeepAlive(config.ttl.by_class(), config.sweep_s, 0 if config.expire else _TRACKED),
        hygiene=parts.hygiene,
        admission=admission,
        auto_truncate=config.too_long == TooLong.TRUNCATE,
        no_tools=config.tools == OFF,
        reasoning=ReasoningFormat(config.reasoning),
        deadline_s=config.deadline_s,
        most_tokens=config.max_tokens,
        close_store=parts.close_store,
        close_memory=parts.close_memory,
    )


def _share_of_draft(engine: Engine, draft: Engine) -> float:
    """The part of the RAM for stored state that the draft model's state of the same tokens takes."""
    mine, its = (each.capabilities.kv_bytes_per_token for each in (engine, draft))
    return its / (mine + its)


def _admission(config: Config, engine: Engine, store: KvStore, largest_slice: int) -> Admission | None:
    if config.memory_margin is None:
        return None
    return open_admission(
        lambda: engine.footprint,
        engine.capabilities,
        largest_slice=largest_slice,
        margin=config.memory_margin,
        store_room=store.ram_room,
    )


def _refuse_llamacpp_settings(config: Config) -> None:
    """Raises EngineError for what would change what the hf engine computes, and does not."""
    for key, default in _LLAMACPP_ONLY.items():
        if getattr(config, key) != default:
            flag = f"--{key.replace('_', '-')}"
            raise EngineError(
                f"{flag} is for GGUF models in llama.cpp: leave it out, or choose --engine llamacpp."
            )


def _lineages(config: Config, engine: Engine) -> Lineages:
    shape = engine.capabilities
    wanted = None if config.approximate in (OFF, NEVER) else Approximation(Repair(config.approximate))
    is_exact = config.approximate == NEVER
    lineages = Lineages(config.kv_bits, shape.packs, wanted, shape.can_blend, is_exact, shape.can_shift)
    lineages.check()
    return lineages


def _template(vocab: Vocab, source: str | None) -> ChatTemplate:
    bos, eos = (
        vocab.pieces[t].decode("utf-8", "replace") if t is not None else "" for t in (vocab.bos, vocab.eos)
    )
    if source is None:
        log.warning("the model has no chat template: ChatML is used")
        return ChatTemplate.default(bos=bos, eos=eos)
    try:
        return ChatTemplate(source, bos=bos, eos=eos)
    except TemplateFailed as error:
        raise ModelBroken(f"{error} Choose another model file.") from error


# ── what a draft model needs: the same vocabulary, and state that can go back ──


_SHOWN = 24
"""Bytes of a token in an error."""


def check_draft(engine: Engine, draft: Engine) -> None:
    """Raises EngineError for a model that cannot draft for the engine's."""
    if draft.fingerprint == engine.fingerprint:
        raise EngineError("The draft model has the weights of the model itself: choose a smaller one.")
    if draft.capabilities.kv_unit.has_snapshots:
        raise EngineError(
            "The draft model's state cannot go back by single tokens, as it must where a draft is wrong: "
            "choose one with attention only."
        )
    if difference := vocab_difference(engine.vocab, draft.vocab):
        raise EngineError(
            f"The draft model has another vocabulary than the model: {difference}. Choose one of the same family."
        )


def vocab_difference(vocab: Vocab, draft: Vocab) -> str | None:
    """The first thing in which they differ, as a part of a sentence; None: a token means the same in both."""
    if len(draft.pieces) != len(vocab.pieces):
        return f"it has {len(draft.pieces):,} tokens and not {len(vocab.pieces):,}"
    for token, (mine, its) in enumerate(zip(vocab.pieces, draft.pieces, strict=True)):
        if mine != its:
            return f"token {token:,} is {its[:_SHOWN]!r} and not {mine[:_SHOWN]!r}"
    for text in sorted({*vocab.specials, *draft.specials}):
        if draft.specials.get(text) != vocab.specials.get(text):
            return f"{text[:_SHOWN]!r} is token {draft.specials.get(text)} and not {vocab.specials.get(text)}"
    if draft.eog != vocab.eog:
        return f"an answer ends with tokens {sorted(draft.eog)} and not {sorted(vocab.eog)}"
    if draft.bos != vocab.bos:
        return f"a text begins with token {draft.bos} and not {vocab.bos}"
    return None
