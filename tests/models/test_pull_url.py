from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from emberkeep.errors import DownloadFailed, ModelBroken
from emberkeep.models import hub
from emberkeep.models.library import InstalledModel, ModelLibrary
from emberkeep.models.pull import pull
from helpers.gguf_builders import tiny_llama
from helpers.model_file_server import ServedFile, Watching, serving

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "PAUSE_S", 0.0)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedFile]:
    with serving(ServedFile(tiny_llama(tmp_path / "remote.gguf").read_bytes())) as file:
        yield file


def _pull(served: ServedFile, library: ModelLibrary, reporter: Watching | None = None) -> InstalledModel:
    return pull(f"{served.url}/dir/Tiny.gguf?key=s3cret", library, reporter=reporter)


def test_a_url_is_downloaded_and_installed(served: ServedFile, library: ModelLibrary) -> None:
    reporter = Watching()
    model = _pull(served, library, reporter)
    assert model.path.read_bytes() == served.content
    assert (model.id, model.record.source) == ("tiny", f"{served.url}/dir/Tiny.gguf")
    assert ("Downloading", len(served.content), len(served.content)) in reporter.seen
    assert library.get("tiny") == model


@pytest.mark.parametrize("has_etag", [True, False])
def test_a_cut_connection_is_continued_where_it_broke(
    served: ServedFile, library: ModelLibrary, has_etag: bool
) -> None:
    """A date serves where there is no ETag."""
    if not has_etag:
        served.etag, served.last_modified = None, "Wed, 21 Oct 2015 07:28:00 GMT"
    served.cuts = [1000, 5000]
    assert _pull(served, library).path.read_bytes() == served.content
    assert served.ranges == [None, "bytes=1000-", "bytes=6000-"]


@pytest.mark.parametrize("etag", [None, 'W/"weak"'])
def test_without_a_strong_validator_a_part_is_never_continued(
    served: ServedFile, library: ModelLibrary, etag: str | None
) -> None:
    served.etag = etag
    served.cuts = [1000]
    assert _pull(served, library).path.read_bytes() == served.content
    assert served.ranges == [None, None]


def test_a_server_that_ignores_ranges_is_started_over(served: ServedFile, library: ModelLibrary) -> None:
    served.understands_ranges = False
    served.cuts = [1000]
    assert _pull(served, library).path.read_bytes() == served.content
    assert served.ranges == [None, "bytes=1000-"]


def test_an_interrupted_pull_goes_on_in_the_next_one(served: ServedFile, library: ModelLibrary) -> None:
    with pytest.raises(KeyboardInterrupt):
        _pull(served, library, Watching(stop_after=1))
    assert list(library.list()) == []
    served.ranges.clear()
    assert _pull(served, library).path.read_bytes() == served.content
    assert served.ranges[0] is not None


def test_bytes_of_two_versions_never_meet(served: ServedFile, library: ModelLibrary, tmp_path: Path) -> None:
    served.cuts = [1000] + [0] * hub.ATTEMPTS
    with pytest.raises(DownloadFailed, match="pull again to resume"):
        _pull(served, library)
    served.content = tiny_llama(tmp_path / "new.gguf", weights="F16").read_bytes()
    served.etag = '"v2"'
    assert _pull(served, library).path.read_bytes() == served.content


def test_a_file_that_became_shorter_is_started_over(
    served: ServedFile, library: ModelLibrary, tmp_path: Path
) -> None:
    served.cuts = [len(served.content) - 10] + [0] * hub.ATTEMPTS
    with pytest.raises(DownloadFailed):
        _pull(served, library)
    served.content = tiny_llama(tmp_path / "new.gguf", weights="Q8_0").read_bytes()
    assert _pull(served, library).path.read_bytes() == served.content


def test_a_passing_server_error_is_tried_again_and_a_lasting_one_reported(
    served: ServedFile, library: ModelLibrary
) -> None:
    served.statuses = [503] * hub.ATTEMPTS
    with pytest.raises(DownloadFailed, match="answered 503"):
        _pull(served, library)
    served.statuses = [503, 429]
    assert _pull(served, library).path.read_bytes() == served.content


def test_a_missing_file_is_reported_at_once_and_without_secrets(served: ServedFile, library: ModelLibrary) -> None:
    served.statuses = [404]
    with pytest.raises(DownloadFailed, match="404 Not Found; check the address") as failed:
        _pull(served, library)
    assert "s3cret" not in str(failed.value)
    assert len(served.ranges) == 1


def test_a_server_that_always_stops_short_fails_and_lists_nothing(
    served: ServedFile, library: ModelLibrary
) -> None:
    served.announces = len(served.content) + 5
    served.understands_ranges = False
    served.cuts = [0] * 50
    with pytest.raises(DownloadFailed):
        _pull(served, library)
    assert list(library.list()) == []


def test_an_unreachable_server_is_reported(library: ModelLibrary) -> None:
    with pytest.raises(DownloadFailed, match="could not be downloaded"):
        pull("http://127.0.0.1:1/m.gguf", library)


def test_a_download_that_is_no_model_leaves_nothing(
    served: ServedFile, library: ModelLibrary, tmp_path: Path
) -> None:
    served.content = b"<html>please log in</html>"
    with pytest.raises(ModelBroken, match=r"tiny\.gguf is not a GGUF file"):
        _pull(served, library)
    assert list(library.list()) == []
    assert [p for p in (tmp_path / "models").rglob("*") if p.is_file()] == []


def test_a_server_that_starts_over_forever_is_given_up(served: ServedFile, library: ModelLibrary) -> None:
    served.understands_ranges = False
    served.cuts = [2000, 1000] * 50
    with pytest.raises(DownloadFailed, match="could not be downloaded"):
        _pull(served, library)
    assert len(served.ranges) < 10


def test_a_continued_part_must_begin_where_it_was_asked_to(served: ServedFile, library: ModelLibrary) -> None:
    served.cuts = [1000]
    served.shifts_ranges = True
    assert _pull(served, library).path.read_bytes() == served.content
    assert served.ranges == [None, "bytes=1000-", None]


# ── single files of the hub ──

COMMIT = "c" * 40


@pytest.fixture
def hub_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServedFile]:
    content = tiny_llama(tmp_path / "remote.gguf").read_bytes()
    file = ServedFile(content, etag=f'"{hashlib.sha256(content).hexdigest()}"')
    file.extra_headers = {"X-Repo-Commit": COMMIT}
    with serving(file):
        monkeypatch.setenv("HF_ENDPOINT", file.url)
        yield file


def test_a_hub_file_is_downloaded_and_installed(hub_file: ServedFile, library: ModelLibrary) -> None:
    watching = Watching()
    model = pull("hf:owner/repo/sub/Tiny.gguf@main", library, reporter=watching)
    assert model.path.read_bytes() == hub_file.content
    assert ("Downloading", len(hub_file.content), len(hub_file.content)) in watching.seen
    assert (model.id, model.record.source) == ("tiny", "hf:owner/repo/sub/Tiny.gguf@main")


def test_a_file_that_is_not_what_the_hub_promised_leaves_nothing(
    hub_file: ServedFile, library: ModelLibrary
) -> None:
    hub_file.etag = f'"{"0" * 64}"'
    with pytest.raises(ModelBroken, match="SHA-256"):
        pull("hf:owner/repo/tiny.gguf", library)
    assert list(library.list()) == []


def test_a_file_the_hub_does_not_have_is_reported(hub_file: ServedFile, library: ModelLibrary) -> None:
    hub_file.statuses = [404]
    with pytest.raises(DownloadFailed, match="answered 404 for hf:owner/repo/none"):
        pull("hf:owner/repo/none.gguf", library)


def test_an_unreachable_hub_is_reported(library: ModelLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(DownloadFailed, match="pull again to resume"):
        pull("hf:owner/repo/tiny.gguf", library)
