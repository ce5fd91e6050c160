"""The weights of the model that a server starts with are loaded while most of the server is imported."""

from __future__ import annotations

from contextlib import suppress

from emberkeep.config import Config
from emberkeep.errors import EmberkeepError
from emberkeep.models.digest import file_versions, known_digest
from emberkeep.models.library import ModelLibrary
from emberkeep.models.remotes import Remotes


def begin_to_load(config: Config) -> None:
    """Blocks for the import of llama.cpp's engine. Does nothing where another start has not shown yet that these
    weights can be loaded here, and where they are not simply loaded by llama.cpp into RAM."""
    with suppress(EmberkeepError, OSError):
        if config.engine != "hf" and not config.mlock and config.draft_model is None and _comes_first(config):
            _begin(config)


def _comes_first(config: Config) -> bool:
    if config.backend == "auto":
        return all(remote.backend != "trtllm" for remote in Remotes(config).list())
    return config.backend == "local"


def _begin(config: Config) -> None:
    library = ModelLibrary(config.data_dir / "models")
    model = library.resolve(config.local_model)
    if model.is_folder:
        return
    versions = file_versions(model.path)  # before the digest, so that the weights are never newer
    digest = known_digest(model.path, library.digests)
    if digest is None:
        return
    from emberkeep.engine.llamacpp import choose_known_library
    from emberkeep.engine.llamacpp.early_load import begin

    if choose_known_library(config.llama_library, digest):
        begin(model.path, versions)
