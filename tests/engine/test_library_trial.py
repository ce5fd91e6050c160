"""A library is tried in a process of its own before this one uses it."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from emberkeep.engine.llamacpp import c_api, shared_library, trial
from emberkeep.engine.llamacpp.shared_library import LibraryFile, candidates, library_in_use, llama
from emberkeep.engine.llamacpp.specimen import write_specimen
from emberkeep.errors import EngineError, ModelBroken

pytestmark = pytest.mark.slow

UNDEFINED = {"aarch64": bytes(4), "x86_64": b"\x0f\x0b\x0f\x0b"}
"""No CPU of the kind has such an instruction."""

needs_maps = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads where a library is mapped")


def file_offset(path: Path, function: str) -> int:
    """Where the code of `function` begins in the file of a library."""
    library = ctypes.CDLL(str(path))
    address = ctypes.cast(getattr(library, function), ctypes.c_void_p).value
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, *_ = line.split()
        start, end = (int(number, 16) for number in span.split("-"))
        if start <= address < end:
            return address - start + int(offset, 16)
    raise AssertionError("it is not mapped")


@pytest.fixture(scope="session")
def trapping(tmp_path_factory) -> LibraryFile:
    """This machine's llama.cpp, as if it had been compiled for a CPU with more instructions."""
    here = library_in_use()
    folder = tmp_path_factory.mktemp("other-cpu") / "lib"
    shutil.copytree(here.path.parent, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    copy = (folder / here.path.name).resolve()
    begin = file_offset(here.path, "llama_decode")
    with copy.open("r+b") as file:
        file.seek(begin)
        file.write(UNDEFINED[os.uname().machine])
    return LibraryFile("native", copy)


@needs_maps
def test_a_library_for_another_cpu_ends_a_child_and_is_one_sentence(trapping, tmp_path):
    with pytest.raises(EngineError, match=r"does not run on this CPU, it was ended by SIGILL: `make native`"):
        trial.prove(trapping, tmp_path)
    assert not list(tmp_path.iterdir())  # it may be mended


@needs_maps
def test_the_next_one_is_used_where_the_first_traps(trapping, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(trial, "candidates", lambda choice: [trapping, library_in_use()])
    assert trial.choose_library("auto", tmp_path) == library_in_use()
    assert "SIGILL" in caplog.text
    assert "SIGILL" in str(trial.find_failures("auto", tmp_path)[0])


def for_gpus(folder: Path, kernels: bytes | None) -> LibraryFile:
    """This machine's llama.cpp, as if it had been compiled for GPUs, perhaps with a file of kernels."""
    here = library_in_use().path
    shutil.copytree(here.parent, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    if kernels is not None:
        (folder / "libggml-cuda.so").write_bytes(kernels)
    return LibraryFile("cuda", folder / here.name)


@pytest.mark.parametrize(
    ("kernels", "reason"), [(None, "found no GPU that it can use"), (b"no ELF", r"libggml-cuda\.so: \w+")]
)
def test_one_for_gpus_that_finds_none_is_a_warning_and_that_for_cpus_is_used(
    kernels, reason, tmp_path, monkeypatch, caplog
):
    library = for_gpus(tmp_path / "lib", kernels)
    monkeypatch.setattr(trial, "candidates", lambda choice: [library, library_in_use()])
    assert trial.choose_library("auto", tmp_path / "trials") == library_in_use()
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "does not run on this GPU" in line
    assert re.search(reason, line)
    assert "`llama_library = ready-made` tries no other" in line


def test_one_for_gpus_whose_trial_does_not_end_is_not_used_either(tmp_path, monkeypatch):
    hanging = for_gpus(tmp_path / "lib", None)

    def hangs(seconds: float, library: Path, *_: object) -> None:
        if library == hanging.path:
            raise EngineError("llama.cpp could not be tried within 1800 s: try again.")

    monkeypatch.setattr(trial, "_try", hangs)
    monkeypatch.setattr(trial, "candidates", lambda choice: [hanging, library_in_use()])
    assert trial.choose_library("auto", tmp_path / "trials") == library_in_use()


def test_what_works_with_one_driver_is_tried_again_with_another(tmp_path, monkeypatch):
    tries = []
    monkeypatch.setattr(trial, "_try", lambda *tried: tries.append(tried[-1]))
    for driver in (12_040, 12_040, 13_010):
        monkeypatch.setattr(trial, "cuda_driver", lambda driver=driver: driver)
        trial.prove(LibraryFile("cuda", library_in_use().path), tmp_path)
    assert tries == ["gpu", "gpu"]


@needs_maps
def test_serving_with_it_is_a_sentence_and_status_1_and_doctor_explains(trapping, tmp_path, model_file):
    environment = {**os.environ, "EMBERKEEP_LLAMA_LIBRARY": str(trapping.path)}
    command = [sys.executable, "-m", "emberkeep"]
    served = subprocess.run(
        [*command, "serve", "--model", str(model_file("dense")), "--data-dir", str(tmp_path), "--port", "0"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert served.returncode == 1
    last = served.stderr.strip().splitlines()[-1]
    assert "does not run on this CPU" in last
    assert "Traceback" not in served.stderr
    checked = subprocess.run(
        [*command, "doctor", "--data-dir", str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert checked.returncode == 1
    line = next(line for line in checked.stdout.splitlines() if "llama.cpp" in line)
    assert line.startswith("fail")
    assert "SIGILL" in line


def test_what_works_is_tried_once_per_library_and_cpu(tmp_path, monkeypatch):
    tries = []
    monkeypatch.setattr(trial, "_try", lambda *tried: tries.append(tried))
    for _ in range(3):
        trial.prove(library_in_use(), tmp_path)
    assert len(tries) == 1
    monkeypatch.setattr(shared_library, "cpu_facts", lambda **_: ("another one",))
    trial.prove(library_in_use(), tmp_path)
    monkeypatch.setattr(shared_library, "digest", lambda library: "another one")
    trial.prove(library_in_use(), tmp_path)
    assert len(tries) == 3


def ends_like(monkeypatch, code: str) -> None:
    monkeypatch.setattr(trial, "with_default_signals", lambda _: [sys.executable, "-c", code])


@pytest.mark.parametrize("ending", [signal.SIGSEGV, signal.SIGABRT])
def test_a_child_that_ends_itself_blames_the_library(ending, monkeypatch, tmp_path):
    ends_like(monkeypatch, f"import os; os.kill(os.getpid(), {int(ending)})")
    with pytest.raises(EngineError, match=f"does not run on this CPU, it was ended by {ending.name}"):
        trial.prove(library_in_use(), tmp_path)


@pytest.mark.parametrize(
    "code", [f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})", "raise OSError('no space')"]
)
def test_what_may_pass_is_not_blamed_on_the_library(code, monkeypatch, tmp_path):
    ends_like(monkeypatch, code)
    monkeypatch.setattr(trial, "candidates", lambda choice: [library_in_use(), library_in_use()])
    with pytest.raises(EngineError, match=r"could not be tried .*: try again"):
        trial.choose_library("auto", tmp_path)


def test_nothing_is_imported_from_the_folder_it_was_started_in(tmp_path, monkeypatch):
    (tmp_path / "numpy.py").write_text("raise SystemExit('foreign code ran')")
    monkeypatch.chdir(tmp_path)
    assert trial._try(60, library_in_use().path, Path(), "library") is None


def test_a_model_that_ends_the_process_is_a_sentence(tmp_path):
    write_specimen(tmp_path / "good.gguf")
    data = (tmp_path / "good.gguf").read_bytes()
    key = b"llama.block_count" + struct.pack("<I", 4)
    begin = data.index(key) + len(key)
    (tmp_path / "bad.gguf").write_bytes(data[:begin] + struct.pack("<I", 513) + data[begin + 4 :])
    trial.prove_model(tmp_path / "good.gguf", "good", tmp_path / "trials")
    with pytest.raises(
        ModelBroken, match=r"bad\.gguf cannot be loaded, a process that tried was ended by SIGABRT"
    ):
        trial.prove_model(tmp_path / "bad.gguf", "bad", tmp_path / "trials")
    assert len(list((tmp_path / "trials").iterdir())) == 1


def test_a_model_is_tried_without_flash_attention_in_a_child_and_what_came_of_it_remembered(
    model_file, monkeypatch, tmp_path
):
    assert trial.survives_without_flash(model_file("dense"), "good", tmp_path)
    (tmp_path / "bad.gguf").write_bytes(model_file("dense").read_bytes()[:2000])
    assert not trial.survives_without_flash(tmp_path / "bad.gguf", "bad", tmp_path)
    remembered = {path: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(trial, "_try", None)
    assert trial.survives_without_flash(model_file("dense"), "good", tmp_path)
    assert not trial.survives_without_flash(tmp_path / "bad.gguf", "bad", tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == remembered


def test_a_child_that_cannot_be_had_says_nothing_about_flash_attention(model_file, monkeypatch, tmp_path):
    def cannot(*_: object) -> None:
        raise EngineError("no memory for a process")

    monkeypatch.setattr(trial, "_try", cannot)
    assert not trial.survives_without_flash(model_file("dense"), "good", tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_fingerprint_is_of_the_files_that_are_open(monkeypatch, tmp_path):
    llama()
    assert len(shared_library.loaded_digest()) == 64
    before = shared_library.loader_variables()
    monkeypatch.setenv("GGML_SOMETHING", "1")
    assert shared_library.loader_variables() != before


def test_a_file_that_is_no_library_is_refused(tmp_path):
    (tmp_path / "libllama.so").write_text("not a library")
    with pytest.raises(EngineError, match=r"not a llama\.cpp library"):
        c_api.bind(tmp_path / "libllama.so")


def test_another_release_is_refused(monkeypatch):
    monkeypatch.setattr(c_api, "VERSIONS", ("9.9.",))
    with pytest.raises(EngineError, match=r"only releases 9\.9\.x are known"):
        c_api.bind(library_in_use().path)


def test_parameters_that_are_elsewhere_are_refused(monkeypatch):
    monkeypatch.setattr(c_api, "_context_layout", lambda library: None)
    with pytest.raises(EngineError, match="are known here"):
        c_api.bind(library_in_use().path)


def test_a_path_that_is_not_there_is_told():
    with pytest.raises(EngineError, match="no library at /nowhere"):
        candidates("/nowhere")


def test_what_is_not_installed_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(shared_library, "_find_installed", lambda choice: iter(()))
    with pytest.raises(EngineError, match=r"emberkeep\[native\]"):
        candidates("native")


def test_a_process_runs_on_one_library(tmp_path):
    library_in_use()
    with pytest.raises(EngineError, match="start another"):
        shared_library.use_library(LibraryFile("named", tmp_path / "other.so"))


def test_a_specimen_is_the_same_every_time(tmp_path):
    write_specimen(tmp_path / "one.gguf")
    write_specimen(tmp_path / "two.gguf")
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "two.gguf").read_bytes()
