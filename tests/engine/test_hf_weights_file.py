from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread

import pytest
import torch

from emberkeep.engine.hf.streaming import WeightsFile
from emberkeep.errors import EngineError

pytestmark = pytest.mark.slow

SIZES = [5000, 9000, 1, 4096, 7000]


def part(number: int) -> torch.Tensor:
    return torch.full((SIZES[number],), number + 1, dtype=torch.uint8)


@pytest.fixture
def file(tmp_path: Path):
    buffers = [torch.empty(max(SIZES), dtype=torch.uint8) for _ in range(2)]
    file = WeightsFile(tmp_path / "spill", SIZES, buffers)
    for number in range(len(SIZES)):
        file.write(number, part(number))
    file.start()
    yield file
    file.close()


def took(file: WeightsFile, number: int) -> bool:
    buffer = file.take(number)
    is_right = torch.equal(buffer.memory[: SIZES[number]], part(number))
    file.give_back(buffer)
    return is_right


def test_parts_come_in_their_order_again_and_again(file):
    assert all(took(file, number) for _ in range(3) for number in range(len(SIZES)))


def test_another_part_may_be_asked_for_at_any_time(file):
    assert all(took(file, number) for number in (0, 3, 4, 0, 0, 2, 1, 2, 4))


def test_a_buffer_that_was_taken_stays_as_it_is(file):
    held = file.take(0)
    assert all(took(file, number) for number in (1, 2, 3, 4, 1))
    assert torch.equal(held.memory[: SIZES[0]], part(0))


def test_a_buffer_is_filled_again_once_its_copy_is_done(file):
    class Copying:
        done = Event()

        def synchronize(self) -> None:
            self.done.wait()

    copying = Copying()
    held = [file.take(number) for number in (0, 1)]
    for buffer in held:
        file.give_back(buffer, copying)
    assert torch.equal(held[0].memory[: SIZES[0]], part(0))
    copying.done.set()
    assert took(file, 2)


def test_nothing_has_a_name(file, tmp_path):
    assert list((tmp_path / "spill").iterdir()) == []


def reading(monkeypatch: pytest.MonkeyPatch, read: Callable[..., int]) -> None:
    monkeypatch.setattr("emberkeep.engine.hf.streaming.os.preadv", read)


def test_a_read_that_fails_is_told_when_its_part_is_wanted_and_tried_again(file, monkeypatch):
    real, broken = os.preadv, {SIZES[1]}

    def read(handle: int, data: list[memoryview], offset: int) -> int:
        if len(data[0]) in broken:
            raise OSError(5, "Input/output error")
        return real(handle, data, offset)

    reading(monkeypatch, read)
    assert took(file, 4)
    assert took(file, 0)  # although what comes behind it cannot be read
    for _ in range(2):
        with pytest.raises(EngineError, match=r"cannot be read from disk \(Input/output error\): check the disk"):
            file.take(1)
    broken.clear()
    assert all(took(file, number) for number in (1, 2, 3, 4, 0, 1))


def test_a_file_that_became_shorter_is_told(file, monkeypatch):
    reading(monkeypatch, lambda *_: 0)
    with pytest.raises(EngineError, match="has become shorter"):
        took(file, 4)


def test_closing_waits_for_a_read_and_ends_the_thread(file, monkeypatch):
    began, may_end, real = Event(), Event(), os.preadv

    def read(*args: object) -> int:
        began.set()
        may_end.wait()
        return real(*args)  # type: ignore[arg-type]

    reading(monkeypatch, read)
    told: list[str] = []

    def take() -> None:
        try:
            file.take(4)
        except EngineError as error:
            told.append(str(error))

    waiting = Thread(target=take)
    waiting.start()
    began.wait()
    closing = Thread(target=file.close)
    closing.start()
    waiting.join()  # it does not wait for a read that is of no use any more
    may_end.set()
    closing.join()
    assert told == ["The model is being closed."]


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(EngineError, match="cannot be written to disk"):
        WeightsFile(tmp_path / "file", [1], [torch.empty(1, dtype=torch.uint8)])
