"""What a server starts with is checked, tried out and loaded while most of the server is imported."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from emberkeep.config.settings import Config
from emberkeep.errors import EmberkeepError
from emberkeep.models.digest import file_versions, known_digest, model_digest
from emberkeep.models.gguf import read_header
from emberkeep.models.library import ModelFile, ModelLibrary
from emberkeep.models.profile import embedding_gguf
from emberkeep.models.remotes import Remotes

if TYPE_CHECKING:
    from emberkeep.engine.llamacpp.model import Tell


@contextmanager
def loaded_early(config: Config) -> Generator[None, None, None]:
    """Begin to load before the block, once llama.cpp's engine is imported; a block that fails waits until it ends.

    Does nothing where weights are not simply loaded by llama.cpp into RAM.
    """
    has_begun = False
    with suppress(EmberkeepError, OSError):
        if config.engine != "hf" and not config.mlock and config.draft_model is None and _comes_first(config):
            has_begun = _begin(config)
    try:
        yield
    except EmberkeepError:
        if has_begun:
            from emberkeep.engine.llamacpp.model import wait

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
    from emberkeep.engine.llamacpp.model import begin

    begin(model.path, file_versions(model.path), partial(_prove, config, model, library.digests))
    return True


def _prove(config: Config, model: ModelFile, digests: Path, tell: Tell) -> tuple[str | None, bool]:
    from emberkeep.engine.llamacpp.trial import choose_known_library

    digest: str | None = None
    try:
        if embedding_gguf(read_header(model.path)) is not None:
            return None, False  # it is tried otherwise
        digest = try_out(config, model, digests, tell)
        return digest, choose_known_library(config.llama_library, digest)
    except (EmberkeepError, OSError):
        return digest, False


def try_out(config: Config, model: ModelFile, digests: Path, tell: Tell) -> str:
    """The digest of a model that writes. It was tried out with the first library that may be used, whatever came
    of that. Blocks. Raises ModelNotFound, ModelBroken and OSError."""
    from emberkeep.engine.llamacpp.trial import try_together

    before = file_versions(model.path)
    return try_together(
        config.llama_library,
        model.path,
        known_digest(model.path, digests),
        partial(model_digest, model.path, digests, partial(tell, f"Checking {model.id}")),
        lambda: file_versions(model.path) == before,
        partial(tell, f"Trying out {model.id}, once", 0, None),
    )
