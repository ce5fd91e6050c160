"""What a start needs: the model, what its engine needs, and the prefixes that the operator declares."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from emberkeep.config.settings import DEFAULT_MODEL, Config
from emberkeep.config.tables import WarmPrefix
from emberkeep.engine.devices import require_hf
from emberkeep.errors import ConfigError, ModelNotFound, RequestError
from emberkeep.types.lineage import SHARED
from emberkeep.types.request import Message, Request

if TYPE_CHECKING:
    from emberkeep.models.spec import Reporter


def ensure_model(config: Config, reporter: Reporter | None = None) -> None:
    """Make sure that the configured model is here, its draft model, and what their engine needs.

    The default model is pulled, and so is a repository of the hub for the Hugging Face engine; any other must be
    here. Blocks while it downloads. Raises ModelError, and EngineError where the engine is not installed.
    """
    from emberkeep.runtime.served_models import may_do_without_local, needs_local

    if not needs_local(config):
        return
    if config.engine == "hf":
        require_hf()
    try:
        for model in (config.local_model, *([config.draft_model] if config.draft_model else [])):
            _ensure(model, config, reporter)
    except ModelNotFound:
        if not may_do_without_local(config):
            raise


def _ensure(model: str, config: Config, reporter: Reporter | None) -> None:
    """Raises ModelNotFound for one that is not here and not pulled by itself."""
    from emberkeep.models.library import ModelLibrary

    library = ModelLibrary(config.data_dir / "models")
    try:
        if not library.resolve(model).is_folder:
            _ensure_llamacpp(config, reporter)
    except ModelNotFound:
        spec = _pullable(model, config)
        if spec is None:
            raise
        # Not before: it brings what downloads need, and most models are here.
        from emberkeep.models.pull import pull
        from emberkeep.models.spec import Silent

        _ensure_llamacpp(config, reporter)
        pull(spec, library, reporter=reporter or Silent())


def _ensure_llamacpp(config: Config, reporter: Reporter | None) -> None:
    from emberkeep.engine.llamacpp.prebuilt import GPU_BUILDS, READY_MADE
    from emberkeep.engine.llamacpp.shared_library import AUTO, is_installed

    choice = config.llama_library
    if config.engine == "hf" or (choice not in GPU_BUILDS and is_installed(choice)):
        return
    from emberkeep.models.registries import ensure_llama_library

    without_gpu = choice == AUTO and config.gpu_layers == 0
    ensure_llama_library(READY_MADE if without_gpu else choice, reporter)


def _pullable(model: str, config: Config) -> str | None:
    from emberkeep.models.library import is_repo

    if model == DEFAULT_MODEL:
        return DEFAULT_MODEL
    # Only where the engine was asked for: else a mistyped path would ask the hub.
    return f"hf:{model}" if config.engine == "hf" and is_repo(model) else None


# ── prefixes that the operator declares, as requests ──


def declared_prefixes(config: Config) -> list[Request]:
    """Every user may reuse their state. Raises ConfigError."""
    return [_declared_prefix(number, prefix) for number, prefix in enumerate(config.warm, 1)]


def _declared_prefix(number: int, prefix: WarmPrefix) -> Request:
    try:
        request = _prompt_or_chat(prefix)
    except RequestError as error:
        raise ConfigError(f"The prefix to warm number {number} cannot be used: {error}") from error
    return replace(request, user=SHARED, namespace=SHARED, ttl=prefix.ttl)


def _prompt_or_chat(prefix: WarmPrefix) -> Request:
    # Imported here: few declare any, and it brings every field of the API.
    from emberkeep.library.arguments import prefix_request

    if prefix.prompt is not None:
        return prefix_request(prefix.prompt, None, {})
    messages = [Message("system", prefix.system)] if prefix.system is not None else list(prefix.messages)
    return prefix_request(messages, list(prefix.tools), {})
