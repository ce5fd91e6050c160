from __future__ import annotations

import threading

from emberkeep.cli import doctor


def test_what_can_be_measured_is_measured_and_nothing_stays_in_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "_EACH_S", 60)  # the machine may be busy
    for speed in (doctor.copy_speed(), doctor.disk_speed(tmp_path)):
        assert speed is not None and speed > 0
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there_and_one_that_hangs_have_no_speed(tmp_path, monkeypatch):
    assert doctor.disk_speed(tmp_path / "none") is None
    never = threading.Event()
    monkeypatch.setattr(doctor, "_EACH_S", 0.01)
    monkeypatch.setattr(doctor, "_disk_speed", lambda folder: float(never.wait()))
    assert doctor.disk_speed(tmp_path) is None
    never.set()
