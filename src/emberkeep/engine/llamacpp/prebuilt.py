"""llama.cpp ready-made: which builds there are, which one suits this machine, and where it lies once fetched."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import platformdirs

from emberkeep.engine.devices import cuda_driver, has_vulkan
from emberkeep.errors import EngineError
from emberkeep.values import dataclass

READY_MADE, CUDA, VULKAN = "ready-made", "cuda", "vulkan"
GPU_BUILDS = (CUDA, VULKAN)
"""The fastest first."""


def cache_folder() -> Path:
    """The folder of what belongs to this user's llama.cpp, whatever the data folder."""
    return platformdirs.user_cache_path("emberkeep", appauthor=False) / "llamacpp"


@dataclass(frozen=True, slots=True)
class Archive:
    """A package on a registry, of which only the shared libraries are used."""

    spec: str
    """As npm writes it (`@node-llama-cpp/linux-x64@3.22.1`), or as pip does (`nvidia-cublas==13.2.0.9`)."""
    size: int
    sha512: str
    """In base64, as npm writes it."""

    @property
    def is_wheel(self) -> bool:
        return "==" in self.spec


@dataclass(frozen=True, slots=True)
class Prebuilt:
    """llama.cpp compiled for every kind of CPU, of which it chooses at run time, and perhaps for GPUs.

    The npm packages of node-llama-cpp carry llama.cpp's own shared libraries, with one file of kernels per
    generation of CPUs, and one for a kind of GPU. They lie in the user's cache, by version and platform, so that
    machines may share a home folder.
    """

    kind: str
    name: str
    """What its folder is called."""
    archives: tuple[Archive, ...]

    @property
    def folder(self) -> Path:
        """Where its libraries are, once they were fetched."""
        return cache_folder() / self.name

    @property
    def library(self) -> Path | None:
        """None until it was fetched."""
        return next(iter(sorted(self.folder.glob("libllama.*v*"))), None)


def build_for(kind: str) -> Prebuilt:
    """The build of `kind` that suits this machine, which is found out within a millisecond where there is no GPU.
    Raises EngineError with what is missing."""
    here = (sys.platform, platform.machine())
    if kind == READY_MADE and here in _FOR_CPUS:
        return _FOR_CPUS[here]
    reason = "nobody compiled it for this platform"
    if kind == VULKAN and here == _X64:
        if has_vulkan():
            return _VULKAN
        reason = "there is no Vulkan loader (libvulkan.so.1), or no GPU of AMD, Intel or NVIDIA"
    if kind == CUDA and here == _X64:
        driver = cuda_driver() or 0
        if fitting := [build for least, build in _CUDA if driver >= least]:
            return next((build for build in fitting if build.library), fitting[0])
        known = f"the NVIDIA driver knows CUDA {driver // 1000}.{driver % 1000 // 10}, and 12.4 is needed"
        reason = known if driver else "there is no NVIDIA driver (libcuda.so.1), or no GPU for it"
    raise EngineError(f"There is no ready-made llama.cpp for {_FOR[kind]} here: {reason}.")


_FOR = {READY_MADE: "CPUs", CUDA: "CUDA", VULKAN: "Vulkan"}
_X64 = ("linux", "x86_64")
_VERSION = "3.22.1"


def _npm(package: str, size: int, sha512: str) -> Archive:
    return Archive(f"@node-llama-cpp/{package}@{_VERSION}", size, sha512)


_LINUX_X64 = _npm(
    "linux-x64",
    10_824_547,
    "5uCCDNqWCNfaAm8aR/Uzxbo4HBpKgNF91kCHPepKhgMgV2OAmatoefbOlMihsqCiH2Od35E/eUHQCFbfRBJuOg==",
)
_LINUX_ARM64 = _npm(
    "linux-arm64",
    7_340_902,
    "W+7naKCXX9/eEjjFmRS8vvx91QyLXDbeFxexZc3bh/PtQABZgmRL3C0AtYYXn4YGTj/3Qor4lWZn2tpjZFPLdQ==",
)
_LINUX_X64_VULKAN = _npm(
    "linux-x64-vulkan",
    24_311_427,
    "bBxqU+JOcBu1nb5Qj2zcMci+JByT1E8EajHvYodyNfVIPkEhXh+/HMwR1/BT7xP08YK0hks+kM8fglER0P8JEg==",
)
_FOR_CPUS = {
    _X64: Prebuilt(READY_MADE, f"linux-x64-{_VERSION}", (_LINUX_X64,)),
    ("linux", "aarch64"): Prebuilt(READY_MADE, f"linux-arm64-{_VERSION}", (_LINUX_ARM64,)),
}
_VULKAN = Prebuilt(VULKAN, f"linux-x64-vulkan-{_VERSION}", (_LINUX_X64_VULKAN,))
# NVIDIA's driver has neither its runtime nor cuBLAS: wheels do. They come first, since pip keeps what it fetched.
_CUDA_13 = (
    Archive(
        "nvidia-cublas==13.2.0.9",
        422_488_322,
        "olPne4vSq6PFFCArn2TOGQWjHOAOCC/D2V+TV40pqjrjgj77P+QcuCB9CL1T89iXqvTYI7dZHiwqj9G62mqdNw==",
    ),
    Archive(
        "nvidia-cuda-runtime==13.1.80",
        2_297_816,
        "rd1hSb7d1ZDDdJ10ayqKenvwhCrF4bWZnKB0T62U4Qo7lfznsPytIlXRzf89NIIh2uA4F/N1jal46CPhMyhoXw==",
    ),
    _npm(
        "linux-x64-cuda",
        142_898_030,
        "8rQCjyNNLZJUFit+YpjwlC4hwkKgOMIkB2wuycKBf8NU2O3ySKbiWZQ8aw9ku2nUTXjSnUIrE6KB88itduTBuA==",
    ),
)
_CUDA_12 = (
    Archive(
        "nvidia-cublas-cu12==12.4.5.8",
        363_438_805,
        "kOnAV5KS3XROwXiAVOJ0kMHSneGh8jhdJ/jP6+hTwLTBUCwgv2j91YfGEpPbmwk9UJLdF7uK3BXTytpqbdYcHg==",
    ),
    Archive(
        "nvidia-cuda-runtime-cu12==12.4.127",
        883_737,
        "tnTKbcAus+jICZ2w7+yKeDKspjuvaL/hdJDMwaJhcNwwHIDfqxCuwyTUjWOEgn+9NYyOfMn5AsBhrLxSA1WCxA==",
    ),
    _npm(
        "linux-x64-cuda-ext",
        176_664_119,
        "4e5ajkiM2aR2WAdB/N/ACk4weEhHvOAIrzxZPsIX0xDFW5+6hhShuy1/vs88SK9NGdgAco9IyE28eYS0H1efpA==",
    ),
    _LINUX_X64,  # the one before has nothing but the kernels for GPUs
)
_CUDA = (
    (13_010, Prebuilt(CUDA, f"linux-x64-cuda-{_VERSION}", _CUDA_13)),
    (12_040, Prebuilt(CUDA, f"linux-x64-cuda-ext-{_VERSION}", _CUDA_12)),
)
"""By the oldest driver that compiles its kernels for any GPU: only some GPUs find theirs compiled."""
