"""Flash attention on or off, and how long steps take: measured when a model is first loaded on a machine.

On a CPU neither way is always the quicker one. Flash attention takes queries together from 64 on and one by one
below, the other way from 8 on or so, and that is where the rows of a turn and of a draft are. Both are measured in
contexts of their own; what was found is remembered by library, CPU, model and number of threads.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from emberkeep.config import free_ram
from emberkeep.engine.llamacpp.context import LlamaSettings, Tuning, available_cores
from emberkeep.engine.llamacpp.model import LlamaModel
from emberkeep.engine.llamacpp.shared_library import cache_folder, library_in_use, llama
from emberkeep.engine.llamacpp.step_timing import DEEP, Measured, measure
from emberkeep.engine.llamacpp.trial import file_name, survives_without_flash
from emberkeep.errors import EngineError
from emberkeep.files import private_folder, replace_file
from emberkeep.types import Json

logger = logging.getLogger("emberkeep.engine")

_FORMAT = 1
_WAITED_FOR = {1: 4, 8: 1, 16: 1, 45: 2, 512: 2}
"""How many rows the steps have that people wait for, and how much each counts: tokens, drafts, turns, prompts."""
_CLEARLY = 0.95
"""The share of the time that must be left without flash attention: another choice makes stored state useless."""
_MOST_SCORES = 1 << 30
_F32 = 4
_CHOICE = "choice"
_LEAST_BATCH = 128
_SMALLEST = 16 << 20
"""Bytes of a model from which on it is worth the time."""


def tune(
    model: LlamaModel, settings: LlamaSettings, weights_digest: str, flash: bool | None, folder: Path | None = None
) -> tuple[LlamaSettings, Tuning]:
    """`settings` with flash attention on or off: what is quicker, or what `flash` says; and what was measured.

    Never an error: where nothing can be found out, flash attention is on. Blocks for some seconds the first time;
    `folder` remembers it.
    """
    subject = Subject(weights_digest, settings.threads, settings.kv_type, model.placement)
    results = Results(model, settings, subject, folder)
    if flash:
        is_on, reason = True, "as asked"
    elif needed := _why_needed(model, settings, weights_digest, is_asked=flash is False):
        is_on, reason = True, needed
    else:
        is_on, reason = (False, "as asked") if flash is False else results.choice()
    measured = results.whole(is_on)
    logger.debug("flash attention is %s: %s", "on" if is_on else "off", reason)
    if not is_on:
        batch = batch_without_flash(model, settings) or max(_LEAST_BATCH, settings.sequences)
        settings = replace(settings, flash=False, batch=batch)
    return settings, Tuning(reason, measured.table, measured.wide_rows) if measured else Tuning(reason)


def compare(on: Measured | None, off: Measured | None) -> tuple[bool, str]:
    """Whether flash attention is to be on, and why. Pure."""
    if on is None or off is None:
        return True, "nothing was measured"
    shares = [
        (off.table.seconds(rows, DEEP) / on.table.seconds(rows, DEEP)) ** weight
        for rows, weight in _WAITED_FOR.items()
    ]
    share = prod(shares) ** (1 / sum(_WAITED_FOR.values()))
    return share >= _CLEARLY, f"without it steps take {share:.0%} of their time here"


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
    free = free_ram()
    room = min(_MOST_SCORES, free // 4) if free is not None else _MOST_SCORES
    of_a_row = settings.cells * max(llama().llama_model_n_head(model.handle), 1) * _F32
    smaller = (batch for batch in (256, _LEAST_BATCH) if settings.sequences <= batch < settings.batch)
    return next((batch for batch in (settings.batch, *smaller) if batch * of_a_row <= room), None)


@dataclass(frozen=True, slots=True)
class Subject:
    """What it was that was measured, with the library in use and on this CPU."""

    weights_digest: str
    threads: int | None
    kv_type: str
    placement: object = "CPU"

    def choice(self, folder: Path | None = None) -> tuple[bool, str] | None:
        """Whether flash attention is on, and why, if that was decided before. Raises EngineError."""
        data = self._read(_CHOICE, folder)
        is_known = isinstance(data, dict) and data.get("format") == _FORMAT
        return (data["flash"] is True, str(data.get("reason"))) if is_known and "flash" in data else None

    def remember_choice(self, is_on: bool, reason: str, folder: Path | None) -> None:
        self._remember(_CHOICE, {"format": _FORMAT, "flash": is_on, "reason": reason}, folder)

    def measured(self, flash: bool, folder: Path | None) -> Measured | None:
        """None where nothing is remembered that can be read."""
        try:
            return Measured.from_json(self._read(str(flash), folder))
        except ValueError:
            return None

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
        self._new: dict[bool, Measured] = {}

    def choice(self) -> tuple[bool, str]:
        """What was chosen once stays, unless the machine was busy then: state is of no use to the other way."""
        if (known := self._subject.choice(self._folder)) is not None:
            return known
        found = {flash: self._subject.measured(flash, self._folder) for flash in (True, False)}
        if None in found.values() or (not _are_whole(found.values()) and _is_quiet()):
            self._measure(list(found))
        on, off = (self._new.get(flash, measured) for flash, measured in found.items())
        chosen = compare(on, off)
        if _are_whole((on, off)):
            self._subject.remember_choice(*chosen, self._folder)
        return chosen

    def whole(self, flash: bool) -> Measured | None:
        """With flash attention or without. None where nothing can be measured.

        What was measured on a busy machine is measured again when it is not, and what is less counts.
        """
        known = self._new.get(flash) or self._subject.measured(flash, self._folder)
        if known is None or (not known.is_whole and not self._new and _is_quiet()):
            self._measure([flash], known)
        return self._new.get(flash) or known

    def _measure(self, ways: Sequence[bool], known: Measured | None = None) -> None:
        if not ways or llama().llama_model_size(self._model.handle) < _SMALLEST:
            return
        try:
            found = measure(self._model, [replace(self._settings, flash=flash) for flash in ways])
        except EngineError as error:
            logger.warning("how long steps take could not be measured: %s", error)
            return
        for flash, measured in zip(ways, found, strict=True):
            self._new[flash] = known.join(measured) if known else measured
            self._subject.remember(flash, self._new[flash], self._folder)


def _are_whole(results: Iterable[Measured | None]) -> bool:
    return all(measured is not None and measured.is_whole for measured in results)


def _is_quiet() -> bool:
    """Whether nothing else has computed for a minute."""
    try:
        return os.getloadavg()[0] < available_cores() / 4
    except OSError:
        return True
