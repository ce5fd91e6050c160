"""Whether flash attention can be off, and how long steps take with it and without: measured when a model is first
loaded on a machine, in contexts of their own, and remembered by library, CPU, model and number of threads.

Where both are possible the engine goes from one to the other as work demands (`flash_switch`).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from emberkeep.config import total_ram
from emberkeep.engine.llamacpp.context import LlamaSettings, Tuning, available_cores, score_bytes
from emberkeep.engine.llamacpp.model import LlamaModel
from emberkeep.engine.llamacpp.shared_library import cache_folder, library_in_use, llama
from emberkeep.engine.llamacpp.step_timing import Measured, measure
from emberkeep.engine.llamacpp.trial import file_name, survives_without_flash
from emberkeep.errors import EngineError
from emberkeep.files import private_folder, replace_file
from emberkeep.types import Json

logger = logging.getLogger("emberkeep.engine")

_MOST_SCORES = 1 << 30
_SHARE_OF_SCORES = 16
"""At most this part of RAM."""
_LEAST_BATCH = 128
_SMALLEST = 16 << 20
"""Bytes of a model from which on it is worth the time."""


def tune(
    model: LlamaModel, settings: LlamaSettings, weights_digest: str, flash: bool | None, folder: Path | None = None
) -> tuple[LlamaSettings, Tuning]:
    """`settings` with flash attention as `flash` says, or as a choice for every step; and what was measured.

    Never an error: where nothing can be found out, flash attention is on. Blocks for some seconds the first time;
    `folder` remembers it.
    """
    ways, reason = [flash is not False], "as asked"
    if not flash and (needed := _why_needed(model, settings, weights_digest, is_asked=flash is False)):
        ways, reason = [True], needed
    elif flash is None:
        ways, reason = [True, False], "what is quicker, step by step"
    subject = Subject(weights_digest, settings.threads, settings.kv_type, model.placement)
    found = Results(model, settings, subject, folder).of(ways)
    if len(found) < len(ways):
        ways, reason = ways[:1], reason if len(ways) == 1 else "nothing was measured"
    logger.debug("flash attention: %s", reason)
    if False in ways:
        batch = batch_without_flash(model, settings) or max(_LEAST_BATCH, settings.sequences)
        settings = replace(settings, flash=ways[0], batch=batch)
    tables = {way: found[way].table for way in ways if way in found}
    wide_rows = found[False].wide_rows if False in found else None
    return settings, Tuning(reason, tables, wide_rows)


def _why_needed(model: LlamaModel, settings: LlamaSettings, weights_digest: str, *, is_asked: bool) -> str | None:
    """Why flash attention cannot be off; `is_asked`: although it should be."""
    if settings.kv_type != "f16":
        return f"{settings.kv_type} values need it"
    if model.offloads:
        return "layers are on a GPU"
    if not is_asked and llama().llama_model_size(model.handle) < _SMALLEST:
        return "the model is small"
    if not is_asked and batch_without_flash(model, settings) is None:
        return f"without it {settings.cells} tokens of context would take too much memory"
    if not survives_without_flash(model.path, weights_digest):
        return "the model does not run without it"
    return None


def batch_without_flash(model: LlamaModel, settings: LlamaSettings) -> int | None:
    """The most rows of a step whose scores have room: one for each row, cell and head. None if that is too few.

    On a CPU a prompt in steps of 128 tokens is no slower than in steps of 512.
    """
    # Not of what is free now: what is stored is of use only while the answer stays the same.
    room = min(_MOST_SCORES, total_ram() // _SHARE_OF_SCORES)
    of_a_row = score_bytes(model, replace(settings, batch=1))
    smaller = (batch for batch in (256, _LEAST_BATCH) if settings.sequences <= batch < settings.batch)
    return next((batch for batch in (settings.batch, *smaller) if batch * of_a_row <= room), None)


@dataclass(frozen=True, slots=True)
class Subject:
    """What it was that was measured, with the library in use and on this CPU."""

    weights_digest: str
    threads: int | None
    kv_type: str
    placement: object = "CPU"

    def measured(self, flash: bool, folder: Path | None) -> Measured | None:
        """None where nothing is remembered that can be read."""
        try:
            return Measured.from_json(self._read(str(flash), folder))
        except ValueError:
            return None

    def is_measured(self, folder: Path | None = None) -> bool:
        """Whether both ways were. Raises EngineError."""
        return all(self.measured(flash, folder) is not None for flash in (True, False))

    def remember(self, flash: bool, measured: Measured, folder: Path | None) -> None:
        self._remember(str(flash), measured.json(), folder)

    def _read(self, what: str, folder: Path | None) -> Json:
        try:
            data: Json = json.loads(self._file(what, folder).read_bytes())
        except (OSError, ValueError):
            return None
        return data

    def _remember(self, what: str, data: Json, folder: Path | None) -> None:
        file = self._file(what, folder)
        try:
            replace_file(private_folder(file.parent) / file.name, json.dumps(data).encode())
        except OSError as error:
            logger.debug("how long steps take is not remembered: %s", error)

    def _file(self, what: str, folder: Path | None) -> Path:
        about = (self.weights_digest, self.threads or available_cores(), self.kv_type, self.placement, what)
        name = file_name(library_in_use(), *(str(part) for part in about))
        return (folder or cache_folder() / "steps") / f"{name}.json"


class Results:
    """What was measured of a model before, or is measured now."""

    def __init__(
        self, model: LlamaModel, settings: LlamaSettings, subject: Subject, folder: Path | None = None
    ) -> None:
        self._model = model
        self._settings = settings
        self._subject = subject
        self._folder = folder

    def of(self, ways: Sequence[bool]) -> dict[bool, Measured]:
        """With flash attention or without: all of `ways`, or what can be found out.

        What was measured on a busy machine is measured again when it is not, and what is less counts.
        """
        found = {way: self._subject.measured(way, self._folder) for way in ways}
        known = {way: measured for way, measured in found.items() if measured is not None}
        if len(known) < len(ways) or (_is_quiet() and not all(each.is_whole for each in known.values())):
            known |= self._measure(ways, known)
        return known

    def _measure(self, ways: Sequence[bool], known: Mapping[bool, Measured]) -> dict[bool, Measured]:
        """All of `ways` side by side."""
        if llama().llama_model_size(self._model.handle) < _SMALLEST:
            return {}
        try:
            measured = measure(self._model, [replace(self._settings, flash=way) for way in ways])
        except EngineError as error:
            logger.warning("how long steps take could not be measured: %s", error)
            return {}
        found = dict(zip(ways, measured, strict=True))
        found |= {way: known[way].join(new) for way, new in found.items() if way in known}
        for way, new in found.items():
            self._subject.remember(way, new, self._folder)
        return found


def _is_quiet() -> bool:
    """Whether nothing else has computed for a minute."""
    try:
        return os.getloadavg()[0] < available_cores() / 4
    except OSError:
        return True
