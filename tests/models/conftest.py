from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from emberkeep.cli.models import app
from emberkeep.models.library import ModelLibrary


@pytest.fixture
def library(tmp_path: Path) -> ModelLibrary:
    return ModelLibrary(tmp_path / "data" / "models")


@pytest.fixture
def models(library: ModelLibrary) -> Callable[..., Result]:
    """`emberkeep models`, over the library."""
    where = ("--data-dir", str(library.root.parent))
    return lambda *arguments, input=None: CliRunner().invoke(app, [*arguments, *where], input=input)
