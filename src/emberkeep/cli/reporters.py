"""What a pull looks like: bars on a terminal, one line per step elsewhere. All of it on stderr."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from emberkeep.cli.common import console

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from emberkeep.models.reporting import Reporter


@contextmanager
def pull_reporter() -> Iterator[Reporter]:
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
    """One bar, for the current step; it pulses while nobody knows how much there is to do."""

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

    columns = [progress.TextColumn("{task.description}"), progress.BarColumn()]
    if total is None:
        columns += [progress.TimeElapsedColumn()]
    else:
        columns += [
            progress.DownloadColumn(),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
        ]
    return progress.Progress(*columns, console=output)
