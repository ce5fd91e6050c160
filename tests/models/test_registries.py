"""Files out of npm packages, brought by a program that stands for npm."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import tarfile
from pathlib import Path

import pytest

from emberkeep.engine.llamacpp.shared_library import Prebuilt
from emberkeep.errors import DownloadFailed, EngineError
from emberkeep.models import registries as llama_library
from emberkeep.models.registries import fetch_npm


def archive(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as packed:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            packed.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def integrity(data: bytes) -> str:
    return f"sha512-{base64.b64encode(hashlib.sha512(data).digest()).decode()}"


GOOD = archive(
    {"package/bins/here/libllama.v1.so": b"code", "package/bins/here/../../evil": b"", "package/README": b""}
)


@pytest.fixture
def npm(tmp_path, monkeypatch):
    """Makes `npm pack` deliver these bytes."""
    programs = tmp_path / "programs"
    programs.mkdir()

    def deliver(data: bytes | None) -> None:
        (programs / "data").write_bytes(data or b"")
        pack = f'cp {programs}/data "$4/a.tgz"' if data else 'echo "npm error code E404" >&2; exit 1'
        for name, body in (("node", "true"), ("npm", pack)):
            (programs / name).write_text(f"#!/bin/sh\n{body}\n")
            (programs / name).chmod(0o755)

    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    return deliver


def fetch(target: Path, wanted: str = integrity(GOOD)) -> None:
    fetch_npm("@some/package", "1.0.0", wanted, "package/bins/here", target)


def test_only_the_files_of_the_folder_arrive(npm, tmp_path):
    npm(GOOD)
    fetch(tmp_path / "cache" / "here")
    assert [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()] == ["libllama.v1.so"]


def test_another_archive_than_expected_is_refused_and_nothing_stays(npm, tmp_path):
    npm(archive({"package/bins/here/libllama.v1.so": b"other code"}))
    with pytest.raises(DownloadFailed, match="not the archive that was expected"):
        fetch(tmp_path / "cache" / "here")
    assert not list((tmp_path / "cache").iterdir())


def test_what_npm_says_is_told(npm, tmp_path):
    npm(None)
    with pytest.raises(DownloadFailed, match="E404"):
        fetch(tmp_path / "cache" / "here")


def test_an_archive_without_the_folder_is_refused(npm, tmp_path):
    other = archive({"package/README": b""})
    npm(other)
    with pytest.raises(DownloadFailed, match="nothing in package/bins/here"):
        fetch(tmp_path / "cache" / "here", integrity(other))


def test_a_library_that_another_process_has_fetched_meanwhile_stays(npm, tmp_path):
    npm(GOOD)
    theirs = tmp_path / "cache" / "here" / "libllama.v1.so"
    theirs.parent.mkdir(parents=True)
    theirs.write_bytes(b"theirs")
    fetch(theirs.parent)
    assert theirs.read_bytes() == b"theirs"
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_folder_that_goes_while_old_ones_are_looked_for_is_no_failure(npm, tmp_path):
    npm(GOOD)
    gone = tmp_path / "cache" / ".tmp-gone"
    gone.parent.mkdir()
    gone.symlink_to(tmp_path / "nowhere")  # listed, and not there
    fetch(tmp_path / "cache" / "here")
    assert (tmp_path / "cache" / "here" / "libllama.v1.so").read_bytes() == b"code"


@pytest.fixture
def nothing_installed(monkeypatch, tmp_path):
    package = Prebuilt("@some/package", "1.0.0", integrity(GOOD), "package/bins/here")
    monkeypatch.setattr(llama_library, "prebuilt", lambda: package)
    monkeypatch.setattr(llama_library, "is_installed", lambda choice: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return package


def test_a_missing_llama_cpp_is_fetched(nothing_installed, npm):
    npm(GOOD)
    llama_library.ensure_llama_library()
    assert nothing_installed.library is not None


def test_a_native_one_is_never_fetched(nothing_installed, npm):
    npm(None)
    llama_library.ensure_llama_library("native")
    assert nothing_installed.library is None


def test_one_that_cannot_be_fetched_says_what_to_do_instead(nothing_installed, npm):
    npm(None)
    with pytest.raises(EngineError, match=r"emberkeep\[native\]"):
        llama_library.ensure_llama_library()


def test_a_platform_without_one_says_what_to_do_instead(nothing_installed, monkeypatch):
    monkeypatch.setattr(llama_library, "prebuilt", lambda: None)
    with pytest.raises(EngineError, match=r"no ready-made llama\.cpp"):
        llama_library.ensure_llama_library()
