"""What the operating system tells about the CPU and about AMD's GPUs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from emberkeep.engine.devices import amd_advice, amd_targets, read_cpu

X86 = """processor\t: 0
model name\t: AMD EPYC 9654 96-Core Processor
flags\t\t: fpu sse2 avx f16c avx2 fma avx512f avx512_vnni avx512_bf16 amx_tile amx_int8
processor\t: 1
model name\t: another one
flags\t\t: fpu
"""
ARM = """processor\t: 0
Features\t: fp asimd aes asimdhp asimddp i8mm bf16 sve sve2
CPU implementer\t: 0x41
CPU part\t: 0xd4f
"""

only_linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux tells it in these files")


@only_linux
def test_a_cpu_is_told_by_its_name_and_its_instructions(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(X86)
    cpu = read_cpu(tmp_path / "cpuinfo")
    assert cpu.name == "AMD EPYC 9654 96-Core Processor"
    assert " ".join(cpu.features) == "AVX AVX2 FMA F16C AVX512 AVX512_VNNI AVX512_BF16 AMX AMX_INT8"
    assert cpu.cores >= 1


@only_linux
def test_arms_own_cores_have_names(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(ARM)
    cpu = read_cpu(tmp_path / "cpuinfo")
    assert (cpu.name, " ".join(cpu.features)) == ("Neoverse V2", "NEON FP16 DOTPROD I8MM BF16 SVE SVE2")


@only_linux
def test_a_system_that_tells_nothing_has_a_cpu_all_the_same(tmp_path: Path) -> None:
    cpu = read_cpu(tmp_path / "none")
    assert cpu.name
    assert cpu.features == ()


def _nodes(folder: Path, *versions: int) -> Path:
    """As the driver writes them; 0 is a CPU."""
    for number, version in enumerate(versions):
        (folder / str(number)).mkdir()
        (folder / str(number) / "properties").write_text(
            f"cpu_cores_count {0 if version else 16}\nsimd_count 80\ngfx_target_version {version}\n"
        )
    return folder


def test_targets_are_named_as_compilers_name_them(tmp_path: Path) -> None:
    nodes = _nodes(tmp_path, 0, 90010, 100301, 110003, 120001)
    assert list(amd_targets(nodes)) == ["gfx90a", "gfx1031", "gfx1103", "gfx1201"]


@pytest.mark.parametrize(
    ("version", "told"),
    [(100301, "10.3.0"), (100302, "10.3.0"), (100305, "10.3.0"), (110003, "11.0.0")],
)
def test_a_gpu_that_rocm_has_no_kernels_for_is_taken_for_one_like_it(
    tmp_path: Path, version: int, told: str
) -> None:
    advice = amd_advice({}, _nodes(tmp_path, 0, version))
    assert advice is not None
    assert f"set HSA_OVERRIDE_GFX_VERSION={told}," in advice


@pytest.mark.parametrize(
    "versions",
    [
        (),
        (0,),
        (100300,),
        (110000,),
        (90010,),
        (80003,),  # nothing runs as it
        (110000, 100306),  # the variable would hold for both
        (100301, 110003),
    ],
)
def test_nothing_is_advised_where_it_would_not_help(tmp_path: Path, versions: tuple[int, ...]) -> None:
    assert amd_advice({}, _nodes(tmp_path, *versions)) is None


def test_what_is_set_already_is_not_advised(tmp_path: Path) -> None:
    assert amd_advice({"HSA_OVERRIDE_GFX_VERSION": "10.3.0"}, _nodes(tmp_path, 100301)) is None


def test_files_that_mean_nothing_are_no_gpus(tmp_path: Path) -> None:
    nodes = _nodes(tmp_path, 100301)
    (tmp_path / "9").mkdir()
    (tmp_path / "9" / "properties").write_text("gfx_target_version many more words\n")
    assert list(amd_targets(nodes)) == ["gfx1031"]
    assert list(amd_targets(tmp_path / "none")) == []
