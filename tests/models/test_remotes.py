"""Registered models: what `emberkeep api` adds, beside what the configuration has."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from emberkeep.config.settings import Config
from emberkeep.errors import ConfigError
from emberkeep.models.remotes import Remotes
from emberkeep.types.models import RemoteModel

CLAUDE = RemoteModel("claude", "anthropic", "claude-sonnet-5-5", description="Good at prose.")
QWEN = RemoteModel("qwen", "compatible", base_url="http://127.0.0.1:8000/v1", max_tokens=100, ctx=4096)


def remotes(folder: Path, *configured: RemoteModel) -> Remotes:
    return Remotes(Config(data_dir=folder / "data", backends=configured))


def test_what_was_added_is_there_in_the_next_run(tmp_path: Path) -> None:
    remotes(tmp_path).add(QWEN)
    remotes(tmp_path).add(CLAUDE)
    assert remotes(tmp_path).list() == (CLAUDE, QWEN)
    assert remotes(tmp_path).get("qwen") == QWEN


def test_its_file_is_only_for_its_owner(tmp_path: Path) -> None:
    remotes(tmp_path).add(CLAUDE)
    path = tmp_path / "data" / "backends.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_text())["claude"]["model"] == CLAUDE.model


def test_what_the_configuration_has_is_listed_too(tmp_path: Path) -> None:
    both = remotes(tmp_path, QWEN)
    both.add(CLAUDE)
    assert both.list() == (CLAUDE, QWEN)


def test_a_name_is_used_once(tmp_path: Path) -> None:
    added = remotes(tmp_path)
    added.add(CLAUDE)
    with pytest.raises(ConfigError, match="already"):
        added.add(CLAUDE)
    with pytest.raises(ConfigError, match="already"):
        remotes(tmp_path, QWEN).add(QWEN)
    with pytest.raises(ConfigError, match="api remove claude"):
        remotes(tmp_path, CLAUDE).list()


def test_what_was_removed_is_gone(tmp_path: Path) -> None:
    added = remotes(tmp_path)
    added.add(CLAUDE)
    added.remove("claude")
    assert added.list() == ()


def test_what_is_not_there_is_told_the_nearest(tmp_path: Path) -> None:
    added = remotes(tmp_path, QWEN)
    added.add(CLAUDE)
    with pytest.raises(ConfigError, match="did you mean claude"):
        added.get("claud")
    with pytest.raises(ConfigError, match="api list"):
        added.remove("nothing")
    with pytest.raises(ConfigError, match=r"\[backends.qwen\]"):
        added.remove("qwen")


@pytest.mark.parametrize("key", ["sk-ant-canary-1", "AIzaSyCanary", "xai canary", "https://canary"])
def test_a_key_is_not_taken_for_the_name_of_its_variable(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        remotes(tmp_path).add(RemoteModel("gpt", "openai", api_key_env=key))
    assert "variable" in str(caught.value) and "anary" not in str(caught.value)
    assert not (tmp_path / "data" / "backends.json").exists()


@pytest.mark.parametrize(
    "bad",
    [
        RemoteModel("../x", "openai"),
        RemoteModel("a__b", "openai"),
        RemoteModel("", "openai"),
        RemoteModel("x", "openai", base_url="file:///etc/passwd"),
        RemoteModel("x", "openai", max_tokens=0),
    ],
)
def test_what_is_no_good_is_not_added(tmp_path: Path, bad: RemoteModel) -> None:
    with pytest.raises(ConfigError):
        remotes(tmp_path).add(bad)


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"x": 1}', '{"x": {"backend": "openai", "key": "canary"}}', "\xff"]
)
def test_a_file_that_cannot_be_read_is_named_and_left_as_it_is(tmp_path: Path, content: str) -> None:
    path = tmp_path / "data" / "backends.json"
    path.parent.mkdir()
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match="repair it") as caught:
        remotes(tmp_path).add(CLAUDE)
    assert "canary" not in str(caught.value)
    assert path.read_bytes() == content.encode("latin-1")
