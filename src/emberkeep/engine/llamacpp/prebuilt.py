"""llama.cpp as somebody else has compiled it: for every kind of CPU, and it chooses at run time.

The npm packages of node-llama-cpp carry llama.cpp's own shared libraries, with one file of kernels per generation
of CPUs. Only those libraries are used. They lie in the user's cache, by version and platform, so that machines may
share a home folder.
"""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass
from pathlib import Path

import platformdirs


def cache_folder() -> Path:
    """Of what belongs to this user's llama.cpp, whatever the data folder."""
    return platformdirs.user_cache_path("emberkeep", appauthor=False) / "llamacpp"


@dataclass(frozen=True, slots=True)
class Prebuilt:
    package: str
    version: str
    integrity: str
    """SHA-512 of the archive as npm writes it."""
    libraries: str
    """The folder inside of the archive."""

    @property
    def folder(self) -> Path:
        """Where its libraries are, once they were fetched."""
        return cache_folder() / f"{self.libraries.rpartition('/')[2]}-{self.version}"

    @property
    def library(self) -> Path | None:
        """None until it was fetched."""
        return next(iter(sorted(self.folder.glob("libllama.v*"))), None)


_VERSION = "3.22.1"
_PACKAGES = {
    ("linux", "x86_64"): Prebuilt(
        "@node-llama-cpp/linux-x64",
        _VERSION,
        "sha512-5uCCDNqWCNfaAm8aR/Uzxbo4HBpKgNF91kCHPepKhgMgV2OAmatoefbOlMihsqCiH2Od35E/eUHQCFbfRBJuOg==",
        "package/bins/linux-x64",
    ),
    ("linux", "aarch64"): Prebuilt(
        "@node-llama-cpp/linux-arm64",
        _VERSION,
        "sha512-W+7naKCXX9/eEjjFmRS8vvx91QyLXDbeFxexZc3bh/PtQABZgmRL3C0AtYYXn4YGTj/3Qor4lWZn2tpjZFPLdQ==",
        "package/bins/linux-arm64",
    ),
}


def prebuilt() -> Prebuilt | None:
    """The one for this machine; None where there is none of a known release."""
    return _PACKAGES.get((sys.platform, platform.machine()))
