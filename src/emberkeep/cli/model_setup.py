"""Pulls and loads the configured model, with a line or a progress bar for the user, on stderr."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from emberkeep.cli.console import console
from emberkeep.config import Config, readable_size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn, TaskID

    from emberkeep.library import Emberkeep
    from emberkeep.models.reporter import Reporter


def install_model(config: Config) -> None:
    """Pull the default model where it is configured and missing, and show it. Raises ModelError."""
    from emberkeep.library import ensure_model

    with pull_reporter() as reporter:
        ensure_model(config, reporter)


def open_model(config: Config) -> Emberkeep:
    """Load a model that is here, with a word about it where a person waits. Raises ModelError, EngineError."""
    from emberkeep.library import Emberkeep
    from emberkeep.runtime import backend_names

    first = backend_names(config)[0]
    with console(stderr=True).status(f"Loading {config.local_model if first == 'local' else first} ..."):
        return Emberkeep.open(config)


@contextmanager
def pull_reporter() -> Iterator[Reporter]:
    """A bar on a terminal, one line per step elsewhere."""
    output = console(stderr=True)
    reporter = Bars(output) if output.is_terminal else Lines(output)
    try:
        yield reporter
    finally:
        reporter.close()


class Lines:
    """A step is mentioned when it begins."""

    def __init__(self, output: Console) -> None:
        self._output = output
        self._step = ""

    def say(self, sentence: str) -> None:
        self._output.print(sentence, markup=False, soft_wrap=True)

    def progress(self, step: str, done: int, total: int | None) -> None:
        if step != self._step:
            self._step = step
            self.say(step)

    def close(self) -> None:
        pass


class Bars:
    """One bar, for the current step; it pulses while it is not known how much there is to do."""

    def __init__(self, output: Console) -> None:
        self._output = output
        self._step = ""
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def say(self, sentence: str) -> None:
        self.close()
        self._output.print(sentence, markup=False)

    def progress(self, step: str, done: int, total: int | None) -> None:
        if self._bar is None or self._task is None or step != self._step:
            self.close()
            self._bar, self._step = _bar(self._output, total), step
            self._bar.start()
            self._task = self._bar.add_task(step, total=total)
        self._bar.update(self._task, completed=done, total=total)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _bar(output: Console, total: int | None) -> Progress:
    from rich import progress
    from rich.text import Text

    class Speed(progress.ProgressColumn):
        """rich's own column counts in powers of 1000, unlike everything else that Emberkeep prints."""

        def render(self, task: progress.Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("?" if speed is None else f"{readable_size(speed)}/s", style="progress.data.speed")

    columns: list[ProgressColumn] = [progress.TextColumn("{task.description}"), progress.BarColumn()]
    if total is None:
        columns += [progress.TimeElapsedColumn()]
    else:
        columns += [progress.DownloadColumn(binary_units=True), Speed(), progress.TimeRemainingColumn()]
    return progress.Progress(*columns, console=output)
