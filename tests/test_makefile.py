"""`make run` and `make native`: what llama.cpp is compiled with, when, and what is said where it cannot be."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")

_RECORDS = """#!/bin/sh
echo "{name} $* LIBRARY=$EMBERKEEP_LLAMA_LIBRARY CMAKE_ARGS=$CMAKE_ARGS" >> "{log}"
"""


class Project:
    """A copy of the Makefile, with programs beside it that only note how they were called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        self.tools = folder / "tools"
        shutil.copy(ROOT / "Makefile", folder)
        (folder / "pyproject.toml").touch()
        for name in ("python", "emberkeep"):
            self._write(folder / ".venv" / "bin" / name)
        (folder / ".venv" / ".emberkeep-installed").touch()
        self.add("c++")
        for name in ("sh", "rm", "cat", "cut", "grep", "echo", "printf", "test", "touch", "awk"):
            (self.tools / name).symlink_to(shutil.which(name) or "/bin/true")
        self.move_to("Linux", "x86_64")

    def move_to(self, system: str, processor: str) -> None:
        """Another machine."""
        uname = self.tools / "uname"
        uname.write_text(f'#!/bin/sh\ntest "$1" = -sm && echo {system} {processor} || echo {system}\n')
        uname.chmod(0o700)

    def add(self, *names: str) -> None:
        """Programs that a build needs."""
        for name in names:
            self._write(self.tools / name)

    def _write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_RECORDS.format(name=path.name, log=self.log))
        path.chmod(0o700)

    def make(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        self.log.unlink(missing_ok=True)
        return subprocess.run(
            [shutil.which("make") or "make", *arguments],
            cwd=self.folder,
            env={"PATH": str(self.tools), "HOME": os.environ.get("HOME", "/"), **variables},
            capture_output=True,
            text=True,
            check=False,
        )

    def calls(self) -> Iterator[str]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return (line for line in lines if not line.startswith("c++ "))

    def compiled_with(self) -> list[str]:
        """What CMake was told, by every build."""
        return [line.partition("CMAKE_ARGS=")[2] for line in self.calls() if "[native]" in line]

    def served(self) -> bool:
        return any(line.startswith("emberkeep serve") for line in self.calls())

    def libraries(self) -> list[str]:
        """The ones that servers were told to use."""
        served = [line.partition(" LIBRARY=")[2] for line in self.calls() if line.startswith("emberkeep serve")]
        return [line.split(" ", 1)[0] for line in served]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "tool", "flags"),
    [
        (["GPU=rocm"], "hipcc", "-DGGML_HIP=ON"),
        (["GPU=cuda", "ARCH=86;89"], "nvcc", "-DGGML_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=86;89"),
        (["GPU=rocm", "ARCH=gfx1100"], "hipcc", "-DGGML_HIP=ON -DAMDGPU_TARGETS=gfx1100"),
        (["ISA=avx512"], "c++", "-DGGML_NATIVE=OFF -DGGML_AVX512=ON"),
        (["ISA=armv8.2-a+dotprod"], "c++", "-DGGML_NATIVE=OFF -DGGML_CPU_ARM_ARCH=armv8.2-a+dotprod"),
        (["GPU=vulkan", "ISA=avx2"], "glslc", "-DGGML_VULKAN=ON -DGGML_NATIVE=OFF"),
    ],
)
def test_running_compiles_once_and_goes_on_with_it(
    project: Project, arguments: list[str], tool: str, flags: str
) -> None:
    project.add(tool)
    first = project.make("run", *arguments)
    assert first.returncode == 0, first.stderr
    assert project.compiled_with() == [f"-DLLAVA_BUILD=OFF {flags}"]
    assert project.served()
    for again in (["run", *arguments], ["run"]):
        assert project.make(*again).returncode == 0
        assert (project.compiled_with(), project.served()) == ([], True)


@pytest.mark.parametrize("gpu", ["cuda", "vulkan"])
def test_what_comes_ready_made_is_not_compiled_unless_it_was(project: Project, gpu: str) -> None:
    assert project.make("run", f"GPU={gpu}").returncode == 0
    assert (project.compiled_with(), project.libraries()) == ([], [gpu])
    project.make("run")
    assert project.libraries() == [""]
    project.add("nvcc", "glslc")
    project.make("native", f"GPU={gpu}")
    assert len(project.compiled_with()) == 1
    project.make("run", f"GPU={gpu}")
    assert (project.compiled_with(), project.libraries()) == ([], [""])


@pytest.mark.parametrize("machine", [("Linux", "aarch64"), ("Darwin", "x86_64")])
def test_where_nothing_comes_ready_made_for_gpus_it_is_compiled(
    project: Project, machine: tuple[str, str]
) -> None:
    project.move_to(*machine)
    project.add("glslc")
    project.make("run", "GPU=vulkan")
    assert project.compiled_with() == ["-DLLAVA_BUILD=OFF -DGGML_VULKAN=ON"]


def test_another_build_takes_the_place_of_the_first(project: Project) -> None:
    project.add("nvcc", "hipcc")
    project.make("native", "GPU=cuda")
    assert not project.served()
    project.make("run", "GPU=rocm")
    assert project.compiled_with() == ["-DLLAVA_BUILD=OFF -DGGML_HIP=ON"]


def test_a_build_that_fails_is_tried_again(project: Project) -> None:
    project.add("hipcc")
    python = project.folder / ".venv" / "bin" / "python"
    works = python.read_text()
    python.write_text(f'{works}case "$*" in *native*) exit 1;; esac\n')
    assert project.make("run", "GPU=rocm").returncode != 0
    assert not project.served()
    python.write_text(works)
    assert project.make("run", "GPU=rocm").returncode == 0
    assert project.served()


@pytest.mark.parametrize(
    ("target", "gpu", "said"),
    [("native", "cuda", "nvcc"), ("native", "vulkan", "glslc"), ("run", "rocm", "hipcc")],
)
def test_what_is_missing_is_said_before_anything_is_changed(
    project: Project, target: str, gpu: str, said: str
) -> None:
    done = project.make(target, f"GPU={gpu}")
    assert done.returncode != 0
    (sentence,) = done.stdout.splitlines()
    assert sentence.startswith(f"GPU={gpu} takes ")
    assert said in sentence
    assert list(project.calls()) == []


@pytest.mark.parametrize(
    ("gpu", "tool", "compiler", "packages"),
    [("vulkan", "glslc", "c++", "libvulkan-dev spirv-headers"), ("cuda", "nvcc", "nvcc", "libcublas-dev")],
)
def test_missing_headers_are_said(project: Project, gpu: str, tool: str, compiler: str, packages: str) -> None:
    project.add(tool)
    (project.tools / compiler).write_text("#!/bin/sh\nexit 1\n")
    done = project.make("native", f"GPU={gpu}")
    assert done.returncode != 0
    assert packages in done.stdout
    assert list(project.calls()) == []


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("GPU=opencl", "GPU=opencl is not known here: it is cuda, vulkan, rocm or metal"),
        ("ISA=mmx", "it is native, avx, avx2, avx512, or for ARM"),
        ("ARCH=90", "ARCH=90 is for GPU=cuda"),
    ],
)
def test_what_is_not_known_is_an_error_that_lists_what_is(project: Project, argument: str, said: str) -> None:
    done = project.make("run", argument)
    assert done.returncode != 0
    assert said in done.stderr
    assert list(project.calls()) == []


def test_variables_of_the_shell_are_for_other_programs(project: Project) -> None:
    assert project.make("run", ARCH="arm64", GPU="cuda", ISA="x86").returncode == 0
    assert (project.compiled_with(), project.libraries()) == ([], [""])
