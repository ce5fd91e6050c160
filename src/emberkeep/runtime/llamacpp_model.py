"""A GGUF model in llama.cpp: from a Config to its engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from emberkeep.backend.model_pool import Report, tell_nobody
from emberkeep.config.settings import PREFILL_SLICE, Config
from emberkeep.errors import ConfigError
from emberkeep.models.early_load import try_out
from emberkeep.models.gguf import read_header
from emberkeep.models.library import ModelFile
from emberkeep.models.parts import part_files
from emberkeep.models.profile import ModelProfile, profile
from emberkeep.runtime.embedding_model import AUTO, open_own_states
from emberkeep.runtime.parts import OpenedModel, stored_by
from emberkeep.runtime.placement import (
    checked_context,
    engine_cells,
    gguf_details,
    live_kv_bytes,
    open_placed,
    place,
    read_adapters,
)
from emberkeep.types.lineage import EXACT_BITS

if TYPE_CHECKING:
    from emberkeep.engine.llamacpp.context import LlamaSettings
    from emberkeep.engine.llamacpp.model import LlamaModel, Placement

_FLASH = {"auto": None, "on": True, "off": False}


def open_llamacpp(model: ModelFile, config: Config, digests: Path, *, report: Report = tell_nobody) -> OpenedModel:
    """Blocks while the model is tried out and loaded. Raises ConfigError, ModelError, EngineError."""
    from emberkeep.engine.llamacpp.early_load import begun
    from emberkeep.engine.llamacpp.engine import LlamaEngine
    from emberkeep.engine.llamacpp.model import LlamaModel, WeightsLoading
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
    settings = _settings(config, shape, kv_bytes)
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


def _settings(config: Config, shape: ModelProfile, kv_bytes: int) -> LlamaSettings:
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
