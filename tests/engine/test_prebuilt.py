"""Which ready-made llama.cpp suits a machine, and how cheaply a machine without a GPU is known."""

from __future__ import annotations

import ctypes
import platform
import sys
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace

import pytest

from emberkeep.engine import devices
from emberkeep.engine.devices import cuda_driver, has_vulkan
from emberkeep.engine.llamacpp import prebuilt
from emberkeep.engine.llamacpp.prebuilt import build_for
from emberkeep.errors import EngineError


@pytest.fixture(autouse=True)
def x64(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def drive(monkeypatch: pytest.MonkeyPatch, version: int | None) -> None:
    monkeypatch.setattr(prebuilt, "cuda_driver", lambda: version)


@pytest.mark.parametrize(("version", "name"), [(13_020, "cuda"), (13_010, "cuda"), (13_000, "cuda-ext")])
def test_a_driver_gets_the_newest_build_whose_kernels_it_compiles(
    monkeypatch: pytest.MonkeyPatch, version: int, name: str
) -> None:
    drive(monkeypatch, version)
    assert build_for("cuda").name.startswith(f"linux-x64-{name}-3")


def test_a_build_that_is_here_is_used_after_the_driver_was_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    drive(monkeypatch, 13_000)
    older = build_for("cuda")
    older.folder.mkdir(parents=True)
    (older.folder / "libllama.v1.so").touch()
    drive(monkeypatch, 13_010)
    assert build_for("cuda") == older


@pytest.mark.parametrize(
    ("version", "reason"), [(None, "there is no NVIDIA driver"), (12_020, "knows CUDA 12.2, and 12.4 is needed")]
)
def test_a_driver_that_is_too_old_or_not_there_is_said(
    monkeypatch: pytest.MonkeyPatch, version: int | None, reason: str
) -> None:
    drive(monkeypatch, version)
    with pytest.raises(EngineError, match=reason):
        build_for("cuda")


def test_a_gpu_of_another_platform_has_no_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert build_for("ready-made").name.startswith("linux-arm64-")
    for kind in ("cuda", "vulkan"):
        with pytest.raises(EngineError, match="nobody compiled it"):
            build_for(kind)


def open_drivers(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    """Lets every driver be opened; NVIDIA's knows this version."""

    def answer(place: object) -> int:
        ctypes.cast(place, ctypes.POINTER(ctypes.c_int))[0] = version  # type: ignore[arg-type]
        return 0

    monkeypatch.setattr(devices.ctypes, "CDLL", lambda name: SimpleNamespace(cuDriverGetVersion=answer))


def test_a_driver_counts_where_there_is_a_device_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    open_drivers(monkeypatch, 12_080)
    assert cuda_driver(tmp_path) is None
    (tmp_path / "nvidiactl").touch()
    assert cuda_driver(tmp_path) is None
    (tmp_path / "nvidia1").touch()
    assert cuda_driver(tmp_path) == 12_080


def test_vulkan_takes_a_gpu_that_computes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    vendor = tmp_path / "renderD128" / "device" / "vendor"
    vendor.parent.mkdir(parents=True)
    vendor.write_text("0x1002\n")
    monkeypatch.setattr(devices, "_VULKAN_LOADER", "libno-such-loader.so.1")
    assert not has_vulkan(tmp_path)
    open_drivers(monkeypatch, 0)
    assert has_vulkan(tmp_path)
    vendor.write_text("0x1af4\n")  # virtio
    assert not has_vulkan(tmp_path)


def test_a_machine_without_drivers_is_known_within_a_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_CUDA_DRIVER", "libno-such-driver.so.1")
    monkeypatch.setattr(devices, "_VULKAN_LOADER", "libno-such-loader.so.1")

    def seconds() -> float:
        begin = perf_counter()
        assert (cuda_driver(), has_vulkan()) == (None, False)
        return perf_counter() - begin

    assert min(seconds() for _ in range(20)) < 0.001
