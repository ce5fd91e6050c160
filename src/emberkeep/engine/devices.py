"""What can compute here, as the operating system tells it: the CPU with its instructions, and GPUs; and
whether the packages are installed that the Hugging Face engine needs. Asking imports none of them.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from emberkeep.errors import EngineError
from emberkeep.signals import with_default_signals
from emberkeep.values import dataclass

_CPUINFO = Path("/proc/cpuinfo")
_KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
_FEATURES: Mapping[str, str] = {
    "avx": "AVX",
    "avx1_0": "AVX",
    "avx2": "AVX2",
    "avx2_0": "AVX2",
    "fma": "FMA",
    "f16c": "F16C",
    "avx_vnni": "AVX_VNNI",
    "avx512f": "AVX512",
    "avx512_vnni": "AVX512_VNNI",
    "avx512_bf16": "AVX512_BF16",
    "amx_tile": "AMX",
    "amx_int8": "AMX_INT8",
    "amx_bf16": "AMX_BF16",
    "asimd": "NEON",
    "neon": "NEON",
    "asimdhp": "FP16",
    "feat_fp16": "FP16",
    "asimddp": "DOTPROD",
    "feat_dotprod": "DOTPROD",
    "i8mm": "I8MM",
    "feat_i8mm": "I8MM",
    "bf16": "BF16",
    "feat_bf16": "BF16",
    "sve": "SVE",
    "sve2": "SVE2",
    "sme": "SME",
    "feat_sme": "SME",
}
"""What Linux and macOS call the instructions that kernels are written for, and what people call them."""
_ARM_PARTS: Mapping[str, str] = {
    "0xd03": "Cortex-A53",
    "0xd08": "Cortex-A72",
    "0xd0b": "Cortex-A76",
    "0xd0c": "Neoverse N1",
    "0xd40": "Neoverse V1",
    "0xd49": "Neoverse N2",
    "0xd4f": "Neoverse V2",
    "0xd84": "Neoverse V3",
    "0xd8e": "Neoverse N3",
}
"""ARM's own cores: Linux tells their numbers only."""
_OVERRIDE = "HSA_OVERRIDE_GFX_VERSION"
_ROCM_TARGETS = re.compile(r"gfx(90[068a]|942|950|1030|110[012]|115[01]|120[01])")
"""What ROCm's libraries are compiled for."""
_RUNS_AS: Mapping[str, str] = {"gfx103": "10.3.0", "gfx110": "11.0.0"}
"""By family: the member that the libraries have kernels for, whose instructions the others know as well."""


@dataclass(frozen=True, slots=True)
class Device:
    """Something that an engine can compute on."""

    backend: str
    """As `CUDA`, `ROCm`, `Vulkan`, `Metal` or `CPU`."""
    name: str
    """As the engine calls it: `CUDA0`, `cuda:0`."""
    description: str
    free: int | None
    """In bytes; None where it is not told."""
    total: int | None


@dataclass(frozen=True, slots=True)
class Cpu:
    name: str
    cores: int
    """That this process may use."""
    features: tuple[str, ...]


def read_cpu(cpuinfo: Path = _CPUINFO) -> Cpu:
    """Never an error: what the system does not tell is left out."""
    facts = _mac_facts() if sys.platform == "darwin" else _linux_facts(cpuinfo)
    named = {word.lower() for word in facts.get("features", "").split()}
    features = dict.fromkeys(name for word, name in _FEATURES.items() if word in named)
    name = facts.get("name") or platform.processor() or platform.machine()
    return Cpu(name, _core_count(), tuple(features))


def _core_count() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _linux_facts(cpuinfo: Path) -> dict[str, str]:
    try:
        lines = cpuinfo.read_text("utf-8", "replace").splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in reversed(lines))
    fields = {key.strip(): value.strip() for key, _, value in pairs}  # of the first core, which is read last
    arm = _ARM_PARTS.get(fields.get("CPU part", "")) if fields.get("CPU implementer") == "0x41" else None
    return {
        "name": fields.get("model name") or arm or "",
        "features": fields.get("flags") or fields.get("Features") or "",
    }


def _mac_facts() -> dict[str, str]:
    values: dict[str, str] = {}
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            with_default_signals(["sysctl", "machdep.cpu.brand_string", "hw.optional"]),
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
        values = dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)
    present = (key.rpartition(".")[2] for key, value in values.items() if value == "1")
    return {"name": values.get("machdep.cpu.brand_string", ""), "features": " ".join(present)}


# ── AMD's GPUs ──


def amd_advice(variables: Mapping[str, str], nodes: Path = _KFD_NODES) -> str | None:
    """One sentence where ROCm needs to be told to take the GPUs here for others of their family; else None.

    It is told for all GPUs of a process at once, so nothing is said where one of them is known as it is.
    """
    targets = list(amd_targets(nodes))
    runs_as = {_RUNS_AS.get(target[:-1]) for target in targets}
    if _OVERRIDE in variables or len(runs_as) != 1 or any(map(_ROCM_TARGETS.fullmatch, targets)):
        return None
    (version,) = runs_as
    if version is None:
        return None
    names = " and ".join(sorted(set(targets)))
    return f"ROCm has no kernels for {names}: set {_OVERRIDE}={version}, and those of a GPU like it are used."


def amd_targets(nodes: Path = _KFD_NODES) -> Iterator[str]:
    """What compilers call each of the GPUs that the driver tells of, as `gfx1031`."""
    for properties in sorted(nodes.glob("*/properties")):
        with suppress(OSError, ValueError):
            fields = dict(line.split() for line in properties.read_text().splitlines())
            number = int(fields["gfx_target_version"]) if "gfx_target_version" in fields else 0
            if number:  # a CPU is a node, too, and has none
                yield f"gfx{number // 10_000}{number // 100 % 100}{number % 100:x}"


# ── drivers that ready-made libraries compute with ──

DRIVERS = _CUDA_DRIVER, _VULKAN_LOADER = "libcuda.so.1", "libvulkan.so.1"
_DEVICES, _DRM = Path("/dev"), Path("/sys/class/drm")
_GPU_VENDORS = ("0x1002", "0x10de", "0x8086")
"""AMD, NVIDIA and Intel. What virtual machines show has others, and computes on the CPU."""


def cuda_driver(devices: Path = _DEVICES) -> int | None:
    """The newest CUDA that NVIDIA's driver knows, as 13010 for 13.1; None where there is no driver, or no GPU."""
    version = ctypes.c_int()
    try:
        answered = ctypes.CDLL(_CUDA_DRIVER).cuDriverGetVersion(ctypes.byref(version)) == 0
    except (OSError, AttributeError):
        return None
    # Under Windows its devices are behind dxg.
    has_gpu = (devices / "dxg").exists() or any(devices.glob("nvidia[0-9]*"))
    return version.value if answered and has_gpu else None


def has_vulkan(drm: Path = _DRM) -> bool:
    """Whether there are Vulkan's loader and a GPU of a kind that has a driver of its own."""
    with suppress(OSError):
        ctypes.CDLL(_VULKAN_LOADER)
        return any(vendor.read_text().strip() in _GPU_VENDORS for vendor in drm.glob("renderD*/device/vendor"))
    return False


_HF_PACKAGES = ("torch", "transformers")


def has_hf() -> bool:
    return all(find_spec(name) is not None for name in _HF_PACKAGES)


def require_hf() -> None:
    """Raises EngineError where the Hugging Face engine cannot be."""
    if not has_hf():
        raise EngineError("The Hugging Face engine needs torch and transformers: pip install 'emberkeep[hf]'.")


def hf_versions() -> str:
    """The packages that shape results, for people."""
    from importlib import metadata  # a fiftieth of all that a server imports

    return ", ".join(f"{name} {metadata.version(name)}" for name in _HF_PACKAGES)
