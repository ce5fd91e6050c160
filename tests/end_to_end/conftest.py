from __future__ import annotations

from pathlib import Path

import platformdirs
import pytest

from emberkeep.config import DEFAULT_MODEL
from emberkeep.models.library import ModelLibrary
from emberkeep.models.pull import pull


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model, pulled once and kept between runs."""
    library = ModelLibrary(platformdirs.user_cache_path("emberkeep-tests") / "models")
    return pull(DEFAULT_MODEL, library).path
