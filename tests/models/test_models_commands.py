from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from emberkeep.errors import ModelNotFound
from emberkeep.models.library import ModelLibrary
from helpers.gguf_builders import KV_BYTES_PER_TOKEN, tiny_llama


def _pull(models: Callable[..., Result], path: Path, *flags: str) -> Result:
    result = models("pull", str(path), *flags)
    assert result.exit_code == 0, result.output
    return result


def test_an_empty_list_says_how_to_begin(models: Callable[..., Result]) -> None:
    assert "emberkeep models pull smollm2-135m" in models("list").stdout


def test_a_pulled_model_is_listed(models: Callable[..., Result], tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / ("long-" * 30 + "name.gguf"), weights="Q4_1")
    pulled = _pull(models, source, "--name", "tiny")
    assert "--optimize" in pulled.stderr
    assert "tiny" in pulled.stdout
    (row,) = models("list").stdout.splitlines()[1:]
    assert row.split()[:2] == ["tiny", "Q4_1"]
    assert row.split()[-1] == str(source)


def test_the_list_as_json(models: Callable[..., Result], tmp_path: Path) -> None:
    _pull(models, tiny_llama(tmp_path / "tiny.gguf"))
    (entry,) = json.loads(models("list", "--json").stdout)
    assert (entry["id"], entry["quantisation"]) == ("tiny", "F32")
    assert Path(entry["file"]).is_file()


def test_show_tells_what_a_model_is(models: Callable[..., Result], tmp_path: Path) -> None:
    _pull(models, tiny_llama(tmp_path / "tiny.gguf", expert_count=4))
    lines = dict(line.split(maxsplit=1) for line in models("show", "tiny").stdout.splitlines())
    assert lines["architecture"].startswith("llama, 2 layers")
    assert lines["kind"].strip() == "moe (4 experts)"
    assert lines["context"].strip() == "256 tokens"
    assert lines["quantisation"].strip() == "F32"
    assert len(lines["sha256"].strip()) == 64


def test_show_works_on_a_path_and_as_json(models: Callable[..., Result], tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "tiny.gguf")
    shown = json.loads(models("show", str(path), "--json").stdout)
    assert (shown["id"], shown["file"]) == ("tiny", str(path))
    assert shown["profile"]["kv_bytes_per_token"] == KV_BYTES_PER_TOKEN
    assert shown["profile"]["kind"] == "dense"


def test_a_long_template_is_shortened_unless_asked_for(models: Callable[..., Result], tmp_path: Path) -> None:
    template = "\n".join(f"[bold]line {i}" for i in range(20))
    path = str(tiny_llama(tmp_path / "tiny.gguf", **{"tokenizer.chat_template": template}))
    short = models("show", path).stdout
    assert "[bold]line 4" in short
    assert "line 5" not in short
    assert models("show", path, "--template").stdout == template + "\n"


def test_a_model_cannot_control_the_terminal(models: Callable[..., Result], tmp_path: Path) -> None:
    path = str(tiny_llama(tmp_path / "tiny.gguf", **{"tokenizer.chat_template": "\x1b[2Jgone\x07"}))
    for flags in ([], ["--template"], ["--json"]):
        output = models("show", path, *flags).stdout
        assert "gone" in output
        assert "\x1b" not in output and "\x07" not in output


def test_remove_asks_first(models: Callable[..., Result], library: ModelLibrary, tmp_path: Path) -> None:
    _pull(models, tiny_llama(tmp_path / "tiny.gguf"))
    assert models("remove", "tiny", input="n\n").exit_code == 1
    assert library.holds("tiny")
    assert models("remove", "tiny", input="y\n").exit_code == 0
    assert not library.holds("tiny")


def test_remove_can_go_without_asking(
    models: Callable[..., Result], library: ModelLibrary, tmp_path: Path
) -> None:
    _pull(models, tiny_llama(tmp_path / "tiny.gguf"))
    assert models("remove", "tiny", "--yes").exit_code == 0
    assert not library.holds("tiny")


@pytest.mark.parametrize("command", [["show", "nothing"], ["remove", "nothing"]])
def test_an_unknown_model_is_an_error_for_main_to_print(models: Callable[..., Result], command: list[str]) -> None:
    assert isinstance(models(*command).exception, ModelNotFound)
