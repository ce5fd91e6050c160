from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from emberkeep.errors import DownloadFailed, ModelBroken
from emberkeep.models.library import ModelLibrary
from emberkeep.models.pull import pull
from helpers.gguf_builders import tiny_llama
from helpers.model_file_server import ServedFile, Watching, serving

pytestmark = pytest.mark.slow

COMMIT = "c" * 40


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServedFile]:
    content = tiny_llama(tmp_path / "remote.gguf").read_bytes()
    file = ServedFile(content, etag=f'"{hashlib.sha256(content).hexdigest()}"')
    file.extra_headers = {"X-Repo-Commit": COMMIT}
    with serving(file):
        monkeypatch.setenv("HF_ENDPOINT", file.url)
        yield file


def test_a_hub_file_is_downloaded_and_installed(hub: ServedFile, library: ModelLibrary) -> None:
    model = pull("hf:owner/repo/sub/Tiny.gguf@main", library)
    assert model.path.read_bytes() == hub.content
    assert (model.id, model.record.source) == ("tiny", "hf:owner/repo/sub/Tiny.gguf@main")


def test_the_progress_of_a_download_is_told(hub: ServedFile, library: ModelLibrary) -> None:
    watching = Watching()
    pull("hf:owner/repo/tiny.gguf", library, reporter=watching)
    size = len(hub.content)
    assert ("Downloading", size, size) in watching.seen


def test_a_file_that_is_not_what_the_hub_promised_leaves_nothing(hub: ServedFile, library: ModelLibrary) -> None:
    hub.etag = f'"{"0" * 64}"'
    with pytest.raises(ModelBroken, match="SHA-256"):
        pull("hf:owner/repo/tiny.gguf", library)
    assert list(library.list()) == []


def test_a_file_the_hub_does_not_have_is_reported(hub: ServedFile, library: ModelLibrary) -> None:
    hub.statuses = [404]
    with pytest.raises(DownloadFailed, match="answered 404 for hf:owner/repo/none"):
        pull("hf:owner/repo/none.gguf", library)


def test_an_unreachable_hub_is_reported(library: ModelLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(DownloadFailed, match="pull again to resume"):
        pull("hf:owner/repo/tiny.gguf", library)
