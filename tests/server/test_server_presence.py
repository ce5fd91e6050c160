"""How commands on the same machine find a running server, and no other."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from emberkeep.server.presence import announce, reachable_url, server_urls


def test_a_server_is_found_while_it_runs_by_its_owner_and_no_key_is_there(tmp_path: Path) -> None:
    assert server_urls(tmp_path) == []
    with announce(tmp_path, "http://127.0.0.1:1"):
        assert server_urls(tmp_path) == ["http://127.0.0.1:1"]
        (file,) = (tmp_path / "servers").iterdir()
        assert file.stat().st_mode & 0o777 == 0o600
        assert json.loads(file.read_text()) == {"url": "http://127.0.0.1:1", "pid": os.getpid()}
    assert server_urls(tmp_path) == []
    assert list((tmp_path / "servers").iterdir()) == []


def left_behind(data_dir: Path, text: str) -> Path:
    """What a killed server leaves: its file, and no lock."""
    (data_dir / "servers").mkdir(exist_ok=True)
    file = data_dir / "servers" / "1.json"
    file.write_text(text)
    return file


@pytest.mark.parametrize("text", ['{"url": "http://127.0.0.1:1", "pid": 1}', "", "{", "[]"])
def test_the_file_of_a_killed_server_is_not_believed_and_the_next_one_tidies_up(tmp_path: Path, text: str) -> None:
    old = left_behind(tmp_path, text)
    assert server_urls(tmp_path) == []
    with announce(tmp_path, "http://127.0.0.1:2"):
        assert not old.exists()
        assert server_urls(tmp_path) == ["http://127.0.0.1:2"]


def test_the_latest_of_several_servers_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with announce(tmp_path, "http://127.0.0.1:1"):
        (first,) = (tmp_path / "servers").iterdir()
        os.utime(first, (0, 0))
        monkeypatch.setattr("os.getpid", lambda: 999_999_999)
        with announce(tmp_path, "http://127.0.0.1:2"):
            assert server_urls(tmp_path) == ["http://127.0.0.1:2", "http://127.0.0.1:1"]
        assert server_urls(tmp_path) == ["http://127.0.0.1:1"]


def test_a_folder_that_cannot_be_written_costs_only_being_found(tmp_path: Path) -> None:
    (tmp_path / "servers").write_text("in the way")
    with announce(tmp_path, "http://127.0.0.1:1"):
        assert server_urls(tmp_path) == []


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("::1", "http://[::1]:80"),
        ("box.example", "http://box.example:80"),
    ],
)
def test_a_server_that_listens_everywhere_is_reached_over_the_loopback(host: str, url: str) -> None:
    assert reachable_url(host, 80) == url
