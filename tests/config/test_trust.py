"""What a file may set that stands in the current folder, before its user has agreed to it."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from emberkeep.cli.commands import default_of
from emberkeep.config.settings import FIELDS
from emberkeep.config.sources import LoadedConfig, load_config, read_config_file, trust, withdraw
from emberkeep.errors import ConfigError
from emberkeep.library.emberkeep import Emberkeep

HARMLESS = {
    *("model", "speculation"),  # as the names of installed models
    "threads",  # no more than there are cores
    *("ctx", "parallel", "kv_type", "flash_attention", "gpu_layers", "cpu_moe"),
    *(
        "tensor_split",
        "engine",
        "device",
        "dtype",
        "quantization",
        "attention",
        "residency",
    ),
    *("kv_bits", "too_long"),
    *("pooling", "reasoning"),
}
"""Before a setting comes in here: could somebody who writes it into a repository run, read, send or redirect
something with it, fill the disk, take a limit or a protection away, or hide a warning?"""


@pytest.fixture(autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's home, with nothing in it."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setattr("platformdirs.user_config_path", lambda *_, **__: home / "config")
    monkeypatch.setattr("platformdirs.user_data_path", lambda *_, **__: home / "data")
    (home / "config").mkdir()
    return home


def write(folder: Path, **settings: object) -> Path:
    file = folder / "emberkeep.json"
    file.write_text(json.dumps(settings))
    return file


def load(folder: Path) -> LoadedConfig:
    return load_config({}, env={}, cwd=folder)


def agree_to(file: Path) -> None:
    read = read_config_file(file)
    trust(read.path, read.digest)


@pytest.mark.parametrize("key", sorted(FIELDS.keys() - HARMLESS))
def test_what_could_do_harm_is_left_out_and_named(tmp_path: Path, key: str) -> None:
    before = load(tmp_path)
    file = write(tmp_path, **{key: "anything"}, ctx=4096)
    loaded = load(tmp_path)
    assert getattr(loaded.config, key) == getattr(before.config, key)
    assert loaded.warning.startswith(f"{file} is not trusted, and what it says of {key} is left out: ")
    assert "`emberkeep config trust`" in loaded.warning
    assert loaded.origins[key] == f"default (that of {file} is not trusted)"
    assert loaded.config.ctx == 4096


@pytest.mark.parametrize("key", sorted(HARMLESS))
def test_what_does_no_harm_counts_without_a_question(tmp_path: Path, key: str) -> None:
    file = write(tmp_path, **{key: default_of(key)})
    loaded = load(tmp_path)
    assert (loaded.origins[key], loaded.warning) == (f"file {file}", "")


@pytest.mark.parametrize("key", ["model", "speculation"])
@pytest.mark.parametrize(
    "value", ["./m", "m.gguf", "m.gguf ", " ./m", "own/er", "/m", "m:cloud", "..", ".", "~/m", 3, ["m"]]
)
def test_a_model_is_harmless_by_its_name_and_not_by_a_path(tmp_path: Path, key: str, value: object) -> None:
    write(tmp_path, **{key: value})
    assert f"says of {key} is left out" in load(tmp_path).warning


def test_threads_are_harmless_as_far_as_there_are_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    write(tmp_path, threads=4)
    assert (load(tmp_path).config.threads, load(tmp_path).warning) == (4, "")
    write(tmp_path, threads=5)
    assert load(tmp_path).config.threads is None
    assert "says of threads is left out" in load(tmp_path).warning


def test_a_file_counts_wholly_once_it_is_trusted_and_until_it_changes(tmp_path: Path) -> None:
    file = write(tmp_path, port=9000)
    agree_to(file)
    loaded = load(tmp_path)
    assert (loaded.config.port, loaded.warning, loaded.origins["port"]) == (9000, "", f"file {file}")
    write(tmp_path, port=9001)
    assert load(tmp_path).config.port == 8080
    agree_to(file)
    assert load(tmp_path).config.port == 9001
    assert withdraw(file) and not withdraw(file)
    assert load(tmp_path).config.port == 8080


def test_trust_in_a_file_is_none_in_its_copy_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    agree_to(write(tmp_path / "a", port=9000))
    write(tmp_path / "b", port=9000)
    assert load(tmp_path / "b").warning


def test_a_link_is_as_trusted_as_the_file_and_its_paths_start_there(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "theirs").mkdir()
    file = write(tmp_path / "mine", tools_from=["tools.py"])
    (tmp_path / "theirs" / "emberkeep.json").symlink_to(file)
    assert load(tmp_path / "theirs").warning.startswith(f"{file} is not trusted")
    agree_to(file)
    assert load(tmp_path / "theirs").config.tools_from == (tmp_path / "mine" / "tools.py",)


def test_the_users_own_file_is_trusted_also_where_the_user_stands_beside_it(own_folders: Path) -> None:
    write(own_folders / "config", port=9000)
    loaded = load(own_folders / "config")
    assert (loaded.config.port, loaded.warning) == (9000, "")


def test_a_link_to_the_users_own_file_moves_none_of_its_paths(tmp_path: Path, own_folders: Path) -> None:
    own = write(own_folders / "config", tools_from=["tools.py"])
    (tmp_path / "emberkeep.json").symlink_to(own)
    assert load(tmp_path).config.tools_from == (own.parent / "tools.py",)


def test_a_file_that_is_named_is_trusted(tmp_path: Path) -> None:
    file = write(tmp_path, port=9000)
    assert load_config({"config": file}, env={}, cwd=tmp_path).config.port == 9000
    assert load_config({}, env={"EMBERKEEP_CONFIG": str(file)}, cwd=tmp_path).config.port == 9000


def test_a_file_of_the_folder_takes_away_nothing_of_the_users_own(tmp_path: Path, own_folders: Path) -> None:
    own = write(own_folders / "config", api_key="mine", disable_tools=["command"], approximate="never", ctx=2048)
    write(tmp_path, disable_tools=[], approximate="selective", ctx=4096)
    loaded = load(tmp_path)
    assert (loaded.config.api_key, loaded.config.disable_tools, loaded.config.ctx) == ("mine", ("command",), 4096)
    assert loaded.config.approximate == "never"
    assert loaded.origins["disable_tools"].startswith(f"file {own} (that of {tmp_path}")


@pytest.mark.parametrize("record", ["", "[]", "{", '{"x": 1}', "[" * 100_000])
def test_a_damaged_record_vouches_for_nothing_and_is_replaced(
    tmp_path: Path, own_folders: Path, record: str
) -> None:
    file = write(tmp_path, port=9000)
    (own_folders / "data").mkdir()
    (own_folders / "data" / "trusted.json").write_text(record)
    assert load(tmp_path).config.port == 8080
    agree_to(file)
    assert load(tmp_path).config.port == 9000


def test_the_record_is_the_users_alone(tmp_path: Path, own_folders: Path) -> None:
    agree_to(write(tmp_path, port=9000))
    record = own_folders / "data" / "trusted.json"
    assert stat.S_IMODE(record.stat().st_mode) == 0o600
    assert stat.S_IMODE(record.parent.stat().st_mode) == 0o700


def test_a_file_cannot_choose_the_folder_of_the_record(tmp_path: Path) -> None:
    file = write(tmp_path, data_dir=".", port=9000)
    digest = read_config_file(file).digest
    (tmp_path / "trusted.json").write_text(json.dumps({str(file): digest}))
    assert load(tmp_path).config.port == 8080


def test_a_file_without_an_end_is_refused_and_not_read_whole(tmp_path: Path) -> None:
    with (tmp_path / "emberkeep.toml").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match="larger than 16 MiB"):
        load(tmp_path)


def test_a_library_call_keeps_to_the_same_rule_and_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, port=9000, ctx=4096)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("emberkeep.library.emberkeep.ensure_model", lambda config: None)
    monkeypatch.setattr(Emberkeep, "open", lambda config: config)
    config = Emberkeep.load()
    assert (config.port, config.ctx) == (8080, 4096)
    assert [record.message for record in caplog.records] == [load(tmp_path).warning]


def test_servers_start_where_their_settings_are_and_not_in_the_current_folder(
    tmp_path: Path, own_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PWD", str(tmp_path))
    servers = {"a": {"command": "x"}, "b": {"command": "x", "cwd": "work"}, "c": {"command": "x", "cwd": "$PWD"}}
    own = write(own_folders / "config", mcp={"servers": servers})
    assert [server.cwd for server in load(tmp_path).config.mcp] == [own.parent, own.parent / "work", tmp_path]


def test_a_library_of_llama_cpp_is_looked_for_where_its_path_is_written(tmp_path: Path, own_folders: Path) -> None:
    own = write(own_folders / "config", llama_library="libllama.so")
    assert load(tmp_path).config.llama_library == str(own.parent / "libllama.so")
    write(own_folders / "config", llama_library="native")
    assert load(tmp_path).config.llama_library == "native"
