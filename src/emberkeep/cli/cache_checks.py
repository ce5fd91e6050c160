"""`emberkeep cache explain` and `verify`: what only a model can tell about its stored state."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from emberkeep.cli.cache_table import agreement, print_explanation, print_verified
from emberkeep.cli.common import ConfigFlag, DataDirFlag, ModelFlag, console, load_config
from emberkeep.cli.reporters import pull_reporter
from emberkeep.cli.tables import counted
from emberkeep.config import Config
from emberkeep.errors import RequestError
from emberkeep.types import EXACT_BITS, Json, Verified

if TYPE_CHECKING:
    from emberkeep.cli.cache_access import Knowing
    from emberkeep.library.stores import Checked

EMPTY = "Nothing is stored here yet: `emberkeep chat` and `emberkeep serve` keep what they evaluate."

SomeIds = Annotated[
    list[str] | None, typer.Argument(metavar="ID", help="Ids from `emberkeep cache ls`, or their beginnings.")
]
FileArgument = Annotated[
    str | None, typer.Argument(metavar="FILE|-", help="The JSON body of a chat or completion; - reads a pipe.")
]
SampleFlag = Annotated[
    int, typer.Option("--sample", min=1, help="How many entries, the latest used, where no ids are given.")
]


def explain(
    file: FileArgument = None,
    prompt: Annotated[str | None, typer.Option("--prompt", help="A raw prompt instead.")] = None,
    user: Annotated[str | None, typer.Option("--user", help="Who would ask.")] = None,
    model: ModelFlag = None,
    data_dir: DataDirFlag = None,
    config: ConfigFlag = None,
) -> None:
    """What a request would reuse if it came now, and why not more.

    Without a running server the model is loaded.
    """
    from emberkeep.cli.cache_access import open_knowing

    if (file is None) == (prompt is None):
        raise typer.BadParameter("give a file with a request, - to read it from a pipe, or --prompt TEXT.")
    body = {"prompt": prompt} if file is None else _read_body(file)
    # Whoever wrote the request may have called the model by another server's name for it.
    body.pop("model", None)
    if user is not None:
        body["user_id"] = user
    with open_knowing(load_config(model=model, data_dir=data_dir, config=config), model) as knowing:
        print_explanation(knowing.explain(body))


def verify(
    ids: SomeIds = None,
    sample: SampleFlag = 4,
    tokens: Annotated[int, typer.Option("--tokens", min=1, max=256, help="How far to continue each.")] = 16,
    model: ModelFlag = None,
    data_dir: DataDirFlag = None,
    config: ConfigFlag = None,
) -> None:
    """Continue stored state and a fresh evaluation of the same tokens, and compare. Status 1 if they differ.

    Without a running server every file is first compared with its checksum, and the model is loaded. A real model
    may differ in a rare token, because what was computed in narrow steps (answers, short turns) rounds differently
    from a whole prompt: the table tells how much of each there is. State in fewer
    than 16 bits or with moved parts is not exact, and may differ in more.
    """
    from emberkeep.cli.cache_access import open_knowing

    settled = load_config(model=model, data_dir=data_dir, config=config)
    checked: list[Checked] = []
    with open_knowing(settled, model, lambda: checked.extend(_check_files(settled, model))) as knowing:
        results = _replay(knowing, ids, sample, tokens)
    if results:
        print_verified(results)
    print(f"{counted(len(results))} replayed, {agreement(results)}.")
    if any(part.damaged for part in checked) or not all(_is_as_promised(result) for result in results):
        raise typer.Exit(1)


def _is_as_promised(result: Verified) -> bool:
    return result.is_equal or result.entry.kv_bits != EXACT_BITS or result.entry.repair is not None


def _read_body(file: str) -> dict[str, Json]:
    """Raises RequestError, OSError."""
    raw = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{file} is not JSON ({error}): give the body of a request.") from error
    if not isinstance(body, dict):
        raise RequestError(f"{file} is not the body of a request: that is a JSON object.")
    return body


def _check_files(config: Config, model: str | None) -> list[Checked]:
    """For when no server runs: it checks by itself what it reads. Ends the command where nothing is stored."""
    from emberkeep.cli.cache_access import closed_folders
    from emberkeep.library.stores import check_files

    folders = closed_folders(config, model)
    if not folders:
        print(EMPTY)
        raise typer.Exit
    with pull_reporter() as reporter:
        report = functools.partial(reporter.progress, "Checking the files")
        checked = [check_files(folder, report) for folder in folders]
    damaged = sum(part.damaged for part in checked)
    quarantine = " and put into quarantine" if damaged else ""
    files = counted(sum(part.files for part in checked), "file", "files")
    print(f"{files} checked, {damaged:,} damaged{quarantine}.")
    return checked


def _replay(knowing: Knowing, ids: Sequence[str] | None, sample: int, tokens: int) -> list[Verified]:
    from rich.progress import track

    from emberkeep.cli.cache_access import full_ids

    stored = knowing.entries()
    wanted = full_ids(stored, ids or ())
    entries = [entry for entry in stored if entry.id in wanted] if ids else stored[:sample]
    output = console(stderr=True)
    bar = track(entries, "Replaying", console=output, transient=True, disable=not output.is_terminal)
    return [knowing.verify(entry, tokens) for entry in bar]
