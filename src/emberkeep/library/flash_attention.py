"""Emberkeep's attention in a model of transformers that the caller has loaded."""

from __future__ import annotations

from typing import Any

from emberkeep.engine.devices import has_hf, require_hf


def flash_attention_available() -> bool:
    """Whether `install_flash_attention` can do something here: whether torch and transformers are installed."""
    return has_hf()


def install_flash_attention(model: Any) -> None:
    """From now on the model computes attention with the fastest code here: Emberkeep's kernel on CUDA, torch's
    fused ones elsewhere. What these do not compute is passed on to what the model used before.

    Changes the model's configuration until `uninstall_flash_attention`. Raises EngineError where it cannot be.
    """
    require_hf()
    from emberkeep.engine.hf.model_attention import install

    install(model)


def uninstall_flash_attention(model: Any) -> None:
    """The model is as it was before; one without it stays as it is. Raises EngineError without torch."""
    require_hf()
    from emberkeep.engine.hf.model_attention import uninstall

    uninstall(model)
