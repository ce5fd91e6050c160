"""What was measured, kept: a file for each result, which says everything by itself, for the page of a server."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from emberkeep.bench.charts import charts_of
from emberkeep.bench.report import BenchResult
from emberkeep.bench.svg import draw
from emberkeep.files import private_folder, replace_file
from emberkeep.types.request import Json

KEPT = 50
"""The newest ones: whoever needs more has --json."""
_NAMED_BY_US = "[0-9]*T[0-9]*-*.json"


def keep_result(folder: Path, result: BenchResult, surroundings: Mapping[str, Json]) -> Path:
    """Its file, whose name sorts by when it was measured. Blocks. Raises OSError."""
    now = datetime.now(UTC)
    name = re.sub("[^a-z0-9]+", "-", result.name.lower()).strip("-")
    path = private_folder(folder) / f"{now:%Y%m%dT%H%M%S%f}-{name}.json"
    around = {**surroundings, "when": now.isoformat(timespec="seconds")}
    replace_file(path, json.dumps(kept_json(result, around), allow_nan=False).encode())
    for old in sorted(folder.glob(_NAMED_BY_US), reverse=True)[KEPT:]:
        old.unlink(missing_ok=True)
    return path


def kept_json(result: BenchResult, surroundings: Mapping[str, Json]) -> dict[str, Json]:
    pictures = [{"title": chart.title, "svg": draw([chart])} for chart in charts_of([result])]
    return {**surroundings, **result.json(), "pictures": pictures}
