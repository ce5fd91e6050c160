"""The bar of a pull on a terminal. Apart from the other reporters because importing rich takes time."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from emberkeep.config import readable_size


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
    columns: list[ProgressColumn] = [TextColumn("{task.description}"), BarColumn()]
    if total is None:
        columns += [TimeElapsedColumn()]
    else:
        columns += [DownloadColumn(binary_units=True), _Speed(), TimeRemainingColumn()]
    return Progress(*columns, console=output)


class _Speed(ProgressColumn):
    """rich's own column counts in powers of 1000, unlike everything else that Emberkeep prints."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("?" if speed is None else f"{readable_size(speed)}/s", style="progress.data.speed")
