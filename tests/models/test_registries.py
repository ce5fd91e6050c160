"""Libraries out of packages, brought by a program that stands for npm, and by pip out of a folder."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import tarfile
import zipfile
from pathlib import Path

import pytest

from emberkeep.engine.llamacpp import shared_library
from emberkeep.engine.llamacpp.prebuilt import Archive, Prebuilt
from emberkeep.errors import DownloadFailed, EngineError
from emberkeep.models import registries
from emberkeep.models.registries import ensure_llama_library, fetch_build
from emberkeep.models.spec import Silent


def packed(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def zipped(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as wheel:
        for name, data in files.items():
            wheel.writestr(name, data)
    return buffer.getvalue()


def sha512(data: bytes) -> str:
    return base64.b64encode(hashlib.sha512(data).digest()).decode()


GOOD = packed({"package/bins/here/libllama.v1.so": b"code", "package/../../evil": b"", "package/README": b""})
GPU = packed({"package/bins/cuda/libllama.cuda.v1.so": b"code", "package/bins/cuda/libggml-cuda.so": b"kernels"})
ABOUT = {"METADATA": b"Metadata-Version: 2.1\nName: nvidia-some\nVersion: 1\n", "WHEEL": b"Wheel-Version: 1.0\n"}
WHEEL = zipped(
    {
        "nvidia/cu13/lib/libcublas.so.13": b"products",
        "nvidia/cu13/include/cublas.h": b"",
        **{f"nvidia_some-1.dist-info/{name}": data for name, data in ABOUT.items()},
    }
)


def for_cpus(data: bytes = GOOD) -> Prebuilt:
    return Prebuilt("ready-made", "here-1", (Archive("@some/package@1", len(data), sha512(data)),))


def for_cuda() -> Prebuilt:
    archives = (Archive("nvidia-some==1", 9, sha512(WHEEL)), Archive("@some/gpu@1", 9, sha512(GPU)))
    return Prebuilt("cuda", "here-cuda-1", archives)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "emberkeep" / "llamacpp"


@pytest.fixture
def npm(tmp_path, monkeypatch):
    """Makes `npm pack` deliver these bytes; for a package with `gpu` in its name, other ones."""
    programs = tmp_path / "programs"
    programs.mkdir()

    def deliver(data: bytes | None, gpu: bytes = b"") -> None:
        (programs / "data").write_bytes(data or b"")
        (programs / "gpu").write_bytes(gpu)
        which = f'case "$2" in *gpu*) cp {programs}/gpu "$4/a.tgz";; *) cp {programs}/data "$4/a.tgz";; esac'
        pack = which if data else 'echo "npm error code E404" >&2; exit 1'
        for name, body in (("node", "true"), ("npm", pack)):
            (programs / name).write_text(f"#!/bin/sh\n{body}\n")
            (programs / name).chmod(0o755)

    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    return deliver


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder in which pip finds the wheels, and nothing else."""
    folder = tmp_path / "index"
    folder.mkdir()
    (folder / "nvidia_some-1-py3-none-any.whl").write_bytes(WHEEL)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_only_the_libraries_arrive(npm, cache):
    npm(GOOD)
    fetch_build(for_cpus())
    assert names(cache) == ["libllama.v1.so"]


def test_what_comes_from_several_archives_lies_in_one_folder(npm, index, cache):
    npm(GOOD, GPU)
    fetch_build(for_cuda())
    assert names(cache / "here-cuda-1") == ["libcublas.so.13", "libggml-cuda.so", "libllama.cuda.v1.so"]
    assert for_cuda().library == cache / "here-cuda-1" / "libllama.cuda.v1.so"


def test_how_much_has_come_is_told(npm, tmp_path, monkeypatch):
    told = []
    npm(GOOD)
    slow = tmp_path / "programs" / "npm"
    slow.write_text(
        slow.read_text().replace("case", f"until test -e {tmp_path}/told; do sleep 0.01; done; case", 1)
    )

    class Listener(Silent):
        def progress(self, step: str, done: int, total: int | None) -> None:
            told.append((step, total))
            (tmp_path / "told").touch()

    monkeypatch.setattr(registries, "_TELL_S", 0.01)
    fetch_build(for_cpus(), Listener())
    assert set(told) == {("Fetching @some/package@1", len(GOOD))}


def test_another_archive_than_expected_is_refused_and_nothing_stays(npm, cache):
    npm(packed({"package/bins/here/libllama.v1.so": b"other code"}))
    with pytest.raises(DownloadFailed, match="not the archive that was expected"):
        fetch_build(for_cpus())
    assert not list(cache.iterdir())


def test_what_npm_says_is_told(npm):
    npm(None)
    with pytest.raises(DownloadFailed, match="E404"):
        fetch_build(for_cpus())


def test_an_archive_without_a_library_is_refused(npm):
    other = packed({"package/README": b""})
    npm(other)
    with pytest.raises(DownloadFailed, match="no library in"):
        fetch_build(for_cpus(other))


def test_a_library_that_another_process_has_fetched_meanwhile_stays(npm, cache):
    npm(GOOD)
    theirs = cache / "here-1" / "libllama.v1.so"
    theirs.parent.mkdir(parents=True)
    theirs.write_bytes(b"theirs")
    fetch_build(for_cpus())
    assert theirs.read_bytes() == b"theirs"
    assert len(list(cache.iterdir())) == 1


def test_a_folder_that_goes_while_old_ones_are_looked_for_is_no_failure(npm, cache, tmp_path):
    npm(GOOD)
    gone = cache / ".tmp-gone"
    cache.mkdir(parents=True)
    gone.symlink_to(tmp_path / "nowhere")  # listed, and not there
    fetch_build(for_cpus())
    assert for_cpus().library.read_bytes() == b"code"


@pytest.fixture
def nothing_installed(monkeypatch):
    """A machine without a GPU, unless `drive` gives it one."""
    builds = {"ready-made": for_cpus()}

    def find(kind: str) -> Prebuilt:
        if kind not in builds:
            raise EngineError(f"There is no ready-made llama.cpp for {kind} here: no driver.")
        return builds[kind]

    for module in (registries, shared_library):
        monkeypatch.setattr(module, "build_for", find)
    monkeypatch.setattr(shared_library, "_package_file", lambda package, pattern: None)
    return builds


@pytest.fixture
def with_gpu(nothing_installed):
    nothing_installed["cuda"] = for_cuda()


def kinds(choice: str) -> list[str]:
    return [library.kind for library in shared_library.candidates(choice)]


def test_a_missing_llama_cpp_is_fetched(nothing_installed, npm):
    npm(GOOD)
    ensure_llama_library()
    assert kinds("auto") == ["ready-made"]


def test_a_machine_with_a_gpu_gets_the_build_for_it_and_that_for_cpus(with_gpu, npm, index):
    npm(GOOD, GPU)
    ensure_llama_library()
    assert kinds("auto") == kinds("cuda") == ["cuda", "ready-made"]
    assert kinds("ready-made") == ["ready-made"]


def test_what_is_here_is_not_replaced_unless_it_is_asked_for_by_name(with_gpu, npm, index):
    npm(GOOD, GPU)
    ensure_llama_library("ready-made")
    ensure_llama_library("auto")
    assert kinds("auto") == ["ready-made"]
    ensure_llama_library("cuda")
    assert kinds("auto") == ["cuda", "ready-made"]


def test_a_build_for_gpus_that_cannot_be_fetched_leaves_that_for_cpus(with_gpu, npm, index, caplog):
    npm(GOOD, b"other bytes")
    ensure_llama_library()
    assert kinds("auto") == ["ready-made"]
    (line,) = caplog.messages
    assert "not the archive that was expected" in line
    assert "`make run GPU=cuda` tries again" in line


def test_a_gpu_that_is_asked_for_and_not_there_is_a_warning(nothing_installed, npm, caplog):
    npm(GOOD)
    ensure_llama_library("cuda")
    assert kinds("cuda") == ["ready-made"]
    assert caplog.messages == ["There is no ready-made llama.cpp for cuda here: no driver."]


def test_a_native_one_is_never_fetched(nothing_installed, npm):
    npm(None)
    ensure_llama_library("native")
    assert not shared_library.is_installed()


def test_one_that_cannot_be_fetched_says_what_to_do_instead(nothing_installed, npm):
    npm(None)
    with pytest.raises(EngineError, match=r"emberkeep\[native\]"):
        ensure_llama_library()


def test_a_platform_without_one_says_what_to_do_instead(nothing_installed):
    nothing_installed.clear()
    with pytest.raises(EngineError, match=r"no ready-made llama\.cpp.*emberkeep\[native\]"):
        ensure_llama_library()
