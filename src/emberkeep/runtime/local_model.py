"""A model that runs here: from a Config to engine, store, scheduler and backend."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from emberkeep.backend.base import Backend, ModelCard
from emberkeep.backend.choices import Permits
from emberkeep.backend.local import LocalBackend, LocalSettings
from emberkeep.backend.on_demand import Report, tell_nobody
from emberkeep.backend.precache import KeepAlive
from emberkeep.chat.render_pool import begin_worker
from emberkeep.chat.template import ChatTemplate
from emberkeep.config.machine import total_ram
from emberkeep.config.settings import DRAIN_S, NEVER, OFF, PREFILL_SLICE, TOOL_TURNS, Config, TooLong
from emberkeep.engine.base import Engine
from emberkeep.engine.embedding import EmbeddingEngine
from emberkeep.engine.extras import require_hf
from emberkeep.engine.facts import facts_folder
from emberkeep.engine.locked_memory import lock_weights
from emberkeep.errors import ConfigError, EngineError, ModelBroken, Overloaded, TemplateFailed
from emberkeep.kv.store import KvStore
from emberkeep.models.adapter import check_adapter
from emberkeep.models.digest import file_versions, model_digest, weights_digest
from emberkeep.models.early_load import try_out
from emberkeep.models.gguf import read_header
from emberkeep.models.library import ModelFile, ModelLibrary
from emberkeep.models.parts import part_files
from emberkeep.models.profile import ModelProfile, profile
from emberkeep.runtime.draft_loading import check_draft, check_engines, check_files, config_of_draft
from emberkeep.runtime.embedding_model import (
    AUTO,
    embedding_profile,
    make_embedder,
    open_embedding,
    open_own_states,
)
from emberkeep.runtime.memory import open_sessions
from emberkeep.runtime.parts import OwnParts, Parts, stored_by
from emberkeep.runtime.placement import live_kv_bytes, open_placed, place
from emberkeep.runtime.tools import server_tools
from emberkeep.sched.admission import Admission, open_admission
from emberkeep.sched.draft_model import LoadedDraft
from emberkeep.sched.engine_thread import EngineThread, promised
from emberkeep.sched.parts import SchedulerSettings
from emberkeep.sched.probe import DeviceProbe, log_plan, probe, step_seconds
from emberkeep.sched.scheduler import Scheduler
from emberkeep.types.lineage import EXACT_BITS, Approximation, Repair
from emberkeep.types.models import AttentionTier, Quantization, Residency
from emberkeep.types.request import Json, Lineages, ReasoningFormat
from emberkeep.values import dataclass

if TYPE_CHECKING:
    from emberkeep.engine.hf.model_loader import HfSource
    from emberkeep.engine.hf.residency import Placing
    from emberkeep.engine.llamacpp.model import LlamaModel, Placement

log = logging.getLogger("emberkeep")

_DEFAULT_CONTEXT = 32_768
"""Cap on a context that was not asked for: models that allow a million tokens exist, machines for them less so."""
_CONTEXT_BESIDE_WEIGHTS = 8192
"""The same for what weights that pass through a GPU leave room for: with more, more of them would have to pass."""
_FLASH = {"auto": None, "on": True, "off": False}
_LLAMACPP_ONLY = {
    "lora": (),
    "kv_type": "f16",
    "flash_attention": "auto",
    "cpu_moe": 0,
    "tensor_split": None,
    "pooling": AUTO,
}
"""Settings that say what is computed, and their defaults."""
_SLICE_ON_GPU = 4096
"""Most prompt tokens in one step: a GPU takes as long for 500 as for thousands."""
_TRACKED = 16
"""Conversations whose slot and prefix are looked after at a time."""
_MOST_DRAFTED = 24
"""Tokens for one answer in one step."""
_KV_SHARE_OF_RAM = 4
"""At most this part of RAM, or of what is for models, for the KV cells of the engine, unless a single context
needs more."""

_PROBED = 64 << 20
"""Bytes that are copied to learn how fast a GPU is: less would measure how long a copy takes to begin."""
_SHARE_OF_DRAFT = 0.1
"""Of a GPU's free memory, for the KV cells of a draft model."""


@dataclass(frozen=True, slots=True)
class _Opened:
    engine: Engine
    template: str | None
    details: Mapping[str, Json]
    """What the model's card tells."""
    states: EmbeddingEngine | None = None
    """Pooled, where that was asked for."""
    device: DeviceProbe | None = None
    """Where it computes, if that has memory of its own. Belongs to the engine's thread."""


def open_local(config: Config, parts: Parts | None = None, report: Report = tell_nobody) -> Backend:
    """Load the configured model. Blocks for as long as that takes. Raises ModelError, EngineError.

    `parts`: those that it shares with other models.
    """
    library = ModelLibrary(config.data_dir / "models")
    model = library.resolve(config.local_model)
    embedding = embedding_profile(model)
    if embedding is not None:
        return open_embedding(config, model, embedding, library.digests, parts.holders if parts else None)
    begin_worker()
    open_engine = _open_hf if _uses_hf(config, model) else _open_llamacpp
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
    backend.scheduler.in_gaps(lambda _: _start(partial(_measure, config, opened, backend)), empties=False)
    if opened.states is not None:
        backend.embed_with(make_embedder(config, card.id, opened.states, backend.scheduler.call))
    return backend


def _start(action: Callable[[], None]) -> bool:
    threading.Thread(target=action, name="probe", daemon=True).start()
    return True


def _measure(config: Config, opened: _Opened, backend: LocalBackend) -> None:
    """What the model runs on, which is logged with what its memory is planned with. Blocks."""
    engine, device, there = opened.engine, opened.device, backend.scheduler.in_a_gap
    backend.machine = probe(
        config.data_dir,
        engine.footprint,
        partial(_step_seconds, engine, there),
        DeviceProbe(partial(there, device.load_speed), partial(there, device.read_speed)) if device else None,
    )
    log_plan(engine.footprint, backend.machine)


def _step_seconds(engine: Engine, there: Callable[[Callable[[], float]], float]) -> float:
    """`there`: calls it in a gap, when the engine holds nothing."""
    known = engine.step_seconds(1, 0, 1)
    return known if known is not None else there(lambda: step_seconds(engine))


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
    draft, own = library.resolve(config.draft_model), config_of_draft(config, config.draft_model)
    check_files(model.path, draft.path)
    hf = _uses_hf(own, draft)
    check_engines(hf=_uses_hf(config, model), draft_hf=hf)
    open_engine = _open_hf_draft if hf else _open_llamacpp
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
    parts: Parts | None = None,
) -> LocalBackend:
    """A backend over any engine, which was opened on `thread`, as `draft` was. All belong to it from now on."""
    template = _template(engine, template_source)
    lineages = _lineages(config, engine)
    share = _share_of_draft(engine, draft.engine) if draft else 0.0
    parts = parts or OwnParts(config)
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
    settings = LocalSettings(
        lineages=lineages,
        permits=Permits(config.parallel + config.queue, config.max_concurrent_per_user),
        keep_alive=KeepAlive(config.ttl.by_class(), config.sweep_s, 0 if config.expire else _TRACKED),
        hygiene=parts.hygiene,
        admission=admission,
        auto_truncate=config.too_long == TooLong.TRUNCATE,
        tool_rounds=TOOL_TURNS + 1,
        no_tools=config.tools == OFF,
        reasoning=ReasoningFormat(config.reasoning),
        deadline_s=config.deadline_s,
        most_tokens=config.max_tokens,
        close_store=parts.close_store,
        close_memory=parts.close_memory,
    )
    memory = parts.memory()
    context, vocab = engine.capabilities.context, engine.vocab
    sessions = open_sessions(config, memory, context, lambda text: len(vocab.tokenize(text)))
    scheduler = Scheduler(engine, store, scheduling, thread=thread, draft=loaded)
    return LocalBackend(card, template, scheduler, sessions, settings, server_tools(config, memory))


def _share_of_draft(engine: Engine, draft: Engine) -> float:
    """Of the RAM for stored state: that of the same tokens."""
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


def _open_llamacpp(model: ModelFile, config: Config, digests: Path, *, report: Report = tell_nobody) -> _Opened:
    from emberkeep.engine.llamacpp.context import LlamaSettings, name_workers
    from emberkeep.engine.llamacpp.early_load import begun
    from emberkeep.engine.llamacpp.engine import LlamaEngine
    from emberkeep.engine.llamacpp.facts import facts_about
    from emberkeep.engine.llamacpp.model import Adapter, LlamaModel
    from emberkeep.engine.llamacpp.trial import choose_library, prove_model
    from emberkeep.engine.llamacpp.tuning import tune

    name_workers()
    _check_kv_bits(config)
    header = read_header(model.path)
    shape = profile(header)
    adapter_headers = [check_adapter(lora.path, header) for lora in config.lora]
    context = _context(config, shape.context_length)
    early = begun(model.path)
    digest = early.proved(report) if early is not None else None
    if digest is None:
        digest = try_out(config, model, digests, report)
    choose_library(config.llama_library)
    prove_model(model.path, digest)
    facts, size = facts_about(digest), sum(part.stat().st_size for part in part_files(model.path))
    adapters = [Adapter(weights_digest(lora.path, digests), lora.scale, lora.path) for lora in config.lora]
    kv_bytes = live_kv_bytes(shape, config.kv_type)
    settings = LlamaSettings(
        context=context,
        cells=_llamacpp_cells(config, shape, kv_bytes, context),
        sequences=2 * config.parallel,
        batch=max(PREFILL_SLICE, 2 * config.parallel),
        threads=config.threads,
        kv_type=config.kv_type,
        rope_switches=shape.short_rope_context is not None,
        stored=stored_by(config),
    )
    placement, settings = place(config, [header, *adapter_headers], shape, settings, kv_bytes)

    def open_engine(loaded: LlamaModel) -> LlamaEngine:
        tuned, tuning = tune(loaded, settings, digest, _FLASH[config.flash_attention])
        return LlamaEngine(loaded, tuned, digest, tuning, facts, owns_thread=True)

    def load(where: Placement) -> LlamaModel:
        def tell(fraction: float) -> None:
            report(_loading(model), int(fraction * size), size)

        return LlamaModel(
            model.path,
            placement=where,
            adapters=adapters,
            locks=config.mlock,
            report=tell,
            facts=facts,
            early=early,
        )

    is_planned = config.gpu_layers is None
    engine, loaded, placement = open_placed(load, placement, open_engine, is_planned=is_planned)
    details = {
        "engine": "llamacpp",
        "file": model.path.name,
        "architecture": shape.architecture,
        "kind": shape.kind,
        "parameters": shape.parameters,
        "quantisation": shape.quantisation,
        "trained_context": shape.context_length,
        "kv_type": config.kv_type,
        **engine.stats(),
        "kv_bytes_per_token": kv_bytes,
        "gpu_layers": placement.count,
        "weights_sha256": digest,
        "lora": [{"file": each.path.name, "scale": each.scale, "sha256": each.digest} for each in adapters],
    }
    states = None if config.pooling == AUTO else open_own_states(config, loaded, digest)
    return _Opened(engine, loaded.chat_template, details, states)


def _loading(model: ModelFile) -> str:
    return f"Loading {model.id}"


def _check_kv_bits(config: Config) -> None:
    """Raises ConfigError."""
    if config.kv_type != "f16" and config.kv_bits != EXACT_BITS:
        raise ConfigError(
            f"kv_bits packs state that is held as f16, and kv_type = {config.kv_type} holds it in fewer bits "
            "already: leave one of the two out."
        )


def _open_hf_draft(model: ModelFile, config: Config, digests: Path) -> _Opened:
    return _open_hf(model, config, digests, is_draft=True)


def _open_hf(
    model: ModelFile, config: Config, digests: Path, *, is_draft: bool = False, report: Report = tell_nobody
) -> _Opened:
    """A draft model leaves most of a GPU's memory to the other one."""
    report(_loading(model), 0, None)  # importing torch takes seconds
    # Beside it: reading all of a large model takes as long as importing and loading.
    digest, compute_digest = promised(lambda: model_digest(model.path, digests))
    threading.Thread(target=compute_digest, name="emberkeep-digest", daemon=True).start()
    from emberkeep.engine.hf.engine import open_engine
    from emberkeep.engine.hf.footprint import affordable_batch, cells_of_share
    from emberkeep.engine.hf.model_loader import HfSettings, load_model

    source = _hf_source(model)
    loaded = load_model(
        source,
        device=config.device,
        dtype=config.dtype,
        attention="eager",
        placing=placing_of(config),
        quantization=Quantization(config.quantization),
    )
    # Beyond it there are no positions, or other ones than what is stored was computed with.
    context = min(_context(config, loaded.context_length), loaded.context_length)
    on_cpu = loaded.device == "cpu"
    cells = engine_cells(config, loaded.kv_bytes_per_token, context) if on_cpu else None
    if is_draft and not on_cpu:
        cells = min(config.parallel * context, cells_of_share(loaded, _SHARE_OF_DRAFT))
    batch = affordable_batch(loaded, PREFILL_SLICE if on_cpu else _SLICE_ON_GPU, config.gpu_memory)
    settings = HfSettings(
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
    try:
        engine = open_engine(loaded, settings, digest.result())
    except BaseException:
        loaded.close()
        raise
    if config.mlock and on_cpu:
        lock_weights(loaded.memory())
    if engine.capabilities.context < context:
        log.warning(
            "%s has room for a context of %d tokens, not of %d: keep fewer layers there, raise gpu_memory, or "
            "choose a smaller model",
            loaded.device,
            engine.capabilities.context,
            context,
        )
    details = {
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
        "weights_sha256": digest.result(),
    }
    return _Opened(engine, loaded.chat_template, details, device=None if on_cpu else device_probe(loaded.device))


def device_probe(name: str) -> DeviceProbe:
    """Of a device of torch. Raises EngineError for one that is not here."""
    from emberkeep.engine.hf.device import DeviceLimits

    limits = DeviceLimits(name)
    limits.settle()  # the first use of a device takes longer than all that follow
    return DeviceProbe(lambda: limits.load_speed(_PROBED), lambda: limits.read_speed(_PROBED))


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


def _refuse_llamacpp_settings(config: Config) -> None:
    """Raises EngineError for what would change what the hf engine computes, and does not."""
    for key, default in _LLAMACPP_ONLY.items():
        if getattr(config, key) != default:
            flag = f"--{key.replace('_', '-')}"
            raise EngineError(
                f"{flag} is for GGUF models in llama.cpp: leave it out, or choose --engine llamacpp."
            )


def _hf_source(model: ModelFile) -> HfSource:
    from emberkeep.engine.hf.model_loader import HfSource

    if model.is_folder:
        return HfSource(model.path)
    prefix = "tokenizer.ggml."
    metadata = read_header(model.path).metadata
    facts = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    return HfSource(model.path.parent, model.path.name, facts, part_files(model.path)[1:])


def _context(config: Config, trained: int) -> int:
    if config.ctx is not None and config.ctx > trained:
        log.warning("a context of %d tokens is more than the %d this model was trained for", config.ctx, trained)
    return context_length(config, trained)


def context_length(config: Config, trained: int) -> int:
    """Of a model that was trained for so many tokens."""
    return min(trained, _DEFAULT_CONTEXT) if config.ctx is None else config.ctx


def _llamacpp_cells(config: Config, shape: ModelProfile, kv_bytes: int, context: int) -> int:
    short = shape.short_rope_context
    # llama.cpp looks at the number of cells: with more of them it would rotate for long contexts.
    most = short if short is not None and context <= short else None
    return engine_cells(config, kv_bytes, context, most)


def engine_cells(config: Config, bytes_per_token: int, context: int, most: int | None = None) -> int:
    """Room for `parallel` full contexts if RAM allows, and always for one."""
    affordable = (config.model_memory or total_ram()) // _KV_SHARE_OF_RAM // max(bytes_per_token, 1)
    return max(context, min(config.parallel * context, affordable, most or affordable))


def _lineages(config: Config, engine: Engine) -> Lineages:
    shape = engine.capabilities
    wanted = None if config.approximate in (OFF, NEVER) else Approximation(Repair(config.approximate))
    is_exact = config.approximate == NEVER
    lineages = Lineages(config.kv_bits, shape.packs, wanted, shape.can_blend, is_exact, shape.can_shift)
    try:
        lineages.check()
    except ConfigError:
        engine.close()
        raise
    return lineages


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
    except Overloaded:
        engine.close()
        raise
    except TemplateFailed as error:
        engine.close()
        raise ModelBroken(f"{error} Choose another model file.") from error
