"""The weights of the model that a server starts with are loaded while most of the server is imported."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, suppress

from emberkeep.config import Config
from emberkeep.errors import EmberkeepError
from emberkeep.models.digest import file_versions, known_digest
from emberkeep.models.library import ModelLibrary
from emberkeep.models.remotes import Remotes


@contextmanager
def loaded_early(config: Config) -> Generator[None, None, None]:
    """Begin to load before the block, once llama.cpp's engine is imported; a block that fails waits until it ends.

    Does nothing where no start has shown yet that these weights can be loaded here, and where they are not simply
    loaded by llama.cpp into RAM.
    """
    has_begun = False
    with suppress(EmberkeepError, OSError):
        if config.engine != "hf" and not config.mlock and config.draft_model is None and _comes_first(config):
            has_begun = _begin(config)
    try:
        yield
    except EmberkeepError:
        if has_begun:
            from emberkeep.engine.llamacpp.early_load import wait

            wait()
        raise


def _comes_first(config: Config) -> bool:
    if config.backend == "auto":
        return all(remote.backend != "trtllm" for remote in Remotes(config).list())
    return config.backend == "local"


def _begin(config: Config) -> bool:
    library = ModelLibrary(config.data_dir / "models")
    model = library.resolve(config.local_model)
    if model.is_folder:
        return False
    versions = file_versions(model.path)  # before the digest, so that the weights are never newer
    digest = known_digest(model.path, library.digests)
    if digest is None:
        return False
    from emberkeep.engine.llamacpp import choose_known_library
    from emberkeep.engine.llamacpp.early_load import begin

    if not choose_known_library(config.llama_library, digest):
        return False
    begin(model.path, versions)
    return True
