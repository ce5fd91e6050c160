"""What `serve` says before it serves."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from emberkeep.cli.model_setup import ProgressLine
from emberkeep.config.settings import Config
from emberkeep.errors import ConfigError, EmberkeepError
from emberkeep.server.lifecycle import banner, bind, serve
from helpers.scripted_server import ScriptedBackend


def _never(config: Config, reporter: object) -> None:
    raise AssertionError("nothing is fetched for a server that cannot start")


def test_the_world_is_not_let_in_without_a_key() -> None:
    with pytest.raises(ConfigError, match="--api-key"):
        serve(Config(host="0.0.0.0"), prepare=_never, reporter=ProgressLine(io.StringIO(), is_changing=False))


def test_a_taken_port_is_noticed_before_the_model_is_opened() -> None:
    with bind("127.0.0.1", 0) as taken, pytest.raises(EmberkeepError, match="in use"):
        config = Config(model="/nowhere/none.gguf", port=taken.getsockname()[1])
        serve(config, prepare=_never, reporter=ProgressLine(io.StringIO(), is_changing=False))


def test_the_banner_tells_where_what_and_how_to_stop() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        text = banner(Config(port=0, data_dir=Path("/data")), ScriptedBackend(), listener)
    assert f"http://127.0.0.1:{port}/v1" in text
    assert "org/tiny" in text
    assert "4,096" in text
    assert "/data" in text
    assert "Ctrl-C" in text
