from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from emberkeep.config import machine
from emberkeep.config.machine import free_ram, peak_ram, resident_ram, total_ram


@pytest.fixture
def group(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_GROUP", tmp_path)
    return tmp_path


def test_a_container_has_its_limit(group):
    whole = total_ram()
    (group / "memory.max").write_text("1000\n")
    assert total_ram() == 1000
    (group / "memory.max").write_text("max\n")
    assert total_ram() == whole


@pytest.mark.skipif(free_ram() is None, reason="this system does not tell")
def test_files_that_were_read_are_free_again_in_a_container(group):
    (group / "memory.max").write_text("1000\n")
    (group / "memory.current").write_text("900\n")
    assert free_ram() == 100
    (group / "memory.stat").write_text("anon 500\ninactive_file 300\n")
    assert free_ram() == 400


@contextmanager
def written_to(size: int) -> Iterator[None]:
    # Not from the heap: there may be room that the process has already.
    with mmap.mmap(-1, size) as block:
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1
        yield


@pytest.mark.skipif(resident_ram() is None, reason="this system does not tell")
def test_a_process_holds_what_it_has_written_to():
    before = resident_ram()
    with written_to(64 << 20):
        assert resident_ram() - before > 32 << 20


@pytest.mark.skipif(not machine._MARKS.exists(), reason="this system does not tell")
def test_a_peak_is_told_once():
    before = resident_ram()
    peak_ram()
    with written_to(64 << 20):
        pass
    assert peak_ram() - before > 32 << 20
    assert peak_ram() - before < 32 << 20


@pytest.mark.skipif(resident_ram() is None, reason="this system does not tell")
def test_where_no_peak_is_told_it_is_what_is_held_now(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "_MARKS", tmp_path / "missing" / "clear_refs")
    before = resident_ram()
    with written_to(64 << 20):
        assert peak_ram() - before > 32 << 20
    assert peak_ram() - before < 32 << 20
