from __future__ import annotations

import json
from pathlib import Path

import pytest

from emberkeep.cli.commands import default_of, help_for
from emberkeep.config.kinds import parse_size
from emberkeep.config.machine import total_ram
from emberkeep.config.settings import Config, public_values, show_value
from emberkeep.config.sources import file_in, load_config
from emberkeep.errors import ConfigError
from emberkeep.server.presence import check_exposure


@pytest.fixture(autouse=True)
def no_user_config(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))


def load(cwd: Path, flags: dict[str, object] | None = None, env: dict[str, str] | None = None) -> Config:
    """With the file that stands there, if there is one, as if it were named."""
    env = {"EMBERKEEP_CONFIG": str(file), **(env or {})} if (file := file_in(cwd)) else env or {}
    return load_config(flags or {}, env=env, cwd=cwd).config


def refusal(cwd: Path, flags: dict[str, object] | None = None, env: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(cwd, flags, env)
    return str(caught.value)


def test_without_any_source_every_value_is_the_default(tmp_path: Path) -> None:
    loaded = load_config({}, env={}, cwd=tmp_path)
    assert (loaded.config.local_model, loaded.config.port, loaded.config.ctx) == ("smollm2-135m", 8080, None)
    assert loaded.config.ram_budget == total_ram() // 4
    assert set(loaded.origins.values()) == {"default"}


def test_a_flag_beats_a_variable_beats_the_file(tmp_path: Path) -> None:
    path = tmp_path / "emberkeep.toml"
    path.write_text('port = 1\nqueue = 2\nparallel = 3\nmodel = "tiny"\n')
    env = {"EMBERKEEP_PORT": "11", "EMBERKEEP_QUEUE": "12"}
    loaded = load_config({"config": path, "port": "21", "threads": None}, env=env, cwd=tmp_path)
    assert (loaded.config.port, loaded.config.queue, loaded.config.parallel) == (21, 12, 3)
    assert loaded.origins["port"] == "flag --port"
    assert loaded.origins["queue"] == "env EMBERKEEP_QUEUE"
    assert loaded.origins["parallel"] == f"file {path}"
    assert loaded.origins["threads"] == "default"


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, ("auto", None)),
        ({"EMBERKEEP_SPECULATION": "off"}, ("off", None)),
        ({"EMBERKEEP_SPECULATION": "small"}, ("small", "small")),
    ],
    ids=["default", "off", "model"],
)
def test_drafts_are_configured(tmp_path: Path, env: dict[str, str], expected: tuple[object, ...]) -> None:
    config = load(tmp_path, env=env)
    assert (config.speculation, config.draft_model) == expected


@pytest.mark.parametrize(("key", "value"), [("speculation", ""), ("residency", "partial:1"), ("replicas", "3-2")])
def test_a_setting_of_drafts_that_is_out_of_bounds_is_named(tmp_path: Path, key: str, value: str) -> None:
    assert f"--{key.replace('_', '-')}" in refusal(tmp_path, {key: value})


def test_a_json_file_says_the_same_as_a_toml_file(tmp_path: Path) -> None:
    (tmp_path / "emberkeep.json").write_text(json.dumps({"ram_budget": "2G", "allow": ["a", "b"]}))
    config = load(tmp_path)
    assert (config.ram_budget, config.allow) == (2 << 30, ("a", "b"))


def test_a_named_file_is_read_instead_of_the_usual_ones(tmp_path: Path) -> None:
    (tmp_path / "emberkeep.toml").write_text("port = 1")
    (tmp_path / "flag.toml").write_text("port = 2")
    (tmp_path / "env.toml").write_text("port = 3")
    env = {"EMBERKEEP_CONFIG": "env.toml"}
    assert load(tmp_path, env=env).port == 3
    assert load(tmp_path, {"config": Path("flag.toml")}, env).port == 2


def test_the_users_own_file_counts_where_that_of_the_folder_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home" / "emberkeep").mkdir(parents=True)
    (tmp_path / "home" / "emberkeep" / "emberkeep.toml").write_text("port = 7")
    monkeypatch.setattr("platformdirs.user_config_path", lambda *_, **__: tmp_path / "home" / "emberkeep")
    assert load_config({}, env={}, cwd=tmp_path).config.port == 7
    (tmp_path / "emberkeep.toml").write_text("parallel = 8")
    both = load_config({}, env={}, cwd=tmp_path)
    assert (both.config.port, both.config.parallel, both.warning) == (7, 8, "")


def test_a_relative_data_dir_starts_where_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "emberkeep.toml").write_text('data_dir = "state"')
    assert load(tmp_path, {"config": "etc/emberkeep.toml"}).data_dir == tmp_path / "etc" / "state"
    assert load(tmp_path, {"data_dir": Path("here")}).data_dir == tmp_path / "here"


def test_an_unknown_key_in_a_file_names_key_file_and_nearest(tmp_path: Path) -> None:
    path = tmp_path / "emberkeep.toml"
    path.write_text('ram_buget = "1G"')
    assert refusal(tmp_path) == f"Unknown key 'ram_buget' in {path}: did you mean ram_budget?"


def test_an_unknown_variable_names_the_nearest(tmp_path: Path) -> None:
    message = refusal(tmp_path, env={"EMBERKEEP_PROT": "1"})
    assert message == "Unknown environment variable EMBERKEEP_PROT: did you mean EMBERKEEP_PORT?"


def test_an_unknown_variable_is_not_like_another_because_of_its_prefix(tmp_path: Path) -> None:
    message = refusal(tmp_path, env={"EMBERKEEP_FOO_BARX": "1"})
    assert message.startswith("Unknown environment variable EMBERKEEP_FOO_BARX: remove it;")


def test_variables_for_tests_are_left_alone(tmp_path: Path) -> None:
    assert load(tmp_path, env={"EMBERKEEP_TEST_MODEL": "x", "OTHER": "y"}) == load(tmp_path)


def test_an_unknown_setting_of_the_library_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path, {"contxt": 1}).startswith("Unknown setting 'contxt'")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("port", "http"),
        ("port", 65536),
        ("port", True),
        ("port", 80.5),
        ("parallel", 0),
        ("max_concurrent_per_user", 0),
        ("max_concurrent_per_user", "many"),
        ("ctx", "big"),
        ("ctx", 1),
        ("ram_budget", "-1"),
        ("ram_budget", "4 apples"),
        ("ram_budget", 1.5),
        ("disk_budget", "auto"),
        ("deadline_s", "nan"),
        ("deadline_s", "inf"),
        ("allow", 5),
        ("allow", [5]),
        ("log_level", "loud"),
        ("log_level", ["info"]),
        ("model", ""),
        ("host", " "),
        ("data_dir", 3),
        ("engine", "fast"),
        ("device", "cuda:"),
        ("device", "tpu"),
        ("dtype", "int4"),
        ("attention", "none"),
    ],
)
def test_a_bad_value_is_refused_with_key_value_and_origin(tmp_path: Path, key: str, value: object) -> None:
    message = refusal(tmp_path, {key: value})
    assert message.startswith(f"{key} = {value!r} (flag --{key.replace('_', '-')}) is not ")


def test_a_bad_value_tells_what_is_accepted(tmp_path: Path) -> None:
    message = refusal(tmp_path, env={"EMBERKEEP_CTX": "x"})
    expected = "a whole number from 128 to 16777216, or auto"
    assert message == f"ctx = 'x' (env EMBERKEEP_CTX) is not {expected}."


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GiB", 4 << 30),
        ("512MB", 512_000_000),
        ("2G", 2 << 30),
        ("2g", 2 << 30),
        ("1.5 KiB", 1536),
        ("1TB", 10**12),
        ("10B", 10),
        ("123", 123),
        (123, 123),
        (0, 0),
    ],
)
def test_sizes_are_read_as_people_write_them(text: object, size: int) -> None:
    assert parse_size(text) == size


def test_auto_and_none_bring_the_default_back(tmp_path: Path) -> None:
    (tmp_path / "emberkeep.toml").write_text(
        'ctx = 1024\nthreads = 2\nram_budget = "1G"\ndeadline_s = 5\nmax_concurrent_per_user = 2'
    )
    assert load(tmp_path).max_concurrent_per_user == 2
    auto, none = ("ctx", "threads", "ram_budget"), ("deadline_s", "max_concurrent_per_user")
    config = load(tmp_path, {**dict.fromkeys(auto, "auto"), **dict.fromkeys(none, "none")})
    assert (config.ctx, config.threads) == (None, None)
    assert (config.deadline_s, config.max_concurrent_per_user) == (None, None)
    assert config.ram_budget == total_ram() // 4


def test_lists_in_a_variable_are_separated_by_commas(tmp_path: Path) -> None:
    env = {"EMBERKEEP_ALLOW": "http://a:1, http://b,", "EMBERKEEP_PINNED": ""}
    config = load(tmp_path, env=env)
    assert (config.allow, config.pinned) == (("http://a:1", "http://b"), ())


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("broken.toml", "port = "),
        ("broken.json", "{"),
        ("list.json", "[1]"),
        ("deep.json", "[" * 100_000),
        ("settings.yaml", "port: 1"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    assert str(tmp_path / name) in refusal(tmp_path, {"config": name})


def test_a_file_that_is_not_there_is_named_with_a_way_out(tmp_path: Path) -> None:
    assert refusal(tmp_path, {"config": "no.toml"}) == (
        f"Cannot read {tmp_path / 'no.toml'} (No such file or directory): "
        "name another file with --config or EMBERKEEP_CONFIG."
    )


def test_the_api_key_is_never_shown(tmp_path: Path) -> None:
    loaded = load_config({"api_key": "canary-1"}, env={}, cwd=tmp_path)
    assert loaded.config.api_key == "canary-1"
    assert "canary-1" not in repr(loaded) + str(loaded.config) + json.dumps(public_values(loaded.config))
    assert show_value(loaded.config, "api_key") == "***"
    (tmp_path / "emberkeep.json").write_text('{"api_key": ["canary-2"]}')
    assert "canary-2" not in refusal(tmp_path)


@pytest.mark.parametrize("url", ["valkey://ann:canary@nas:6379/1", "unix://:canary@/run/valkey.sock"])
def test_the_password_of_a_shared_server_is_never_shown(tmp_path: Path, url: str) -> None:
    config = load(tmp_path, {"remote": url})
    assert config.remote == url
    assert "canary" not in f"{config!r} {public_values(config)} {show_value(config, 'remote')}"


@pytest.mark.parametrize(
    "url", ["valkey://ann:ca/nary@nas", "valkey://:6/nary@nas", "redis://:1#nary@nas", "http://ann:canary@nas"]
)
def test_a_password_that_ends_the_address_of_a_shared_server_too_early_is_refused(
    tmp_path: Path, url: str
) -> None:
    message = refusal(tmp_path, {"remote": url})
    assert message.startswith("remote = '***' (flag --remote) is not valkey://") and "nary" not in message


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.8.8"])
def test_this_machine_may_connect_without_a_key(host: str) -> None:
    check_exposure(Config(host=host))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org", "localhost.example.org"])
def test_other_machines_need_a_key(tmp_path: Path, host: str) -> None:
    with pytest.raises(ConfigError, match="set --api-key or EMBERKEEP_API_KEY"):
        check_exposure(load(tmp_path, {"host": host}, {"EMBERKEEP_API_KEY": ""}))
    check_exposure(load(tmp_path, {"host": host, "api_key": "k"}))


def test_values_are_shown_as_they_are_written(tmp_path: Path) -> None:
    config = load(tmp_path, {"disk_budget": "1.5GiB", "allow": ["a", "b"], "deadline_s": 2.5, "ctx": 512})
    shows = {key: show_value(config, key) for key in ("disk_budget", "allow", "deadline_s", "ctx", "threads")}
    assert shows == {
        "disk_budget": "1.5 GiB",
        "allow": "a, b",
        "deadline_s": "2.5",
        "ctx": "512",
        "threads": "auto",
    }


def test_a_default_is_the_word_that_brings_it_back() -> None:
    assert [default_of(key) for key in ("ctx", "ram_budget", "deadline_s")] == ["auto", "auto", "none"]
    assert [default_of(key) for key in ("port", "disk_budget", "api_key")] == ["8080", "20 GiB", "none"]


def test_every_setting_has_a_help_text() -> None:
    assert all(help_for(key).endswith(".") for key in public_values(Config()))


@pytest.mark.parametrize(("given", "meant"), [("true", True), ("Off", False), ("1", True), (False, False)])
def test_a_switch_is_on_or_off(given: object, meant: bool) -> None:
    assert load_config({"memory": given}, env={}).config.memory is meant


@pytest.mark.parametrize("given", ["maybe", "", 1, None])
def test_a_switch_is_nothing_else(tmp_path: Path, given: object) -> None:
    file = tmp_path / "emberkeep.json"
    file.write_text(json.dumps({"memory": given}))
    with pytest.raises(ConfigError, match="true or false"):
        load_config({"config": file}, env={})


def test_adapters_are_files_with_or_without_a_scale(tmp_path: Path) -> None:
    (tmp_path / "emberkeep.toml").write_text('lora = ["a.gguf", "b.gguf:0.5", "odd:name.gguf"]\n')
    config = load(tmp_path)
    assert [(lora.path, lora.scale) for lora in config.lora] == [
        (tmp_path / "a.gguf", 1.0),
        (tmp_path / "b.gguf", 0.5),
        (tmp_path / "odd:name.gguf", 1.0),
    ]
    assert public_values(config)["lora"] == [
        str(tmp_path / name) for name in ("a.gguf", "b.gguf:0.5", "odd:name.gguf")
    ]
    by_variable = load(tmp_path, env={"EMBERKEEP_LORA": "a.gguf,/b.gguf:-2"})
    assert [str(lora) for lora in by_variable.lora] == [str(tmp_path / "a.gguf"), "/b.gguf:-2"]
    assert load(tmp_path, {"lora": ["c.gguf:0"]}).lora[0].scale == 0
    assert load(tmp_path, {"lora": Path("d.gguf")}).lora == load(tmp_path, {"lora": [Path("d.gguf")]}).lora


@pytest.mark.parametrize("value", [":0.5", "a.gguf:nan", "a.gguf:inf", " ", "0.5"])
def test_a_scale_alone_or_one_that_is_no_number_is_no_adapter(tmp_path: Path, value: str) -> None:
    assert "lora" in refusal(tmp_path, {"lora": [value]})


def test_layers_are_a_number_or_all_or_left_to_the_machine(tmp_path: Path) -> None:
    assert load(tmp_path).gpu_layers is None
    assert [load(tmp_path, {"gpu_layers": given}).gpu_layers for given in ("0", "12", "auto")] == [0, 12, None]
    everything = load(tmp_path, {"gpu_layers": "all", "cpu_moe": "all"})
    assert (show_value(everything, "gpu_layers"), show_value(everything, "cpu_moe")) == ("all", "all")
    assert everything.gpu_layers == everything.cpu_moe > 10_000
    assert "or all, or auto" in refusal(tmp_path, {"gpu_layers": "most"})


def test_shares_of_gpus_are_numbers_that_add_up_to_something(tmp_path: Path) -> None:
    assert load(tmp_path, {"tensor_split": "3,1"}).tensor_split == (3.0, 1.0)
    assert load(tmp_path, {"tensor_split": "auto"}).tensor_split is None
    assert show_value(load(tmp_path, {"tensor_split": "3,0.5"}), "tensor_split") == "3,0.5"
    for wrong in ("0,0", "-1,2", "a,b", "", "inf,1", "nan"):
        assert "shares such as 3,1" in refusal(tmp_path, {"tensor_split": wrong})


def test_aliases_are_a_table_or_pairs(tmp_path: Path) -> None:
    (tmp_path / "emberkeep.toml").write_text('[aliases]\n"gpt-4o" = "mine"\n')
    assert public_values(load(tmp_path))["aliases"] == {"gpt-4o": "mine"}
    by_flag = load(tmp_path, {"aliases": ["a=b", "c=d=e"]})
    assert [str(alias) for alias in by_flag.aliases] == ["a=b", "c=d=e"]
    assert "aliases" in refusal(tmp_path, {"aliases": ["a"]})


def test_other_models_are_names_or_words(tmp_path: Path) -> None:
    assert load(tmp_path, {"models": ["a", "b"]}).models == ("a", "b")
    assert load(tmp_path, env={"EMBERKEEP_MODELS": "auto"}).models == ()
    assert load(tmp_path, {"unload_after_s": "never"}).unload_after_s is None


def test_a_table_of_models_is_refused_with_what_to_say_instead(tmp_path: Path) -> None:
    (tmp_path / "emberkeep.toml").write_text('[models.aliases]\nc = "x"\n')
    assert "is gone: say models = [...], and aliases in [aliases]" in refusal(tmp_path)
