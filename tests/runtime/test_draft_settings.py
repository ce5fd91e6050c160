"""Settings of drafts that cannot be met, as users are told."""

from __future__ import annotations

import pytest

from emberkeep.config.settings import Config
from emberkeep.errors import ConfigError
from emberkeep.runtime.served_models import open_backend


def test_a_draft_model_is_for_a_model_that_runs_here() -> None:
    with pytest.raises(
        ConfigError, match=r"drafts for a model that runs here.*: leave speculation out, or add local"
    ):
        open_backend(Config(backend="openai", speculation="small"))
