"""The default model arrives by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from emberkeep.config import DEFAULT_MODEL, Config
from emberkeep.errors import ModelNotFound

if TYPE_CHECKING:
    from emberkeep.models.reporting import Reporter


def ensure_model(config: Config, reporter: Reporter | None = None) -> None:
    """Make sure that the configured model is here: the default one is pulled, any other must be.

    Blocks while it downloads. Raises ModelNotFound, ModelBroken, DownloadFailed.
    """
    from emberkeep.models.library import ModelLibrary
    from emberkeep.models.pull import pull
    from emberkeep.models.reporting import Silent

    library = ModelLibrary(config.data_dir / "models")
    try:
        library.resolve(config.model)
    except ModelNotFound:
        if config.model != DEFAULT_MODEL:
            raise
        pull(DEFAULT_MODEL, library, reporter=reporter or Silent())
