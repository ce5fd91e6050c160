"""What an engine needs beyond the package itself. Asking imports nothing of it."""

from __future__ import annotations

from importlib.util import find_spec

from emberkeep.errors import EngineError

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
